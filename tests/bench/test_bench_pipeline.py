"""The bench runs and says what it must; how fast the pipeline is, is for people to read."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_pipeline_bench_prints_each_figure_beside_its_target() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "tests.bench.bench_pipeline", "--quick"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    promised = (
        *("caller to engine", "engine to caller", "< 2 ms p50", "raw pyzmq round trip, uvloop"),
        *("64 KiB kv: engine to engine", "<= 2 ms p50", "requests, one stage", ">= 2,000", "raw pyzmq echoes"),
        *("master", "< 0.5", "8 replicas", "target < +1", "64 MiB, relayed", "of raw"),
    )
    for words in promised:
        assert words in run.stdout, run.stdout
