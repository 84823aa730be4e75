"""A world around `MasterCore`: hundreds of stage processes, thousands of callers, a network that misbehaves, one clock.

Everything is drawn from one seed and happens in virtual time, so a failure can be played again. `World.run` checks while
it goes: one terminal news for each request and nothing after it, the right outputs in every success, the core's own
invariants. `World.check_over` then asks that every gauge is back at zero, in the master and in every stage.
"""

import hashlib
import heapq
import random
import socket
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from omni.core import MasterCore
from omni.events import (
    CallAsked,
    CallDone,
    Cancelled,
    ChildExited,
    Completed,
    ControlReceived,
    DataReceived,
    Errored,
    Event,
    JunkReceived,
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
from omni.plan import RequestPlan, TaskKey
from omni.planning import Planner
from omni.request import GenerateRequest
from proto.deploy import Deploy, LimitsSpec, MasterSpec, StageSpec
from proto.ids import CallId, Epoch, RequestId, StageName
from proto.messages import (
    Chunk,
    ControlUp,
    DataUp,
    Failed,
    Heartbeat,
    Images,
    Published,
    Result,
    Submit,
    Text,
    TextDelta,
    Tokens,
)
from proto.tensors import WireTensor
from tests.unit.drive import ar, diffusion
from tests.unit.simulated_worker import Serving, Worker, content, items_of, text_of, tokens_of

NUMBERED = (Chunk, Published, Result, Failed)
HERE = socket.gethostname()


@dataclass(frozen=True)
class Faults:
    """Chances: of each message, piece, step or request; those `_rate` are events a second in the whole world."""

    duplicate: float = 0.0
    reorder: float = 0.0
    lose_piece: float = 0.0
    damage_piece: float = 0.0
    lose_lease: float = 0.0
    fail: float = 0.0
    cancel: float = 0.0
    kill_rate: float = 0.0
    freeze_rate: float = 0.0
    drain_rate: float = 0.0
    junk_rate: float = 0.0
    call_rate: float = 0.0


ALL = Faults(
    duplicate=0.03, reorder=0.05, lose_piece=0.003, damage_piece=0.003, lose_lease=0.003, fail=0.005, cancel=0.05,
    kill_rate=3.0, freeze_rate=1.5, drain_rate=1.0, junk_rate=2.0, call_rate=2.0,
)  # fmt: skip


def stages_of_every_shape(replicas: int) -> dict[str, StageSpec]:
    """Several graphs side by side: one stage; a companion; a diamond; one payload for two; a companion through two."""
    n = replicas
    return {
        "solo": ar(replicas=n),
        "thinker": ar(replicas=n),
        "painter": diffusion(kv="thinker.kv", companion="kv", replicas=n),
        "top": ar(None, replicas=n),
        "left": ar(prompt="top.text", replicas=n),
        "right": diffusion(None, prompt="top.text", replicas=n),
        "bottom": diffusion(prompt="left.text", latents="right.latents", replicas=n),
        "fan": ar(replicas=n),
        "fan_a": diffusion(prompt_embeds="fan.hidden", generated_prompt_embeds="fan.hidden", replicas=n),
        "fan_b": diffusion(prompt_embeds="fan.hidden", prior_token_ids="fan.tokens", replicas=n),
        "first": ar(None, replicas=n),
        "second": ar(prompt="first.text", replicas=n),
        "last": diffusion(kv="second.kv", prompt="first.text", companion="kv", replicas=n),
    }


ASKS = (
    ("solo",), ("solo",), ("thinker",), ("painter",), ("thinker", "painter"), ("bottom",), ("left", "bottom"),
    ("fan", "fan_a", "fan_b"), ("fan_b",), ("fan_a",), ("last",), ("second", "last"),
)  # fmt: skip


@dataclass(frozen=True)
class Setting:
    """`requests` are spread over `seconds`; then faults end and the world may settle."""

    requests: int = 100
    seconds: float = 10.0
    replicas: int = 2
    faults: Faults = Faults()
    limits: LimitsSpec = field(default_factory=LimitsSpec)
    check_every: int = 1
    trace: bool = False


@dataclass
class Asked:
    plan: RequestPlan
    news: list[RequestNews] = field(default_factory=list)
    end: Completed | Errored | None = None


class World:
    def __init__(self, seed: int, setting: Setting) -> None:
        self.now = 0.0
        self.setting = setting
        self.rng = random.Random(seed)
        self.quiet = False  # no more faults
        self.deploy = Deploy(
            name="sim",
            stages={StageName(k): v for k, v in stages_of_every_shape(setting.replicas).items()},
            master=MasterSpec(suspect_after=3.0, dead_after=6.0, load_stall=20.0),
            limits=setting.limits,
        )
        self.core = MasterCore(self.deploy, new_session=lambda: f"{self.rng.getrandbits(64):x}", seed=seed)
        self.planner = Planner(self.deploy, self.core.graph)
        self.asked: dict[RequestId, Asked] = {}
        self.calls: dict[CallId, CallDone | None] = {}
        self.workers: list[Worker] = []
        self.events = 0
        self.numbers = 0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = 0
        self._owners: dict[bytes, Worker] = {}
        self._last: dict[tuple[bytes, str], float] = {}
        self._tick_at: float | None = None
        self._hash = hashlib.blake2b(digest_size=16)

    # --- time ---------------------------------------------------------------------------------------------------------

    def after(self, delay: float, call: Callable[[], None]) -> None:
        self._order += 1
        heapq.heappush(self._heap, (self.now + delay, self._order, call))

    def _until(self, end: float) -> None:
        while self._heap and self._heap[0][0] <= end:
            self.now, _, call = heapq.heappop(self._heap)
            call()
        self.now = end

    def between(self, low: float, high: float) -> float:
        return self.rng.uniform(low, high)

    def chance(self, fault: str) -> bool:
        rates: Mapping[str, float] = vars(self.setting.faults)
        return not self.quiet and rates[fault] > 0 and self.rng.random() < rates[fault]

    # --- the master ---------------------------------------------------------------------------------------------------

    def handle(self, event: Event) -> None:
        actions = self.core.handle(event, self.now)
        self.events += 1
        if self.setting.trace:
            self._hash.update(f"{self.now!r} {event!r} {actions!r}\n".encode())
        for action in actions:
            if isinstance(action, SendControl | SendData):
                self._down(action)
            elif isinstance(action, Tell):
                self._told(action.request, action.news)
            elif isinstance(action, CallDone):
                assert self.calls[action.call] is None, "a call was answered twice"
                self.calls[action.call] = action
            else:
                assert isinstance(action, MembershipChanged)
        if self.events % self.setting.check_every == 0:
            self.core.orchestrator.check_integrity()
        if not isinstance(event, DataReceived) and not (
            isinstance(event, ControlReceived) and isinstance(event.message, Heartbeat)
        ):
            self._arm()

    def _arm(self) -> None:
        at = self.core.deadline()
        if at is not None and (self._tick_at is None or at < self._tick_at):
            self._tick_at = at
            self.after(max(0.0, at - self.now), lambda: self._tick(at))

    def _tick(self, at: float) -> None:
        if self._tick_at == at:
            self._tick_at = None
            self.handle(Tick())

    # --- the network --------------------------------------------------------------------------------------------------

    def connect(self, worker: Worker) -> tuple[bytes, bytes]:
        self.numbers += 1
        control, data = b"c%d" % self.numbers, b"d%d" % self.numbers
        self._owners |= {control: worker, data: worker}
        return control, data

    def _arrival(self, lane: tuple[bytes, str], free: bool) -> float:
        """How long a message takes. One lane keeps its order, unless the message is `free` of it."""
        delay = self.rng.expovariate(500.0)
        if free and self.chance("reorder"):
            return delay * 8
        at = max(self._last.get(lane, 0.0), self.now + delay)
        self._last[lane] = at
        return at - self.now

    def up_control(self, peer: bytes, message: ControlUp) -> None:
        event = ControlReceived(peer, message)
        delay = self._arrival((peer, "up"), False)
        self.after(delay, lambda: self.handle(event))
        if self.chance("duplicate"):
            self.after(delay + self.rng.expovariate(20.0), lambda: self.handle(event))

    def up_data(self, peer: bytes, message: DataUp, tensors: tuple[WireTensor, ...] = ()) -> None:
        event = DataReceived(peer, message, tensors)
        delay = self._arrival((peer, "up"), isinstance(message, NUMBERED))
        self.after(delay, lambda: self.handle(event))
        if self.chance("duplicate"):
            self.after(delay + self.rng.expovariate(20.0), lambda: self.handle(event))

    def _down(self, action: SendControl | SendData) -> None:
        worker = self._owners.get(action.peer)
        if worker is None:
            return  # a stranger
        session = worker.session
        if session is None or action.peer not in (session.control, session.data):
            if worker.pid % 2:  # the others' hosts have vanished without a word: only silence tells
                self.after(0.0, lambda: self.handle(PeerGone(action.peer, "unreachable")))
            return
        delay = self._arrival((action.peer, "down"), False)
        self.after(delay, lambda: worker.run(lambda: self._into(session, worker, action)))
        if self.chance("duplicate"):
            # A Submit that comes again after its request was answered would be run again, as any order would.
            later = 0.0 if isinstance(action.message, Submit) else self.rng.expovariate(20.0)
            self.after(delay + later, lambda: worker.run(lambda: self._into(session, worker, action)))

    @staticmethod
    def _into(session: Serving, worker: Worker, action: SendControl | SendData) -> None:
        if worker.session is not session:
            return
        if isinstance(action, SendControl):
            session.on_control(action.message)
        else:
            session.on_data(action.message, tuple(action.tensors))

    # --- processes ----------------------------------------------------------------------------------------------------

    def start(self, stage: StageName, index: int | None) -> None:
        self.numbers += 1
        worker = Worker(self, stage, HERE, self.numbers, index)
        self.workers.append(worker)
        worker.join()

    def exited(self, worker: Worker) -> None:
        """A process has ended: its parent sees it (if it is of this host), and starts another one after a while."""
        self.workers.remove(worker)
        if worker.pid % 2:
            code = ChildExited(worker.stage, worker.index or 0, worker.pid, -9, will_restart=True)
            self.after(self.rng.expovariate(50.0), lambda: self.handle(code))
        self.after(self.between(0.1, 3.0), lambda: self.start(worker.stage, worker.index))

    def _every(self, rate: float, call: Callable[[], None]) -> None:
        def again() -> None:
            if not self.quiet:
                call()
                self.after(self.rng.expovariate(rate), again)

        if rate:
            self.after(self.rng.expovariate(rate), again)

    def _kill(self) -> None:
        for worker in self._someone():
            worker.end()

    def _freeze(self) -> None:
        for worker in self._someone():
            worker.frozen_until = self.now + self.between(0.5, 15.0)

    def _drain(self) -> None:
        for worker in self._someone():
            if worker.session is not None and self.now >= worker.frozen_until:
                worker.session.drain()

    def _someone(self) -> list[Worker]:
        """A process by chance, if there is any."""
        return [self.rng.choice(self.workers)] if self.workers else []

    def _junk(self) -> None:
        self.handle(JunkReceived(b"stranger", "not msgpack"))
        epoch = Epoch(self.rng.randrange(100))
        self.handle(ControlReceived(b"stranger", Heartbeat(epoch=epoch, steps=0, queued=0, running=0)))

    def _call(self) -> None:
        self.numbers += 1
        call = CallId(self.numbers)
        self.calls[call] = None
        stage = self.rng.choice(list(self.deploy.stages))
        some = None if self.rng.random() < 0.5 else [0, 1]
        self.handle(CallAsked(call, stage, "echo", {}, some, timeout_s=1.0))

    # --- callers ------------------------------------------------------------------------------------------------------

    def _ask(self) -> None:
        request = RequestId(f"r{len(self.asked)}")
        outputs = tuple(StageName(name) for name in self.rng.choice(ASKS))
        affinity = f"user{self.rng.randrange(5)}" if self.rng.random() < 0.2 else None
        plan = self.planner.plan(GenerateRequest(prompt=f"prompt of {request}", outputs=outputs, affinity=affinity), {})
        self.asked[request] = Asked(plan)
        self.handle(Submitted(request, plan))
        if self.chance("cancel"):
            self.after(self.rng.expovariate(5.0), lambda: self.handle(Cancelled(request)))

    def _told(self, request: RequestId, news: RequestNews) -> None:
        asked = self.asked[request]
        assert asked.end is None, f"{request} was told {news} after its end {asked.end}"
        asked.news.append(news)
        if isinstance(news, Completed | Errored):
            asked.end = news
            if isinstance(news, Completed):
                self._check_outputs(asked)
            asked.news.clear()

    def _check_outputs(self, asked: Asked) -> None:
        """A success has every stage once, and what it gives follows from what went in, through the whole graph."""
        finished = {news.stage: news for news in asked.news if isinstance(news, StageFinished)}
        assert set(finished) == set(asked.plan.stages)
        assert len(finished) == sum(isinstance(news, StageFinished) for news in asked.news)
        streamed: dict[StageName, str] = {}
        for news in asked.news:
            if isinstance(news, PartArrived) and isinstance(news.part, TextDelta):
                streamed[news.stage] = streamed.get(news.stage, "") + news.part.text
        known: dict[TaskKey, Mapping[str, str]] = {}
        for task in asked.plan.tasks:
            inputs = {name: content(value) for name, value in task.inputs.items()}
            for name, link in task.links.items():
                inputs[name] = _output(link.task.stage, link.output, known[link.task])
            known[task.key] = inputs
            news = finished[task.key.stage]
            for output in task.emit:
                value = news.outputs[output]
                if isinstance(value, Text):
                    assert value.text == text_of(task.key.stage, inputs) == streamed[task.key.stage]
                else:
                    assert isinstance(value, Images)
                    assert news.tensors[0].data == items_of(task.key.stage, output, inputs)[0]

    # --- the whole ----------------------------------------------------------------------------------------------------

    def run(self) -> "World":
        setting, faults = self.setting, self.setting.faults
        for stage in self.deploy.stages:
            numbered = self.rng.random() < 0.5  # else they take any free slot
            for index in range(setting.replicas):
                self.start(stage, index if numbered else None)
        self._until(4.0)
        for _ in range(setting.requests):
            self.after(self.between(0, setting.seconds), self._ask)
        self._every(faults.kill_rate, self._kill)
        self._every(faults.freeze_rate, self._freeze)
        self._every(faults.drain_rate, self._drain)
        self._every(faults.junk_rate, self._junk)
        self._every(faults.call_rate, self._call)
        self._until(self.now + setting.seconds)
        self.quiet = True
        self._until(self.now + 60.0)
        return self

    @property
    def ends(self) -> Counter[str]:
        """How many requests ended in which way."""
        return Counter(
            "done" if isinstance(asked.end, Completed) else asked.end.error.code.value if asked.end else "NEVER"
            for asked in self.asked.values()
        )

    @property
    def trace(self) -> str:
        return self._hash.hexdigest()

    def check_over(self) -> None:
        """Every request and call has ended, and nothing of them is left anywhere."""
        core = self.core
        core.orchestrator.check_integrity()
        assert self.ends["NEVER"] == 0, self.ends
        assert len(self.asked) == self.setting.requests
        assert all(done is not None for done in self.calls.values())
        assert not core.orchestrator.running
        assert not core.orchestrator.queued
        assert not any(core.orchestrator.waiting.values())
        assert not core.orchestrator._unanswered
        assert not any(replica.in_flight for replica in core.members.replicas())
        assert (len(core.leases), core.leases._pulls, core.leases._of_request) == (0, {}, {})
        assert not core.calls._pending
        assert core.orchestrator.done == self.ends["done"]
        assert sum(core.orchestrator.failed.values()) == len(self.asked) - self.ends["done"]
        for stage in self.deploy.stages:
            assert len(core.members.ready(stage)) == self.setting.replicas, core.members.waiting_for()
        for worker in self.workers:
            assert worker.session is not None
            assert not worker.session.active, worker
            assert not worker.session.store, worker


def _output(stage: str, output: str, inputs: Mapping[str, str]) -> str:
    if output == "text":
        return text_of(stage, inputs)
    if output == "tokens":
        return content(Tokens(ids=tokens_of(stage, inputs)))
    return content(items_of(stage, output, inputs))
