"""A stage process of the simulation: joins, loads, serves, is killed, freezes, drains and joins again.

It keeps the same rules as `stages.worker`, `stages.requests` and `stages.payload`: messages of a request are numbered
without a gap, each `Submit` ends in one `Result`, `Failed` or `Aborted`, payloads are pulled piece by piece and checked.
What it computes is a digest of all that went in (`digest`), so a wrong, missing or mixed-up input is found at the end.
"""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from proto.deploy import ArStage
from proto.errors import ErrorCode, ErrorInfo
from proto.ids import Epoch, LeaseId, PullId, RequestId, Session, StageName
from proto.messages import (
    PROTOCOL,
    Abort,
    Aborted,
    Ack,
    Attach,
    Attached,
    BeatAck,
    Call,
    CallReply,
    Chunk,
    ControlDown,
    ControlUp,
    DataDown,
    DataUp,
    Failed,
    Goodbye,
    Heartbeat,
    Hello,
    Images,
    Leaving,
    LoadProgress,
    Nack,
    Payload,
    PayloadTensor,
    Piece,
    Progress,
    Published,
    Pull,
    PullRefused,
    Ready,
    Refuse,
    Release,
    Result,
    Shutdown,
    StageInfo,
    Started,
    Submit,
    Text,
    TextDelta,
    Tokens,
    Value,
    Welcome,
)
from proto.tensors import Dtype, TensorRef, WireTensor

ITEMS = 3
REF = TensorRef(Dtype.U8, (16,))
TEXTS = ("text", "tokens")


def digest(*parts: object) -> bytes:
    """16 bytes that depend on every part."""
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).digest()


def text_of(stage: str, inputs: Mapping[str, str]) -> str:
    return digest(stage, "text", sorted(inputs.items())).hex()


def tokens_of(stage: str, inputs: Mapping[str, str]) -> tuple[int, ...]:
    return tuple(digest(stage, "tokens", sorted(inputs.items())))


def items_of(stage: str, output: str, inputs: Mapping[str, str]) -> list[bytes]:
    """The tensors of an output that is neither text nor tokens."""
    return [digest(stage, output, sorted(inputs.items()), item) for item in range(ITEMS)]


def content(value: Value | list[bytes]) -> str:
    """What a stage reads in an input: pulled items are joined."""
    if isinstance(value, list):
        return b"".join(value).hex()
    assert isinstance(value, Text | Tokens)
    return value.text if isinstance(value, Text) else repr(value.ids)


class Network(Protocol):
    """What a worker needs of its world."""

    now: float

    def after(self, delay: float, call: Callable[[], None]) -> None: ...
    def up_control(self, peer: bytes, message: ControlUp) -> None: ...
    def up_data(self, peer: bytes, message: DataUp, tensors: tuple[WireTensor, ...] = ()) -> None: ...
    def connect(self, worker: "Worker") -> tuple[bytes, bytes]: ...
    def chance(self, fault: str) -> bool: ...
    def between(self, low: float, high: float) -> float: ...
    def exited(self, worker: "Worker") -> None: ...


@dataclass(slots=True)
class Pulling:
    name: str
    payload: Payload
    got: list[bytes] = field(default_factory=list)
    done: bool = False


@dataclass(slots=True)
class Active:
    submit: Submit
    seq: int = 0
    pulls: dict[PullId, Pulling] = field(default_factory=dict)
    running: bool = False
    published: set[str] = field(default_factory=set)
    inputs: dict[str, str] = field(default_factory=dict)


@dataclass(eq=False)
class Worker:
    world: Network
    stage: StageName
    host: str
    pid: int
    index: int | None = None
    alive: bool = True
    frozen_until: float = 0.0
    loaded: bool = False
    session: "Serving | None" = None

    def run(self, call: Callable[[], None]) -> None:
        """Everything that happens in the process comes through here: nothing does while it is frozen or dead."""
        if self.world.now < self.frozen_until:
            self.world.after(self.frozen_until - self.world.now, lambda: self.run(call))
        elif self.alive:
            call()

    def after(self, delay: float, call: Callable[[], None]) -> None:
        self.world.after(delay, lambda: self.run(call))

    def join(self) -> None:
        """A session with connections of its own."""
        self.session = Serving(self, *self.world.connect(self))
        self.session.say_hello()

    def end(self) -> None:
        """The process ends by itself."""
        self.alive = False
        self.session = None
        self.world.exited(self)


