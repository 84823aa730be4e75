"""What step batching brings: `python -m tests.bench.bench_step_batching [--quick] [--dtype D] [--threads N]
[--lots N]`.

- mean and p95 time from arrival to answer of mixed requests that come at random, at 0.9 and 1.3 of what the stock pipeline
  can do one after the other: stock behind a lock, stock in static batches (those waiting with the same step count), ours
- denoiser rows a second of 1, 2, 4 and 8 requests, against one stock call with the same batch
- what parking, grouping and resuming cost each request at each step, beside the forward and the pipeline's own code
- denoiser forwards that still run after an abort

The model is a Flux of random weights, 12 blocks of width 64, that draws 64 tokens: on a CPU batching pays where tokens and
weights are few, and eight rows cost twice what one does. Wider ones are bound by arithmetic, of which each row needs its own.
A processor without bfloat16 instructions gains less in bfloat16 than in float32. All sides have the same weights, threads
and dtype.

With one thread all times are the processor's, so that others on the machine do not count. The mean and the p95 are of all
requests of all lots: in a short lot the lock may happen to be idle, and then nobody can be better than it. What could be
reached at all is told beside: if rows cost nothing, every request would take as long as if it were alone.
"""

import argparse
import random
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch
from diffusers import DiffusionPipeline, FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
from transformers import CLIPTextModel, T5Config, T5EncoderModel

from proto.deploy import DiffusionEngineSpec, DiffusionStage, LimitsSpec, ModelSpec
from proto.ids import RequestId, StageName
from proto.messages import Text
from proto.params import DiffusionParams, Json
from stages.demo.tiny_painter import letter_tokenizer
from stages.diffusion import parking
from stages.diffusion.engine import DiffusionEngine
from stages.diffusion.parking import Call, Site
from stages.diffusion.runner import Runner
from stages.engine import Finished, Job, LoadContext
from tests.bench.report import alternate, machine, median, percentile, table
from tests.models.tiny_diffusion import clip_config, image_vae, seeded_build, t5_config, t5_tokenizer

SIDE = 32  # pixels: 16 x 16 latents, 8 x 8 tokens
STEPS = (8, 12, 20, 28, 50)
MOST = 8  # requests in one batch, for all


@dataclass(frozen=True)
class Ask:
    """One request: seconds after the start at which it comes, and its steps."""

    name: str
    arrival: float
    steps: int


def build(heads: int, layers: int, dtype: torch.dtype = torch.bfloat16) -> Callable[[Path], Path]:
    """Flux with so many heads of 64, and twice as many single blocks as double ones."""

    @seeded_build
    def write(folder: Path) -> None:
        FluxPipeline(
            transformer=FluxTransformer2DModel(
                patch_size=1,
                in_channels=16,
                num_layers=layers,
                num_single_layers=2 * layers,
                attention_head_dim=64,
                num_attention_heads=heads,
                joint_attention_dim=32,
                pooled_projection_dim=32,
                axes_dims_rope=(16, 24, 24),
                guidance_embeds=True,
            ),
            scheduler=FlowMatchEulerDiscreteScheduler(),
            vae=image_vae(4),
            text_encoder=CLIPTextModel(clip_config()),
            tokenizer=letter_tokenizer(),
            text_encoder_2=T5EncoderModel(t5_config(T5Config)),
            tokenizer_2=t5_tokenizer(),
        ).to(dtype).save_pretrained(folder)

    return write


def load(folder: Path, **spec: Json) -> DiffusionEngine:
    engine = DiffusionEngine()
    stage = DiffusionStage(
        model=ModelSpec(path=str(folder)),
        engine=DiffusionEngineSpec(max_num_seqs=MOST, max_rows=MOST, memory_profile=False, **spec),
    )
    engine.load(LoadContext(StageName("painter"), stage, LimitsSpec(), "cpu", (), lambda note, done: None))
    return engine


def job(ask: Ask) -> Job:
    params = DiffusionParams(
        num_inference_steps=ask.steps, width=SIDE, height=SIDE, seed=1, extra={"max_sequence_length": 16}
    )
    return Job(RequestId(ask.name), {"prompt": Text(text=f"a fox, {ask.name}")}, params, emit=("image",))


def call_stock(pipe: DiffusionPipeline, asks: Sequence[Ask]) -> None:
    with torch.inference_mode():
        pipe(
            prompt=[f"a fox, {ask.name}" for ask in asks],
            num_inference_steps=asks[0].steps,
            width=SIDE,
            height=SIDE,
            max_sequence_length=16,
            generator=[torch.Generator().manual_seed(1) for _ in asks],
        )


# --- arrivals ---------------------------------------------------------------------------------------------------------


def lot(count: int, per_second: float, seed: int) -> list[Ask]:
    """Poisson arrivals."""
    dice = random.Random(seed)
    at, asks = 0.0, []
    for number in range(count):
        asks.append(Ask(f"r{number}", at, dice.choice(STEPS)))
        at += dice.expovariate(per_second)
    return asks


def clock_reader() -> Callable[[], float]:
    return time.process_time if torch.get_num_threads() == 1 else time.perf_counter


