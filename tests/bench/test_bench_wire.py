"""The bench runs and says what it must; how fast it is, is for people to read."""

import subprocess
import sys
from pathlib import Path

from tests.bench.report import alternate, percentile, table

ROOT = Path(__file__).resolve().parents[2]


def test_the_wire_bench_prints_its_three_tables() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "tests.bench.bench_wire", "--quick"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    for promised in ("pyzmq 2", "libzmq", "Welcome", "ping-pong, blocking, us p50", "chunks one way", "of raw"):
        assert promised in run.stdout
    assert "frame to send lies on the array        True" in run.stdout
    assert "received array lies on the frame       True" in run.stdout


def test_percentiles_lie_between_neighbours() -> None:
    assert percentile([3.0], 99) == 3.0
    assert percentile([4.0, 1.0, 3.0, 2.0], 50) == 2.5
    assert percentile([1.0, 2.0], 100) == 2.0


def test_candidates_alternate_and_the_first_round_is_thrown_away() -> None:
    order: list[str] = []

    def of(name: str) -> float:
        order.append(name)
        return float(len(order))

    figures = alternate({"a": lambda: of("a"), "b": lambda: of("b")}, rounds=2)
    assert order == ["b", "a", "a", "b", "b", "a"]
    assert figures == {"a": [3.0, 6.0], "b": [4.0, 5.0]}


def test_a_table_lines_its_columns_up() -> None:
    assert table("t", ("what", "x"), [("long name", 1234.5), ("b", 0.12345)]).splitlines()[1:] == [
        "t",
        "what           x",
        "----------------",
        "long name  1,234",
        "b          0.123",
    ]
