"""Weights that wait in host memory until they are called: diffusers' model, sequential and group offload.

Model offload is made for one call of the pipeline at a time: each model sends away the one before it, and at the end of the
call all are sent away and hooked again. Here several requests take turns, in any order, and nothing is hooked again. So
whichever model comes sends away the one that was there, and the last one stays until another comes.

Invariant of model offload: of the models in the pipeline's offload sequence at most one is on the device.
"""

import torch
from accelerate.hooks import UserCpuOffloadHook, clear_device_cache
from diffusers import DiffusionPipeline

from proto.deploy import Offload
from proto.params import Json


class CannotOffload(ValueError):
    """The text says why, and what to do."""


def enable(pipe: DiffusionPipeline, how: Offload, device: torch.device) -> None:
    """The pipeline's modules are in host memory, and go to `device` when they are called. Raises `CannotOffload`."""
    _check_device(how, device)
    try:
        if how is Offload.GROUP:
            _offload_groups(pipe, device)
        elif how is Offload.SEQUENTIAL:
            pipe.enable_sequential_cpu_offload(device=device)
        else:
            pipe.enable_model_cpu_offload(device=device)
            one_at_a_time(pipe)
    except (ValueError, RuntimeError, ImportError, NotImplementedError) as error:
        raise CannotOffload(
            f"{type(pipe).__name__} cannot do it ({error}); take another way, or leave it out"
        ) from error


def _check_device(how: Offload, device: torch.device) -> None:
    if device.type == "cpu":
        raise CannotOffload(
            f"{how.value} moves weights between host memory and an accelerator, and this stage runs on the CPU;"
            " leave it out, or give the stage a device such as cuda:0"
        )


def _offload_groups(pipe: DiffusionPipeline, device: torch.device) -> None:
    """Layer by layer: the only way that also fits modules of which a method is called, such as a VAE's `decode`."""
    streams = device.type == "cuda"
    pipe.enable_group_offload(
        onload_device=device,
        offload_device=torch.device("cpu"),
        offload_type="leaf_level",
        use_stream=streams,
        non_blocking=streams,
    )


def one_at_a_time(pipe: DiffusionPipeline) -> None:
    """Change the hooks of `enable_model_cpu_offload` so that each model of its sequence sends away whichever is there."""
    sequence = {
        part for name in pipe.model_cpu_offload_seq.split("->") if (part := pipe.components.get(name)) is not None
    }
    room = _Room()
    for hook in pipe._all_hooks:
        if hook.model in sequence:  # the others, such as a ControlNet, are called in turn with one of these and stay
            room.guard(hook)


class _Room:
    """There is room for one model: the one that `_there` is the hook of."""

    def __init__(self) -> None:
        self._there: UserCpuOffloadHook | None = None

    def guard(self, hook: UserCpuOffloadHook) -> None:
        """The hook's model takes the room whenever it is called."""
        bring = hook.hook.pre_forward

        def pre_forward(module: torch.nn.Module, *args: Json, **kwargs: Json) -> Json:
            if self._there is not hook:
                if self._there is not None:
                    self._there.offload()
                    clear_device_cache()
                self._there = hook
            return bring(module, *args, **kwargs)

        hook.hook.prev_module_hook = None
        hook.hook.pre_forward = pre_forward
