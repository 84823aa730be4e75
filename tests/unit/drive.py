"""Drives `MasterCore` by hand: stages that say what a test tells them to, callers that note what they are told.

No stage here does anything by itself; for stages that live their own life see `tests.unit.simulation`.
"""

import itertools
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias, TypeVar

from omni.core import MasterCore
from omni.events import (
    Action,
    Cancelled,
    Completed,
    ControlReceived,
    DataReceived,
    Errored,
    Event,
    MembershipChanged,
    PartArrived,
    PeerGone,
    RequestNews,
    SendControl,
    SendData,
    StageFinished,
    Submitted,
    Tell,
    Tick,
)
from omni.membership import Replica
from omni.planning import Planner
from omni.request import GenerateRequest
from proto.deploy import ArStage, Deploy, DiffusionStage, Kind, LimitsSpec, Link, MasterSpec, StageSpec
from proto.errors import ErrorCode, ErrorInfo
from proto.ids import Epoch, LeaseId, PullId, RequestId, StageName
from proto.messages import (
    PROTOCOL,
    Abort,
    Aborted,
    Ack,
    Attach,
    Chunk,
    ControlDown,
    ControlUp,
    DataDown,
    DataUp,
    Failed,
    Heartbeat,
    Hello,
    Images,
    Payload,
    PayloadTensor,
    Published,
    Pull,
    Ready,
    Refuse,
    Release,
    Result,
    StageInfo,
    Submit,
    Text,
    TextDelta,
    Value,
    Welcome,
)
from proto.params import Json
from proto.tensors import Dtype, TensorRef, WireTensor

M = TypeVar("M")
Message: TypeAlias = ControlDown | DataDown

HERE = socket.gethostname()
ITEM = WireTensor(TensorRef(Dtype.U8, (16,)), bytes(range(16)))


def ar(output: Kind | None = Kind.TEXT, *, replicas: int = 1, **inputs: str) -> ArStage:
    return ArStage(inputs={n: Link(source=s) for n, s in inputs.items()}, output=output, replicas=replicas)


def diffusion(
    output: Kind | None = Kind.IMAGE, *, replicas: int = 1, companion: str | None = None, **inputs: str
) -> DiffusionStage:
    """`companion` names the input whose link has the companion negative_prompt."""
    links = {n: Link(source=s, companion="negative_prompt" if n == companion else None) for n, s in inputs.items()}
    return DiffusionStage(inputs=links, output=output, replicas=replicas)


def deploy(limits: LimitsSpec | None = None, master: MasterSpec | None = None, **stages: StageSpec) -> Deploy:
    return Deploy(
        name="test",
        stages={StageName(name): spec for name, spec in stages.items()},
        limits=limits or LimitsSpec(),
        master=master or MasterSpec(),
    )


