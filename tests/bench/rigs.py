"""What `bench_pipeline` measures with: pipelines of real processes, raw pyzmq peers, and what was seen of them."""

import asyncio
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic

import uvloop
import zmq

from omni.async_omni import AsyncOmni
from omni.outputs import RequestOutput
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
from proto.ids import StageName
from tests.bench.raw_peer import STOP
from tests.bench.report import median, percentile

ROOT = Path(__file__).resolve().parents[2]
RAW_PEER = [sys.executable, "-m", "tests.bench.raw_peer"]
PROMPT = "A red fox crossing a frozen river at dawn, in the style of an old woodcut print."


def ar(
    output: Kind | None,
    replicas: int = 1,
    *,
    source: str | None = None,
    payload_bytes: int = 0,
    local: int | None = None,
) -> ArStage:
    return ArStage(
        engine=ArEngineSpec(use="tests.bench.stamp_engines:StampAr", options={"payload_bytes": payload_bytes}),
        inputs={} if source is None else {"prompt": Link(source=source)},
        output=output,
        replicas=replicas,
        local=local,
        max_in_flight=1024,
        threads=1,
        env={"PYTHONPATH": str(ROOT)},
    )


def painter() -> DiffusionStage:
    return DiffusionStage(
        engine=DiffusionEngineSpec(use="tests.bench.stamp_engines:StampDiffusion"),
        inputs={"prompt": Link(source="first.text"), "kv": Link(source="first.kv")},
        output=Kind.IMAGE,
        max_in_flight=1024,
        threads=1,
        env={"PYTHONPATH": str(ROOT)},
    )


@dataclass
class Pipeline:
    """A running pipeline, on a loop of its own that runs while a measurement does."""

    runner: asyncio.Runner
    omni: AsyncOmni

    async def request(self, seed: int = 0) -> tuple[float, RequestOutput, float]:
        """When it was asked, the answer, and when that was there."""
        asked = monotonic()
        async for event in self.omni.stream(PROMPT, stages={"first": {"seed": seed}} if seed else None):
            last = event
        assert isinstance(last, RequestOutput)
        return asked, last, monotonic()


@contextmanager
def pipeline(*, bare: int = 0, **stages: StageSpec) -> Iterator[Pipeline]:
    """Whole workers, or `bare` stages of plain sockets in their place."""
    deploy = Deploy(
        name="bench",
        master=MasterSpec(bind="tcp://127.0.0.1:0", suspect_after=600.0, dead_after=600.0),
        limits=LimitsSpec(max_requests=1024),
        stages={StageName(name): stage for name, stage in stages.items()},
    )
    processes = []
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        omni = AsyncOmni(deploy)
        runner.run(omni.start(wait=False))
        try:
            assert omni.endpoints is not None
            for _ in range(bare):
                command = [*RAW_PEER, omni.endpoints.control, "stage"]
                processes.append(subprocess.Popen(command, cwd=ROOT))
            runner.run(omni.engine.wait_ready())
            yield Pipeline(runner, omni)
        finally:
            runner.run(omni.stop())
            for process in processes:
                process.wait(20)


class RawPeers:
    """Processes of `raw_peer` at the other end of one ROUTER socket, by mode in the order in which they were asked for."""

    def __init__(self, sock: "zmq.Socket[bytes]", modes: Sequence[str]) -> None:
        sock.bind("tcp://127.0.0.1:0")
        endpoint = sock.getsockopt_string(zmq.LAST_ENDPOINT)
        self.sock = sock
        self.routes: list[bytes] = []
        self._processes = []
        for mode in modes:
            self._processes.append(subprocess.Popen([*RAW_PEER, endpoint, mode], cwd=ROOT))
            self.routes.append(sock.recv_multipart()[0])

    def stop(self) -> None:
        for route in self.routes:
            self.sock.send_multipart([route, STOP])
        for process in self._processes:
            process.wait(20)


@contextmanager
def raw(*modes: str) -> Iterator[RawPeers]:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as sock:
        sock.setsockopt(zmq.LINGER, 0)
        sock.setsockopt(zmq.RCVTIMEO, 60_000)
        peers = RawPeers(sock, modes)
        try:
            yield peers
        finally:
            peers.stop()


@dataclass
class Seen:
    """Seconds of many trips, round by round, so that one bad moment of the machine spoils one round's tail only."""

    rounds: list[list[float]] = field(default_factory=list)

    def percentile(self, q: float) -> float:
        """The median of the rounds' percentiles; the first round warms up."""
        return median([percentile(one, q) for one in self.rounds[1:] or self.rounds])


@dataclass
class Ways:
    """Of each request: to the first engine, between two engines, from the last engine, and all of that."""

    there: Seen = field(default_factory=Seen)
    between: Seen = field(default_factory=Seen)
    back: Seen = field(default_factory=Seen)
    total: Seen = field(default_factory=Seen)

    def new_round(self) -> None:
        for seen in (self.there, self.between, self.back, self.total):
            seen.rounds.append([])

    def add(self, asked: float, answer: RequestOutput, got: float) -> None:
        details = [done.timings.detail for done in answer.stages.values()]
        details.sort(key=lambda detail: detail["submitted"])
        self.there.rounds[-1].append(details[0]["submitted"] - asked)
        self.back.rounds[-1].append(got - details[-1]["finished"])
        if len(details) == 2:
            self.between.rounds[-1].append(details[1]["submitted"] - details[0]["finished"])
        self.total.rounds[-1].append(got - asked - sum(detail["finished"] - detail["submitted"] for detail in details))
