"""Once, when a stage starts: does this model run on pages, what do its layers keep, and how many pages are there?

A model runs on pages if one packed forward of two prompts in chunks gives what each gives alone. That is tried, not looked
up: so a model that transformers gains tomorrow works, and one that keeps more than keys and values, or masks in ways of
its own, is found out before it answers anybody.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from transformers import AttentionInterface, PreTrainedModel

from proto.deploy import ArEngineSpec
from proto.ids import RequestId
from stages.ar.attention import BATCH, NAME, Layer, Traits, attend_alone, choose_backend, paged_attention
from stages.ar.kv_blocks import KvBlocks
from stages.ar.native.decoder import Decoder, Unfit
from stages.ar.native.library import Unavailable, library
from stages.ar.native.runner import NativeRunner
from stages.ar.runner import PagedRunner, Runner, StockRunner
from stages.ar.scheduler import Limits, Scheduler, Track
from stages.ar.zeros import zeros
from stages.parallel.distributed import least

TOLERANCE: Final = {torch.float32: 2e-3}
HALF_TOLERANCE: Final = 0.15
"""How far logits may be apart, as a share of their length: rounding is far below it, a wrong mask far above."""

_SHARE: Final = 4
"""The pool takes at most one part in so many of the memory that is free, unless the deploy says how much."""


@dataclass(frozen=True, slots=True)
class LayerShape:
    kv_heads: int
    key_size: int
    value_size: int
    window: int | None
    scale: float = 1.0
    plain: bool = True  # attention without a soft cap and without sinks

    def bytes(self, dtype: torch.dtype) -> int:
        """Of one token."""
        return self.kv_heads * (self.key_size + self.value_size) * int(dtype.itemsize)


class _Probe:
    """Answers a forward's attention calls for one sequence alone, and notes what each layer keeps."""

    def __init__(self) -> None:
        self.shapes: dict[int, LayerShape] = {}

    def __call__(
        self, index: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, traits: Traits
    ) -> torch.Tensor:
        self.shapes[index] = LayerShape(
            key.shape[1],
            key.shape[2],
            value.shape[2],
            traits.window,
            traits.scale,
            plain=traits.softcap is None and traits.sinks is None,
        )
        return attend_alone(query, key, value, traits)


def measure(model: PreTrainedModel, device: torch.device, ids: Sequence[int]) -> tuple[LayerShape, ...]:
    """What each attention layer keeps. Raises what the model raises; `ValueError` if its layers cannot be told apart."""
    probe = _Probe()
    model.set_attn_implementation(NAME)
    token = BATCH.set(probe)
    try:
        with torch.inference_mode():
            places = torch.arange(len(ids), device=device).unsqueeze(0)
            model(input_ids=torch.tensor([list(ids)], device=device), position_ids=places, use_cache=False)
    finally:
        BATCH.reset(token)
    config = model.config.get_text_config(decoder=True)
    kinds = list(getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers)
    if sorted(probe.shapes) != list(range(len(kinds))):
        raise ValueError(f"{len(probe.shapes)} of {len(kinds)} layers attend")
    for index, kind in enumerate(kinds):
        windowed = probe.shapes[index].window is not None
        if kind not in ("full_attention", "sliding_attention") or (kind == "sliding_attention" and not windowed):
            raise ValueError(f"layer {index} is a {kind} layer")
    return tuple(probe.shapes[index] for index in range(len(kinds)))


