"""A follower: the process of every rank of a replica but the first. Started by `stages.parallel.group`, never by hand.

It loads what its role says, then does its part of each command that the leader sends, and reports whether that raised. It
ends when its leader does, however that ended: the pipe that it watches has its only writing end there.

Signals are the leader's business: it may be finishing work when the whole process group is told to end.
"""

import contextlib
import ctypes
import logging
import os
import signal
import sys
import threading
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Final, NoReturn

from proto.errors import OmniError
from stages.parallel.line import LeaderGone, Line, Role
from stages.parallel.messages import Begin, Unfit, hear, packed

log = logging.getLogger("omni.rank")

EXIT_LEADER_GONE: Final = 3
EXIT_UNFIT: Final = 4
_PR_SET_PDEATHSIG: Final = 1


def main(pipe_fd: int, alive_fd: int) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_leader, args=(alive_fd,), name="leader", daemon=True).start()
    _end_even_if_stopped()
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    pipe = Connection(pipe_fd)
    begin = hear(pipe)
    assert isinstance(begin, Begin)
    try:
        _role(begin.role)(begin.context, Line(begin.seat, pipe))
    except LeaderGone:
        _leave(EXIT_LEADER_GONE)
    except BaseException as error:  # a library may raise SystemExit; the leader is told why, whatever it was
        if not isinstance(error, OmniError):  # the words of a failed load are enough
            log.exception("%s is broken", begin.seat)
        text = str(error) if isinstance(error, OmniError) else f"{type(error).__name__}: {error}"
        with contextlib.suppress(OSError):
            pipe.send_bytes(packed(Unfit(text)))
        _leave(EXIT_UNFIT)


def _role(path: str) -> Role:
    module, _, name = path.partition(":")
    role: Role = getattr(import_module(module), name)
    return role


def _end_with_leader(fd: int) -> None:
    while os.read(fd, 1):
        pass
    _leave(EXIT_LEADER_GONE)


def _end_even_if_stopped() -> None:
    """On Linux the kernel ends this process with the leader's engine, also one that is stopped or in a long native call."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _leave(code: int) -> NoReturn:
    """Not sys.exit: finalisation would wait for collectives that nobody joins any more."""
    logging.shutdown()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
