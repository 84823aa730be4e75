"""The launcher of local stage processes: starts them, watches them, restarts those that die in service, ends them all.

Invariants: no process outlives `stop`; none outlives this process either, however it ends, because each child watches a
pipe whose only writing end is here. A stage that dies before it was ever up is not restarted: that is a failed start.
Whether it was up it says itself, once its engine has loaded, by a byte in a pipe of its own; no time limit could tell.
"""

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from launch.addresses import from_here
from launch.deploy_file import load_deploy
from launch.environment import child_environment
from omni.events import ChildExited
from proto.deploy import Deploy
from proto.ids import StageName
from proto.sockets import is_loopback, split_endpoint

log = logging.getLogger("omni.launch")

RESTART_DELAYS_S: tuple[float, ...] = (0.0, 1.0, 2.0, 5.0, 10.0)
"""Before the first, second, ... restart of one replica. After that it stays down."""

FORGIVEN_AFTER_S: Final = 600.0
"""A restarted process that lived so long counts as never restarted."""


@dataclass(slots=True)
class _Child:
    stage: StageName
    replica: int
    process: subprocess.Popen[bytes]
    up: int  # where its byte comes out
    started_at: float
    restarts: int


class LocalLauncher:
    """Implements `omni.launcher.Launcher`. Safe to call from any thread."""

    def __init__(self, stage_options: Sequence[str] = ("--quiet",)) -> None:
        """`stage_options` go to every `omni-stage` that is started. By default they log warnings only: what they do is
        told to the master."""
        self._stage_options = tuple(stage_options)
        self._lock = threading.Lock()
        self._ending = threading.Lock()  # a second `stop` waits for the first
        self._children: dict[int, _Child] = {}
        self._watchers: list[threading.Thread] = []
        self._stopping = threading.Event()
        self._alive_read, self._alive_write = -1, -1

    def load(self, source: str | Path, overrides: Sequence[str] = ()) -> Deploy:
        return load_deploy(source, overrides).deploy

    def start(self, deploy: Deploy, master: str, on_exit: Callable[[ChildExited], None]) -> None:
        self._deploy, self._master, self._on_exit = deploy, from_here(master), on_exit
        self._alive_read, self._alive_write = os.pipe()
        for name, stage in deploy.stages.items():
            for replica in range(stage.local_replicas):
                self._spawn(StageName(name), replica, 0)

    def _spawn(self, stage: StageName, replica: int, restarts: int) -> None:
        with self._lock:
            if self._stopping.is_set():
                return
            env, device = child_environment(self._deploy.stages[stage], replica, self._deploy)
            up_read, up_write = os.pipe()
            command = [
                *(self._python(stage), "-m", "launch.stage", "--master", self._master, "--stage", stage),
                *(
                    "--replica",
                    str(replica),
                    "--devices",
                    device,
                    "--exit-with-master",
                    "--parent-fd",
                    str(self._alive_read),
                    "--up-fd",
                    str(up_write),
                ),
                *(() if is_loopback(split_endpoint(self._master)[0]) else ("--insecure",)),  # the deploy has allowed it
                *self._stage_options,
            ]
            try:
                process = subprocess.Popen(
                    command,
                    env=env,
                    stdin=subprocess.DEVNULL,
                    pass_fds=(self._alive_read, up_write),
                    start_new_session=True,  # Ctrl-C is for the master, which then ends its stages in order
                )
            except BaseException:
                os.close(up_read)
                raise
            finally:
                os.close(up_write)
            child = _Child(stage, replica, process, up_read, time.monotonic(), restarts)
            self._children[process.pid] = child
            watcher = threading.Thread(target=self._watch, args=(child,), name=f"watch-{process.pid}", daemon=True)
            self._watchers.append(watcher)
            watcher.start()

    def _python(self, stage: StageName) -> str:
        own = self._deploy.stages[stage].python
        return sys.executable if own is None else os.path.expanduser(own)

    def _watch(self, child: _Child) -> None:
        code = child.process.wait()
        was_up = _said_up(child.up)
        with self._lock:
            self._children.pop(child.process.pid, None)
        if self._stopping.is_set():
            return
        lived = time.monotonic() - child.started_at
        restarts = 0 if lived >= FORGIVEN_AFTER_S else child.restarts
        restart = _is_worth_a_restart(code, was_up, restarts)
        level = logging.WARNING if code else logging.INFO
        log.log(level, "stage %s/%s: process %d ended with %d", child.stage, child.replica, child.process.pid, code)
        self._on_exit(ChildExited(child.stage, child.replica, child.process.pid, code, restart))
        if restart and not self._stopping.wait(RESTART_DELAYS_S[restarts]):
            self._spawn(child.stage, child.replica, restarts + 1)

    def stop(self, timeout_s: float) -> None:
        self._stopping.set()
        with self._ending:
            self._end_all(timeout_s)

    def _end_all(self, timeout_s: float) -> None:
        with self._lock:
            children = list(self._children.values())
        deadline = time.monotonic() + timeout_s
        grace = min(1.0, timeout_s / 2)  # the master has told them already
        for child in children:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.process.wait(max(0.0, grace - (time.monotonic() - deadline + timeout_s)))
        _signal(children, signal.SIGTERM)
        for child in children:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.process.wait(max(0.0, deadline - time.monotonic()))
        _signal(children, signal.SIGKILL)
        for child in children:
            child.process.wait()
        for watcher in self._watchers:
            watcher.join()
        for fd in (self._alive_read, self._alive_write):
            if fd >= 0:
                os.close(fd)
        self._alive_read, self._alive_write = -1, -1


def _said_up(fd: int) -> bool:
    """Whether a process that has ended was up before, as it said in its pipe; closes the pipe."""
    os.set_blocking(fd, False)  # a process that it started may still hold the other end
    try:
        return os.read(fd, 1) != b""
    except BlockingIOError:
        return False
    finally:
        os.close(fd)


def _is_worth_a_restart(code: int, was_up: bool, restarts: int) -> bool:
    """Not one that was told to leave, nor one that never came up: that is a failed start, and its reason is known."""
    if code == 0 or (restarts == 0 and not was_up):
        return False
    return restarts < len(RESTART_DELAYS_S)


def _signal(children: Sequence[_Child], number: signal.Signals) -> None:
    """To each child and whatever it started: a child leads a process group of its own."""
    for child in children:
        if child.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.process.pid, number)