class Serving:
    """One session: from Hello to the end of its epoch."""

    def __init__(self, worker: Worker, control: bytes, data: bytes) -> None:
        self.worker, self.world = worker, worker.world
        self.control, self.data = control, data
        self.nonce = f"nonce-{control.hex()}"
        self.epoch = Epoch(0)
        self.index = 0
        self.welcome: Welcome | None = None
        self.attached = False
        self.draining = False
        self.last_ack = self.world.now
        self.active: dict[RequestId, Active] = {}
        self.aborted_early: set[RequestId] = set()
        self.store: dict[LeaseId, tuple[Payload, list[bytes]]] = {}
        self.numbers = 0

    # --- life ---------------------------------------------------------------------------------------------------------

    @property
    def current(self) -> bool:
        return self.worker.session is self

    def later(self, delay: float, call: Callable[[], None]) -> None:
        self.worker.after(delay, lambda: call() if self.current else None)

    def say(self, message: ControlUp) -> None:
        self.world.up_control(self.control, message)

    def say_hello(self) -> None:
        worker = self.worker
        hello = Hello(
            protocol=PROTOCOL, build="sim", stage=worker.stage, nonce=self.nonce, host=worker.host, pid=worker.pid,
            replica=worker.index,
        )  # fmt: skip
        self.say(hello)

    def on_control(self, message: ControlDown) -> None:
        if isinstance(message, Welcome):
            if self.welcome is None:
                self.welcome, self.epoch, self.index = message, message.epoch, message.replica
                self.world.up_data(self.data, Attach(session=Session(message.session), epoch=self.epoch))
        elif isinstance(message, Refuse):
            if self.welcome is None:
                assert message.retry, message
                self.later(1.0, self.say_hello)
            else:
                self.lost()
        elif isinstance(message, Abort):
            self.abort(message.request)
        elif isinstance(message, BeatAck):
            self.last_ack = self.world.now
        elif isinstance(message, Call):
            reply = CallReply(epoch=self.epoch, call=message.call, ok=True, value=self.index)
            self.later(self.world.between(0.001, 1.5), lambda: self.say(reply))
        elif isinstance(message, Shutdown):
            self.worker.end()

    def lost(self) -> None:
        """The master has forgotten us: join again, as we are."""
        self.say(Goodbye(epoch=self.epoch, reason="lost"))
        self.worker.join()

    def serve(self) -> None:
        if self.attached:
            return
        self.attached = True
        self.beat()
        if self.worker.loaded:
            self.say(Ready(epoch=self.epoch, info=StageInfo(), load_s=0.0))
        else:
            self.load(3)

    def load(self, steps: int) -> None:
        if steps:
            self.say(LoadProgress(epoch=self.epoch, note=f"{steps} to go"))
            self.later(self.world.between(0.05, 0.5), lambda: self.load(steps - 1))
        else:
            self.worker.loaded = True
            self.say(Ready(epoch=self.epoch, info=StageInfo(), load_s=1.0))

    def beat(self) -> None:
        assert self.welcome is not None
        every = self.welcome.heartbeat_s
        self.say(Heartbeat(epoch=self.epoch, steps=0, queued=0, running=len(self.active)))
        if self.draining and not self.active and not self.store:
            self.say(Goodbye(epoch=self.epoch, reason="left"))
            self.worker.end()
        elif self.world.now - self.last_ack > 10 * every:
            self.lost()
        else:
            self.later(every, self.beat)

    def drain(self) -> None:
        if self.attached:
            self.draining = True
            self.say(Leaving(epoch=self.epoch))

    # --- requests -----------------------------------------------------------------------------------------------------

    def on_data(self, message: DataDown, tensors: tuple[WireTensor, ...]) -> None:
        if isinstance(message, Attached):
            self.serve()
        elif isinstance(message, Submit):
            if message.epoch == self.epoch:
                self.submit(message)
        elif isinstance(message, Release):
            self.store.pop(message.lease, None)
        elif isinstance(message, Pull):
            self.give(message)
        elif isinstance(message, Piece | PullRefused):
            self.on_piece(message, tensors)

    def submit(self, message: Submit) -> None:
        if message.request in self.aborted_early:
            self.aborted_early.discard(message.request)
            self.say(Aborted(epoch=self.epoch, request=message.request))
            return
        if message.request in self.active:
            return
        active = self.active[message.request] = Active(message)
        for name, value in message.inputs.items():
            if isinstance(value, Payload):
                self.numbers += 1
                active.pulls[PullId(f"{self.epoch}.{self.numbers}")] = Pulling(name, value)
            else:
                active.inputs[name] = content(value)
        for pull in list(active.pulls):
            self.ask(active, pull)
            self.later(message.params.seed or 3.0, lambda pull=pull: self.give_up(active, pull, "too late"))  # type: ignore[misc]
        if not active.pulls:
            self.compute(active)

    def abort(self, request: RequestId) -> None:
        active = self.active.get(request)
        if active is None:
            self.aborted_early.add(request)
            self.say(Aborted(epoch=self.epoch, request=request))
        elif not active.running:
            self.over(active)
            self.say(Aborted(epoch=self.epoch, request=request))
        else:
            self.later(self.world.between(0.0, 0.02), lambda: self.dropped(request))

    def dropped(self, request: RequestId) -> None:
        self.active.pop(request, None)
        self.say(Aborted(epoch=self.epoch, request=request))

    def over(self, active: Active) -> None:
        self.active.pop(active.submit.request, None)

    def is_active(self, active: Active) -> bool:
        return self.active.get(active.submit.request) is active

    def number(self, active: Active) -> int:
        active.seq += 1
        return active.seq - 1

    def fail(self, active: Active, code: ErrorCode, text: str) -> None:
        request, seq = active.submit.request, self.number(active)
        self.over(active)
        error = ErrorInfo(code, text, self.worker.stage)
        self.world.up_data(self.data, Failed(request=request, epoch=self.epoch, seq=seq, error=error))

    # --- payloads -----------------------------------------------------------------------------------------------------

    def ask(self, active: Active, pull: PullId) -> None:
        pulling = active.pulls[pull]
        payload = pulling.payload
        message = Pull(
            epoch=self.epoch, pull=pull, request=active.submit.request, lease=payload.lease, source=payload.source,
            replica=payload.replica, source_epoch=payload.epoch, first=len(pulling.got),
        )  # fmt: skip
        self.world.up_data(self.data, message)

    def give(self, message: Pull) -> None:
        if self.world.chance("lose_lease"):
            self.store.pop(message.lease, None)
        kept = self.store.get(message.lease)
        if kept is None:
            refused = PullRefused(epoch=self.epoch, pull=message.pull, reason="its lease has ended")
            self.world.up_data(self.data, refused)
            return
        if self.world.chance("lose_piece"):
            return
        data = kept[1][message.first]
        if self.world.chance("damage_piece"):
            data = bytes(16)
        piece = Piece(epoch=self.epoch, pull=message.pull, first=message.first, tensors=(REF,))
        self.world.up_data(self.data, piece, (WireTensor(REF, data),))

    def on_piece(self, message: Piece | PullRefused, tensors: tuple[WireTensor, ...]) -> None:
        active = next((a for a in self.active.values() if message.pull in a.pulls), None)
        if active is None or active.pulls[message.pull].done:
            return
        pulling = active.pulls[message.pull]
        if isinstance(message, PullRefused):
            self.give_up(active, message.pull, message.reason)
        elif message.first == len(pulling.got):
            pulling.got += [bytes(tensor.data) for tensor in tensors]
            if len(pulling.got) < len(pulling.payload.items):
                self.ask(active, message.pull)
            else:
                self.verify(active, message.pull)

    def verify(self, active: Active, pull: PullId) -> None:
        pulling = active.pulls[pull]
        if [int.from_bytes(got[:8]) for got in pulling.got] != [item.checksum for item in pulling.payload.items]:
            self.give_up(active, pull, "damaged")
            return
        pulling.done = True
        self.world.up_data(self.data, Ack(epoch=self.epoch, pull=pull))
        active.inputs[pulling.name] = content(pulling.got)
        if all(one.done for one in active.pulls.values()):
            self.compute(active)

    def give_up(self, active: Active, pull: PullId, reason: str) -> None:
        if self.is_active(active) and not active.pulls[pull].done:
            self.world.up_data(self.data, Nack(epoch=self.epoch, pull=pull, reason=reason))
            self.fail(active, ErrorCode.PAYLOAD_LOST, reason)

    # --- the engine ---------------------------------------------------------------------------------------------------

    def compute(self, active: Active) -> None:
        active.running = True
        self.chunk(active, "", Started(queue_s=0.0))
        steps = round(self.world.between(1, 4))
        self.later(self.world.between(0.001, 0.05), lambda: self.step(active, 0, steps))

    def step(self, active: Active, step: int, steps: int) -> None:
        if not self.is_active(active):
            return
        if self.world.chance("fail"):
            self.fail(active, ErrorCode.STAGE_FAILED, "raised")
            return
        early = [name for name in active.submit.publish if name not in TEXTS and name not in active.published]
        if early and self.world.between(0, 1) < 0.5:
            self.publish(active, early[0])
        if "text" in active.submit.emit:
            text = text_of(self.worker.stage, active.inputs)
            size = -(-len(text) // steps)
            self.chunk(active, "text", TextDelta(text=text[step * size : (step + 1) * size]))
        else:
            self.chunk(active, "", Progress(step=step + 1, total=steps))
        if step + 1 < steps:
            self.later(self.world.between(0.001, 0.05), lambda: self.step(active, step + 1, steps))
        else:
            self.finish(active)

    def chunk(self, active: Active, output: str, part: Started | TextDelta | Progress) -> None:
        message = Chunk(
            request=active.submit.request, epoch=self.epoch, seq=self.number(active), output=output, part=part
        )
        self.world.up_data(self.data, message)

    def publish(self, active: Active, output: str) -> None:
        active.published.add(output)
        items = items_of(self.worker.stage, output, active.inputs)
        self.numbers += 1
        payload = Payload(
            lease=LeaseId(f"{self.epoch}.{self.numbers}"),
            source=self.worker.stage,
            replica=self.index,
            epoch=self.epoch,
            kind=output,
            items=tuple(PayloadTensor(str(i), REF, int.from_bytes(item[:8])) for i, item in enumerate(items)),
        )
        self.store[payload.lease] = (payload, items)
        message = Published(
            request=active.submit.request, epoch=self.epoch, seq=self.number(active), output=output, value=payload
        )
        self.world.up_data(self.data, message)

    def finish(self, active: Active) -> None:
        submit, stage = active.submit, self.worker.stage
        for output in submit.publish:
            if output not in TEXTS and output not in active.published:
                self.publish(active, output)
        outputs: dict[str, Value] = {}
        tensors: tuple[WireTensor, ...] = ()
        assert self.welcome is not None
        for output in dict.fromkeys((*submit.emit, *submit.publish)):
            if output == "text":
                outputs[output] = Text(text=text_of(stage, active.inputs))
            elif output == "tokens":
                outputs[output] = Tokens(ids=tokens_of(stage, active.inputs))
            elif output in submit.emit:
                assert not isinstance(self.welcome.spec, ArStage)
                outputs[output] = Images(tensor=0)
                tensors = (WireTensor(REF, items_of(stage, output, active.inputs)[0]),)
        seq = self.number(active)
        self.over(active)
        refs = tuple(tensor.ref for tensor in tensors)
        result = Result(request=submit.request, epoch=self.epoch, seq=seq, outputs=outputs, tensors=refs)
        self.world.up_data(self.data, result, tensors)
