"""Requests that the stage draws for itself when it loads: to warm up shapes, and to find out what they take of the memory.

They go through the engine like any other, so that what is found holds for real ones. Each has words of its own, for no
encoder is asked twice for the same ones.
"""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Protocol

import msgspec
import torch

from proto.deploy import DiffusionStage, Kind, WarmupSpec
from proto.errors import OmniError, StartError
from proto.ids import Epoch, LeaseId, RequestId, StageName
from proto.messages import Images, Payload, Progress, Tensor, Text, Tokens, Value
from proto.params import DiffusionParams, Json
from proto.tensors import WireTensor
from proto.torch_tensors import to_wire
from stages.diffusion import budget, library
from stages.diffusion.arguments import amount, given_pixels
from stages.diffusion.budget import Budget, Measured, Profile, mib
from stages.diffusion.loading import Painter
from stages.diffusion.memory import Gauge
from stages.diffusion.prompt_cache import size_of
from stages.diffusion.request import PaintRequest
from stages.diffusion.scheduler import Phase
from stages.engine import Emit, Event, Failed, Job, LoadContext, PulledPayload

log = logging.getLogger(__name__)

_DONE: Final = 0.95
"""Of the load, when trials begin."""
_LATENTS: Final = (16, 32)
"""Latents along each side of what is drawn to measure: large enough to be seen, and soon done."""
_FRAMES: Final = (9, 17)
"""Of videos, which models compress in time by 2, 4 or 8 but for the first frame."""
_USUAL_PICTURE: Final = 512 * 512
"""Pixels of what is told of a pipeline that draws at the size of its picture."""
_GUIDED: Final = 5.0
"""Guidance doubles the rows of many pipelines, so what is measured is guided."""
_WORDS: Final = 16  # tokens of made-up embeddings
_EMBEDDED: Final = ("joint_attention_dim", "caption_channels", "cross_attention_dim", "cap_feat_dim", "text_dim")


class TrialFailed(Exception):
    """A request of the stage's own did not come to a good end."""


class Stage(Protocol):
    """The engine, as far as trials need it."""

    @property
    def has_work(self) -> bool: ...

    def submit(self, job: Job) -> None: ...

    def step(self) -> list[Event]: ...

    def request(self, name: RequestId) -> PaintRequest: ...


@dataclass(frozen=True, slots=True)
class Shape:
    """None is the model's own."""

    width: int | None = None
    height: int | None = None
    frames: int | None = None
    images: int = 1


# --- warming up -------------------------------------------------------------------------------------------------------


def warm_up(stage: Stage, painter: Painter, context: LoadContext) -> None:
    """Draw what `engine.warmup` names, each entry's rows together. Raises `StartError` naming the entry."""
    assert isinstance(context.spec, DiffusionStage)
    entries = context.spec.engine.warmup
    for number, entry in enumerate(entries):
        began = time.perf_counter()
        words = f"warming up {_named(entry)} ({number + 1} of {len(entries)})"
        try:
            _draw(stage, _warmup_jobs(entry, painter, context.spec), words, context)
        except TrialFailed as error:
            raise StartError(
                f"stage {context.stage}: engine.warmup[{number}], {_named(entry)}: {error}",
                stage=context.stage,
                field=f"engine.warmup[{number}]",
            ) from error
        context.report(f"{words}: {time.perf_counter() - began:.1f} s", _DONE)


def _named(entry: WarmupSpec) -> str:
    """Only what the deploy says."""
    size = f"{entry.width or 'default'}x{entry.height or 'default'}" if entry.width or entry.height else "default size"
    frames = f", {entry.frames} frames" if entry.frames else ""
    return f"{size}{frames}, {entry.steps} steps, {entry.rows} rows"


def _warmup_jobs(entry: WarmupSpec, painter: Painter, spec: DiffusionStage) -> list[Job]:
    shape = Shape(entry.width, entry.height, entry.frames)
    return [_job(f"warm-up {row}", shape, entry.steps, painter, spec.defaults) for row in range(entry.rows)]


# --- measuring --------------------------------------------------------------------------------------------------------


