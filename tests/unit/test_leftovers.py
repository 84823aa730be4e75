"""The guard that other tests rely on finds what it must."""

import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

pytest_plugins = ["pytester"]
ROOT = Path(__file__).resolve().parents[2]
PREFACE = "import os, signal, socket, subprocess, sys\nfrom tests.leftovers import no_leftovers\n"


@pytest.fixture
def inner(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    monkeypatch.setattr("tests.leftovers.PATIENCE", 0.2)
    monkeypatch.syspath_prepend(str(ROOT))
    return pytester


def test_a_child_left_running_fails_the_test_and_is_killed(inner: pytest.Pytester) -> None:
    inner.makepyfile(
        PREFACE + "def test_it(no_leftovers):\n"
        "    child = subprocess.Popen([sys.executable, '-c', 'print(1, flush=True); input()'],"
        " stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)\n"
        "    child.stdout.readline()\n"
        "    open('pid', 'w').write(str(child.pid))\n"
    )
    result = inner.runpytest_inprocess("-p", "no:cacheprovider")
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines(["*still running*"])
    pid = int((inner.path / "pid").read_text())
    assert not psutil.pid_exists(pid) or psutil.Process(pid).wait(10) is not None


def test_a_socket_left_listening_fails_the_test(inner: pytest.Pytester) -> None:
    inner.makepyfile(
        PREFACE + "kept = []\ndef test_it(no_leftovers):\n    kept.append(socket.create_server(('127.0.0.1', 0)))\n"
    )
    result = inner.runpytest_inprocess("-p", "no:cacheprovider")
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines(["*still listening*"])


def test_what_is_cleaned_up_is_no_leftover(no_leftovers: None) -> None:
    with socket.create_server(("127.0.0.1", 0)):
        subprocess.run([sys.executable, "-c", ""], check=True)
