"""How well the painter draws captions that it never saw: pictures by the engine's shared steps, judged by the checker."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from proto.deploy import Compile, DiffusionEngineSpec, DiffusionStage, Kind, LimitsSpec, ModelSpec
from proto.ids import Epoch, LeaseId, RequestId, StageName
from proto.messages import Payload
from proto.numpy_tensors import from_wire
from proto.params import DiffusionParams
from proto.torch_tensors import to_wire
from stages.diffusion.engine import DiffusionEngine
from stages.diffusion.painter.captions import Caption, Captions, Split
from stages.diffusion.painter.kv import Thinker
from stages.engine import Finished, Job, LoadContext, PulledPayload
from tests.painter.checker import judge

Cached = Mapping[str, torch.Tensor]
Control = Callable[[Sequence[Cached]], Sequence[Cached]]
"""What the painter gets in place of the captions' own keys and values."""


@dataclass(frozen=True)
class Scores:
    """Shares of what is right. `one` and `two`: of things in captions with so many, in colour and shape; `relation`: of pairs
    that are where the caption says; `background`: of all; `whole`: of pictures in which everything is right,
    places included, and nothing is too much."""

    one: float
    two: float
    relation: float
    background: float
    whole: float
    count: int

    def row(self) -> str:
        return (
            f"one {self.one:6.1%}  two {self.two:6.1%}  relation {self.relation:6.1%}"
            f"  background {self.background:6.1%}  whole {self.whole:6.1%}  of {self.count}"
        )


def held_out_captions(count: int, seed: int = 0, kinds: Sequence[str] = ("one", "two")) -> list[Caption]:
    """`count` captions, the kinds in turn; of one, two or three things always with something held out from training."""
    source = Captions(Split.TEST, seed)
    return [source.draw(kinds[n % len(kinds)]) for n in range(count)]


def load_painter(folder: Path | str, compiled: Compile = Compile.NONE) -> DiffusionEngine:
    """The diffusion engine with the painter of `folder` or demo://NAME."""
    loaded = DiffusionEngine()
    spec = DiffusionStage(model=ModelSpec(path=str(folder)), engine=DiffusionEngineSpec(compile=compiled))
    loaded.load(LoadContext(StageName("painter"), spec, LimitsSpec(), "cpu", (), lambda note, done: None))
    return loaded


def draw(
    engine: DiffusionEngine, texts: Sequence[Cached], empty: Cached, *, steps: int = 20, guidance: float = 3.0
) -> list[np.ndarray]:
    """A picture of each text, with its number as seed; at most 64 in the engine at a time."""
    pictures: dict[str, np.ndarray] = {}
    negative = _payload(empty)
    for start in range(0, len(texts), 64):
        for n in range(start, min(start + 64, len(texts))):
            payloads = {"kv": _payload(texts[n]), "negative_kv": negative}
            own = DiffusionParams(num_inference_steps=steps, guidance_scale=guidance, seed=n)
            engine.submit(Job(RequestId(f"r{n}"), {}, own, emit=("image",), payloads=payloads))
        while engine.has_work:
            for event in engine.step():
                if isinstance(event, Finished):
                    pictures[event.request] = from_wire(event.tensors[0])[0]
    return [pictures[f"r{n}"] for n in range(len(texts))]


def score(captions: Sequence[Caption], pictures: Sequence[np.ndarray]) -> Scores:
    verdicts = [judge(picture, caption) for picture, caption in zip(pictures, captions, strict=True)]
    by_count: dict[int, list[bool]] = {1: [], 2: []}
    for caption, verdict in zip(captions, verdicts, strict=True):
        by_count.setdefault(len(caption.layout.things), []).extend(verdict.things)
    relations = [verdict.relation for verdict in verdicts if verdict.relation is not None]
    return Scores(
        one=_share(by_count[1]),
        two=_share(by_count[2]),
        relation=_share(relations),
        background=_share([verdict.background for verdict in verdicts]),
        whole=_share([verdict.all_right for verdict in verdicts]),
        count=len(captions),
    )


def measure(
    engine: DiffusionEngine, thinker: Thinker, captions: Sequence[Caption], control: Control | None = None
) -> Scores:
    """Draw the captions, or what `control` makes of their texts, and judge."""
    texts: Sequence[Cached] = [thinker.cached(caption.text) for caption in captions]
    pictures = draw(engine, control(texts) if control else texts, thinker.cached(""))
    return score(captions, pictures)


def of_another_caption(texts: Sequence[Cached]) -> Sequence[Cached]:
    """Each gets the keys and values of the one before the one before it, which is of its kind."""
    return [*texts[-2:], *texts[:-2]]


def zeroed(texts: Sequence[Cached]) -> Sequence[Cached]:
    return [{name: torch.zeros_like(tensor) for name, tensor in text.items()} for text in texts]


def _payload(text: Cached) -> PulledPayload:
    described = Payload(
        lease=LeaseId("l1"), source=StageName("thinker"), replica=0, epoch=Epoch(1), kind=Kind.KV.value, items=()
    )
    return PulledPayload(described, {name: to_wire(tensor) for name, tensor in text.items()})


def _share(right: Sequence[bool]) -> float:
    return sum(right) / len(right) if right else 0.0
