"""Whole pipelines for tests: deploys of fake engines, start and stop with nothing left over, waiting for conditions.

A `Running` pipeline has an event loop of its own in a thread, so that tests stay plain functions. Nothing here sleeps to
synchronise: `until` asks again and again for a condition, and gives up with a message that says what never came true.
"""

import asyncio
import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Self, TypeVar

import msgspec
import psutil
import uvloop

from omni.async_omni import AsyncOmni, closing
from omni.outputs import RequestEvent, RequestOutput
from omni.status import PipelineStatus, ReplicaStatus, StageStatus
from proto.deploy import (
    ArEngineSpec,
    ArStage,
    Deploy,
    DiffusionEngineSpec,
    DiffusionStage,
    Kind,
    LimitsSpec,
    Link,
    MasterSpec,
    StageSpec,
)
from proto.params import Json

T = TypeVar("T")

ROOT: Final = Path(__file__).resolve().parents[2]
ENV: Final = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
FAKE_AR: Final = "tests.fakes.engines:FakeAr"
FAKE_DIFFUSION: Final = "tests.fakes.engines:FakeDiffusion"
PATIENCE_S: Final = 60.0
"""How long a condition may take before a test gives up. Nothing is measured by it."""

ASK_AGAIN_S: Final = 0.01


# --- deploys ----------------------------------------------------------------------------------------------------------


def fake_ar(*, use: str = FAKE_AR, options: Mapping[str, Json] | None = None, **more: Json) -> ArStage:
    engine = ArEngineSpec(use=use, options=dict(options or {}))
    return ArStage(**{"engine": engine, "output": Kind.TEXT, "env": ENV, **more})


def fake_painter(
    *, use: str = FAKE_DIFFUSION, options: Mapping[str, Json] | None = None, **more: Json
) -> DiffusionStage:
    engine = DiffusionEngineSpec(use=use, options=dict(options or {}))
    return DiffusionStage(**{"engine": engine, "output": Kind.IMAGE, "env": ENV, **more})


def deploy(
    stages: Mapping[str, StageSpec], *, limits: LimitsSpec | None = None, name: str = "test", **master: Json
) -> Deploy:
    """Loopback, a port that the system picks, fast heartbeats. Whoever is slow under load is not taken for dead."""
    spec = MasterSpec(
        **{"bind": "tcp://127.0.0.1:0", "heartbeat": 0.1, "suspect_after": 30.0, "dead_after": 60.0, **master}
    )
    return Deploy(name=name, stages=dict(stages), master=spec, limits=limits or LimitsSpec())


def text_to_image(
    thinker: Mapping[str, Json] | None = None, painter: Mapping[str, Json] | None = None, **more: Json
) -> Deploy:
    """thinker.text -> painter.prompt, both fake, both visible."""
    inputs = {"prompt": Link(source="thinker.text")}
    return deploy(
        {"thinker": fake_ar(**(thinker or {})), "painter": fake_painter(inputs=inputs, **(painter or {}))}, **more
    )


# --- waiting ----------------------------------------------------------------------------------------------------------


def until(condition: Callable[[], T], what: str, timeout_s: float = PATIENCE_S) -> T:
    """The first true value of `condition`, asked again and again."""
    deadline = time.monotonic() + timeout_s
    pause = threading.Event()
    while not (value := condition()):
        assert time.monotonic() < deadline, f"never came true: {what}"
        pause.wait(ASK_AGAIN_S)
    return value


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and waits for its parent does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def until_gone(pids: Sequence[int]) -> None:
    until(lambda: not any(map(alive, pids)), f"the end of processes {list(pids)}")


# --- a request under way ----------------------------------------------------------------------------------------------


class Flight:
    """One request, consumed in the pipeline's loop; the test looks at what has come so far."""

    def __init__(self, running: "Running", prompt: str, keywords: Mapping[str, Json]) -> None:
        self.events: list[RequestEvent] = []
        self._changed = threading.Condition()
        self._future = running.soon(self._run(running.omni, prompt, keywords))

    async def _run(self, omni: AsyncOmni, prompt: str, keywords: Mapping[str, Json]) -> RequestOutput:
        async with closing(omni.stream(prompt, **keywords)) as events:
            async for event in events:
                with self._changed:
                    self.events.append(event)
                    self._changed.notify_all()
                if isinstance(event, RequestOutput):
                    return event
        raise AssertionError("the request ended without a result")

    def wait_for(self, kind: type[RequestEvent], stage: str | None = None) -> RequestEvent:
        """The first event of that kind (of that stage)."""

        def found() -> RequestEvent | None:
            matching = (e for e in self.events if isinstance(e, kind))
            return next((e for e in matching if stage is None or getattr(e, "stage", None) == stage), None)

        with self._changed:
            assert self._changed.wait_for(found, PATIENCE_S), f"no {kind.__name__} came: {self.events}"
            event = found()
        assert event is not None
        return event

    def result(self) -> RequestOutput:
        return self._future.result(PATIENCE_S)

    def error(self) -> BaseException:
        """What it failed with."""
        error = self._future.exception(PATIENCE_S)
        assert error is not None, "the request succeeded"
        return error

    @property
    def over(self) -> bool:
        return self._future.done()

    def leave(self) -> None:
        """The caller goes away in the middle of the iteration."""
        self._future.cancel()


# --- a pipeline -------------------------------------------------------------------------------------------------------


