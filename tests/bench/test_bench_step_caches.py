"""The bench runs and says what it must; how fast it is, is for people to read."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_the_step_caches_bench_prints_its_table() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "tests.bench.bench_step_caches", "--quick"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    for promised in ("diffusers 0.", "four together", "first_block", "taylorseer", "pab", "PSNR"):
        assert promised in run.stdout
