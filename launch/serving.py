"""`omni-master launch DEPLOY`: start everything, serve the API until interrupted, end everything."""

import asyncio
import contextlib
import time

from rich.console import Console

from launch.joining import say_who_may_join
from launch.waiting import Waiting
from omni.api.server import listen, serve
from omni.async_omni import AsyncOmni


async def serve_until_cancelled(omni: AsyncOmni, console: Console, progress: Console) -> None:
    """The API answers from the first moment (health, 503); requests are taken as soon as every stage is ready.

    Raises `DeployError` when an address is taken, before any stage is started, or `StartError` when a stage will not
    come up. Where to ask goes to `console`, what is waited for to `progress`.
    """
    deploy = omni.deploy
    bound: asyncio.Future[tuple[str, int]] = asyncio.get_running_loop().create_future()
    listener = await listen(deploy.api.host, deploy.api.port)
    try:
        await omni.start(wait=False)
        api = asyncio.create_task(
            serve(
                omni,
                deploy.api.host,
                deploy.api.port,
                listener=listener,
                on_bound=lambda host, port: bound.set_result((host, port)),
            )
        )
        try:
            api.add_done_callback(lambda _: bound.cancel())
            try:
                host, port = await bound
            except asyncio.CancelledError:
                if api.done():
                    await api  # it says why it could not bind
                raise
            shown = f"http://{f'[{host}]' if ':' in host else host}:{port}"
            console.out(f"API: {shown} (not ready yet)", highlight=False)
            say_who_may_join(omni, console)
            await _serve(omni, api, shown, console, progress)
        finally:
            progress.out("stopping", highlight=False)
            api.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await api
    finally:
        listener.close()
        await omni.stop()


async def _serve(omni: AsyncOmni, api: asyncio.Task[None], url: str, console: Console, progress: Console) -> None:
    began = time.monotonic()
    with Waiting(progress, lambda: omni.engine.readiness.waiting) as waiting:
        ready = asyncio.create_task(omni.engine.wait_ready(waiting.show))
        try:
            await asyncio.wait([ready, api], return_when=asyncio.FIRST_COMPLETED)
        finally:
            ready.cancel()
        if ready.done():
            await ready
    console.out(f"ready after {time.monotonic() - began:.1f} s: {url}/v1 (Ctrl-C ends)", highlight=False)
    await api