class Running:
    """A started pipeline. Leaving it stops it and checks that nothing of it is left."""

    def __init__(self, deploy: Deploy, *, wait: bool = True) -> None:
        self.lines: list[str] = []
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="test-pipeline", daemon=True)
        self._thread.start()
        self.omni = AsyncOmni(deploy)
        self._pids: set[int] = set()
        try:
            self.do(self.omni.start(self.lines.append, wait=wait))
        except BaseException:
            self._end_loop()
            raise

    def soon(self, work: Coroutine[None, None, T]) -> "asyncio.Future[T]":
        return asyncio.run_coroutine_threadsafe(work, self._loop)  # type: ignore[return-value]

    def do(self, work: Coroutine[None, None, T]) -> T:
        return self.soon(work).result(2 * PATIENCE_S)

    @property
    def url(self) -> str:
        assert self.omni.endpoints is not None
        return self.omni.endpoints.control

    # --- asking -------------------------------------------------------------------------------------------------------

    def launch(self, prompt: str, **keywords: Json) -> Flight:
        return Flight(self, prompt, keywords)

    def run(self, prompt: str, **keywords: Json) -> RequestOutput:
        return self.launch(prompt, **keywords).result()

    def call(self, stage: str, method: str, args: Mapping[str, Json] | None = None, **more: Json) -> Mapping[int, Json]:
        return self.do(self.omni.call(stage, method, args, **more))  # type: ignore[arg-type]

    def status(self) -> PipelineStatus:
        status = self.do(self.omni.status())
        self._pids |= {r.pid for stage in status.stages for r in stage.replicas}
        return status

    def stage(self, name: str) -> StageStatus:
        return next(stage for stage in self.status().stages if stage.stage == name)

    def replica(self, stage: str, index: int = 0) -> ReplicaStatus:
        return next(r for r in self.stage(stage).replicas if r.replica == index)

    def pid(self, stage: str, index: int = 0) -> int:
        return self.replica(stage, index).pid

    # --- waiting ------------------------------------------------------------------------------------------------------

    def until_ready(self) -> PipelineStatus:
        until(lambda: self.status().ready, "the pipeline is ready")
        return self.status()

    def until_idle(self) -> PipelineStatus:
        """Until every gauge is at zero, in the master and in what the stages say from now on."""
        until(lambda: _idle(self.status()), "all gauges at zero")
        heard = _last_heard(self.status())
        for _ in range(2):  # the first beat may have been under way already
            heard = until(lambda old=heard: _all_heard_again(self.status(), old), "a beat of every stage")
        until(lambda: _idle(self.status()), "all gauges at zero, as the stages say")
        return self.status()

    # --- the end ------------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        if self._thread.is_alive():
            self.do(self.omni.stop())
            self._end_loop()

    def _end_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        local = [pid for pid in self._pids if _has_a_launcher(pid)] if error is None else []
        self.stop()
        until_gone(local)


def _has_a_launcher(pid: int) -> bool:
    """Whether a stage process was started by a master, and has to end with it."""
    try:
        return "--parent-fd" in psutil.Process(pid).cmdline()
    except psutil.NoSuchProcess:
        return False


def _idle(status: PipelineStatus) -> bool:
    replicas = [r for stage in status.stages for r in stage.replicas]
    return not (
        status.running
        or status.queued
        or status.leases
        or status.lease_bytes
        or any(stage.waiting for stage in status.stages)
        or any(r.in_flight or r.queued or r.running or r.leases or r.lease_bytes for r in replicas)
    )


def _last_heard(status: PipelineStatus) -> dict[int, float]:
    """When each replica's last message came, by epoch, in seconds since the master's start."""
    return {
        r.epoch: status.uptime_s - r.silent_s for stage in status.stages for r in stage.replicas if r.host != "test"
    }


def _all_heard_again(status: PipelineStatus, before: Mapping[int, float]) -> dict[int, float]:
    heard = _last_heard(status)
    return heard if all(heard[epoch] > before.get(epoch, 0.0) + 0.001 for epoch in heard) else {}


# --- other processes --------------------------------------------------------------------------------------------------


class Process:
    """A child of the test, in a process group of its own; its output goes to a file. Killed at the end if it is still there."""

    def __init__(self, command: Sequence[str], log: Path, env: Mapping[str, str] | None = None) -> None:
        self.log = log
        with log.open("wb") as out:
            self._popen = subprocess.Popen(
                command,
                env={**os.environ, **ENV, **(env or {})},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                start_new_session=True,
            )
        self.pid = self._popen.pid

    def signal(self, number: int) -> None:
        self._popen.send_signal(number)

    def wait(self) -> int:
        """Its exit status."""
        return self._popen.wait(PATIENCE_S)

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def until_says(self, words: str) -> str:
        """The first line with `words`."""

        def line() -> str | None:
            found = next((line for line in self.output.splitlines() if words in line), None)
            assert found is not None or self._popen.poll() is None, f"ended without {words!r}:\n{self.output}"
            return found

        found = until(line, f"{words!r} in {self.log.name}")
        assert found is not None
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._popen.poll() is None:
            self._popen.kill()
        self._popen.wait()


def omni_stage(master: str, stage: str, log: Path, *further: str, prefix: Sequence[str] = ()) -> Process:
    """A worker as an operator starts one on any host."""
    command = [*prefix, sys.executable, "-m", "launch.stage", "--master", master, "--stage", stage, *further]
    return Process(command, log)


@contextlib.contextmanager
def nothing_left_in_shared_memory() -> Iterator[None]:
    """Shared memory and socket files of ours, by name, are as before."""

    def ours() -> set[str]:
        found = set()
        for folder in ("/dev/shm", "/tmp"):
            with contextlib.suppress(FileNotFoundError):
                found |= {f"{folder}/{name}" for name in os.listdir(folder) if name.startswith(("omni-", "omni_"))}
        return found

    before = ours()
    yield
    assert ours() <= before


def to_json(deploy: Deploy) -> str:
    return msgspec.json.encode(deploy).decode()
