"""`omni-master launch DEPLOY`: start everything, serve the API until interrupted, end everything."""

import asyncio
import contextlib

from rich.console import Console

from launch.waiting import Waiting
from omni.api.server import serve
from omni.async_omni import AsyncOmni
from proto.deploy import Deploy
from proto.sockets import is_loopback


async def serve_until_cancelled(omni: AsyncOmni, console: Console) -> None:
    """The API answers from the first moment (health, 503); requests are taken as soon as every stage is ready.

    Raises `DeployError` or `StartError` when an address is taken or a stage will not come up.
    """
    deploy = omni.deploy
    bound: asyncio.Future[tuple[str, int]] = asyncio.get_running_loop().create_future()
    try:
        await omni.start(wait=False)
        api = asyncio.create_task(
            serve(omni, deploy.api.host, deploy.api.port, on_bound=lambda host, port: bound.set_result((host, port)))
        )
        try:
            api.add_done_callback(lambda _: bound.cancel())
            try:
                host, port = await bound
            except asyncio.CancelledError:
                if api.done():
                    await api  # it says why it could not bind
                raise
            _say_where(omni, deploy, host, port, console)
            await _serve(omni, api, console)
        finally:
            api.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await api
    finally:
        await omni.stop()


async def _serve(omni: AsyncOmni, api: asyncio.Task[None], console: Console) -> None:
    with Waiting(console) as waiting:
        ready = asyncio.create_task(omni.engine.wait_ready(waiting.show))
        try:
            await asyncio.wait([ready, api], return_when=asyncio.FIRST_COMPLETED)
        finally:
            ready.cancel()
        if ready.done():
            await ready
    console.out("ready: every stage has its replicas (Ctrl-C ends)", highlight=False)
    await api


def _say_where(omni: AsyncOmni, deploy: Deploy, host: str, port: int, console: Console) -> None:
    assert omni.endpoints is not None  # set by `start`
    shown = f"[{host}]" if ":" in host else host
    console.out(f"API: http://{shown}:{port} (not ready yet)", highlight=False)
    control = omni.endpoints.control
    insecure = "" if is_loopback(control.removeprefix("tcp://").rpartition(":")[0]) else " --insecure"
    for name, stage in deploy.stages.items():
        if stage.slots > stage.local_replicas:
            places = stage.slots - stage.local_replicas
            console.out(
                f"room for {places} more of stage {name}: omni-stage --master {control} --stage {name}{insecure}",
                highlight=False,
            )