class Master:
    """The core with a clock that only the test moves. `check_integrity` runs after every event."""

    def __init__(self, spec: Deploy) -> None:
        secrets = itertools.count(1)
        self.core = MasterCore(spec, new_session=lambda: f"secret-{next(secrets)}", data_port=77, seed=1)
        self.planner = Planner(spec, self.core.graph)
        self.now = 0.0
        self.news: dict[RequestId, list[RequestNews]] = {}
        self._numbers = itertools.count(1)
        self._stages: dict[bytes, Stage] = {}

    def handle(self, event: Event) -> list[Action]:
        actions = self.core.handle(event, self.now)
        for action in actions:
            if isinstance(action, Tell):
                self.news.setdefault(action.request, []).append(action.news)
            elif isinstance(action, SendControl | SendData) and action.peer in self._stages:
                self._stages[action.peer].inbox.append(action.message)
        self.core.orchestrator.check_integrity()
        return actions

    def wait(self, seconds: float) -> list[Action]:
        """Let time pass, with every Tick that falls due in it."""
        end, actions = self.now + seconds, []
        while (at := self.core.deadline()) is not None and at <= end:
            self.now = max(self.now, at)
            actions += self.handle(Tick())
        self.now = end
        return actions

    # --- stages -------------------------------------------------------------------------------------------------------

    def hello(self, stage: str, replica: int | None = None, **changes: Json) -> "Stage":
        """Say hello from a connection of its own. `Stage.answer` is what came back."""
        number = next(self._numbers)
        stand_in = Stage(self, StageName(stage), b"c%d" % number, b"d%d" % number)
        self._stages |= {stand_in.control: stand_in, stand_in.data: stand_in}
        fields: dict[str, Json] = {
            "protocol": PROTOCOL,
            "build": "test",
            "nonce": f"nonce-{number}",
            "host": HERE,
            "pid": number,
        } | changes
        stand_in.say_hello(Hello(stage=StageName(stage), replica=replica, **fields))
        return stand_in

    def join(self, stage: str, replica: int | None = None) -> "Stage":
        """A replica that is ready for work."""
        stand_in = self.hello(stage, replica)
        stand_in.attach()
        stand_in.ready()
        return stand_in

    # --- callers ------------------------------------------------------------------------------------------------------

    def submit(
        self,
        prompt: str = "a cat",
        *,
        outputs: Iterable[str] | None = None,
        params: Mapping[str, Mapping[str, Json]] | None = None,
        affinity: str | None = None,
    ) -> RequestId:
        request = RequestId(f"r{next(self._numbers)}")
        asked = GenerateRequest(
            prompt=prompt,
            outputs=None if outputs is None else tuple(StageName(name) for name in outputs),
            params={StageName(name): given for name, given in (params or {}).items()},
            affinity=affinity,
        )
        self.news[request] = []
        self.handle(Submitted(request, self.planner.plan(asked, {})))
        return request

    def cancel(self, request: RequestId) -> list[Action]:
        return self.handle(Cancelled(request))

    def ends(self, request: RequestId) -> list[Completed | Errored]:
        return [news for news in self.news[request] if isinstance(news, Completed | Errored)]

    def error(self, request: RequestId) -> ErrorInfo:
        """The error that the request ended with, as its last and only terminal news."""
        (end,) = self.ends(request)
        assert isinstance(end, Errored)
        assert self.news[request][-1] is end
        return end.error

    def succeeded(self, request: RequestId) -> bool:
        ends = self.ends(request)
        assert len(ends) <= 1
        return bool(ends) and isinstance(ends[0], Completed) and self.news[request][-1] is ends[0]

    def finished(self, request: RequestId) -> dict[str, StageFinished]:
        return {str(n.stage): n for n in self.news[request] if isinstance(n, StageFinished)}

    def parts(self, request: RequestId) -> list[PartArrived]:
        return [news for news in self.news[request] if isinstance(news, PartArrived)]

    def assert_idle(self) -> None:
        """Every gauge is back at zero."""
        orchestrator, leases = self.core.orchestrator, self.core.leases
        orchestrator.check_integrity()
        assert not orchestrator.running
        assert not orchestrator.queued
        assert not any(orchestrator.waiting.values())
        assert not orchestrator._unanswered
        assert not any(replica.in_flight for replica in self.core.members.replicas())
        assert (len(leases), leases.nbytes, leases._pulls, leases._of_request) == (0, 0, {}, {})
        assert not self.core.calls._pending


