"""The one exception hierarchy, and the form in which an error crosses a process boundary.

Every error names, where they exist, the stage, the field, the value seen and the remedy. The code says what kind of
error it is; which HTTP status that becomes is decided in one place, `omni.api.errors`.
"""

import enum
from typing import Self

import msgspec


class ErrorCode(enum.Enum):
    INVALID_REQUEST = "invalid_request"  # the caller can mend it
    UNKNOWN_MODEL = "unknown_model"
    NOT_SERVABLE = "not_servable"  # the deploy has no stage for it
    QUEUE_FULL = "queue_full"  # try again later
    STAGE_UNAVAILABLE = "stage_unavailable"  # no replica of a needed stage is ready
    REPLICA_LOST = "replica_lost"  # the process that ran the request went away
    STAGE_FAILED = "stage_failed"  # the request raised inside a stage
    PAYLOAD_LOST = "payload_lost"  # tensors did not arrive whole and in time
    DEADLINE = "deadline"
    ABORTED = "aborted"
    PROTOCOL = "protocol"  # a peer sent what it must not
    SHUTTING_DOWN = "shutting_down"
    INTERNAL = "internal"


class ErrorInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a caller is told. `message` is one sentence that stands alone; `field` names the argument to change."""

    code: ErrorCode
    message: str
    stage: str | None = None
    field: str | None = None
    retry_after_s: float | None = None


class OmniError(Exception):
    """Base of every error that this project raises on purpose."""

    code = ErrorCode.INTERNAL

    def __init__(
        self,
        message: str,
        *,
        stage: str | None = None,
        field: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.info = ErrorInfo(self.code, message, stage, field, retry_after_s)

    def at_stage(self, stage: str) -> Self:
        """The same error, with the stage's name in front."""
        message = f"stage {stage}: {self.info.message}"
        named = type(self)(message)
        named.info = msgspec.structs.replace(self.info, message=message, stage=stage)
        return named


class InvalidRequest(OmniError):
    code = ErrorCode.INVALID_REQUEST


class UnknownModel(OmniError):
    code = ErrorCode.UNKNOWN_MODEL


class NotServable(OmniError):
    code = ErrorCode.NOT_SERVABLE


class QueueFull(OmniError):
    code = ErrorCode.QUEUE_FULL


class StageUnavailable(OmniError):
    code = ErrorCode.STAGE_UNAVAILABLE


class ReplicaLost(OmniError):
    code = ErrorCode.REPLICA_LOST


class StageFailed(OmniError):
    code = ErrorCode.STAGE_FAILED


class PayloadLost(OmniError):
    code = ErrorCode.PAYLOAD_LOST


class DeadlineExceeded(OmniError):
    code = ErrorCode.DEADLINE


class RequestAborted(OmniError):
    code = ErrorCode.ABORTED


class ProtocolError(OmniError):
    """A frame or message that breaks the wire's rules. It is dropped and counted; it never ends a loop."""

    code = ErrorCode.PROTOCOL


class ShuttingDown(OmniError):
    code = ErrorCode.SHUTTING_DOWN


class DeployError(OmniError):
    """The deploy file cannot be used. `message` holds every problem found, one a line."""

    code = ErrorCode.INVALID_REQUEST


class StartError(OmniError):
    """A stage did not become ready: its load failed, stalled, or its process ended."""

    code = ErrorCode.STAGE_UNAVAILABLE


_BY_CODE: dict[ErrorCode, type[OmniError]] = {
    cls.code: cls
    for cls in (
        InvalidRequest,
        UnknownModel,
        NotServable,
        QueueFull,
        StageUnavailable,
        ReplicaLost,
        StageFailed,
        PayloadLost,
        DeadlineExceeded,
        RequestAborted,
        ProtocolError,
        ShuttingDown,
    )
}


def to_exception(info: ErrorInfo) -> OmniError:
    """The exception that a caller catches for an error that came over the wire."""
    return _BY_CODE.get(info.code, OmniError)(
        info.message, stage=info.stage, field=info.field, retry_after_s=info.retry_after_s
    )
