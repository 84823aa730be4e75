"""What a caller is told when a request raised. The fault stays with its request."""

import traceback
from pathlib import PurePath
from typing import Final

from proto.errors import ErrorInfo, InvalidRequest, OmniError, StageFailed
from proto.ids import StageName

_CHECKING: Final = ("__call__", "check_inputs", "retrieve_timesteps", "get_timesteps")
_LONGEST: Final = 2000  # characters of a message; some libraries print whole tensors


def to_error(error: BaseException, stage: StageName, model: str, steps: int) -> ErrorInfo:
    """An error of ours as it is. A `ValueError` that the pipeline's own checks raised before its first step is about the
    request. Everything else is a failure of the stage, named by its class."""
    if isinstance(error, OmniError):
        return error.info
    text = str(error)[:_LONGEST] or "no message"
    if steps == 0 and isinstance(error, ValueError) and _raised_by_checks(error):
        return InvalidRequest(f"stage {stage}: {model} refuses the request: {text}", stage=stage).info
    return StageFailed(f"stage {stage}: {type(error).__name__}: {text}", stage=stage).info


def _raised_by_checks(error: ValueError) -> bool:
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and frames[-1].name in _CHECKING and "pipelines" in PurePath(frames[-1].filename).parts
