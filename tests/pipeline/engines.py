"""Fake engines for single promises: large payloads of many tensors, a consumer that says what it got, a slow load."""

import dataclasses
import hashlib
import random
import sys
from collections.abc import Mapping
from pathlib import Path

from proto.deploy import Kind
from proto.messages import StageInfo, Text, TextDelta
from proto.params import Json
from proto.tensors import Dtype, TensorRef, WireTensor
from stages.engine import Emit, Event, Finished, Job, LoadContext, OutgoingPayload, Publish
from stages.parallel.group import Group
from tests.fakes.engines import FakeAr, FakeDiffusion, _Running
from tests.fakes.ranks import Fault, Note


def kv_tensors(prompt: str, count: int, nbytes: int) -> dict[str, WireTensor]:
    """The tensors that `BigKv` publishes for a prompt: each of its own bytes, of several element types and shapes."""
    tensors = {}
    for index in range(count):
        block = random.Random(f"{prompt}/{index}").randbytes(min(nbytes, 65536 - 4))
        data = (block * (nbytes // len(block) + 1))[:nbytes] if nbytes else b""
        dtype, width = ((Dtype.BF16, 2), (Dtype.F32, 4), (Dtype.U8, 1))[index % 3]
        tensors[f"k.{index}"] = WireTensor(TensorRef(dtype, (1, nbytes // width)), data)
    return tensors


def digest(tensors: Mapping[str, WireTensor]) -> bytes:
    """SHA-256 of names, element types, shapes and bytes."""
    found = hashlib.sha256()
    for name in sorted(tensors):
        ref, data = tensors[name]
        found.update(f"{name} {ref.dtype.value} {ref.shape} ".encode())
        found.update(data)
    return found.digest()


class BigKv(FakeAr):
    """Publishes `options.tensors` tensors of `options.nbytes` bytes each as `kv`."""

    def one(self, running: _Running) -> list[Event]:
        job = running.job
        first = running.step == 0
        events = [event for event in super().one(running) if not isinstance(event, Publish)]
        if first and "kv" in job.publish:
            tensors = kv_tensors(self._prompt(job), int(self._options["tensors"]), int(self._options["nbytes"]))
            events.insert(0, Publish(job.request, "kv", OutgoingPayload(Kind.KV, tensors, {"layers": [0, 1]})))
        return events


class Witness(FakeDiffusion):
    """Its picture's first bytes are the digests of the payloads that it got, in the order of their names."""

    inputs = ("prompt", "kv", "negative_kv", "image")

    def one(self, running: _Running) -> list[Event]:
        whole = running.job
        running.job = dataclasses.replace(whole, payloads={})
        events = super().one(running)
        running.job = whole
        return [self._seen(whole, event) if isinstance(event, Finished) else event for event in events]

    @staticmethod
    def _seen(job: Job, finished: Finished) -> Finished:
        ref, _ = finished.tensors[0]
        seen = b"".join(digest(job.payloads[name].tensors) for name in sorted(job.payloads))
        picture = seen.ljust(ref.nbytes, b"\0")[: ref.nbytes]
        return Finished(job.request, finished.outputs, [WireTensor(ref, picture)])


class HeldInStep(Witness):
    """Makes the file `options.inside` when a step begins, and ends no step before there is a file `options.gate`."""

    def step(self) -> list[Event]:
        Path(str(self._options["inside"])).touch()
        while not Path(str(self._options["gate"])).exists():
            self._idle.wait(0.01)
        return super().step()


class Picky(FakeAr):
    """Says in its info that of all params it takes `max_tokens` alone."""

    def load(self, context: LoadContext) -> StageInfo:
        info = super().load(context)
        return StageInfo(model=info.model, inputs=info.inputs, outputs=info.outputs, params=("max_tokens",))


class Breaks(FakeAr):
    """A step that gets the prompt "break" raises out of `step`: the engine itself is broken."""

    def one(self, running: _Running) -> list[Event]:
        if self._prompt(running.job) == "break":
            raise RuntimeError("the device is gone, as the test asked")
        return super().one(running)


class Leaves(FakeAr):
    """Raises SystemExit, as a library may that takes itself for a program: in a load, a step or a call."""

    def load(self, context: LoadContext) -> StageInfo:
        if context.spec.engine.options.get("load") == "exit":
            sys.exit("the library leaves, as the test asked")
        return super().load(context)

    def one(self, running: _Running) -> list[Event]:
        if self._prompt(running.job) == "exit":
            sys.exit("the library leaves, as the test asked")
        return super().one(running)

    def call(self, method: str, args: Mapping[str, Json]) -> Json:
        if method == "exit":
            sys.exit("the library leaves, as the test asked")
        return super().call(method, args)


class BadAnswers(FakeAr):
    """Answers a call with what the wire cannot carry."""

    def call(self, method: str, args: Mapping[str, Json]) -> Json:
        return {"set": {1, 2}} if method == "set" else super().call(method, args)


class Talker(FakeAr):
    """Says 17 MiB at once, which is more than a header holds: as a chunk for the prompt "chunk", else as its result."""

    def one(self, running: _Running) -> list[Event]:
        prompt, job = self._prompt(running.job), running.job
        if prompt not in ("chunk", "result"):
            return super().one(running)
        running.step = running.steps
        words = "a" * (17 << 20)
        if prompt == "chunk":
            return [Emit(job.request, "text", TextDelta(text=words))]
        return [Finished(job.request, {"text": Text(text=words)})]


class Offers(FakeAr):
    """Has adapters that are names only, and sleeps when told."""

    def __init__(self) -> None:
        super().__init__()
        self._loras: dict[str, Json] = {}
        self._asleep = False

    def call(self, method: str, args: Mapping[str, Json]) -> Json:
        if method == "hold":  # says that it has begun, and waits until it is told to go on
            Path(args["begun"]).write_text("begun")
            Path(args["go"]).read_text()
        elif method == "load_lora":
            self._loras[args["name"]] = {}
        elif method in ("sleep", "wake"):
            self._asleep = method == "sleep"
        return {"loras": dict(self._loras), "asleep": self._asleep}


class Ranked(FakeAr):
    """Has followers, who take a note of each step in the file `options.notes`. A step for the prompt "stop" stops one of
    them for good; the call `ranks` gives their process ids."""

    def load(self, context: LoadContext) -> StageInfo:
        info = super().load(context)
        self._group = Group(context, "tests.fakes.ranks:follow")
        self._group.meet()
        return info

    def step(self) -> list[Event]:
        stop = any(self._prompt(running.job) == "stop" for running in self._running.values())
        note = Note(str(self._options["notes"]), "step", Fault.STOP if stop else Fault.NONE)
        return self._group.run(note, super().step)

    def call(self, method: str, args: Mapping[str, Json]) -> Json:
        return self._group.pids if method == "ranks" else super().call(method, args)

    def close(self) -> None:
        self._group.close()
