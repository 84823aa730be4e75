"""A diffusion stage on several ranks: the denoiser's work is shared out, everything else is done by the first one.

Each rank gets every forward's whole arguments; the library's hooks (`stages.diffusion.sharing`) take its part of them and give
back the whole result.

Invariant: every rank makes the same forwards with the same arguments in the same order. Nothing but these arguments goes from
the first rank to the others, so whatever else would change a denoiser (adapters, sleep) is refused.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final

import msgspec
import torch
from diffusers import DiffusionPipeline
from diffusers.hooks import HookRegistry, ModelHook

from proto.calls import Method
from proto.deploy import DiffusionParallelSpec, DiffusionStage
from proto.errors import InvalidRequest, StartError
from proto.ids import StageName
from proto.params import Json
from stages.devices import usable_device
from stages.diffusion import library
from stages.diffusion.loading import denoiser_classes, read_index
from stages.diffusion.sharing import share
from stages.engine import LoadContext
from stages.parallel.distributed import join
from stages.parallel.group import Group
from stages.parallel.tensors import Bundle, bundled, give, take

ROLE: Final = "stages.diffusion.follower:follow"
_HOOK: Final = "omni_ranks"
_ALONE: Final = (Method.LOAD_LORA, Method.UNLOAD_LORA, Method.SLEEP, Method.WAKE)


@dataclass(frozen=True, slots=True)
class Denoise:
    """A forward of the denoiser `name`."""

    name: str
    arguments: Bundle


def lead(context: LoadContext) -> tuple[Group, LoadContext]:
    """Start the other ranks and become the first; with what to load from then on. Raises `StartError` if the pipeline's
    denoiser cannot be shared out."""
    spec = context.spec
    assert isinstance(spec, DiffusionStage)
    folder, _ = read_index(context)
    check_plan(context, spec.parallel)
    model = msgspec.structs.replace(spec.model, path=str(folder))  # found once, and not by every rank at the same time
    context = replace(context, spec=msgspec.structs.replace(spec, model=model))
    group = Group(context, ROLE)
    try:
        join(group.seat, usable_device(context), group.listener)
    except Exception as error:
        group.close()
        raise _refusal(context, "parallel", f"its ranks have not come together: {error}") from error
    return group, context


def check_plan(context: LoadContext, spec: DiffusionParallelSpec) -> None:
    """Whether diffusers can share this pipeline's denoisers out. Raises `StartError` with the reason if it cannot."""
    _, index = read_index(context)
    found = denoiser_classes(index)
    if not found:
        raise _refusal(context, "parallel", "the model has no denoiser that diffusers could share out; take it away")
    field, plan, what = (
        ("parallel.tensor", "_tp_plan", "weights") if spec.tensor > 1 else ("parallel.context", "_cp_plan", "tokens")
    )
    for name, cls in found.items():
        if getattr(cls, plan, None) is None:
            raise _refusal(
                context,
                field,
                f"diffusers has no plan to share the {what} of {cls.__name__} ({name}) out; take it away",
            )


def attach(pipe: DiffusionPipeline, group: Group, context: LoadContext) -> None:
    """In the first rank: share the pipeline's denoisers out, and have the others make every forward too. Raises
    `StartError`."""
    spec, device = context.spec.parallel, usable_device(context)
    assert isinstance(spec, DiffusionParallelSpec)
    for name, module in library.denoisers(pipe).items():
        try:
            share(module, spec, device)
        except (ValueError, RuntimeError) as error:
            raise _refusal(context, "parallel.context", f"{name} cannot be shared out: {error}") from error
    group.meet()
    for name, module in library.denoisers(pipe).items():
        hook = _RanksHook()
        HookRegistry.check_if_exists_or_initialize(module).register_hook(hook, _HOOK)
        hook.forward = _in_all_ranks(name, group, hook.fn_ref.original_forward)


class _RanksHook(ModelHook):  # type: ignore[misc]  # the library has no types
    """`forward` is set after registration: it makes the forward that the hook replaces."""

    forward: Callable[..., Json]

    def new_forward(self, module: torch.nn.Module, *args: Json, **kwargs: Json) -> Json:
        return self.forward(*args, **kwargs)


def _in_all_ranks(name: str, group: Group, forward: Callable[..., Json]) -> Callable[..., Json]:
    def call(*args: Json, **kwargs: Json) -> Json:
        bundle, tensors = bundled((args, kwargs))

        def mine() -> Json:
            give(tensors)
            return forward(*args, **kwargs)

        return group.run(Denoise(name, bundle), mine)

    return call


def following(denoisers: Mapping[str, torch.nn.Module], device: torch.device) -> Callable[[object], None]:
    """In another rank: makes the forwards that the first one tells it of."""

    def do(command: object) -> None:
        assert isinstance(command, Denoise)
        args, kwargs = take(command.arguments, device)
        with torch.inference_mode():
            denoisers[command.name](*args, **kwargs)

    return do


def refuse_what_one_rank_cannot_do(stage: StageName, method: str) -> None:
    """Raises `InvalidRequest` for calls that would change the first rank's denoiser and no other's."""
    if method in _ALONE:
        raise InvalidRequest(
            f"stage {stage}: call {method!r} is not possible with `parallel`: it would change one rank and not the others",
            stage=stage,
            field="method",
        )


def _refusal(context: LoadContext, field: str, problem: str) -> StartError:
    return StartError(f"stage {context.stage}: {field}: {problem}", stage=context.stage, field=field)
