"""The requests that run now, by the ids that callers know them by.

Invariant: an id names one running request at most, and none that has ended.
"""

import re
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from starlette.requests import Request

from omni.api.decode import cut
from omni.api.errors import HttpError
from omni.running import RunningRequest
from proto.errors import InvalidRequest

HEADER: Final = "x-request-id"
_ID: Final = re.compile(r"[A-Za-z0-9_.:-]{1,128}")


class Requests:
    """The requests that run now, by their public ids."""

    def __init__(self) -> None:
        self._running: dict[str, RunningRequest] = {}

    def new_id(self, http: Request, prefix: str) -> str:
        """The id that the caller chose, or a new one. Raises `InvalidRequest`, or `HttpError` 409 for one in use."""
        chosen = http.headers.get(HEADER)
        if chosen is None:
            return f"{prefix}-{uuid.uuid4().hex}"
        if not _ID.fullmatch(chosen):
            raise InvalidRequest(
                f"{HEADER}: {cut(chosen)!r} is not 1 to 128 letters, digits and any of _.:-", field=HEADER
            )
        if chosen in self._running:
            raise _taken(chosen)
        return chosen

    @contextmanager
    def running(self, name: str, request: RunningRequest) -> Iterator[None]:
        """The request can be found by that id inside this block."""
        self.add(name, request)
        try:
            yield
        finally:
            self.remove(name, request)

    def add(self, name: str, request: RunningRequest) -> None:
        """It can be found by that id until it is removed. Raises `HttpError` 409 for an id in use."""
        if name in self._running:
            raise _taken(name)
        self._running[name] = request

    def remove(self, name: str, request: RunningRequest) -> None:
        """It is over. Harmless if it was never added, or is another one by now."""
        if self._running.get(name) is request:
            del self._running[name]

    def find(self, name: str) -> RunningRequest:
        request = self._running.get(name)
        if request is None:
            raise HttpError(
                404, f"no request {cut(name)!r} runs here; it is over, or has not come yet", code="request_not_found"
            )
        return request


def _taken(name: str) -> HttpError:
    return HttpError(409, f"a request {name!r} runs already; choose another {HEADER}", code="request_exists")
