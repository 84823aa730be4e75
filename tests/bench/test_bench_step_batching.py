"""The bench runs and says what it must; how fast it is, is for people to read."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_the_step_batching_bench_prints_its_tables() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "tests.bench.bench_step_batching", "--quick"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    for promised in (
        "diffusers 0.",
        "park, group, resume",
        "after an abort",
        "one stock call",
        "1.3 of capacity, ours",
    ):
        assert promised in run.stdout
