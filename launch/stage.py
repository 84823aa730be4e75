"""`omni-stage`: one stage worker. It needs no deploy file: the master hands it its config.

omni-stage --master tcp://10.0.0.5:5570 --stage painter
"""

import asyncio
import contextlib
import logging
import os
import sys
import threading
from typing import Annotated

import typer
import uvloop

from launch.environment import QUIET_LIBRARIES
from launch.logs import set_up_logs
from launch.standard_streams import open_those_that_are_closed
from proto.errors import OmniError
from proto.ids import StageName
from proto.sockets import is_loopback, split_endpoint
from stages.session import WorkerOptions
from stages.worker import EXIT_MASTER_LOST, Worker

app = typer.Typer(add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False)


@app.command()
def stage(
    master: Annotated[
        str, typer.Option(metavar="URL", help="The master's control address, as it prints it: tcp://HOST:PORT.")
    ],
    stage: Annotated[str, typer.Option(metavar="NAME", help="Which stage of the deploy to run.")],
    replica: Annotated[
        int | None, typer.Option(metavar="N", min=0, help="Replica slot to take. Default: any free one.")
    ] = None,
    devices: Annotated[
        str | None,
        typer.Option(metavar="LIST", help="Devices to use here instead of the deploy's, with commas: cuda:0 or cpu."),
    ] = None,
    threads: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="CPU threads. Default: the deploy's, or all cores.")
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Allow a master that is not on this machine, without authentication.")
    ] = False,
    exit_with_master: Annotated[
        bool,
        typer.Option("--exit-with-master", help="End when the master does, instead of waiting for it to come back."),
    ] = False,
    parent_fd: Annotated[int | None, typer.Option(hidden=True)] = None,
    up_fd: Annotated[int | None, typer.Option(hidden=True)] = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log more.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Log warnings only.")] = False,
) -> None:
    """Run one worker of a pipeline stage, on this host, for a master that may be on another.

    [bold]omni-stage --master tcp://127.0.0.1:5570 --stage painter[/bold]

    It may be started before the master, and waits for it again whenever it was away.

    The first Ctrl-C (or SIGTERM) finishes the requests that are here and leaves;
    the second leaves at once.
    Exit status: 0 left, 2 refused, 3 its master is gone, any other: broken.
    """
    set_up_logs(stage, verbose, quiet)
    try:
        host, _ = split_endpoint(master)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--master") from None
    if not is_loopback(host):
        if not insecure:
            raise typer.BadParameter(
                f"{master} is not on this machine and there is no authentication yet; pass --insecure to connect anyway",
                param_hint="--master",
            )
        logging.getLogger("omni.stage").warning("INSECURE: connecting to %s without authentication", master)
    if not verbose:
        for name, value in QUIET_LIBRARIES.items():
            os.environ.setdefault(name, value)
    if threads is not None:
        os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(threads)
    if parent_fd is not None:
        threading.Thread(target=_end_with_parent, args=(parent_fd,), name="parent", daemon=True).start()
    chosen = tuple(one.strip() for one in devices.split(",") if one.strip()) if devices else ()
    alone = parent_fd is None
    code = _run(
        WorkerOptions(master, StageName(stage), replica, chosen, exit_with_master, exit_with_master and alone), up_fd
    )
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: the engine's thread may be inside a long native call, which finalisation would wait for or crash in.
    os._exit(code)


def _run(options: WorkerOptions, up_fd: int | None) -> int:
    async def work() -> int:
        return await Worker(options, lambda: _say_up(up_fd)).run()

    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(work())
    except OmniError as error:
        logging.getLogger("omni.stage").error("%s", error)
        return 2


def _say_up(fd: int | None) -> None:
    """Tell the launcher, if it started us, that from now on we are worth a restart."""
    if fd is not None:
        with contextlib.suppress(BrokenPipeError):  # the launcher is gone, and so are we in a moment
            os.write(fd, b"1")


def _end_with_parent(fd: int) -> None:
    """The pipe's other end is held by the launcher alone: end of file means that it is gone, however it ended."""
    while os.read(fd, 1):
        pass
    os._exit(EXIT_MASTER_LOST)


def main() -> None:
    open_those_that_are_closed()
    app()


if __name__ == "__main__":
    main()
