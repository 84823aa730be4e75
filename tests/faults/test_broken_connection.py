"""A connection that breaks and is made anew: ZeroMQ hides it, so master and worker must find out by themselves."""

import signal
from pathlib import Path

import pytest

from omni.outputs import StageStarted
from proto.errors import ErrorCode, OmniError
from proto.sockets import split_endpoint
from tests.pipeline.harness import Running, deploy, fake_ar, omni_stage, until
from tests.pipeline.proxy import Proxy

pytestmark = pytest.mark.usefixtures("no_leftovers")

ELSEWHERE = "127.0.0.3"


@pytest.mark.parametrize("lane", ["control", "data"])
def test_a_request_on_a_connection_that_broke_fails_and_the_worker_joins_again(tmp_path: Path, lane: str) -> None:
    with Running(deploy({"thinker": fake_ar(local=0)}), wait=False) as pipeline:
        assert pipeline.omni.endpoints is not None
        ports = {
            "control": split_endpoint(pipeline.omni.endpoints.control)[1],
            "data": split_endpoint(pipeline.omni.endpoints.data)[1],
        }
        with (
            Proxy(ELSEWHERE, ports["control"]) as control,
            Proxy(ELSEWHERE, ports["data"]) as data,
            omni_stage(f"tcp://{ELSEWHERE}:{ports['control']}", "thinker", tmp_path / "log") as worker,
        ):
            pipeline.until_ready()
            epoch = pipeline.replica("thinker").epoch
            flight = pipeline.launch("hang")
            flight.wait_for(StageStarted)
            {"control": control, "data": data}[lane].cut()
            error = flight.error()
            assert isinstance(error, OmniError)
            assert error.info.code is ErrorCode.REPLICA_LOST
            assert error.info.stage == "thinker"
            until(lambda: _fresh(pipeline, epoch), "the worker is back under a new epoch")
            assert pipeline.pid("thinker") == worker.pid
            assert pipeline.run("again").text == "echo: again"
            pipeline.until_idle()
            worker.signal(signal.SIGTERM)
            assert worker.wait() == 0


def _fresh(pipeline: Running, epoch: int) -> bool:
    replicas = pipeline.stage("thinker").replicas
    return bool(replicas) and replicas[0].epoch > epoch and replicas[0].state == "ready"
