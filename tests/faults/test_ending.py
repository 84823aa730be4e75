"""However the master ends, its local stages end too, and nothing of it is left: processes, ports, files."""

import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from proto.deploy import Deploy
from tests.pipeline.harness import (
    Process,
    Running,
    deploy,
    fake_ar,
    fake_painter,
    nothing_left_in_shared_memory,
    to_json,
    until,
    until_gone,
)

pytestmark = pytest.mark.usefixtures("no_leftovers")
BIND = "tcp://127.0.0.1:25573"
SIGNALS = (signal.SIGINT, signal.SIGTERM)
WAYS = ("async", "blocking")


def master(how: str, plan: Deploy, log: Path) -> Process:
    return Process([sys.executable, "-m", "tests.faults.master_process", how, to_json(plan)], log)


def at_work() -> Deploy:
    return deploy({"thinker": fake_ar(replicas=2), "painter": fake_painter()}, bind=BIND)


def loading() -> Deploy:
    return deploy({"thinker": fake_ar(), "slow": fake_ar(options={"load": "hang"})}, bind=BIND)


def children(process: Process) -> list[int]:
    return [child.pid for child in psutil.Process(process.pid).children(recursive=True)]


def until_generating(process: Process) -> Sequence[int]:
    process.until_says("ready ")
    process.until_says("StageStarted")
    return children(process)


def assert_the_port_is_free() -> None:
    with Running(deploy({"thinker": fake_ar()}, bind=BIND)) as pipeline:
        assert pipeline.run("again").text == "echo: again"


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("how", WAYS)
def test_a_signal_while_generating_ends_everything(how: str, number: signal.Signals, tmp_path: Path) -> None:
    with nothing_left_in_shared_memory(), master(how, at_work(), tmp_path / "log") as process:
        pids = until_generating(process)
        assert len(pids) == 3
        process.signal(number)
        assert process.wait() == 130, process.output
        until_gone(pids)
        assert "Traceback" not in process.output
    assert_the_port_is_free()


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("how", WAYS)
def test_a_signal_while_a_stage_hangs_in_its_load_ends_everything(
    how: str, number: signal.Signals, tmp_path: Path
) -> None:
    with nothing_left_in_shared_memory(), master(how, loading(), tmp_path / "log") as process:
        process.until_says("pretending to load")
        pids = until(lambda: children(process), "its children")
        process.signal(number)
        assert process.wait() == 130, process.output
        until_gone(pids)
        assert "Traceback" not in process.output
    assert_the_port_is_free()


def test_a_killed_master_takes_its_local_stages_with_it(tmp_path: Path) -> None:
    with nothing_left_in_shared_memory(), master("async", at_work(), tmp_path / "log") as process:
        pids = until_generating(process)
        process.signal(signal.SIGKILL)
        process.wait()
        until_gone(pids)
    assert_the_port_is_free()


def test_a_killed_master_takes_a_stage_that_hangs_in_its_load_with_it(tmp_path: Path) -> None:
    with master("async", loading(), tmp_path / "log") as process:
        process.until_says("pretending to load")
        pids = until(lambda: children(process), "its children")
        process.signal(signal.SIGKILL)
        process.wait()
        until_gone(pids)


def test_stopping_fails_what_runs_and_can_be_done_twice() -> None:
    with Running(deploy({"thinker": fake_ar()})) as pipeline:
        flight = pipeline.launch("hang")
        until(lambda: pipeline.replica("thinker").in_flight == 1, "it runs")
        pipeline.do(pipeline.omni.stop())
        assert "shutting down" in str(flight.error())
        pipeline.do(pipeline.omni.stop())
        assert "shutting down" in str(pipeline.launch("late").error())


def test_stages_that_do_not_listen_are_killed() -> None:
    with Running(deploy({"thinker": fake_ar()})) as pipeline:
        pid = pipeline.pid("thinker")
        psutil.Process(pid).suspend()
        pipeline.stop()
        until_gone([pid])
