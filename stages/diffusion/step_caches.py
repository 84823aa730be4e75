"""diffusers' step caches on a pipeline that serves several requests: which it can have, and each request's own session.

`enable` puts one of the library's caches into the denoisers. A request's `Session` notes in its fiber which context each
call is made in; the call then carries that memory along (`Call.inside`) and is made by itself: whether a step is computed
depends on what this one request did before.

A context is what the pipeline says it is (`cond`, `uncond`). Where it says nothing, the k-th call of each step is one.
"""

import inspect
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager

import torch
from diffusers import (
    CacheMixin,
    DiffusionPipeline,
    FasterCacheConfig,
    FirstBlockCacheConfig,
    MagCacheConfig,
    PyramidAttentionBroadcastConfig,
    TaylorSeerCacheConfig,
)
from diffusers.hooks._common import _ALL_TRANSFORMER_BLOCK_IDENTIFIERS
from diffusers.hooks._helpers import TransformerBlockRegistry
from diffusers.hooks.hooks import CacheContext
from diffusers.hooks.mag_cache import FLUX_MAG_RATIOS

from proto.errors import InvalidRequest
from proto.params import Json
from proto.step_cache import (
    FasterCache,
    FirstBlockCache,
    MagCache,
    PyramidAttentionBroadcast,
    StepCacheSpec,
    TaylorSeer,
)
from stages.diffusion import library
from stages.diffusion.cache_states import Slots
from stages.diffusion.parking import Call

_PLAIN = (torch.Tensor, bool, int, float, str, list, tuple, dict, type(None))


class CannotCache(ValueError):
    """The pipeline cannot have this cache; the text says why and what else to do."""


class _Here(threading.local):
    session: "Session | None" = None


_here = _Here()


class StepCaches:
    """A cache that is on. `remove` takes it out of the modules again."""

    def __init__(self, spec: StepCacheSpec, pipe: DiffusionPipeline) -> None:
        self.spec = spec
        self.timestep = 0.0  # of the call that is being made
        self.slots: dict[str, Slots] = {}
        self._undo: list[Callable[[], None]] = []
        modules = library.denoisers(pipe)
        _check(spec, pipe, modules)
        try:
            for name, module in modules.items():
                self._enable(name, module)
        except BaseException:
            self.remove()
            raise

    def _enable(self, name: str, module: torch.nn.Module) -> None:
        try:
            module.enable_cache(self.config(28))
        except (ValueError, IndexError, TypeError) as error:  # its blocks are too few, or unknown to the library
            raise CannotCache(
                f"diffusers cannot put it into {type(module).__name__} ({error}); take another method, or none"
            ) from error
        self._undo.append(module.disable_cache)
        slots = self.slots[name] = Slots(module)
        idle = isinstance(self.spec, FasterCache) and self.spec.is_guidance_distilled  # the denoiser's own hook, then
        if len(slots) <= int(idle):
            more = "; name modules in `cache_identifiers`, or" if isinstance(self.spec, TaylorSeer) else ";"
            raise CannotCache(
                f"diffusers finds nothing in {type(module).__name__} to put it into{more} take another method, or none"
            )
        object.__setattr__(module, "cache_context", _context_of_the_request(module.cache_context))
        self._undo.append(lambda: object.__delattr__(module, "cache_context"))

    def config(self, steps: int) -> Json:
        """The library's config for a request of so many steps."""
        return library_config(self.spec, steps, lambda: self.timestep)

    def session(self, pipe: DiffusionPipeline) -> "Session":
        """For one request, whose own copy of the pipeline is `pipe`. Call in its fiber."""
        _here.session = Session(self, pipe)
        return _here.session

    def remove(self) -> None:
        for one in reversed(self._undo):
            one()
        self._undo = []