def page_count(shapes: Sequence[LayerShape], dtype: torch.dtype, spec: ArEngineSpec, context: int, free: int) -> int:
    """How many pages, page 0 included. `free`: bytes of memory that nothing uses now."""
    page_bytes = spec.block_size * sum(shape.bytes(dtype) for shape in shapes)
    full = spec.max_num_seqs * -(-context // spec.block_size)
    if spec.kv_cache_bytes is not None:
        return 1 + min(full, spec.kv_cache_bytes // page_bytes)
    return 1 + max(-(-context // spec.block_size), min(full, free // _SHARE // page_bytes))


def free_bytes(device: torch.device) -> int:
    """Of the device; for systems that do not say, all that it has."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    free = "SC_AVPHYS_PAGES" if "SC_AVPHYS_PAGES" in os.sysconf_names else "SC_PHYS_PAGES"
    return os.sysconf(free) * os.sysconf("SC_PAGE_SIZE")


def allocate(
    shapes: Sequence[LayerShape], dtype: torch.dtype, device: torch.device, pages: int, size: int
) -> list[Layer]:
    """Pages of zeros: what is masked must be a number all the same. On a CPU memory is taken as pages are first used."""
    return [
        Layer(
            zeros(pages, size, shape.kv_heads, shape.key_size, dtype=dtype, device=device),
            zeros(pages, size, shape.kv_heads, shape.value_size, dtype=dtype, device=device),
        )
        for shape in shapes
    ]


@dataclass(frozen=True, slots=True)
class Engine:
    """What computes, and who plans for it. `note` says why a model does not run on pages, `slow`
    why its answers are not computed in C, if that is so."""

    runner: Runner
    scheduler: Scheduler
    page_bytes: int
    note: str | None = None
    slow: str | None = None

    def compile(self, model: PreTrainedModel, spec: ArEngineSpec) -> None:
        """Compile the model's repeated layers, once for one row and once for many, and try them. Raises what the compiler
        raises; `ValueError` if the model has none or they give something else then."""
        repeated = [one for one in model.modules() if type(one).__name__ in (model._no_split_modules or ())]
        if not repeated:
            raise ValueError(f"{type(model).__name__} does not say which of its layers repeat")
        if not self.runner.paged:
            raise ValueError(f"only models that run on pages can be compiled; {self.note}")
        prompts = _prompts(model)
        blocks = KvBlocks(self.scheduler.blocks.count, self.scheduler.blocks.size)
        expected = _logits(self.runner, _scheduler(spec, blocks, budget=5), prompts)
        AttentionInterface.register(NAME, torch.compiler.disable(paged_attention))
        for one in repeated:
            one.compile(dynamic=True, **self._cuda_graphs(model.device, spec))
        found = _logits(self.runner, _scheduler(spec, blocks, budget=5), prompts)
        _logits(self.runner, _scheduler(spec, blocks, budget=1), prompts[:1])
        _compare(found, expected, model.dtype)

    def _cuda_graphs(self, device: torch.device, spec: ArEngineSpec) -> dict[str, object]:
        """On CUDA the compiler's own graphs of what lies between two attentions, for forwards of answers, whose sizes are
        rounded up to few; on a CPU there are none."""
        if device.type != "cuda" or not isinstance(self.runner, PagedRunner):
            return {}
        sizes = (*(2**power for power in range((spec.max_num_seqs - 1).bit_length())), spec.max_num_seqs)
        self.runner.sizes = sizes
        return {"options": {"triton.cudagraphs": True, "triton.cudagraph_capture_sizes": sizes}}


def build(model: PreTrainedModel, device: torch.device, spec: ArEngineSpec, context: int) -> Engine:
    """Runner and scheduler for a loaded model. Raises what the model raises where even its own forward does."""
    attention = model.config._attn_implementation
    stock = StockRunner(model, device, attention)
    prompts = _prompts(model, context)
    expected = _logits(stock, _scheduler(spec, KvBlocks(64, 4), budget=5), prompts)
    try:
        shapes = measure(model, device, prompts[0])
        pages = least(page_count(shapes, model.dtype, spec, context, free_bytes(device)))  # one number for all ranks
        layers = allocate(shapes, model.dtype, device, max(pages, 2), spec.block_size)
        backend = choose_backend(device, model.dtype, spec.block_size)
        runner = PagedRunner(model, layers, backend, seats=spec.max_num_seqs, context=context)
        trial = KvBlocks(max(pages, 2), spec.block_size)
        found = _logits(runner, _scheduler(spec, trial, budget=5), prompts)
        _compare(found, expected, model.dtype)
    except Exception as error:  # noqa: BLE001  # a model may raise anything; it has shown that its own forward works
        width = spec.max_num_seqs * -(-context // spec.block_size)
        blocks = KvBlocks(1 + width, spec.block_size)
        return Engine(stock, _scheduler(spec, blocks, caching=False), 0, f"{type(error).__name__}: {error}")
    blocks = KvBlocks(max(pages, 2), spec.block_size)
    answering, slow = _native(model, runner, layers, shapes, spec, context, prompts, expected)
    page_bytes = spec.block_size * sum(shape.bytes(model.dtype) for shape in shapes)
    return Engine(answering, _scheduler(spec, blocks, caching=spec.prefix_caching), page_bytes, slow=slow)


def _native(
    model: PreTrainedModel,
    paged: PagedRunner,
    layers: Sequence[Layer],
    shapes: Sequence[LayerShape],
    spec: ArEngineSpec,
    context: int,
    prompts: Sequence[Sequence[int]],
    expected: torch.Tensor,
) -> tuple[Runner, str | None]:
    """The runner whose answers are computed in C, tried; where that cannot be, `paged` and why."""
    if spec.native is False or layers[0].keys.device.type != "cpu":
        return paged, None
    try:
        library()  # for the sampler too, whatever becomes of the model
        if not all(shape.plain for shape in shapes):
            raise Unfit("its attention has a soft cap or sinks")
        decoder = Decoder(model, layers, [one.window for one in shapes], [one.scale for one in shapes], context)
        runner = NativeRunner(paged, decoder)
        for budget in (5, 1):
            trial = KvBlocks(layers[0].keys.shape[0], spec.block_size)
            _compare(_logits(runner, _scheduler(spec, trial, budget=budget), prompts), expected, model.dtype)
    except (Unfit, Unavailable, ValueError, AttributeError, TypeError) as error:
        return paged, str(error)
    return runner, None


def _prompts(model: PreTrainedModel, context: int = 16) -> list[list[int]]:
    """Two, of different lengths."""
    vocabulary = int(model.get_input_embeddings().weight.shape[0])
    return [[(7 * i + 3 + one) % vocabulary for i in range(min(one, context - 1))] for one in (9, 6)]


def _compare(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    apart = float((found - expected).norm() / expected.norm())
    if not apart < TOLERANCE.get(dtype, HALF_TOLERANCE):
        raise ValueError(f"its logits are {apart:.1%} off")


def _scheduler(spec: ArEngineSpec, blocks: KvBlocks, *, budget: int = 0, caching: bool = False) -> Scheduler:
    limits = Limits(
        max_seqs=spec.max_num_seqs,
        max_batched_tokens=budget or max(spec.max_num_batched_tokens, spec.max_num_seqs),
        prefix_caching=caching,
    )
    return Scheduler(limits, blocks)


def _logits(runner: Runner, scheduler: Scheduler, prompts: Sequence[Sequence[int]]) -> torch.Tensor:
    """Logits after each prompt and after one token more, (2 * prompts, V), float32, in a fixed order."""
    found: dict[tuple[RequestId, int], torch.Tensor] = {}
    tracks = [
        Track(RequestId(str(number)), list(prompt), longest=len(prompt) + 1) for number, prompt in enumerate(prompts)
    ]
    for track in tracks:
        scheduler.add(track)
    while scheduler.waiting or scheduler.running:
        plan = scheduler.schedule()
        out = runner.run(plan.chunks)
        scheduler.commit(plan.chunks)
        ended = [chunk.track for chunk in plan.chunks if chunk.last]
        for row, track in enumerate(ended):
            found[track.request, len(track.tokens)] = out.logits[row].float().cpu()
            if len(track.tokens) == track.longest:
                scheduler.remove(track)
                runner.forget(track)
            else:
                track.tokens.append(track.tokens[0])
    return torch.stack([found[key] for key in sorted(found)])
