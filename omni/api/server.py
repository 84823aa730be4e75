"""The HTTP server: binds a port, says which, serves until it is cancelled, and leaves no request hanging.

It installs no signal handlers: signals are the caller's. The loop is the caller's too (uvloop), and the pipeline's.
"""

import asyncio
import socket
from collections.abc import Callable
from typing import Final

import uvicorn

from omni.api.app import create_app
from omni.api.lifetime import Lifetime
from omni.pipeline import Pipeline
from proto.errors import DeployError

_TICK_S: Final = 1.0  # the Date header's resolution
_GRACE_S: Final = 2  # for answers on their way out when the server stops
_BACKLOG: Final = 2048
KEPT_S: Final = 75
"""Longer than clients keep a connection that is not in use (5 s is common): else now and then one is closed by us just
when its client sends a request on it, and that request fails."""


async def serve(
    pipeline: Pipeline,
    host: str,
    port: int,
    *,
    on_bound: Callable[[str, int], None],
    listener: socket.socket | None = None,
) -> None:
    """Serve the API until this task is cancelled; then end open requests with a clear error, within seconds.

    `on_bound(host, port)` is called once connections are accepted, with the real port where `port` was 0. A `listener`
    from `listen` is used, and closed, instead of binding now. Raises `DeployError` if the address cannot be bound.
    """
    lifetime = Lifetime()
    listener = listener or await listen(host, port)
    try:
        config = uvicorn.Config(
            create_app(pipeline, lifetime),
            loop="none",
            http="h11",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            backlog=_BACKLOG,
            timeout_keep_alive=KEPT_S,
            timeout_graceful_shutdown=_GRACE_S,
        )
        server = uvicorn.Server(config)
        config.load()
        server.lifespan = config.lifespan_class(config)
        # Not `server.serve()`: that takes the process's signals. Not `main_loop()`: that wakes ten times a second.
        await server.startup(sockets=[listener])
        try:
            await server.on_tick(0)
            on_bound(host, listener.getsockname()[1])
            while True:
                await asyncio.sleep(_TICK_S)
                await server.on_tick(0)
        finally:
            lifetime.stop()
            await _shut_down(server, listener)
    finally:
        listener.close()


async def _shut_down(server: uvicorn.Server, listener: socket.socket) -> None:
    await server.shutdown(sockets=[listener])
    if server.server_state.tasks:  # cancelled by now, but perhaps not done
        await asyncio.wait(server.server_state.tasks, timeout=_GRACE_S)
    for connection in list(server.server_state.connections):
        connection.transport.abort()  # the peer does not read: nothing more can be told to it


async def listen(host: str, port: int) -> socket.socket:
    """A socket that listens; those who connect are answered once `serve` has it. Raises `DeployError`."""
    try:
        found = await asyncio.get_running_loop().getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        family, kind, protocol, _, address = found[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(_BACKLOG)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise DeployError(
            f"api: cannot listen on {host} port {port}: {error.strerror or error}; "
            "set api.host and api.port to a free address (port 0 picks one)",
            field="api.port",
        ) from None
    listener.setblocking(False)
    return listener