class Session:
    """What one request's denoisers remember. It is dropped with the request."""

    def __init__(self, caches: StepCaches, pipe: DiffusionPipeline) -> None:
        self._caches = caches
        self._pipe = pipe
        self._memories: dict[tuple[str, str], list[Json]] = {}
        self._calls_in_step: Counter[str] = Counter()
        self._config: Json = None
        self.context: CacheContext | None = None
        """What the pipeline says it is doing, where it does."""

    def attach(self, call: Call) -> None:
        """In the fiber, before it parks: a denoiser's call is made inside of what this request remembers."""
        name = call.site.name
        if name not in self._caches.slots:
            return
        context = self.context
        if context is None:
            if any(not isinstance(v, _PLAIN) and not library.is_inert(name, v) for v in call.arguments.values()):
                context = CacheContext("in full")  # it has a memory of its own, and may be no step at all
                call.inside = lambda: self._inside(name, context, keep=False)
                return
            context = CacheContext(f"call {self._calls_in_step[name]} of the step")
            self._calls_in_step[name] += 1
        call.inside = lambda: self._inside(name, context, keep=True)

    def step_done(self) -> None:
        self._calls_in_step.clear()

    @contextmanager
    def _inside(self, name: str, context: CacheContext, keep: bool) -> Iterator[None]:
        slots = self._caches.slots[name]
        if not self._memories:
            self._check_guidance()
        if isinstance(self._caches.spec, MagCache):
            if self._config is None:
                self._config = self._caches.config(self._steps())
            slots.configure(self._config)
        now = library.attribute(self._pipe, "_current_timestep")
        self._caches.timestep = 0.0 if now is None else float(now)
        key = (name, context.name)
        with slots.holding(self._memories.get(key, ()) if keep else (), context) as after:
            yield
        if keep:
            self._memories[key] = after

    def _steps(self) -> int:
        return library.planned_steps(self._pipe, library.schedulers(self._pipe).get("scheduler")) or 28

    def _check_guidance(self) -> None:
        """Without guidance there are no two halves, and the cache would take half of the pictures for one."""
        spec = self._caches.spec
        if isinstance(spec, FasterCache) and not spec.is_guidance_distilled and not library.guides(self._pipe):
            raise InvalidRequest(
                "the stage's step cache (faster) serves requests with guidance only; ask for a guidance_scale above 1",
                field="guidance_scale",
            )


def _context_of_the_request(shared: Callable[..., AbstractContextManager[None]]) -> Callable[..., Json]:
    """`cache_context` for a shared module: in a fiber, what is said concerns its own request only."""

    @contextmanager
    def cache_context(name: str, **more: Json) -> Iterator[None]:
        session = _here.session
        if session is None:
            with shared(name, **more):
                yield
            return
        before, session.context = session.context, CacheContext(name, **more)
        try:
            yield
        finally:
            session.context = before

    return cache_context


# --- what goes with what ----------------------------------------------------------------------------------------------


def _check(spec: StepCacheSpec, pipe: DiffusionPipeline, modules: Mapping[str, torch.nn.Module]) -> None:
    """Raises `CannotCache`."""
    own = type(pipe).__name__
    unable = [type(module).__name__ for module in modules.values() if not isinstance(module, CacheMixin)]
    if unable or not modules:
        raise CannotCache(f"diffusers has no step caches for {unable[0] if unable else own}; leave it out")
    match spec:
        case MagCache() if len(modules) > 1:
            raise CannotCache(f"{own} changes its denoiser on the way, and this cache counts the steps of one")
        case MagCache(ratios=()) if not own.startswith("Flux") or own.startswith("Flux2"):
            raise CannotCache(
                f"{own} needs `ratios` measured for its model: run diffusers' own MagCacheConfig(calibrate=True) once"
            )
        case FirstBlockCache():
            for module in modules.values():
                _check_first_and_last(module)
        case FasterCache(is_guidance_distilled=False) if not _guides_in_one_call(pipe):
            raise CannotCache(
                f"{own} does not make both halves of guidance in one call; set `is_guidance_distilled: true`"
            )
    if isinstance(spec, FasterCache | PyramidAttentionBroadcast) and "current_timestep" not in dir(type(pipe)):
        raise CannotCache(f"{own} does not tell its timestep, which this cache goes by; take another method, or none")


