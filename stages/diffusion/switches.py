"""Switches that diffusers has, thrown from the deploy: attention backend, step cache, compilation, offload.

`throw` is called once, between loading and the first request. A switch that the pipeline, the device or the installed
packages do not have is refused with what can be had instead; none is left aside in silence.

Order matters. A compiled forward lies innermost, then the library's hooks, and the sites of `parking` come last, around
everything: no compiler ever sees them, and a call reaches its device only when it is made.
"""

from collections.abc import Callable, Mapping
from typing import Final

import torch
from diffusers import DiffusionPipeline
from diffusers.models.attention_dispatch import (
    AttentionBackendName,
    _AttentionBackendRegistry,
    dispatch_attention_fn,
)

from proto.deploy import Compile, DiffusionEngineSpec, Offload
from proto.step_cache import StepCacheSpec
from stages.diffusion import library, offload
from stages.diffusion.step_caches import CannotCache, StepCaches

_FETCHED: Final = "_hub"  # in the names of backends whose kernels the library downloads


class Refused(Exception):
    """`field` of the deploy asks for what cannot be had here; the text says why, and what can."""

    def __init__(self, field: str, text: str) -> None:
        super().__init__(f"{field}: {text}")
        self.field = field


def throw(
    pipe: DiffusionPipeline,
    spec: DiffusionEngineSpec,
    device: torch.device,
    dtype: torch.dtype,
    report: Callable[[str, float | None], None],
) -> StepCaches | None:
    """Set the pipeline up as `spec` says and bring it to `device`. Raises `Refused`."""
    if spec.attention is not None:
        set_attention(library.denoisers(pipe), spec.attention, device, dtype)
    caches = None if spec.step_cache is None else _enable_cache(pipe, spec.step_cache)
    if spec.compile is not Compile.NONE:
        report("trying the compiler", None)
        _compile(pipe, spec.compile, device)
    if spec.offload is Offload.NONE:
        pipe.to(device)
        return caches
    try:
        offload.enable(pipe, spec.offload, device)
    except offload.CannotOffload as error:
        raise Refused("engine.offload", str(error)) from error
    return caches


def _enable_cache(pipe: DiffusionPipeline, spec: StepCacheSpec) -> StepCaches:
    try:
        return StepCaches(spec, pipe)
    except CannotCache as error:
        raise Refused("engine.step_cache", str(error)) from error


# --- attention --------------------------------------------------------------------------------------------------------


def set_attention(
    denoisers: Mapping[str, torch.nn.Module], backend: str, device: torch.device, dtype: torch.dtype
) -> None:
    """Raises `Refused`. The library also makes it the whole process's; that is undone, for other components may not be able to use it."""
    known = [name.value for name in AttentionBackendName]
    if backend not in known:
        raise Refused(
            "engine.attention", f"diffusers has no backend {backend!r}; usable here: {_usable(device, dtype)}"
        )
    for module in denoisers.values():
        if not any("_attention_backend" in dir(vars(part).get("processor")) for part in module.modules()):
            raise Refused(
                "engine.attention",
                f"the backend of {type(module).__name__} cannot be chosen in diffusers; leave it out",
            )
    before = _AttentionBackendRegistry.get_active_backend()[0]
    try:
        for module in denoisers.values():
            module.set_attention_backend(backend)
        _try_attention(AttentionBackendName(backend), device, dtype)
    except Exception as error:  # a kernel may raise anything
        raise Refused(
            "engine.attention", f"{backend} cannot be used here ({error}); usable: {_usable(device, dtype)}"
        ) from error
    finally:
        _AttentionBackendRegistry.set_active_backend(before)


def _usable(device: torch.device, dtype: torch.dtype) -> str:
    """Those that work on the device without a download, found by trying them."""
    names = []
    for backend in AttentionBackendName:
        if _FETCHED in backend.value:
            continue
        try:
            _try_attention(backend, device, dtype)
        except Exception:  # noqa: BLE001 - whatever it raises, it is not usable
            continue
        names.append(backend.value)
    return ", ".join(names)


def _try_attention(backend: AttentionBackendName, device: torch.device, dtype: torch.dtype) -> None:
    """Attend once: 1 row, 16 tokens, 2 heads of 64."""
    tokens = torch.zeros(1, 16, 2, 64, device=device, dtype=dtype)
    with torch.inference_mode():
        dispatch_attention_fn(tokens, tokens, tokens, backend=backend)


# --- compilation ------------------------------------------------------------------------------------------------------


def _compile(pipe: DiffusionPipeline, how: Compile, device: torch.device) -> None:
    """With dynamic shapes: one compilation for one row and one for all other numbers of rows. It happens at the first
    call of each; warming up makes that part of the start."""
    try:
        with torch.inference_mode():
            torch.compile(_smallest, dynamic=True)(torch.zeros(2, device=device))
    except Exception as error:  # whatever is missing: a compiler, its headers, Triton
        raise Refused(
            "engine.compile",
            f"nothing can be compiled for {device} here ({_first_line(error)}); a CPU needs a C++ compiler such as g++, a"
            " GPU needs Triton; install it, or leave compile out",
        ) from error
    modules = library.denoisers(pipe)
    if not modules:
        raise Refused("engine.compile", f"{type(pipe).__name__} has no denoiser that we know; leave it out")
    for module in modules.values():
        if how is Compile.FULL:
            object.__setattr__(module, "forward", torch.compile(module.forward, dynamic=True))
            continue
        try:
            module.compile_repeated_blocks(dynamic=True)
        except (ValueError, AttributeError) as error:
            raise Refused(
                "engine.compile",
                f"{type(module).__name__} names no repeated blocks, which `regional` compiles; write `full`",
            ) from error


def _smallest(value: torch.Tensor) -> torch.Tensor:
    return value.sin() + 1


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
