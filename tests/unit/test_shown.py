"""What the commands show: whole and plain when piped, at home on a terminal of any width."""

import io
import re

import numpy as np
import pytest
from rich.console import Console

from launch.render import show_outputs, show_status, show_timings
from launch.waiting import Waiting
from omni.outputs import (
    AudioOutput,
    ImageOutput,
    RequestOutput,
    StageDone,
    TensorOutput,
    TextOutput,
    TokensOutput,
    VideoOutput,
)
from omni.status import EdgeStatus, PipelineStatus, ReplicaStatus, StageStatus
from proto.ids import Epoch, RequestId, StageName
from proto.messages import StageInfo, Timings, Usage

ESCAPE = "\x1b"
CODES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def piped() -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, force_terminal=False, width=80), out


def terminal(width: int) -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, force_terminal=True, width=width, color_system="standard", legacy_windows=False), out


def replica(state: str = "ready", note: str = "") -> ReplicaStatus:
    return ReplicaStatus(
        replica=0,
        state=state,
        epoch=Epoch(1),
        host="gpu-host-17.example",
        pid=4194303,
        devices=("cuda:1",),
        note=note,
        in_flight=3,
        steps=12345,
        queued=2,
        running=1,
        step_s=0.0125,
        leases=0,
        lease_bytes=0,
        rss_bytes=300 << 20,
        silent_s=0.1,
    )


def status(*painters: ReplicaStatus) -> PipelineStatus:
    def stage(name: str, wanted: int, replicas: tuple[ReplicaStatus, ...]) -> StageStatus:
        ready = sum(one.state == "ready" for one in replicas)
        return StageStatus(
            stage=StageName(name),
            kind="ar",
            model="m",
            wanted=wanted,
            slots=4,
            ready=ready,
            waiting=0,
            output="text",
            info=StageInfo(device="cuda:0") if ready else None,
            replicas=replicas,
        )

    stages = (stage("thinker", 1, (replica(),)), stage("painter", 2, painters))
    return PipelineStatus(
        name="studio",
        ready=stages[1].ready == 2,
        uptime_s=75.4,
        running=3,
        queued=1,
        done=7,
        failed={"stage_failed": 2, "deadline": 1},
        junk=0,
        leases=0,
        lease_bytes=0,
        stages=stages,
        edges=(EdgeStatus("thinker.kv", "painter.kv", 4, 4096),),
    )


def test_piped_status_has_a_line_for_each_replica_and_each_missing_one() -> None:
    console, out = piped()
    show_status(status(replica("loading", "loading [unet] (40%)")), console)
    lines = out.getvalue().splitlines()
    assert (
        lines[0]
        == "studio: not ready, up 75 s, requests: 3 running, 1 queued, 7 done, 2 stage_failed, 1 deadline failed"
    )
    assert [line.split()[:2] for line in lines[2:5]] == [
        ["thinker/0", "ready"],
        ["painter/0", "loading"],
        ["painter/-", "missing"],
    ]
    assert " ".join(lines[2].split()) == "thinker/0 ready gpu-host-17.example 4194303 cuda:1 3 2 12345 12.5 300"
    assert "painter/0 loading: loading [unet] (40%)" in lines
    assert lines[-1] == "edge thinker.kv -> painter.kv: 4 payloads, 4096 bytes"
    assert ESCAPE not in out.getvalue()


@pytest.mark.parametrize("width", [40, 80, 100, 200])
def test_terminal_of_any_width_loses_nothing_of_a_status(width: int) -> None:
    console, out = terminal(width)
    show_status(status(replica(), replica()), console)
    text = CODES.sub("", out.getvalue())
    for word in ("studio: ready", "thinker/0", "gpu-host-17.example", "4194303", "cuda:1", "in flight", "12345", "300"):
        assert word in text
    assert "…" not in text


def result(*, images: int = 1) -> RequestOutput:
    array = np.zeros((images, 48, 64, 3), np.uint8)
    request = RequestId("r")
    told = Timings(queue_s=0.25, run_s=1.5, detail={"prefill": 0.5, "decode": 0.875, "steps": 8.0, "rows_shared": 0.0})
    detail = {"queue": 0.001, "denoise": 1.75, "peak_memory_bytes": 5242880.0, "total": 2.001}
    drawn = Timings(queue_s=0.0, pull_s=0.125, run_s=2.0, detail=detail)
    stages = [
        StageDone(request, StageName("thinker"), TextOutput("a [bold] star"), "stop", Usage(12, 34), told),
        StageDone(request, StageName("painter"), ImageOutput(array, tuple(range(images))), "stop", Usage(), drawn),
        StageDone(request, StageName("ids"), TokensOutput((1,)), "stop", Usage(), Timings()),
        StageDone(request, StageName("hidden"), None, "stop", Usage(), Timings()),
    ]
    return RequestOutput(request, {done.stage: done for done in stages}, 4.0)


