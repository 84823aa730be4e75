"""What a deploy says of replicas of several ranks that cannot be: found before any process starts. Nothing here raises.

What needs the model (a plan for sharding, heads that can be shared out) is checked when the stage starts.
"""

from collections.abc import Iterator
from typing import Final

from omni.graph import Finding
from proto.deploy import ArStage, Compile, DiffusionStage, StageSpec

_NUMBERED: Final = ("cuda:", "xpu:")
"""Devices that ranks can have other than `cpu`. Each rank needs one of its own, so they are numbered."""


def parallel_findings(stage: StageSpec, path: str) -> Iterator[Finding]:
    degree = stage.parallel.degree
    if degree == 1:
        return
    if stage.engine.use != "builtin":
        yield Finding(
            f"{path}.parallel", f"only the built-in engines have ranks, not {stage.engine.use!r}; take it away"
        )
    if stage.engine.loras:
        names = ", ".join(stage.engine.loras)
        yield Finding(f"{path}.engine.loras", f"ranks take no adapters ({names}); take them or `parallel` away")
    if isinstance(stage, ArStage):
        yield from _ar_findings(stage, path)
    else:
        yield from _diffusion_findings(stage, path)
    yield from _device_findings(stage, path)


def _ar_findings(stage: ArStage, path: str) -> Iterator[Finding]:
    if stage.engine.pack_weights:
        yield Finding(f"{path}.engine.pack_weights", "weights that ranks share out cannot be packed; take this away")
    if stage.engine.native:
        yield Finding(f"{path}.engine.native", "nothing is computed in C by several ranks; take this away")
    if stage.engine.overlap:
        yield Finding(f"{path}.engine.overlap", "several ranks cannot overlap forwards; take this away")
    if (stage.model.path or "").endswith(".gguf"):
        yield Finding(
            f"{path}.parallel.tensor", "a GGUF file cannot be shared out; use a checkpoint folder, or take this away"
        )


def _diffusion_findings(stage: DiffusionStage, path: str) -> Iterator[Finding]:
    parallel = stage.parallel
    if stage.model.trust_remote_code:
        message = "the code of a model's own cannot be shared out among ranks; take this or `parallel` away"
        yield Finding(f"{path}.model.trust_remote_code", message)
    if stage.engine.compile is not Compile.NONE:
        yield Finding(f"{path}.engine.compile", "what ranks share out is not compiled; take this or `parallel` away")
    if stage.model.quantization:
        yield Finding(
            f"{path}.model.quantization", "quantised weights cannot be shared out; take this or `parallel` away"
        )
    if parallel.tensor > 1 and parallel.degree > parallel.tensor:
        message = (
            f"{parallel.tensor} cannot be had together with `context` (diffusers shards by one of them); take one away"
        )
        yield Finding(f"{path}.parallel.tensor", message)
    if "cpu" not in stage.devices:
        if parallel.context.ring > 1 and stage.engine.attention is None:
            message = "missing; a ring needs a backend that gives sums of exponentials, such as _native_cudnn or flash"
            yield Finding(f"{path}.engine.attention", message, derived=True)
        return
    if parallel.tensor > 1:
        message = (
            f"{parallel.tensor} needs CUDA or XPU devices: diffusers shards no weights on a CPU; use `context` there"
        )
        yield Finding(f"{path}.parallel.tensor", message)
    if parallel.context.ring > 1:
        message = (
            f"{parallel.context.ring} needs CUDA: no attention on a CPU gives what a ring needs; use `ulysses` there"
        )
        yield Finding(f"{path}.parallel.context.ring", message)


def _device_findings(stage: StageSpec, path: str) -> Iterator[Finding]:
    degree, devices, where = stage.parallel.degree, stage.devices, f"{path}.devices"
    if not devices:
        return
    if len(devices) % degree:
        message = (
            f"{len(devices)} cannot be shared out to replicas of {degree} ranks ({_product(stage)}); list {degree} for"
        )
        yield Finding(where, f"{message} each local replica, such as [{_example(devices[0], degree)}]")
        return
    groups = [devices[at : at + degree] for at in range(0, len(devices), degree)]
    replicas = stage.local_replicas or stage.slots
    if len(groups) > replicas:
        message = f"{len(devices)} are {len(groups)} groups of {degree} ({_product(stage)}), and there are {replicas} replicas"
        yield Finding(where, f"{message}; raise `replicas`, raise the degrees, or list {degree * replicas}")
    for group in groups:
        yield from _group_findings(group, where)


def _group_findings(group: tuple[str, ...], where: str) -> Iterator[Finding]:
    """The devices of one replica are of one type, and no two ranks share an accelerator."""
    types = sorted({device.partition(":")[0] for device in group})
    if len(types) > 1:
        yield Finding(
            where, f"one replica cannot have {' and '.join(types)}: [{', '.join(group)}]; its ranks need one type"
        )
    elif types == ["cpu"]:
        return
    elif not all(device.startswith(_NUMBERED) for device in group):
        message = (
            f"[{', '.join(group)}] are not for the ranks of a replica; write {_example('cuda', len(group))}, or cpu"
        )
        yield Finding(where, message)
    elif len(set(group)) < len(group):
        yield Finding(
            where, f"[{', '.join(group)}] gives two ranks of a replica one device; list {len(group)} different ones"
        )


def _product(stage: StageSpec) -> str:
    """tensor 2, or ulysses 2 x ring 3."""
    parallel = stage.parallel
    degrees = {"tensor": parallel.tensor}
    if not isinstance(stage, ArStage):
        degrees |= {"ulysses": stage.parallel.context.ulysses, "ring": stage.parallel.context.ring}
    return " x ".join(f"{name} {degree}" for name, degree in degrees.items() if degree > 1)


def _example(device: str, degree: int) -> str:
    kind = device.partition(":")[0]
    return ", ".join("cpu" if kind == "cpu" else f"{kind}:{rank}" for rank in range(degree))
