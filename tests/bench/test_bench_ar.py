"""The bench runs and says what it must; how fast it is, is for people to read."""

import subprocess
import sys
from pathlib import Path

from tests.models.tiny_ar import build_tiny_llama

ROOT = Path(__file__).resolve().parents[2]


def test_the_ar_bench_prints_its_tables(tmp_path: Path) -> None:
    model = build_tiny_llama(tmp_path / "tiny", never_ends=True)
    run = subprocess.run(
        [sys.executable, "-m", "tests.bench.bench_ar", "--quick", "--dtype", "fp32", "--model", str(model)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    for promised in (
        "transformers 5",
        "x continuous",
        "16 ragged arrivals",
        "known prefix",
        "the prompt in one piece",
        "resident, GiB",
    ):
        assert promised in run.stdout
