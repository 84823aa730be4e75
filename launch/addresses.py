"""The master's address as its own machine and as others must write it. A socket that listens on every address of a machine
is bound to a host that nobody can connect to by that name."""

import socket
from typing import Final

from proto.sockets import split_endpoint

EVERY_ADDRESS: Final = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}
"""Hosts that stand for all addresses, and where this machine itself finds what listens on them."""


def from_here(master: str) -> str:
    """For processes of this machine. `master` is where the control socket listens: tcp://HOST:PORT."""
    host, port = split_endpoint(master)
    return f"tcp://{EVERY_ADDRESS.get(host, host)}:{port}"


def from_elsewhere(master: str) -> str:
    """For people to type on another machine: a master that listens on every address is named by its host."""
    host, port = split_endpoint(master)
    return f"tcp://{socket.gethostname() if host in EVERY_ADDRESS else host}:{port}"
