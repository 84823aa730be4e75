"""The installed commands as users call them, and what a served pipeline says of itself over HTTP."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

import httpx
import msgspec
import psutil
import typer
from prometheus_client.parser import text_string_to_metric_families
from typer.testing import CliRunner

from omni.status import PipelineStatus, ReplicaStatus
from tests.pipeline.harness import ENV, PATIENCE_S, Process, until, until_gone

MASTER: Final = str(Path(sys.executable).with_name("omni-master"))
STAGE: Final = str(Path(sys.executable).with_name("omni-stage"))
PLAIN: Final = {**ENV, "COLUMNS": "100"}
"""Fake engines can be imported, and the width of help texts is known."""

HEADER: Final = """\
name: test
master: {bind: "tcp://127.0.0.1:0", heartbeat: 100ms, suspect_after: 30s, dead_after: 60s}
api: {port: 0}
"""


class Done(NamedTuple):
    status: int
    out: str
    err: str


def run(*command: str | Path, cwd: Path, env: Mapping[str, str] | None = None) -> Done:
    """Run a command to its end, piped."""
    done = subprocess.run(
        [*map(str, command)],
        cwd=cwd,
        env={**os.environ, **PLAIN, **(env or {})},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE_S,
        check=False,
    )
    return Done(done.returncode, done.stdout, done.stderr)


def call(app: typer.Typer, *arguments: str, cwd: Path) -> Done:
    """The same without a process, for what ends before anything would start. A process takes a second to import."""
    runner = CliRunner(env=PLAIN | {"NO_COLOR": "1"})
    with contextlib.chdir(cwd):
        result = runner.invoke(app, arguments)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Done(result.exit_code, result.stdout, result.stderr)


class Served(Process):
    """`omni-master launch` without a prompt. Its API answers from the start; `until_ready` waits for the stages."""

    def __init__(self, deploy: str | Path, log: Path, *further: str) -> None:
        super().__init__([MASTER, "launch", str(deploy), *further], log, PLAIN)
        self.url = self.until_says("API: ").split()[1]

    def until_ready(self) -> "Served":
        self.until_says("(Ctrl-C ends)")
        return self

    def children(self) -> list[int]:
        return [child.pid for child in psutil.Process(self.pid).children(recursive=True)]

    def stop(self, number: int = signal.SIGINT) -> int:
        """Interrupt it. Its exit status, once it and its stages are gone."""
        children = self.children()
        self.signal(number)
        status = self.wait()
        until_gone(children)
        return status

    # --- what it says -------------------------------------------------------------------------------------------------

    def status(self) -> PipelineStatus:
        return msgspec.json.decode(httpx.get(f"{self.url}/status").content, type=PipelineStatus)

    def replica(self, stage: str) -> ReplicaStatus:
        """The only one of its stage."""
        (replica,) = next(one.replicas for one in self.status().stages if one.stage == stage)
        return replica

    def steps(self) -> dict[str, int]:
        """Engine steps of every stage, as said in a heartbeat that was sent after this call."""
        before = self.status()
        heard = {s.stage: before.uptime_s - r.silent_s for s in before.stages for r in s.replicas}

        def again() -> PipelineStatus | None:
            now = self.status()
            new = all(now.uptime_s - r.silent_s > heard[s.stage] + 0.11 for s in now.stages for r in s.replicas)
            return now if new else None

        status = until(again, "a heartbeat of every stage")
        return {s.stage: sum(r.steps for r in s.replicas) for s in status.stages}

    def until_idle(self) -> PipelineStatus:
        """Until nothing runs, in the master and in the stages."""

        def idle() -> PipelineStatus | None:
            now = self.status()
            replicas = [r for stage in now.stages for r in stage.replicas]
            work = now.running or now.queued or any(r.in_flight or r.running or r.queued for r in replicas)
            return None if work else now

        return until(idle, "nothing runs")

    def metrics(self) -> dict[str, float]:
        """Every sample, as name{label=value,...}, parsed as Prometheus would."""
        text = httpx.get(f"{self.url}/metrics").raise_for_status().text
        return {
            f"{sample.name}{{{','.join(f'{k}={v}' for k, v in sorted(sample.labels.items()))}}}": sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }
