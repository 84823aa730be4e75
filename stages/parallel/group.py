"""A replica of several ranks, seen from its first one, the leader: the stage worker that talks to the master.

The leader starts the other ranks as processes of its own and decides alone what is done: it schedules, samples and answers.
Of each forward it tells the followers what goes in, and every rank computes its part; they meet in the collectives of
torch.distributed inside the model. So no rank needs the others' clock, and none ever decides by itself.

    leader:    begin -> (load) -> meet -> run, run, run ... -> close
    follower:          (load) -> meet -> do,  do,  do  ...

Invariants: all ranks do the same commands in the same order. A command raises in all ranks or in none; everything else (a
rank that ends, hangs, or raises alone) ends the whole replica, through `LoadContext.broken` and `RankLost`. No follower
outlives its leader: each watches a pipe whose only writing end is here.

Nothing here imports torch. Idle followers wait for the next command on a socket, not in a collective, where they would time
out.
"""

import contextlib
import dataclasses
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing import Pipe
from typing import Final, TypeVar

from proto.errors import StartError
from stages.engine import LoadContext
from stages.parallel.messages import (
    Arrived,
    Begin,
    Do,
    Done,
    FromFollower,
    Go,
    Gone,
    Seat,
    ToFollower,
    Unfit,
    hear,
    packed,
)

T = TypeVar("T")

SLACK_S: Final = 1.0
"""A rank that waits for another is told so by its own collective first, and has so long to say it."""

ENDING_S: Final = 5.0
"""How long a follower may take to end once its socket is closed."""


class RankLost(BaseException):
    """The ranks are no longer in step: the replica is of no more use. Not an `Exception`, so that no fault boundary of a
    request takes it for the request's own."""


class Group:
    """The leader's side. Everything here belongs to one thread, the engine's. `listener` is bound for the ranks to find each
    other by; whoever brings them together takes it (`stages.parallel.distributed`)."""

    def __init__(self, context: LoadContext, role: str) -> None:
        """Start the followers, each of which loads what `role` says. Raises `StartError` if the devices are too few."""
        spec = context.spec.parallel
        self._broken = context.broken
        self._report = context.report
        self._stage = context.stage
        if len(context.ranks) != spec.degree:
            raise StartError(
                f"stage {context.stage}: its ranks need {spec.degree} devices, and there are {len(context.ranks)}:"
                f" {', '.join(context.ranks)}; give the worker --devices with {spec.degree} of them",
                stage=context.stage,
                field="devices",
            )
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.seat = Seat(0, spec.degree, self.listener.getsockname()[1], spec.timeout)
        self._closing = False
        self._number = 0
        self._since: float | None = None
        self._lost: str | None = None
        self._alive_read, self._alive_write = os.pipe()
        self._followers: list[_Follower] = []
        try:
            for rank in range(1, spec.degree):
                self._followers.append(_Follower(rank, self._alive_read))
            for follower in self._followers:
                seat = dataclasses.replace(self.seat, rank=follower.rank)
                follower.watch(self._watch)
                self._tell(follower, packed(Begin(seat, role, _alone(context, follower.rank))))
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        """Of the followers, by rank."""
        return [follower.process.pid for follower in self._followers]

    def meet(self) -> None:
        """While loading: wait until all ranks have come here. The master bounds how long. Raises `StartError`."""
        for follower in self._followers:
            self._report(f"waiting for rank {follower.rank}", None)
            said = follower.mail.get()
            if not isinstance(said, Arrived):
                lost = self._end(self._reason(follower, said))
                raise StartError(f"stage {self._stage}: {lost}", stage=self._stage, field="parallel")
        for follower in self._followers:
            self._tell(follower, packed(Go()))

    def run(self, command: object, work: Callable[[], T]) -> T:
        """Have each follower do `command`, and do `work`, this rank's part of the same. Raises what `work` raised, if it
        raised in all ranks; `RankLost` if they are no longer in step."""
        if self._lost is not None:
            raise RankLost(self._lost)
        self._number += 1
        self._since = time.monotonic()
        order = packed(Do(self._number, command))
        for follower in self._followers:
            self._tell(follower, order)
        raised: Exception | None = None
        try:
            value = work()
        except Exception as error:  # noqa: BLE001 - it is raised below, or is one of the reasons why the ranks are lost
            raised = error
        errors = [self._outcome(follower, raised) for follower in self._followers]
        took, self._since = time.monotonic() - self._since, None
        if raised is not None and took >= self.seat.timeout:
            late = f"the ranks have waited for one another for {self.seat.timeout:g} s (parallel.timeout)"
            raise self._end(f"{late}: {_words(raised)}") from raised
        if raised is None and not any(errors):
            return value
        alone = next((at for at, error in enumerate(errors) if (error is None) is not (raised is None)), None)
        if alone is not None:
            mine = f"rank 0 raised {_words(raised)}" if raised else "rank 0 did not raise"
            other = f"rank {self._followers[alone].rank}"
            said = f"{other} raised {errors[alone]}" if errors[alone] else f"{other} did not raise"
            raise self._end(f"the ranks are out of step: {said}, and {mine}")
        assert raised is not None
        raise raised

    def close(self) -> None:
        """End the followers."""
        self._closing = True
        for fd in (self._alive_read, self._alive_write):
            if fd >= 0:
                os.close(fd)
        self._alive_read, self._alive_write = -1, -1
        for follower in self._followers:
            follower.end()
        self._followers = []
        self.listener.close()

    def _tell(self, follower: "_Follower", message: bytes) -> None:
        try:
            follower.pipe.send_bytes(message)
        except OSError:
            raise self._end(self._reason(follower, follower.last_words())) from None

    def _outcome(self, follower: "_Follower", raised: Exception | None) -> str | None:
        """What the follower's part of the current command raised. Raises `RankLost` if it says nothing."""
        assert self._since is not None
        left = self._since + self.seat.timeout + SLACK_S - time.monotonic()
        try:
            said = follower.mail.get(timeout=max(left, SLACK_S))
        except queue.Empty:
            mine = f" (rank 0 raised {_words(raised)})" if raised else ""
            raise self._end(self._late(follower) + mine) from raised
        if isinstance(said, Done) and said.number == self._number:
            return said.error
        raise self._end(self._reason(follower, said)) from raised

    def _watch(self, follower: "_Follower") -> None:
        """In a thread: what the follower says goes to its mail. If it ends or hangs the replica does, whatever the engine
        is doing: it may wait for that rank in a collective."""
        pipe, reason = follower.pipe, ""
        try:
            while True:
                if pipe.poll(self.seat.timeout + SLACK_S):
                    said = hear(pipe)
                    if isinstance(said, Unfit):
                        reason = said.error
                    follower.mail.put(said)
                elif self._since is not None and time.monotonic() - self._since > self.seat.timeout + 2 * SLACK_S:
                    self._end(self._late(follower))
        except (EOFError, OSError):
            pass
        code = follower.wait()
        gone = Gone(reason or f"its process {follower.process.pid} ended with {code}")
        follower.mail.put(gone)
        if not self._closing:
            self._end(self._reason(follower, gone))

    def _end(self, reason: str) -> RankLost:
        """The replica is lost: say why, once, and end every follower, also those that are stuck."""
        if self._lost is None and not self._closing:
            self._lost = reason
            self._broken(reason)
        for follower in self._followers:
            follower.kill()
        return RankLost(self._lost or reason)

    def _late(self, follower: "_Follower") -> str:
        return (
            f"{self._name(follower)} has not done its part for {self.seat.timeout:g} s (parallel.timeout);"
            f" the replica ends"
        )

    def _reason(self, follower: "_Follower", said: object) -> str:
        words = said.error if isinstance(said, Unfit | Gone) else f"it said {said} out of turn"
        return f"{self._name(follower)}: {words}"

    def _name(self, follower: "_Follower") -> str:
        return f"rank {follower.rank} of {self.seat.degree} ({self._stage})"


class _Follower:
    """Another rank's process, and the ends of what connects it to this one."""

    def __init__(self, rank: int, alive: int) -> None:
        self.rank = rank
        self.mail: queue.SimpleQueue[ToFollower | FromFollower | Gone] = queue.SimpleQueue()
        self.pipe, theirs = Pipe()
        self._watcher: threading.Thread | None = None
        command = [sys.executable, "-m", "stages.parallel.follower", str(theirs.fileno()), str(alive)]
        try:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=(theirs.fileno(), alive))
        except BaseException:
            self.pipe.close()
            raise
        finally:
            theirs.close()

    def watch(self, watch: Callable[["_Follower"], None]) -> None:
        self._watcher = threading.Thread(target=watch, args=(self,), name=f"rank-{self.rank}", daemon=True)
        self._watcher.start()

    def last_words(self) -> object:
        """What it said last; it cannot be told anything any more."""
        said: object = None
        with contextlib.suppress(queue.Empty):
            while True:
                said = self.mail.get(timeout=ENDING_S)
                if isinstance(said, Gone):
                    break
        return said

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()

    def wait(self) -> int:
        try:
            return self.process.wait(ENDING_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()

    def end(self) -> None:
        """It ends by itself when the pipe that it watches does."""
        self.wait()
        if self._watcher is not None:
            self._watcher.join()
        self.pipe.close()


def _alone(context: LoadContext, rank: int) -> LoadContext:
    """The same for one rank's device, without what belongs to this process."""
    return dataclasses.replace(context, device=context.ranks[rank], report=_say_nothing, broken=_do_nothing)


def _say_nothing(note: str, done: float | None) -> None:
    """A follower's progress is the leader's."""


def _do_nothing(reason: str) -> None:
    """A follower that is broken ends."""


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