class Watch:
    """Seconds since it was made. With one thread, of the processor: then a busy machine slows nobody down, and time in
    which nothing is at work need not be waited for."""

    def __init__(self) -> None:
        self._read = clock_reader()
        self._zero = self._read()

    def now(self) -> float:
        return self._read() - self._zero

    def skip_to(self, moment: float) -> None:
        self._zero -= max(0.0, moment - self.now())


def serve_stock(pipe: DiffusionPipeline, asks: Sequence[Ask], together: bool) -> list[float]:
    """Seconds from arrival to answer. One after the other, or all those waiting that want the first one's steps."""
    coming, waiting, took = deque(asks), list[Ask](), []
    watch = Watch()
    while coming or waiting:
        now = watch.now()
        while coming and coming[0].arrival <= now:
            waiting.append(coming.popleft())
        if not waiting:
            watch.skip_to(coming[0].arrival)
            continue
        batch = [ask for ask in waiting if ask.steps == waiting[0].steps][: MOST if together else 1]
        call_stock(pipe, batch)
        waiting = [ask for ask in waiting if ask not in batch]
        ended = watch.now()
        took += [ended - ask.arrival for ask in batch]
    return took


def serve_ours(engine: DiffusionEngine, asks: Sequence[Ask]) -> list[float]:
    coming, took = deque(asks), []
    arrivals = {ask.name: ask.arrival for ask in asks}
    watch = Watch()
    while coming or engine.has_work:
        now = watch.now()
        while coming and coming[0].arrival <= now:
            engine.submit(job(coming.popleft()))
        if not engine.has_work:
            watch.skip_to(coming[0].arrival)
            continue
        for event in engine.step():
            if isinstance(event, Finished):
                took.append(watch.now() - arrivals[event.request])
    return took


def arrivals(pipe: DiffusionPipeline, engine: DiffusionEngine, count: int, lots: int) -> None:
    """Prints a table for each rate."""
    call_stock(pipe, [Ask("warm", 0, 8)])
    steps_a_second = median([rate(lambda: call_stock(pipe, [Ask("measure", 0, 28)]), 28) for _ in range(5)])
    per_request = sum(STEPS) / len(STEPS) / steps_a_second
    for load_factor in (0.9, 1.3):
        rows = []
        took: dict[str, list[float]] = {"lock": [], "static": [], "ours": [], "if rows cost nothing": []}
        for turn in range(lots):
            asks = lot(count, load_factor / per_request, seed=turn)
            took["ours"] += serve_ours(engine, asks)
            took["static"] += serve_stock(pipe, asks, together=True)
            took["lock"] += serve_stock(pipe, asks, together=False)
            took["if rows cost nothing"] += [per_request * ask.steps * len(STEPS) / sum(STEPS) for ask in asks]
        means = {name: sum(all_of) / len(all_of) for name, all_of in took.items()}
        p95s = {name: percentile(all_of, 95) for name, all_of in took.items()}
        for name in took:
            rows.append(
                [f"{load_factor} of capacity, {name}", means[name], means["lock"] / means[name], p95s[name],
                 p95s["lock"] / p95s[name]]
            )  # fmt: skip
        title = (
            f"{lots} lots of {count} requests of {min(STEPS)} to {max(STEPS)} steps, seconds (of the processor, if one"
            " thread); x is times better than behind a lock"
        )
        print(table(title, ["", "mean", "x", "p95", "x"], rows), flush=True)


# --- rows a second ----------------------------------------------------------------------------------------------------


def rows_a_second(pipe: DiffusionPipeline, engine: DiffusionEngine, rounds: int, steps: int) -> str:
    candidates: dict[tuple[int, str], Callable[[], float]] = {}
    for count in (1, 2, 4, 8):
        asks = [Ask(f"r{number}", 0.0, steps) for number in range(count)]
        candidates[count, "stock"] = lambda asks=asks: rate(lambda: call_stock(pipe, asks), len(asks) * steps)
        candidates[count, "ours"] = lambda asks=asks: rate(lambda: serve_ours(engine, asks), len(asks) * steps)
    figures = {key: median(values) for key, values in alternate(candidates, rounds).items()}
    one = figures[1, "stock"]
    rows = [
        [f"{count} requests", figures[count, "stock"], figures[count, "stock"] / one, figures[count, "ours"],
         figures[count, "ours"] / one, f"{figures[count, 'ours'] / figures[count, 'stock']:.0%}"]
        for count in (1, 2, 4, 8)
    ]  # fmt: skip
    header = ["", "one stock call", "x one", "ours", "x one", "of stock"]
    return table("denoiser rows a second, whole requests with their encoding and decoding", header, rows)


def rate(function: Callable[[], object], rows: int) -> float:
    watch = Watch()
    function()
    return rows / watch.now()


# --- overhead ---------------------------------------------------------------------------------------------------------


@dataclass
class Clock:
    """Seconds in forwards, and in the fibers' own code between two calls."""

    forwards: float = 0.0
    own: float = 0.0


