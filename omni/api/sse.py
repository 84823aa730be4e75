"""Server-sent events of requests at work."""

import asyncio
import functools
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from typing import Final

from sse_starlette import EventSourceResponse
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from omni.api.lifetime import Events, while_connected
from omni.api.params import Spelling, caller_spelling
from omni.api.requests import HEADER, Requests
from omni.outputs import RequestEvent
from omni.running import RunningRequest


class OwnedStream(EventSourceResponse):
    """Server-sent events that close the pipeline's iteration however they end, even before they began."""

    def __init__(
        self,
        lines: AsyncGenerator[bytes, None],
        events: Events,
        over: Callable[[], None],
        headers: Mapping[str, str],
    ) -> None:
        super().__init__(lines, headers=headers, sep="\n")
        self._lines: Final = lines
        self._events: Final = events
        self._over: Final = over

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._over()
            await self._lines.aclose()
            await self._events.aclose()

    async def _listen_for_exit_signal_with_grace(self) -> None:
        """Nothing to listen for: `Lifetime` ends the stream. The library's own way wakes twice a second for ever, and
        obeys the signal handlers of other servers in the process."""
        await asyncio.Event().wait()


async def open_stream(
    http: Request,
    requests: Requests,
    name: str,
    spelling: Spelling,
    events: RunningRequest,
    first: Callable[[], Coroutine[None, None, RequestEvent]],
    lines: Callable[[RequestEvent], AsyncGenerator[bytes, None]],
) -> OwnedStream:
    """A stream that begins with the event that `first` waits for: until it is there, an error still has its own status. The
    request can be found by `name` while the stream lasts. Raises what the request ended with before it."""
    try:
        requests.add(name, events)
        with caller_spelling(spelling):
            event = await while_connected(http, first())
    except BaseException:
        requests.remove(name, events)
        await events.aclose()
        raise
    return OwnedStream(lines(event), events, functools.partial(requests.remove, name, events), headers={HEADER: name})


def line(data: bytes, event: str | None = None) -> bytes:
    """One event. Clients that know OpenAI's read its kind from the data; `event` says it to the others."""
    name = b"" if event is None else b"event: " + event.encode() + b"\n"
    return name + b"data: " + data + b"\n\n"
