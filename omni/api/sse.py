"""Server-sent events of requests at work."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Final

from sse_starlette import EventSourceResponse
from starlette.types import Receive, Scope, Send

from omni.api.lifetime import Events


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


def line(data: bytes, event: str | None = None) -> bytes:
    """One event. Clients that know OpenAI's read its kind from the data; `event` says it to the others."""
    name = b"" if event is None else b"event: " + event.encode() + b"\n"
    return name + b"data: " + data + b"\n\n"
