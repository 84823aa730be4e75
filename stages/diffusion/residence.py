"""Where a pipeline's weights are, found out once.

diffusers walks through all submodules whenever a pipeline asks for its device, or for that of an encoder or a decoder: some
hook could move weights. Where none does, the answer is the same at every call and for every request, and the walks were most
of what a request of a small model cost beside its forwards.

Invariant: nothing changes for anybody but a request's own copy of the pipeline, in the request's own thread.
"""

import functools
import itertools
import sys
import threading
import types
from collections.abc import Callable
from dataclasses import dataclass

import torch
from diffusers import DiffusionPipeline
from diffusers.utils import torch_utils

from proto.params import Json
from stages.diffusion import library


@dataclass(frozen=True, slots=True)
class Residence:
    """All weights are on `device` whenever a request is at work. `pipeline_class` is the pipeline's own class, but for that
    knowledge, and that its constructor's signature is read once."""

    device: torch.device
    pipeline_class: type[DiffusionPipeline]

    def enter(self) -> None:
        """This thread works for such a pipeline from now on."""
        _here.device = self.device


class _Here(threading.local):
    device: torch.device | None = None


_here = _Here()


def find_residence(pipe: DiffusionPipeline) -> Residence | None:
    """None if the weights are on several devices or none, or are moved by hooks."""
    parts = library.modules(pipe).values()
    if any("_hf_hook" in vars(module) for part in parts for module in part.modules()):
        return None
    devices = {tensor.device for part in parts for tensor in itertools.chain(part.parameters(), part.buffers())}
    if len(devices) != 1 or {pipe.device, pipe._execution_device} != devices:
        return None
    device = devices.pop()
    _shorten_walks(type(pipe))
    return Residence(device, _settled_class(pipe, device))


def _settled_class(pipe: DiffusionPipeline, device: torch.device) -> type[DiffusionPipeline]:
    """Of the same name: pipelines and the library write it into what they say, and look things up by it."""
    cls = type(pipe)
    required, optional = cls._get_signature_keys(pipe)

    def signature_keys(_cls: type, _pipe: Json) -> tuple[list[str], list[str]]:
        return list(required), list(optional)

    members: dict[str, Json] = {
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        "device": property(lambda _: device),
        "_execution_device": property(lambda _: device),
        "_get_signature_keys": classmethod(signature_keys),
    }
    settled: type[DiffusionPipeline] = types.new_class(
        cls.__name__, (cls,), exec_body=lambda body: body.update(members)
    )
    return settled


def _shorten_walks(cls: type) -> None:
    """In the files of the pipeline's classes, the library's function knows the device of a thread that has entered a
    residence. Everywhere else it is as it was."""
    for base in cls.__mro__:
        names = vars(sys.modules[base.__module__]) if base.__module__ in sys.modules else {}
        if names.get(_NAME) is _walk:
            names[_NAME] = _execution_device


_NAME = "get_module_execution_device"
_walk: Callable[[torch.nn.Module], torch.device] = torch_utils.get_module_execution_device


@functools.wraps(_walk)
def _execution_device(module: torch.nn.Module) -> torch.device:
    return _walk(module) if _here.device is None else _here.device
