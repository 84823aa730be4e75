"""The one place where an error becomes an HTTP status and OpenAI's error shape.

Every answer that is not a success, from a body that is no JSON to a stage that died, has the form
`{"error": {"message", "type", "param", "code"}}`. `param` is the field as the caller spelled it. Nothing else in
`omni.api` chooses a status for an error.
"""

import logging
import math
from http import HTTPStatus
from typing import Final

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from proto.errors import ErrorCode, ErrorInfo, OmniError

log = logging.getLogger(__name__)

STATUS: Final[dict[ErrorCode, int]] = {
    ErrorCode.INVALID_REQUEST: 400,
    ErrorCode.NOT_SERVABLE: 400,
    ErrorCode.UNKNOWN_MODEL: 404,
    ErrorCode.QUEUE_FULL: 429,
    ErrorCode.ABORTED: 500,
    ErrorCode.STAGE_FAILED: 500,
    ErrorCode.INTERNAL: 500,
    ErrorCode.REPLICA_LOST: 502,
    ErrorCode.PAYLOAD_LOST: 502,
    ErrorCode.PROTOCOL: 502,
    ErrorCode.STAGE_UNAVAILABLE: 503,
    ErrorCode.SHUTTING_DOWN: 503,
    ErrorCode.DEADLINE: 504,
}
CLIENT_GONE: Final = 499
"""Never seen by a client, only in the metrics: the caller left before there was an answer."""

_OPENAI_CODE: Final = {ErrorCode.UNKNOWN_MODEL: "model_not_found", ErrorCode.QUEUE_FULL: "rate_limit_exceeded"}
_COME_BACK: Final = frozenset({ErrorCode.QUEUE_FULL, ErrorCode.STAGE_UNAVAILABLE, ErrorCode.SHUTTING_DOWN})
_DEFAULT_RETRY_S: Final = 1.0


class ErrorBody(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(msgspec.Struct, frozen=True):
    error: ErrorBody


class ClientGone(Exception):
    """The caller closed the connection while the request ran. Nobody is left to be told."""


class HttpError(Exception):
    """A fault of HTTP itself, before there is a request: 404, 405, 413, 415 and the like."""

    def __init__(self, status: int, message: str, *, code: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.headers = headers or {}


def error_answer(info: ErrorInfo) -> ErrorAnswer:
    """What the caller reads. The stage is in the message even where its writer left it out."""
    message = info.message
    if info.stage is not None and info.stage not in message:
        message = f"stage {info.stage}: {message}"
    code = _OPENAI_CODE.get(info.code, info.code.value)
    return ErrorAnswer(ErrorBody(message, _type_of(STATUS[info.code]), info.field, code))


def error_response(error: OmniError) -> Response:
    info = error.info
    headers = {}
    if info.code in _COME_BACK or info.retry_after_s is not None:
        seconds = _DEFAULT_RETRY_S if info.retry_after_s is None else info.retry_after_s
        headers["retry-after"] = str(max(1, math.ceil(seconds)))
    return _respond(STATUS[info.code], error_answer(info), headers)


def _type_of(status: int) -> str:
    if status == HTTPStatus.TOO_MANY_REQUESTS:
        return "rate_limit_error"
    return "invalid_request_error" if status < HTTPStatus.INTERNAL_SERVER_ERROR else "server_error"


def _respond(status: int, answer: ErrorAnswer, headers: dict[str, str]) -> Response:
    return Response(msgspec.json.encode(answer), status, headers, "application/json")


# --- Starlette's handlers, by class of exception ----------------------------------------------------------------------


async def on_omni_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, OmniError)
    return error_response(error)


async def on_http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HttpError)
    body = ErrorBody(error.message, _type_of(error.status), None, error.code)
    return _respond(error.status, ErrorAnswer(body), error.headers)


async def on_starlette_error(request: Request, error: Exception) -> Response:
    """404 and 405 of the router, in our shape."""
    assert isinstance(error, HTTPException)
    where = f"{request.method} {request.url.path}"
    message = f"{where}: {error.detail}"
    if error.status_code == HTTPStatus.NOT_FOUND:
        message = f"{where}: there is no such route"
    elif error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        message = f"{where}: this route takes {(error.headers or {}).get('Allow', 'another method')}"
    body = ErrorBody(message, _type_of(error.status_code), None, HTTPStatus(error.status_code).name.lower())
    return _respond(error.status_code, ErrorAnswer(body), dict(error.headers or {}))


async def on_client_gone(_: Request, __: Exception) -> Response:
    return Response(status_code=CLIENT_GONE)


async def on_bug(request: Request, _: Exception) -> Response:
    """A fault of ours. The server logs the traceback; the caller is told no internals."""
    body = ErrorBody(f"{request.method} {request.url.path}: internal error", "server_error", None, "internal")
    return _respond(500, ErrorAnswer(body), {})


def log_bug() -> None:
    """To be called in an `except` whose error reaches nobody else."""
    log.exception("internal error in an open stream")
