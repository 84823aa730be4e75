"""What diffusers' step caches bring in our engine: `python -m tests.bench.bench_step_caches [--quick] [--threads N] [--rounds N]`.

For each cache, beside the same engine without one:
- how much sooner one request of 28 steps ends, and the share of the denoiser's attention layers that were still computed
- how far its latents and its picture are from those without the cache
- how much sooner four requests end that come together: with a cache each takes its own forwards, without one they share them

The model is a Flux of random weights that draws 256 tokens. What that can show: `mag`, `taylorseer`, `pab` and `faster` skip by
the number of the step, so a trained model of this shape would skip the same and take the same time; `first_block` skips by
what the first block does, which depends on the weights. How far the pictures are apart depends on the weights always:
here it says only that the caches are on, and in what order they come.
"""

import argparse
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from diffusers.models.transformers.transformer_flux import FluxAttention

from proto.deploy import DiffusionEngineSpec, DiffusionStage, LimitsSpec, ModelSpec
from proto.ids import RequestId, StageName
from proto.messages import Text
from proto.params import DiffusionParams, Json
from proto.step_cache import (
    FasterCache,
    FirstBlockCache,
    MagCache,
    PyramidAttentionBroadcast,
    StepCacheSpec,
    TaylorSeer,
)
from proto.torch_tensors import from_wire
from stages.diffusion.engine import DiffusionEngine
from stages.engine import Finished, Job, LoadContext
from tests.bench.bench_step_batching import Watch, build
from tests.bench.report import alternate, machine, median, table

CACHES: Mapping[str, StepCacheSpec | None] = {
    "none": None,
    "first_block, 0.05": FirstBlockCache(threshold=0.05),
    "first_block, 0.15": FirstBlockCache(threshold=0.15),
    "mag, Flux's ratios": MagCache(),
    "taylorseer": TaylorSeer(),
    "taylorseer, lite": TaylorSeer(use_lite_mode=True),
    "pab": PyramidAttentionBroadcast(),
    "faster, distilled": FasterCache(is_guidance_distilled=True),
}
SIDE = 64  # pixels: 32 x 32 latents, 16 x 16 tokens


@dataclass(frozen=True)
class Drawn:
    """Seconds, attention layers computed, and what came out of the first request."""

    seconds: float
    computed: int
    latents: torch.Tensor
    picture: torch.Tensor


class Painting:
    """An engine with one of the caches, its attention layers counted where they really run."""

    def __init__(self, folder: Path, cache: StepCacheSpec | None) -> None:
        self.engine = DiffusionEngine()
        stage = DiffusionStage(
            model=ModelSpec(path=str(folder)), engine=DiffusionEngineSpec(step_cache=cache, memory_profile=False)
        )
        self.engine.load(LoadContext(StageName("painter"), stage, LimitsSpec(), "cpu", (), lambda note, done: None))
        self.computed = 0
        for part in self.engine._loaded().pipe.transformer.modules():
            if isinstance(part, FluxAttention):
                part.norm_q.register_forward_pre_hook(self._count)

    def _count(self, module: torch.nn.Module, inputs: Json) -> None:
        self.computed += 1

    def draw(self, count: int, steps: int) -> Drawn:
        self.computed = 0
        watch = Watch()
        for number in range(count):
            self.engine.submit(_job(number, steps))
        ended: dict[str, Finished] = {}
        while self.engine.has_work:
            for event in self.engine.step():
                if isinstance(event, Finished):
                    ended[event.request] = event
        seconds = watch.now()
        picture, latents = (from_wire(tensor).float() for tensor in ended["r0"].tensors[:2])
        return Drawn(seconds, self.computed, latents, picture)


def _job(number: int, steps: int) -> Job:
    params = DiffusionParams(
        num_inference_steps=steps, width=SIDE, height=SIDE, seed=number, extra={"max_sequence_length": 16}
    )
    words = {"prompt": Text(text=f"a fox, {number}")}
    return Job(RequestId(f"r{number}"), words, params, emit=("image", "latents"))


def caches(folder: Path, rounds: int, steps: int) -> str:
    paintings = {name: Painting(folder, spec) for name, spec in CACHES.items()}
    drawn = {name: one.draw(1, steps) for name, one in paintings.items()}
    exact = drawn["none"]
    alone = alternate({name: lambda one=one: one.draw(1, steps).seconds for name, one in paintings.items()}, rounds)
    four = alternate({name: lambda one=one: one.draw(4, steps).seconds for name, one in paintings.items()}, rounds)
    rows = []
    for name, one in drawn.items():
        apart = float((one.latents - exact.latents).norm() / exact.latents.norm())
        error = float((one.picture - exact.picture).pow(2).mean())
        rows.append(
            [
                name,
                _ratio(alone["none"], alone[name]),
                f"{one.computed / exact.computed:.0%}",
                _ratio(four["none"], four[name]),
                f"{apart:.1%}",
                "same" if error == 0 else f"{10 * float(torch.log10(torch.tensor(255.0**2 / error))):.1f} dB",
            ]
        )
    title = (
        f"{steps} steps, {SIDE} x {SIDE} pixels; times are of the processor if one thread; x is times as fast as none"
    )
    header = ["", "one request, x", "attention computed", "four together, x", "latents apart", "picture, PSNR"]
    return table(title, header, rows)


def _ratio(before: list[float], after: list[float]) -> str:
    """The median of the rounds' own ratios."""
    return f"{median([one / other for one, other in zip(before, after, strict=True)]):.2f}"


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--quick", action="store_true", help="a small model and few steps: does it run?")
    options.add_argument("--threads", type=int, default=1)
    options.add_argument("--rounds", type=int, default=3)
    args = options.parse_args()
    torch.set_num_threads(args.threads)
    print(machine("diffusers", "torch"))
    heads, layers, rounds, steps = (2, 2, 1, 8) if args.quick else (4, 2, args.rounds, 28)
    with tempfile.TemporaryDirectory() as root:
        folder = build(heads, layers, torch.float32)(Path(root) / "flux")
        print(
            f"Flux of {heads} heads of 64, {layers} double and {2 * layers} single blocks, {args.threads} threads, fp32"
        )
        print(caches(folder, rounds, steps))


if __name__ == "__main__":
    main()
