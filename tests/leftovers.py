"""What a test must not leave behind: processes and listening sockets. Opt in with the fixture `no_leftovers`.

Processes are found by a mark in their environment, so one whose parent was killed and one in a session of its own are
found too.
"""

import os
import uuid
from collections.abc import Iterator

import psutil
import pytest

MARK = "OMNI_TEST_MARK"
PATIENCE = 10.0
"""Seconds that processes get to end after the test's last line."""


@pytest.fixture
def no_leftovers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fail the test if a process that it started is alive, or this process listens on a new port, when it is over.

    What is left is killed, so that the next test starts clean. List the fixture before those that start things: it is
    then torn down after them.
    """
    mark = uuid.uuid4().hex
    monkeypatch.setenv(MARK, mark)
    before = listening()
    yield
    _, alive = psutil.wait_procs(marked(mark), timeout=PATIENCE)
    named = [f"{process.pid}: {command_of(process)}" for process in alive]
    for process in alive:
        process.kill()
    ports = sorted(listening() - before)
    assert not named, f"still running after {PATIENCE:.0f} s: {named}"
    assert not ports, f"still listening: {ports}"


def marked(mark: str) -> list[psutil.Process]:
    """Every other process that inherited the mark."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get(MARK) == mark:
                found.append(process)
        except psutil.Error:
            continue  # ended meanwhile, a zombie, or not ours to look at
    return found


def listening() -> set[tuple[str, int]]:
    """Addresses on which this process listens."""
    open_ports = psutil.Process().net_connections(kind="tcp")
    return {tuple(conn.laddr) for conn in open_ports if conn.status == psutil.CONN_LISTEN and conn.laddr}


def command_of(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return "unknown"