def overhead(engine: DiffusionEngine, count: int, steps: int) -> tuple[float, float]:
    """Microseconds a request and step that are neither the forward's nor the pipeline's; and those of the pipeline."""
    clock, began_own, read = Clock(), threading.local(), clock_reader()
    stop, make, make_alone = parking.stop_at, Runner._make, Call.make

    def timed_stop(site: Site, args: Json = (), kwargs: Json = None) -> Json:
        if vars(began_own).get("at") is not None:
            clock.own += read() - began_own.at
        result = stop(site, args, kwargs)
        began_own.at = read() if threading.current_thread().name.startswith("paint-") else None
        return result

    def timed(function: Callable[..., Json]) -> Callable[..., Json]:
        def call(*args: Json, **kwargs: Json) -> Json:
            began = read()
            try:
                return function(*args, **kwargs)
            finally:
                clock.forwards += read() - began

        return call

    for number in range(count):
        engine.submit(job(Ask(f"r{number}", 0.0, steps + 10)))
    done = engine.call("stats", {})["steps"]
    while engine.call("stats", {})["steps"] < done + 2 * count:
        engine.step()
    with (
        mock.patch.object(parking, "stop_at", timed_stop),
        mock.patch.object(Runner, "_make", timed(make)),
        mock.patch.object(Call, "make", timed(make_alone)),
    ):
        engine.step()  # from here on every fiber's clock runs
        figures = []
        for _ in range(steps):
            clock.forwards = clock.own = 0.0
            began = read()
            engine.step()
            figures.append((read() - began - clock.forwards - clock.own, clock.own))
    for number in range(count):
        engine.abort(RequestId(f"r{number}"))
    return median([ours for ours, _ in figures]) * 1e6 / count, median([own for _, own in figures]) * 1e6 / count


def no_forward(
    self: FluxTransformer2DModel,
    hidden_states: torch.Tensor,
    encoder_hidden_states: torch.Tensor | None = None,
    pooled_projections: torch.Tensor | None = None,
    timestep: torch.Tensor | None = None,
    img_ids: torch.Tensor | None = None,
    txt_ids: torch.Tensor | None = None,
    guidance: torch.Tensor | None = None,
    joint_attention_kwargs: Json = None,
    return_dict: bool = True,
) -> tuple[torch.Tensor]:
    """In place of the denoiser's: takes no time and leaves the processor's caches alone."""
    return (hidden_states,)


def overheads(folder: Path, rounds: int, steps: int) -> str:
    """Twice: with a denoiser that does nothing, and with a small one, which leaves the caches cold for what follows."""
    small = load(folder)
    with mock.patch.object(FluxTransformer2DModel, "forward", no_forward):
        nothing = load(folder)
    rows = []
    for name, engine in (("no forward", nothing), ("5 ms forward", small)):
        for count in (1, 2, 4, 8):
            figures = [overhead(engine, count, steps) for _ in range(rounds + 1)][1:]
            rows.append([f"{name}, {count} requests", *(median(column) for column in zip(*figures, strict=True))])
    title = "microseconds a request and step beside the forward (medians of steps)"
    return table(title, ["", "park, group, resume", "the pipeline's own code"], rows)


def after_abort(engine: DiffusionEngine) -> str:
    worst = 0
    for steps in range(1, 8):
        engine.submit(job(Ask("leaves", 0.0, 50)))
        done = engine.call("stats", {})["steps"]
        while engine.call("stats", {})["steps"] < done + steps:
            engine.step()
        before = engine.call("stats", {})["forwards"]
        engine.abort(RequestId("leaves"))
        while engine.has_work:
            engine.step()
        worst = max(worst, engine.call("stats", {})["forwards"] - before)
    return table("denoiser forwards after an abort", ["", "most"], [["7 aborts at steps 1 to 7", worst]])


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--quick", action="store_true", help="a small model and few requests: does it run?")
    options.add_argument("--lots", type=int, default=4)
    options.add_argument("--threads", type=int, default=1)
    options.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    given = options.parse_args()
    torch.set_num_threads(given.threads)
    print(machine("torch", "diffusers"), f"{given.threads} threads", sep=", ")
    dtype = {"bfloat16": torch.bfloat16, "float32": torch.float32}[given.dtype]
    heads, layers = (1, 1) if given.quick else (1, 4)
    with tempfile.TemporaryDirectory() as folder:
        where = build(heads, layers, dtype)(Path(folder) / "flux")
        tiny = build(1, 1)(Path(folder) / "tiny")
        pipe = DiffusionPipeline.from_pretrained(where, dtype=dtype)
        pipe.set_progress_bar_config(disable=True)
        engine = load(where, prompt_cache=0)
        size = sum(p.numel() for p in pipe.transformer.parameters()) / 1e6
        print(f"Flux, {size:.1f} million parameters in its denoiser, {given.dtype}, 64 image and 16 text tokens")
        print(overheads(tiny, 1 if given.quick else 5, 10 if given.quick else 100), flush=True)
        print(after_abort(engine), flush=True)
        print(rows_a_second(pipe, engine, 1 if given.quick else 5, 4 if given.quick else 20), flush=True)
        arrivals(pipe, engine, 4 if given.quick else 24, 1 if given.quick else given.lots)


if __name__ == "__main__":
    main()
