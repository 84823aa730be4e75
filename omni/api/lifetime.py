"""How long a request may run: until it is done, its caller leaves, or the server stops.

Invariant: whichever ends it, the pipeline's iteration is closed, so that every stage lets the request go.
"""

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.requests import Request

from omni.api.errors import ClientGone
from omni.outputs import RequestEvent, RequestOutput
from proto.errors import OmniError, ShuttingDown

T = TypeVar("T")
Events = AsyncGenerator[RequestEvent, None]


class Lifetime:
    """The server's. `stop` ends every wait for a pipeline's event with `ShuttingDown`, at once and from then on."""

    def __init__(self) -> None:
        self._stopped = False
        self._waits: set[asyncio.Timeout] = set()

    def stop(self) -> None:
        if self._stopped:
            return
        self._stopped = True
        now = asyncio.get_running_loop().time()
        for wait in self._waits:
            wait.reschedule(now)

    async def next(self, events: Events) -> RequestEvent:
        """The next event. A timer without a deadline costs no task per event, and `stop` gives it one."""
        if self._stopped:
            raise _stopping()
        wait = asyncio.timeout(None)
        try:
            async with wait:
                self._waits.add(wait)
                return await anext(events)
        except TimeoutError:
            if wait.expired():
                raise _stopping() from None
            raise
        except StopAsyncIteration:
            raise OmniError("the pipeline ended the request without a result") from None
        finally:
            self._waits.discard(wait)

    async def last(self, events: Events) -> RequestOutput:
        """Iterate to the end, and close."""
        async with aclosing(events):
            while True:
                event = await self.next(events)
                if isinstance(event, RequestOutput):
                    return event


def _stopping() -> ShuttingDown:
    return ShuttingDown("the server is shutting down; send the request again when it is back")


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Await `work`, but cancel it and raise `ClientGone` once the caller has closed the connection.

    The request's body must have been read.
    """
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