def test_piped_outputs_are_lines_with_the_models_words_untouched() -> None:
    for images, words in ((1, "1 image of 64x48, seed 0"), (2, "2 images of 64x48, seeds 0, 1")):
        console, out = piped()
        show_outputs(result(images=images), console)
        assert out.getvalue().splitlines() == ["thinker: a [bold] star", f"painter: {words}", "ids: 1 token"]


def test_a_picture_drawn_without_a_seed_is_told_without_one() -> None:
    request, picture = RequestId("r"), ImageOutput(np.zeros((1, 48, 64, 3), np.uint8), ())
    done = StageDone(request, StageName("stripes"), picture, "stop", Usage(), Timings())
    console, out = piped()
    show_outputs(RequestOutput(request, {done.stage: done}), console)
    assert out.getvalue() == "stripes: 1 image of 64x48\n"


def test_other_kinds_are_told_by_their_sizes() -> None:
    request = RequestId("r")
    outputs = {
        "sound": AudioOutput(np.zeros((1, 2, 24000), np.float32), 16000),
        "film": VideoOutput(np.zeros((2, 9, 48, 64, 3), np.uint8), 8.0),
        "latents": TensorOutput(np.zeros((1, 4, 8, 8), np.float32)),
    }
    stages = {
        StageName(name): StageDone(request, StageName(name), output, "stop", Usage(), Timings())
        for name, output in outputs.items()
    }
    console, out = piped()
    show_outputs(RequestOutput(request, stages), console)
    assert out.getvalue().splitlines() == [
        "sound: 1 sound of 1.5 s at 16000 Hz",
        "film: 2 videos of 9 frames, 64x48",
        "latents: float32 tensor of (1, 4, 8, 8)",
    ]


def test_long_words_are_not_broken_into_lines() -> None:
    for console, out in (piped(), terminal(40)):
        request, words = RequestId("r"), "word " * 100
        done = StageDone(request, StageName("thinker"), TextOutput(words), "stop", Usage(), Timings())
        show_outputs(RequestOutput(request, {done.stage: done}), console)
        assert CODES.sub("", out.getvalue()) == f"thinker: {words}\n"


def test_times_of_the_stages_and_between_them_add_up_to_the_total() -> None:
    console, out = piped()
    show_timings(result(), console)
    rows = [" ".join(line.split()) for line in out.getvalue().splitlines()[2:]]
    assert rows[0] == "thinker 0.250 0.000 1.500 1.750 prefill 0.500, decode 0.875, steps 8, 12 + 34 tokens"
    assert rows[1] == "painter 0.000 0.125 2.000 2.125 denoise 1.750, peak memory 5 MiB"
    assert rows[-2:] == ["between stages 0.125", "total 4.000"]


def test_piped_waiting_prints_each_new_state_once_and_no_percents() -> None:
    console, out = piped()
    with Waiting(console, list) as waiting:
        for line in (
            "waiting for stage a (0 of 1 replicas)",
            "waiting for stage b (0 of 1 replicas)",
            "waiting for stage a (0 of 1 replicas)",
            "waiting for stage a (0 of 1 replicas) [a/0: reading (10%)]",
            "waiting for stage a (0 of 1 replicas) [a/0: reading (20%)]",
            "waiting for stage b (0 of 1 replicas)",
        ):
            waiting.show(line)
    assert out.getvalue().splitlines() == [
        "waiting for stage a (0 of 1 replicas)",
        "waiting for stage b (0 of 1 replicas)",
        "waiting for stage a (0 of 1 replicas) [a/0: reading]",
    ]


def test_terminal_shows_all_that_is_waited_for_and_wipes_it_at_the_end() -> None:
    console, out = terminal(80)
    lines = ["waiting for stage a (0 of 1 replicas) [a/0: x]", "waiting for stage b (1 of 2 replicas)"]
    with Waiting(console, lambda: lines) as waiting:
        waiting.show(lines[0])
        console.out("a log line", highlight=False)
    text = out.getvalue()
    assert "[a/0: x]" in text
    assert lines[1] in text
    assert "a log line\n" in CODES.sub("", text)
    assert text.rstrip().endswith(f"{ESCAPE}[2K")