def memory_budget(stage: Stage, painter: Painter, gauge: Gauge | None, context: LoadContext) -> Budget | None:
    """What requests may take, or None if there is no bound: the deploy wants none, or it cannot be found out, which is an
    error (`StartError`) only where the deploy names a budget."""
    assert isinstance(context.spec, DiffusionStage)
    spec = context.spec.engine
    if not spec.memory_profile:
        return None
    began = time.perf_counter()
    try:
        if gauge is None:
            raise TrialFailed(f"the memory of {painter.device} cannot be measured here")
        profile = _measure(stage, painter, gauge, context)
    except TrialFailed as error:
        problem = f"what requests take of the memory could not be found out: {error}"
        if spec.memory is None:
            log.warning("stage %s: %s; it is not bounded", context.stage, problem)
            return None
        raise StartError(
            f"stage {context.stage}: engine.memory: {problem}; leave engine.memory out and set engine.max_pixels instead",
            stage=context.stage,
            field="engine.memory",
        ) from error
    total = spec.memory if spec.memory is not None else int(gauge.free() * spec.memory_share)
    by_image = painter.recipe.sized_by_image
    unit = budget.PIXELS if painter.recipe.default_size or by_image else budget.ITEMS
    found = Budget(painter.stage, painter.info.model, profile, total, unit, by_image)
    usual = profile.need(amount(DiffusionParams(), painter, _USUAL_PICTURE if by_image else 0))
    size = f"{_USUAL_PICTURE} pixels" if by_image else "the default size"
    seconds = time.perf_counter() - began
    context.report(
        f"memory: {mib(total)} for requests, one of {size} takes {mib(usual.peak)}, most of it to"
        f" {usual.worst.value} ({seconds:.1f} s to find out)",
        _DONE,
    )
    return found


def _measure(stage: Stage, painter: Painter, gauge: Gauge, context: LoadContext) -> Profile:
    """The first request is drawn twice: what is taken once and for all is not its own."""
    shapes = _shapes(painter)
    measured = []
    with _eager():
        for number, shape in enumerate((shapes[0], *shapes)):
            job = _job(f"trial {number}", shape, 2, painter, _guided(painter))
            [(request, held)] = _draw(stage, [job], f"measuring memory, {number} of {len(shapes)}", context)
            peaks = {phase: round(taken) for phase, taken in request.meter.peaks.items()}
            drawn = amount(request.params, painter, given_pixels(job, painter))
            measured.append(Measured(drawn, peaks, held))
    return budget.fit(measured[1:])


@contextmanager
def _eager() -> Iterator[None]:
    """Compiled modules run as they were written: these shapes are not worth a compilation, and take no less memory so."""
    with torch.compiler.set_stance("force_eager"):
        yield