@dataclass
class Stage:
    """One worker's side of its two connections. `inbox` has what the master sent it, on both lanes, in order."""

    master: Master
    stage: StageName
    control: bytes
    data: bytes
    answer: ControlDown | None = None
    epoch: Epoch = field(default=Epoch(0))
    inbox: list[Message] = field(default_factory=list)
    seqs: dict[RequestId, int] = field(default_factory=dict)
    leases: int = 0

    def took(self, kind: type[M]) -> list[M]:
        """The messages of one kind that have come since the last time."""
        taken: list[M] = [message for message in self.inbox if isinstance(message, kind)]
        self.inbox = [message for message in self.inbox if not isinstance(message, kind)]
        return taken

    def submits(self) -> list[str]:
        """The requests that have come since the last time, by their names on the wire."""
        return [str(message.request) for message in self.took(Submit)]

    def aborts(self) -> list[str]:
        return [str(message.request) for message in self.took(Abort)]

    def released(self) -> list[str]:
        return [str(message.lease) for message in self.took(Release)]

    def say(self, message: ControlUp) -> list[Action]:
        return self.master.handle(ControlReceived(self.control, message))

    def send(self, message: DataUp, *tensors: WireTensor) -> list[Action]:
        return self.master.handle(DataReceived(self.data, message, tensors))

    # --- life ---------------------------------------------------------------------------------------------------------

    def say_hello(self, hello: Hello) -> None:
        self.say(hello)
        answers: list[ControlDown] = [*self.took(Welcome), *self.took(Refuse)]
        self.answer = answers[0] if answers else None
        if isinstance(self.answer, Welcome):
            self.epoch = self.answer.epoch

    def attach(self, session: str | None = None) -> list[Action]:
        if session is None:
            assert isinstance(self.answer, Welcome)
            session = self.answer.session
        return self.send(Attach(session=session, epoch=self.epoch))  # type: ignore[arg-type] # a NewType

    def ready(self, info: StageInfo | None = None) -> list[Action]:
        return self.say(Ready(epoch=self.epoch, info=info or StageInfo(), load_s=1.0))

    def beat(self) -> list[Action]:
        return self.say(Heartbeat(epoch=self.epoch, steps=0, queued=0, running=0))

    def die(self) -> list[Action]:
        """The master finds the connection gone."""
        return self.master.handle(PeerGone(self.control, "killed"))

    @property
    def replica(self) -> Replica | None:
        """What the master has in this epoch's slot."""
        return next((r for r in self.master.core.members.replicas() if r.epoch == self.epoch), None)

    @property
    def in_flight(self) -> int:
        assert self.replica is not None
        return self.replica.in_flight

    # --- work ---------------------------------------------------------------------------------------------------------

    def seq(self, wire: str) -> int:
        number = self.seqs.get(RequestId(wire), 0)
        self.seqs[RequestId(wire)] = number + 1
        return number

    def delta(self, wire: str, text: str) -> list[Action]:
        return self.send(self.chunk(wire, text))

    def chunk(self, wire: str, text: str) -> Chunk:
        return Chunk(
            request=RequestId(wire), epoch=self.epoch, seq=self.seq(wire), output="text", part=TextDelta(text=text)
        )

    def payload(self, kind: str = "kv", items: int = 1) -> Payload:
        self.leases += 1
        assert self.replica is not None
        return Payload(
            lease=LeaseId(f"{self.epoch}.{self.leases}"),
            source=self.stage,
            replica=self.replica.index,
            epoch=self.epoch,
            kind=kind,
            items=tuple(PayloadTensor(f"item{i}", ITEM.ref, i) for i in range(items)),
        )

    def publish(self, wire: str, output: str, value: Value) -> list[Action]:
        return self.send(
            Published(request=RequestId(wire), epoch=self.epoch, seq=self.seq(wire), output=output, value=value)
        )

    def result(self, wire: str, **outputs: Value) -> list[Action]:
        return self.send(
            Result(request=RequestId(wire), epoch=self.epoch, seq=self.seq(wire), outputs=dict(outputs)),
        )

    def says(self, wire: str, text: str) -> list[Action]:
        return self.result(wire, text=Text(text=text))

    def draws(self, wire: str) -> list[Action]:
        message = Result(
            request=RequestId(wire),
            epoch=self.epoch,
            seq=self.seq(wire),
            outputs={"image": Images(tensor=0)},
            tensors=(ITEM.ref,),
        )
        return self.send(message, ITEM)

    def fails(self, wire: str, code: ErrorCode = ErrorCode.STAGE_FAILED, text: str = "boom") -> list[Action]:
        error = ErrorInfo(code, text)
        return self.send(Failed(request=RequestId(wire), epoch=self.epoch, seq=self.seq(wire), error=error))

    def aborted(self, wire: str) -> list[Action]:
        return self.say(Aborted(epoch=self.epoch, request=RequestId(wire)))

    def pull(self, wire: str, payload: Payload, pull: str, first: int = 0) -> list[Action]:
        return self.send(
            Pull(
                epoch=self.epoch,
                pull=PullId(pull),
                request=RequestId(wire),
                lease=payload.lease,
                source=payload.source,
                replica=payload.replica,
                source_epoch=payload.epoch,
                first=first,
            )
        )

    def ack(self, pull: str) -> list[Action]:
        return self.send(Ack(epoch=self.epoch, pull=PullId(pull)))


def lines(actions: Iterable[Action]) -> list[str]:
    return [action.line for action in actions if isinstance(action, MembershipChanged)]
