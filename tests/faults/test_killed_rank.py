"""A replica of several ranks lives and dies as one: whichever of its processes ends or hangs, its requests are told which,
all of it goes, and all of it comes back."""

import os
import signal
from pathlib import Path

import psutil
import pytest

from omni.outputs import TextDelta
from proto.deploy import ArParallelSpec, ArStage, Deploy, Kind, ModelSpec
from proto.errors import OmniError
from stages.worker import EXIT_NOT_LOADED
from tests.models.tiny_ar import build_tiny_llama
from tests.pipeline.harness import ENV, Running, deploy, fake_ar, omni_stage, until, until_gone
from tests.pipeline.test_headless import free_port

pytestmark = pytest.mark.usefixtures("no_leftovers")
USE = "tests.pipeline.engines:Ranked"
LONG = " ".join("word" for _ in range(500))


def ranked(tmp_path: Path, *, timeout: float = 60.0, **more: int) -> Deploy:
    options = {"step_s": 0.02, "notes": str(tmp_path / "notes")}
    parallel = ArParallelSpec(tensor=3, timeout=timeout)
    return deploy({"thinker": fake_ar(use=USE, options=options, parallel=parallel, devices=("cpu",) * 3, **more)})


def followers(pipeline: Running) -> list[int]:
    return pipeline.call("thinker", "ranks")[0]  # type: ignore[return-value]


def until_it_is_back(pipeline: Running, stage: str, before: int) -> None:
    """Until the stage is ready in another process than before."""

    def back() -> bool:
        replicas = pipeline.stage(stage).replicas
        return bool(replicas) and replicas[0].pid != before and pipeline.status().ready

    until(back, f"stage {stage} is back")


def test_a_killed_rank_fails_its_replicas_requests_by_name_and_the_replica_comes_back_whole(tmp_path: Path) -> None:
    with Running(ranked(tmp_path)) as pipeline:
        leader, others = pipeline.pid("thinker"), followers(pipeline)
        flight = pipeline.launch(LONG)
        flight.wait_for(TextDelta)
        os.kill(others[1], signal.SIGKILL)
        assert f"rank 2 of 3 (thinker): its process {others[1]} ended with -9" in str(flight.error())
        until_gone([leader, *others])
        until_it_is_back(pipeline, "thinker", leader)
        assert pipeline.run("again").text == "echo: again"
        assert set(followers(pipeline)).isdisjoint(others)


def test_a_rank_that_hangs_fails_its_replicas_requests_with_the_limit(tmp_path: Path) -> None:
    with Running(ranked(tmp_path, timeout=0.5)) as pipeline:
        others = followers(pipeline)
        error = str(pipeline.launch("stop").error())
        assert "rank 1 of 3 (thinker) has not done its part for 0.5 s (parallel.timeout)" in error
        until_gone(others)


def test_no_rank_is_left_when_the_first_is_killed(tmp_path: Path) -> None:
    with Running(ranked(tmp_path)) as pipeline:
        leader, others = pipeline.pid("thinker"), followers(pipeline)
        os.kill(leader, signal.SIGKILL)
        until_gone([leader, *others])
        until_it_is_back(pipeline, "thinker", leader)
        assert pipeline.run("again").text == "echo: again"


def test_a_worker_from_elsewhere_brings_its_ranks_and_starts_afresh_with_others_when_its_config_has_changed(
    tmp_path: Path,
) -> None:
    port = free_port()

    def headless(**more: object) -> Deploy:
        options = {"notes": str(tmp_path / "notes"), **more}
        parallel = ArParallelSpec(tensor=2, timeout=60.0)
        stage = fake_ar(use=USE, options=options, parallel=parallel, local=0, threads=6)
        return deploy({"thinker": stage}, bind=f"tcp://127.0.0.1:{port}")

    url = f"tcp://127.0.0.1:{port}"
    with omni_stage(url, "thinker", tmp_path / "log", "--devices", "cuda:5,cuda:6") as process:
        with Running(headless(some=1)) as pipeline:
            assert pipeline.run("first").text == "echo: first"
            (before,) = followers(pipeline)
        with Running(headless(some=2)) as pipeline:
            assert pipeline.run("second").text == "echo: second"
            assert pipeline.pid("thinker") == process.pid
            until_gone([before])
        process.signal(signal.SIGTERM)
        assert process.wait() == 0
    assert set((tmp_path / "notes").read_text().splitlines()) == {
        "step 1 cuda:1"
    }  # the second of the two that they see


def test_a_worker_with_too_few_devices_for_its_ranks_says_so_and_ends(tmp_path: Path) -> None:
    with (
        Running(ranked(tmp_path, local=0), wait=False) as pipeline,
        omni_stage(pipeline.url, "thinker", tmp_path / "log", "--devices", "cpu,cpu") as process,
    ):
        process.until_says("its ranks need 3 devices, and there are 2: cpu, cpu; give the worker --devices with 3")
        assert process.wait() == EXIT_NOT_LOADED


@pytest.mark.slow
def test_a_language_model_on_two_ranks_says_the_same_before_and_after_a_rank_is_killed(tmp_path: Path) -> None:
    """The real engine in real processes, with a request in company."""
    model = ModelSpec(path=str(build_tiny_llama(tmp_path / "tiny", never_ends=True)), dtype="float32")
    parallel = ArParallelSpec(tensor=2)
    plain = ArStage(model=model, output=Kind.TEXT, env=ENV)
    shared = ArStage(model=model, output=Kind.TEXT, env=ENV, parallel=parallel, devices=("cpu", "cpu"))
    prompts = ("What is the capital of France?", "a", "List three fruits.")
    greedy = {"temperature": 0, "max_tokens": 24}
    with Running(deploy({"t": plain})) as pipeline:
        expected = [pipeline.run(prompt, **greedy).text for prompt in prompts]
    with Running(deploy({"t": shared})) as pipeline:
        flights = [pipeline.launch(prompt, **greedy) for prompt in prompts]
        assert [flight.result().text for flight in flights] == expected
        flight = pipeline.launch("a", temperature=0, max_tokens=400)
        flight.wait_for(TextDelta)
        leader = pipeline.pid("t")
        (rank,) = (child.pid for child in psutil.Process(leader).children())
        os.kill(rank, signal.SIGKILL)
        assert isinstance(flight.error(), OmniError)
        until_gone([leader, rank])
        until_it_is_back(pipeline, "t", leader)
        assert [pipeline.run(prompt, **greedy).text for prompt in prompts] == expected
