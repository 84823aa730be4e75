"""Waiting that a cancellation does not cut short: for starts and ends, half of which would be worse than none."""

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")


async def to_its_end(work: Awaitable[T]) -> T:
    """Await `work` to its end. Whoever waits and is cancelled meanwhile, however often, gets that afterwards."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is None:
        return task.result()
    if not task.cancelled():
        task.exception()  # seen; the cancellation says more
    raise cancelled
