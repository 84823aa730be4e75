"""Workers that nobody here started: before the master, after it, on another address, on another host."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from proto.deploy import Deploy
from proto.errors import StartError
from proto.messages import Failed, Shutdown
from stages.worker import EXIT_MASTER_LOST
from tests.pipeline.harness import Process, Running, deploy, fake_ar, omni_stage, text_to_image, to_json, until
from tests.pipeline.raw_master import RawMaster

pytestmark = pytest.mark.usefixtures("no_leftovers")


def free_port() -> int:
    """A port for masters that must come back on the same one. The master itself takes port 0 wherever it may."""
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def headless(port: int, **options: int) -> Deploy:
    return deploy({"thinker": fake_ar(local=0, options=options)}, bind=f"tcp://127.0.0.1:{port}")


def test_a_worker_that_was_there_before_the_master_joins_it(tmp_path: Path) -> None:
    port = free_port()
    with omni_stage(f"tcp://127.0.0.1:{port}", "thinker", tmp_path / "log") as process:
        process.until_says("no answer from a master")
        with Running(headless(port)) as pipeline:
            assert pipeline.pid("thinker") == process.pid
            assert pipeline.run("at last").text == "echo: at last"
            process.signal(signal.SIGTERM)
            assert process.wait() == 0


def test_a_worker_outlives_its_master_and_serves_the_next_one_without_loading_again(tmp_path: Path) -> None:
    port = free_port()
    with omni_stage(f"tcp://127.0.0.1:{port}", "thinker", tmp_path / "log") as process:
        with Running(headless(port)) as pipeline:
            pid = pipeline.pid("thinker")
            calls = pipeline.call("thinker", "echo")[0]["calls"]
        with Running(headless(port)) as pipeline:
            assert pipeline.pid("thinker") == pid == process.pid
            assert pipeline.call("thinker", "echo")[0]["calls"] == calls + 1  # the same engine
            assert pipeline.run("again").text == "echo: again"
        process.signal(signal.SIGTERM)
        assert process.wait() == 0


def test_a_worker_whose_config_has_changed_starts_afresh_with_the_new_one(tmp_path: Path) -> None:
    port = free_port()
    with omni_stage(f"tcp://127.0.0.1:{port}", "thinker", tmp_path / "log") as process:
        with Running(headless(port, some=1)) as pipeline:
            pipeline.call("thinker", "echo")
        with Running(headless(port, some=2)) as pipeline:
            assert pipeline.call("thinker", "echo")[0]["calls"] == 1  # another engine
            assert pipeline.pid("thinker") == process.pid  # in the same place
        process.signal(signal.SIGTERM)
        assert process.wait() == 0


def test_a_worker_that_was_working_when_its_master_was_stopped_is_free_for_the_next_one(tmp_path: Path) -> None:
    port = free_port()
    with omni_stage(f"tcp://127.0.0.1:{port}", "thinker", tmp_path / "log") as process:
        with Running(headless(port)) as pipeline:
            flights = [pipeline.launch("hang") for _ in range(3)]
            until(lambda: pipeline.replica("thinker").running == 3, "all of them run")
        for flight in flights:
            flight.error()
        with Running(headless(port)) as pipeline:
            pipeline.until_idle()
            assert pipeline.run("next").text == "echo: next"
        process.signal(signal.SIGTERM)
        assert process.wait() == 0


def test_a_worker_whose_master_was_killed_joins_the_next_one_without_loading_again(tmp_path: Path) -> None:
    port = free_port()
    command = [sys.executable, "-m", "tests.faults.master_process", "async", to_json(headless(port))]
    with omni_stage(f"tcp://127.0.0.1:{port}", "thinker", tmp_path / "log") as process:
        with Process(command, tmp_path / "master") as master:
            master.until_says("StageStarted")
            master.signal(signal.SIGKILL)
            master.wait()
        with Running(headless(port)) as pipeline:
            assert pipeline.pid("thinker") == process.pid
            assert process.output.count("joined") == 2
            pipeline.until_idle()  # of the dead master's request nothing is left
            assert pipeline.run("again").text == "echo: again"
        process.signal(signal.SIGTERM)
        assert process.wait() == 0


def test_a_worker_that_is_to_end_with_its_master_ends_also_when_that_is_killed(tmp_path: Path) -> None:
    port = free_port()
    command = [sys.executable, "-m", "tests.faults.master_process", "async", to_json(headless(port))]
    with omni_stage(f"tcp://127.0.0.1:{port}", "thinker", tmp_path / "log", "--exit-with-master") as process:
        with Process(command, tmp_path / "master") as master:
            master.until_says("StageStarted")
            master.signal(signal.SIGKILL)
            master.wait()
        assert process.wait() == EXIT_MASTER_LOST
        assert "is gone" in process.output


def test_a_worker_that_waits_for_a_master_leaves_at_the_first_signal(tmp_path: Path) -> None:
    with omni_stage(f"tcp://127.0.0.1:{free_port()}", "thinker", tmp_path / "log") as process:
        process.until_says("no answer from a master")
        process.signal(signal.SIGINT)
        assert process.wait() == 0


def test_a_stage_on_another_address_of_this_host_joins(tmp_path: Path) -> None:
    plan = deploy({"thinker": fake_ar(local=0)}, bind="tcp://127.0.0.2:0")
    with Running(plan, wait=False) as pipeline:
        assert pipeline.url.startswith("tcp://127.0.0.2:")
        with omni_stage(pipeline.url, "thinker", tmp_path / "log") as process:
            pipeline.until_ready()
            assert pipeline.run("over there").text == "echo: over there"
            process.signal(signal.SIGTERM)
            assert process.wait() == 0


def test_an_address_beyond_this_host_is_bound_and_connected_only_when_told_that_it_is_insecure(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="insecure: true"):
        Running(deploy({"thinker": fake_ar(local=0)}, bind="tcp://0.0.0.0:0"))
    with omni_stage("tcp://192.0.2.1:5570", "thinker", tmp_path / "log") as process:
        assert process.wait() == 2
        assert "--insecure" in process.output


def test_a_master_on_every_address_starts_the_stages_of_its_own_host_too() -> None:
    plan = deploy({"thinker": fake_ar()}, bind="tcp://0.0.0.0:0", insecure=True)
    with Running(plan) as pipeline:
        assert pipeline.run("here").text == "echo: here"


# --- another host -----------------------------------------------------------------------------------------------------

NAMESPACE, HERE, THERE = f"omni{os.getpid()}", "10.213.77.1", "10.213.77.2"


def ip(*words: str) -> None:
    subprocess.run(("ip", *words), check=True, capture_output=True, text=True)


@pytest.fixture(scope="module")
def other_host() -> Iterator[str]:
    """A network namespace, joined to this one by a pair of virtual cards. Skipped where that is not allowed."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("making a network namespace needs root and the command ip")
    outer, inner = f"o{os.getpid()}", f"i{os.getpid()}"
    try:
        ip("netns", "add", NAMESPACE)
        ip("link", "add", outer, "type", "veth", "peer", "name", inner, "netns", NAMESPACE)
        ip("addr", "add", f"{HERE}/30", "dev", outer)
        ip("link", "set", outer, "up")
        ip("-n", NAMESPACE, "addr", "add", f"{THERE}/30", "dev", inner)
        ip("-n", NAMESPACE, "link", "set", inner, "up")
        yield NAMESPACE
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespace here: {error.stderr.strip()}")
    finally:
        with contextlib.suppress(subprocess.CalledProcessError):
            ip("link", "del", outer)
        with contextlib.suppress(subprocess.CalledProcessError):
            ip("netns", "del", NAMESPACE)


