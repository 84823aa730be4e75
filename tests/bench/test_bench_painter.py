"""The bench runs and says what it must; how well the painter draws is `tests/painter/test_weights.py`'s matter."""

import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

ROOT = Path(__file__).resolve().parents[2]


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tests.bench.bench_painter", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


@pytest.mark.slow
def test_the_painter_bench_prints_shares_controls_and_times() -> None:
    said = bench("--quick").stdout
    for promised in ("own keys", "another caption's", "zeroed", "kind character", "relation", "8 pictures, engine"):
        assert promised in said


@pytest.mark.slow
def test_the_painter_bench_draws_the_sheet(tmp_path: Path) -> None:
    assert bench("--sheet", str(tmp_path / "sheet.png")).returncode == 0
    with Image.open(tmp_path / "sheet.png") as sheet:
        assert sheet.size == (532, 532)


@pytest.mark.slow
def test_a_card_is_not_written_of_a_few_captions(tmp_path: Path) -> None:
    for few in (("--count", "20"), ("--times",)):
        refused = bench(*few, "--write", str(tmp_path / "measured.json"))
        assert refused.returncode == 2
        assert "300 captions at least" in refused.stderr
