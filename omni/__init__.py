"""omni: a multi-process pipeline server for any-to-any models.

`Omni` (blocking) and `AsyncOmni` run a deploy; `Deploy` and the errors are in `proto`. Names are loaded when first used,
so that importing the package costs next to nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from omni.async_omni import AsyncOmni
    from omni.blocking import Omni
    from omni.outputs import (
        AudioOutput,
        ImageOutput,
        RequestOutput,
        StageDone,
        StagePartial,
        StagePaused,
        StagePreview,
        StageProgress,
        StageUpdated,
        TensorOutput,
        TextDelta,
        TextOutput,
        VideoOutput,
    )
    from omni.request import GenerateRequest
    from omni.stream import CallFailed
    from proto.errors import OmniError

__all__ = [
    "AsyncOmni",
    "AudioOutput",
    "CallFailed",
    "GenerateRequest",
    "ImageOutput",
    "Omni",
    "OmniError",
    "RequestOutput",
    "StageDone",
    "StagePartial",
    "StagePaused",
    "StagePreview",
    "StageProgress",
    "StageUpdated",
    "TensorOutput",
    "TextDelta",
    "TextOutput",
    "VideoOutput",
]

_HOME: Final = {
    "AsyncOmni": "omni.async_omni",
    "CallFailed": "omni.stream",
    "GenerateRequest": "omni.request",
    "Omni": "omni.blocking",
    "OmniError": "proto.errors",
}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'omni' has no attribute {name!r}")
    return getattr(import_module(_HOME.get(name, "omni.outputs")), name)
