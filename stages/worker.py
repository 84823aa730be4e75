"""The stage worker: joins a master, again and again, with an engine that it loads once.

    join -> load -> serve -> (master lost: join again, with the engine as it is) ... -> leave

The I/O loop lives here and in `stages.session`, the engine in `stages.engine_thread`. Nothing polls: wake-ups come from sockets, queues, timers
and signals. A worker whose master is gone drops its work at once, since nobody waits for it, and says hello again.
"""

import asyncio
import logging
import os
import signal
import socket
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Final

import zmq

from proto.deploy import devices_of
from proto.ids import Session
from proto.messages import (
    PROTOCOL,
    Goodbye,
    Hello,
    Welcome,
)
from stages.connection import Connection, new_nonce
from stages.engine import LoadContext
from stages.engine_thread import (
    DropAll,
    EngineThread,
    Loaded,
)
from stages.engines import engine_factory
from stages.parallel.devices import narrowed, share_of_threads
from stages.session import Ended, StageSession, WorkerOptions

log = logging.getLogger("omni.stage")

GOODBYE_S: Final = 0.5
"""How long a Goodbye may take to leave this process."""

EXIT_MASTER_LOST: Final = 3
"""Exit status of a worker that was to end with its master, and whose master is gone without a word."""

EXIT_NOT_LOADED: Final = 4
"""Exit status of a worker whose engine could not load: trying again would not help by itself."""


class Worker:
    """Runs until told to go; `run` gives the process's exit status."""

    def __init__(self, options: WorkerOptions, on_loaded: Callable[[], None] = lambda: None) -> None:
        """`on_loaded` is called once, when the engine has loaded."""
        self._options = options
        self._environment = dict(os.environ)
        self._on_loaded = on_loaded
        self._engine: EngineThread | None = None
        self._config_hash: str | None = None
        self._loaded: Loaded | None = None
        self._last_session: Session | None = None
        self._session: StageSession | None = None
        self._signals = 0
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._joining: asyncio.Task[Welcome] | None = None

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signalled)
        try:
            while True:
                ended = await self._one_session()
                if ended in (Ended.LEFT, Ended.DISMISSED):
                    return 0
                if ended is Ended.BROKEN:
                    return 1
                if ended is Ended.NOT_LOADED:
                    return EXIT_NOT_LOADED
                if self._signals:
                    return 0
                if ended is Ended.OUTDATED:
                    # Weights and compiled kernels can't be unloaded cleanly in general; a fresh process can.
                    log.warning("the stage's config has changed; restarting this worker")
                    self._context.term()
                    _restart(self._environment)
                if self._options.exit_when_lost and self._last_session is not None:
                    log.warning("the master at %s is gone", self._options.master)
                    return EXIT_MASTER_LOST
                log.warning("the master at %s is gone; waiting for it", self._options.master)
        finally:
            self._context.term()  # waits for last words

    async def _one_session(self) -> Ended:
        connection = Connection(self._context, self._options.master)
        ended = Ended.MASTER_LOST
        try:
            self._joining = asyncio.create_task(connection.join(self._hello()))
            try:
                welcome = await self._joining
            except asyncio.CancelledError:
                return Ended.LEFT  # a signal, while there was no master
            except ConnectionError as error:
                log.warning("joining failed: %s", error)
                return Ended.MASTER_LOST
            finally:
                self._joining = None
            self._last_session = welcome.session
            log.info(
                "stage %s/%s joined %s (epoch %s)",
                self._options.stage,
                welcome.replica,
                self._options.master,
                welcome.epoch,
            )
            if self._engine is not None and welcome.config_hash != self._config_hash:
                connection.send_control(Goodbye(epoch=welcome.epoch, reason=Ended.OUTDATED.value))
                ended = Ended.OUTDATED
                return ended
            engine = self._start_engine(welcome)
            self._session = StageSession(connection, welcome, engine, self._loaded, self._options)
            if self._signals:
                self._session.drain()
            ended = await self._session.serve(self._remember)
            if engine.broken is not None:  # whatever ended the session, there is nothing to join again with
                ended = Ended.BROKEN if engine.broken.loaded else Ended.NOT_LOADED
            elif ended is Ended.MASTER_LOST:
                engine.commands.async_q.put_nowait(DropAll())
            return ended
        finally:
            if self._session is not None:
                self._session.close()
                self._session = None
            connection.close(0.0 if ended in (Ended.MASTER_LOST, Ended.DISMISSED) else GOODBYE_S)

    def _hello(self) -> Hello:
        return Hello(
            protocol=PROTOCOL,
            build=_build(),
            stage=self._options.stage,
            nonce=new_nonce(),
            host=socket.gethostname(),
            pid=os.getpid(),
            replica=self._options.replica,
            devices=self._options.devices,
            config_hash=self._config_hash,
            previous=self._last_session,
        )

    def _start_engine(self, welcome: Welcome) -> EngineThread:
        """The engine, started if this is the first join. One that is loaded serves again."""
        if self._engine is not None:
            return self._engine
        self._config_hash = welcome.config_hash
        spec, degree = welcome.spec, welcome.spec.parallel.degree
        devices = devices_of(self._options.devices or spec.devices, degree, welcome.replica)
        if degree > 1:  # before torch is imported, as all of this
            devices, seen = narrowed(devices, os.environ)
            os.environ.update(seen)
            threads = share_of_threads(os.environ, spec.threads, degree, len(os.sched_getaffinity(0)))
            os.environ["OMP_NUM_THREADS"] = str(threads)
        elif spec.threads is not None:
            os.environ.setdefault("OMP_NUM_THREADS", str(spec.threads))
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        engine = EngineThread(engine_factory(spec), self._context_for(welcome, devices))
        self._engine = engine  # first, because the engine reports from its thread as soon as it runs
        engine.start()
        return engine

    def _context_for(self, welcome: Welcome, devices: tuple[str, ...]) -> LoadContext:
        def report(note: str, done: float | None = None) -> None:
            assert self._engine is not None
            self._engine.report_loading(note, done)

        def broken(reason: str) -> None:
            assert self._engine is not None
            self._engine.report_broken(reason)

        return LoadContext(
            self._options.stage,
            welcome.spec,
            welcome.limits,
            devices[0],
            welcome.publishes,
            report,
            devices if welcome.spec.parallel.degree > 1 else (),
            broken,
        )

    def _remember(self, report: Loaded) -> None:
        self._loaded = report
        self._on_loaded()

    def _signalled(self) -> None:
        """The first signal drains, the second ends at once."""
        self._signals += 1
        if self._joining is not None:
            self._joining.cancel()
        elif self._session is not None:
            if self._signals > 1:
                self._session.end(Ended.LEFT)
            else:
                self._session.drain()


def _build() -> str:
    try:
        return version("omni-pipeline")
    except PackageNotFoundError:
        return "unknown"


def _restart(environment: Mapping[str, str]) -> None:
    """Become a fresh process with the same command line. The environment is the first one: this process has narrowed its
    own, to its share of the devices and threads."""
    import sys

    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)