def _shapes(painter: Painter) -> list[Shape]:
    """Two squares of few latents, of a video a third one of more frames. What has no size, or one only, is measured as it is, and
    two of it if a request may ask for several."""
    if painter.recipe.one_size or (painter.recipe.default_size is None and not painter.recipe.sized_by_image):
        several = "num_images" in (painter.info.params or ())
        return [Shape(images=count) for count in ((1, 2) if several else (1,))]
    multiple, scale = painter.info.size_multiple, library.scale_factor(painter.pipe)
    sides = [multiple * -(-latents * scale // multiple) for latents in _LATENTS]
    if not _has_frames(painter):
        return [Shape(side, side) for side in sides]
    return [*(Shape(side, side, _FRAMES[0]) for side in sides), Shape(sides[-1], sides[-1], _FRAMES[1])]


def _has_frames(painter: Painter) -> bool:
    return "num_frames" in painter.signature.plain


def _guided(painter: Painter) -> DiffusionParams:
    known = painter.info.params or ()
    return DiffusionParams(
        guidance_scale=_GUIDED if "guidance_scale" in known else None,
        negative_prompt="grey" if "negative_prompt" in known and _reads(painter) else None,
    )


# --- drawing ----------------------------------------------------------------------------------------------------------


def _draw(stage: Stage, jobs: Sequence[Job], words: str, context: LoadContext) -> list[tuple[PaintRequest, int]]:
    """The requests as they ended, and the bytes that each held between its denoiser's calls. Raises `TrialFailed`."""
    context.report(words, _DONE)
    try:
        for job in jobs:
            stage.submit(job)
    except OmniError as error:
        _finish(stage, lambda step: None)
        raise TrialFailed(str(error)) from error
    requests = [stage.request(job.request) for job in jobs]
    held = dict.fromkeys(range(len(jobs)), 0)

    def stepped(step: Progress | None) -> None:
        if step is not None:
            context.report(f"{words}, step {step.step} of {step.total}", _DONE)
        for at, request in enumerate(requests):
            if request.call is not None and request.call.site.phase is Phase.DENOISE:
                held[at] = max(held[at], size_of(dict(request.call.arguments)))

    failed = _finish(stage, stepped)
    if failed is not None:
        raise TrialFailed(failed.error.message)
    return [(request, held[at]) for at, request in enumerate(requests)]


def _finish(stage: Stage, stepped: Callable[[Progress | None], None]) -> Failed | None:
    """Run until nothing is left; the first failure."""
    failed: Failed | None = None
    while stage.has_work:
        events = stage.step()
        steps = [event.part for event in events if isinstance(event, Emit) and isinstance(event.part, Progress)]
        stepped(steps[-1] if steps else None)
        failed = next((event for event in events if isinstance(event, Failed)), failed)
    return failed


def _job(name: str, shape: Shape, steps: int, painter: Painter, base: DiffusionParams) -> Job:
    """A request of that shape with the inputs that its pipeline needs, made up."""
    known = painter.info.params or ()
    asked: dict[str, Json] = {"width": shape.width, "height": shape.height, "seed": 0, "num_inference_steps": steps}
    params = {name: value for name, value in asked.items() if name in known}
    if shape.images > 1:
        params["num_images"] = shape.images
    if shape.frames is not None and _has_frames(painter):
        params["extra"] = {**(base.extra or {}), "num_frames": shape.frames}
    inputs, tensors = _inputs(name, shape, painter)
    emit = tuple(name for name in painter.info.outputs if name != "latents") or painter.info.outputs
    return Job(
        RequestId(name),
        inputs,
        msgspec.structs.replace(base, **params),
        emit=emit[:1],
        tensors=tensors,
        payloads=_payloads(painter),
    )


def _payloads(painter: Painter) -> dict[str, PulledPayload]:
    """Keys and values of a made-up prompt and its companion, for a pipeline that draws from them."""
    names = [name for name in ("kv", "negative_kv") if name in painter.info.inputs]
    layers, heads, size = (library.denoiser_setting(painter.pipe, n) for n in ("kv_layers", "kv_heads", "kv_head_dim"))
    if not names or not layers or not heads or not size:
        return {}
    described = Payload(
        lease=LeaseId("trial"), source=StageName("trial"), replica=0, epoch=Epoch(0), kind=Kind.KV.value, items=()
    )
    tokens = _WORDS + int(library.denoiser_setting(painter.pipe, "prefix_tokens") or 0)
    zeros = to_wire(torch.zeros(1, int(heads), tokens, int(size)))
    text = PulledPayload(described, {f"{one}.{layer}": zeros for layer in layers for one in ("k", "v")})
    return dict.fromkeys(names, text)


def _inputs(name: str, shape: Shape, painter: Painter) -> tuple[dict[str, Value], list[WireTensor]]:
    takes, recipe = painter.info.inputs, painter.recipe
    width, height = (
        shape.width or (recipe.default_size or (64, 64))[0],
        shape.height or (recipe.default_size or (64, 64))[1],
    )
    inputs: dict[str, Value] = {}
    tensors: list[WireTensor] = []
    if "prompt" in takes and _reads(painter):
        inputs["prompt"] = Text(text=name)
    elif "prompt_embeds" in takes and (size := library.denoiser_setting(painter.pipe, *_EMBEDDED)):
        inputs["prompt_embeds"] = Tensor(tensor=len(tensors))
        tensors.append(to_wire(torch.zeros(_WORDS, int(size))))
    if "prior_token_ids" in takes:
        side = library.scale_factor(painter.pipe) * library.patch_size(painter.pipe)
        inputs["prior_token_ids"] = Tokens(ids=(0,) * ((width // side) * (height // side)))
    if recipe.needs_image:
        inputs["image"] = Images(tensor=len(tensors))
        tensors.append(to_wire(torch.full((1, height, width, 3), 128, dtype=torch.uint8)))
    if recipe.needs_mask:
        inputs["mask_image"] = Images(tensor=len(tensors))
        tensors.append(to_wire(torch.full((1, height, width, 1), 255, dtype=torch.uint8)))
    return inputs, tensors


def _reads(painter: Painter) -> bool:
    """Whether the stage has what it needs to read words: others are given embeddings by another stage."""
    return any(name.startswith("text_encoder") for name in library.encoders(painter.pipe))