def _guides_in_one_call(pipe: DiffusionPipeline) -> bool:
    """Read from the pipeline's code, for nothing else says it."""
    source = inspect.getsource(type(pipe).__call__)
    apart = '"uncond"' in source or source.count("self.transformer(") > 1
    return "do_classifier_free_guidance" in source and not apart


def _check_first_and_last(module: torch.nn.Module) -> None:
    """The library takes the difference of what the first and the last block return, so they must return the same."""
    blocks = [
        block
        for name, part in module.named_children()
        if name in _ALL_TRANSFORMER_BLOCK_IDENTIFIERS and isinstance(part, torch.nn.ModuleList)
        for block in part
    ]
    if len(blocks) < 2:
        raise CannotCache(f"{type(module).__name__} has {len(blocks)} blocks, and this cache needs two; leave it out")
    try:
        apart = {TransformerBlockRegistry.get(type(b)).return_encoder_hidden_states_index is None for b in blocks}
    except ValueError as error:
        raise CannotCache(f"diffusers does not know the blocks of {type(module).__name__} ({error})") from error
    if len(apart) > 1:
        raise CannotCache(
            f"the first and last blocks of {type(module).__name__} return different things; take another method, or none"
        )


def library_config(spec: StepCacheSpec, steps: int, timestep: Callable[[], float]) -> Json:
    """The library's config of a cache, for a request of so many steps; `timestep` tells that of the call being made."""
    """The library's config of a cache, for a request of so many steps; `timestep` tells that of the call being made."""
    match spec:
        case FirstBlockCache():
            return FirstBlockCacheConfig(threshold=spec.threshold)
        case MagCache():
            return MagCacheConfig(
                threshold=spec.threshold,
                max_skip_steps=spec.max_skip_steps,
                retention_ratio=spec.retention_ratio,
                num_inference_steps=steps,
                mag_ratios=torch.tensor(spec.ratios) if spec.ratios else FLUX_MAG_RATIOS,
            )
        case TaylorSeer():
            return TaylorSeerCacheConfig(
                cache_interval=spec.cache_interval,
                disable_cache_before_step=spec.disable_cache_before_step,
                disable_cache_after_step=spec.disable_cache_after_step,
                max_order=spec.max_order,
                taylor_factors_dtype={"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}[
                    spec.factors_dtype
                ],
                use_lite_mode=spec.use_lite_mode,
                cache_identifiers=list(spec.cache_identifiers) or None,
                skip_predict_identifiers=list(spec.skip_predict_identifiers) or None,
            )
        case FasterCache():
            attention = (spec.attention_from_timestep, spec.attention_to_timestep)
            return FasterCacheConfig(
                spatial_attention_block_skip_range=spec.spatial_attention_block_skip_range,
                temporal_attention_block_skip_range=spec.temporal_attention_block_skip_range,
                spatial_attention_timestep_skip_range=attention,
                temporal_attention_timestep_skip_range=attention,
                unconditional_batch_skip_range=spec.unconditional_batch_skip_range,
                unconditional_batch_timestep_skip_range=(
                    spec.unconditional_from_timestep,
                    spec.unconditional_to_timestep,
                ),
                attention_weight_callback=lambda _: spec.attention_weight,
                tensor_format=spec.tensor_format,
                is_guidance_distilled=spec.is_guidance_distilled,
                current_timestep_callback=timestep,
            )
        case PyramidAttentionBroadcast():
            skipped = (spec.from_timestep, spec.to_timestep)
            return PyramidAttentionBroadcastConfig(
                spatial_attention_block_skip_range=spec.spatial_attention_block_skip_range,
                temporal_attention_block_skip_range=spec.temporal_attention_block_skip_range,
                cross_attention_block_skip_range=spec.cross_attention_block_skip_range,
                spatial_attention_timestep_skip_range=skipped,
                temporal_attention_timestep_skip_range=skipped,
                cross_attention_timestep_skip_range=skipped,
                current_timestep_callback=timestep,
            )