def stage_there(pipeline: Running, log: Path) -> Process:
    return omni_stage(pipeline.url, "painter", log, "--insecure", prefix=("ip", "netns", "exec", NAMESPACE))


def test_a_stage_on_another_host_joins_and_its_tensors_cross(other_host: str, tmp_path: Path) -> None:
    plan = text_to_image({"local": 0}, {"local": 0}, bind=f"tcp://{HERE}:0", insecure=True)
    with Running(plan, wait=False) as pipeline:
        near = omni_stage(pipeline.url, "thinker", tmp_path / "near", "--insecure")
        with near, stage_there(pipeline, tmp_path / "there") as there:
            pipeline.until_ready()
            done = pipeline.run("a red star", seed=3)
            assert done.text == "echo: a red star"
            assert done.images[0].size == (8, 8)
            near.until_says("INSECURE")
            there.until_says("INSECURE")
            for process in (near, there):
                process.signal(signal.SIGTERM)
            assert [near.wait(), there.wait()] == [0, 0]


def test_a_worker_whose_engine_broke_while_its_master_went_away_does_not_join_with_it_again(tmp_path: Path) -> None:
    with RawMaster() as master, omni_stage(master.url, "thinker", tmp_path / "log") as process:
        master.welcome(fake_ar(use="tests.pipeline.engines:Breaks"))
        master.submit("break")
        master.got(Failed)
        master.tell(Shutdown(reason="just now"))  # while the worker waits until its last words are heard
        assert process.wait() == 1, process.output
