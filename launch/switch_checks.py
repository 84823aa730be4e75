"""What a diffusion stage's switches can have wrong before its model is known. Nothing here raises."""

import re
from collections.abc import Iterator
from pathlib import PurePosixPath

from omni.graph import Finding
from proto.deploy import QUANTIZED, Compile, DiffusionStage, Offload, QuantizationSpec, Quantizer, StageSpec
from proto.step_cache import FasterCache, PyramidAttentionBroadcast, StepCacheSpec, TaylorSeer
from proto.suggest import hint


def switch_findings(stage: StageSpec, path: str) -> Iterator[Finding]:
    if not isinstance(stage, DiffusionStage):
        if stage.model.quantization:
            yield Finding(f"{path}.model.quantization", "only stages of kind diffusion have it; take it away")
        return
    yield from _compile_findings(stage, f"{path}.engine.compile")
    engine, on_cpu = stage.engine, "cpu" in stage.devices
    if engine.offload is not Offload.NONE and on_cpu:
        message = "moves weights between host memory and an accelerator, and `devices` has `cpu`; leave it out"
        yield Finding(f"{path}.engine.offload", f"{engine.offload.value} {message}")
    if engine.offload is not Offload.NONE and engine.loras:
        yield Finding(f"{path}.engine.loras", "adapters cannot be loaded into weights that `offload` moves; choose one")
    if stage.parallel.degree > 1:
        for name, on in (
            ("offload", engine.offload is not Offload.NONE),
            ("step_cache", engine.step_cache is not None),
        ):
            if on:
                yield Finding(f"{path}.engine.{name}", "cannot be had with several ranks (`parallel`); take one away")
    if engine.step_cache is not None:
        yield from _cache_findings(engine.step_cache, f"{path}.engine.step_cache")
    for name, spec in stage.model.quantization.items():
        where = f"{path}.model.quantization.{name}"
        yield from _quantization_findings(spec, where)
        if spec.method is Quantizer.BITSANDBYTES and on_cpu:
            yield Finding(where, "bitsandbytes is for accelerators, and `devices` has `cpu`; take torchao or quanto")


def _compile_findings(stage: DiffusionStage, where: str) -> Iterator[Finding]:
    engine = stage.engine
    if engine.compile is Compile.NONE:
        return
    if engine.step_cache is not None:
        yield Finding(
            where, "a `step_cache` decides at each step what to compute, inside of what would be compiled; choose one"
        )
    if engine.offload in (Offload.SEQUENTIAL, Offload.GROUP):
        message = f"`offload: {engine.offload.value}` moves layers inside of what would be compiled"
        yield Finding(where, f"{message}; take `offload: model`, or leave one out")


def _cache_findings(spec: StepCacheSpec, where: str) -> Iterator[Finding]:
    ranges: list[tuple[str, float, float]] = []
    if isinstance(spec, PyramidAttentionBroadcast):
        ranges = [("", spec.from_timestep, spec.to_timestep)]
        kinds = ("spatial", "temporal", "cross")
        fields = [f"{kind}_attention_block_skip_range" for kind in kinds]
        if not any(getattr(spec, field) for field in fields):
            yield Finding(where, f"one of {', '.join(fields)} must be set, or there is nothing to skip")
    if isinstance(spec, FasterCache):
        ranges = [
            ("attention_", spec.attention_from_timestep, spec.attention_to_timestep),
            ("unconditional_", spec.unconditional_from_timestep, spec.unconditional_to_timestep),
        ]
    for name, first, last in ranges:
        if first >= last:
            message = f"{last:g} is not above `{name}from_timestep` ({first:g}), so nothing would be skipped"
            yield Finding(f"{where}.{name}to_timestep", message, derived=True)
    if isinstance(spec, TaylorSeer):
        for name in ("cache_identifiers", "skip_predict_identifiers"):
            yield from _pattern_findings(getattr(spec, name), f"{where}.{name}", spec.use_lite_mode)


def _pattern_findings(patterns: tuple[str, ...], where: str, lite: bool) -> Iterator[Finding]:
    if patterns and lite:
        yield Finding(where, "`use_lite_mode` has patterns of its own; leave one out")
    for at, pattern in enumerate(patterns):
        try:
            re.compile(pattern)
        except re.error as error:
            yield Finding(f"{where}[{at}]", f"{pattern!r} is no regular expression: {error}")


def _quantization_findings(spec: QuantizationSpec, where: str) -> Iterator[Finding]:
    able = QUANTIZED[spec.method]
    if spec.method is Quantizer.GGUF:
        if spec.weights is not None or spec.keep:
            yield Finding(where, "a GGUF file says itself how its weights are stored; leave `weights` and `keep` out")
        if spec.file is None:
            yield Finding(f"{where}.file", "missing; the GGUF file, inside the pipeline folder", derived=True)
        elif PurePosixPath(spec.file).is_absolute() or ".." in PurePosixPath(spec.file).parts:
            yield Finding(f"{where}.file", f"{spec.file!r} must be a path inside the pipeline folder")
        return
    if spec.file is not None:
        yield Finding(f"{where}.file", f"only gguf reads a file; {spec.method.value} converts the folder's own weights")
    if spec.weights is not None and spec.weights not in able:
        message = f"{spec.method.value} does not make {spec.weights!r}; {hint(spec.weights, able, 'it makes')}"
        yield Finding(f"{where}.weights", message)
