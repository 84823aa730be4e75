"""The master's address, as processes here and people elsewhere can use it."""

import socket

import pytest

from launch.addresses import from_elsewhere, from_here


@pytest.mark.parametrize(
    ("bound", "here"),
    [
        ("tcp://0.0.0.0:5570", "tcp://127.0.0.1:5570"),
        ("tcp://[::]:5570", "tcp://[::1]:5570"),
        ("tcp://192.0.2.10:5570", "tcp://192.0.2.10:5570"),
        ("tcp://127.0.0.2:5570", "tcp://127.0.0.2:5570"),
    ],
)
def test_processes_here_connect_to_an_address_that_exists(bound: str, here: str) -> None:
    assert from_here(bound) == here


def test_other_hosts_are_given_this_hosts_name_for_every_address_and_else_the_address() -> None:
    assert from_elsewhere("tcp://0.0.0.0:5570") == f"tcp://{socket.gethostname()}:5570"
    assert from_elsewhere("tcp://[::]:5570") == f"tcp://{socket.gethostname()}:5570"
    assert from_elsewhere("tcp://192.0.2.10:5570") == "tcp://192.0.2.10:5570"
