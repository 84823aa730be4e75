"""`omni-master launch DEPLOY --prompt TEXT`: files, words, times and exit status; and bare model folders."""

import re
import shutil
import signal
from pathlib import Path

import pytest
from PIL import Image

from tests.cli.commands import HEADER, MASTER, PLAIN, run
from tests.fakes.engines import SIZE, drawing
from tests.pipeline.harness import Process, omni_stage

ESCAPE = "\x1b"

FAKE = HEADER + (
    """
stages:
  thinker:
    kind: ar
    engine: {use: tests.fakes.engines:FakeAr}
    output: text
  painter:
    kind: diffusion
    engine: {use: tests.fakes.engines:FakeDiffusion}
    inputs: {prompt: thinker.text}
    defaults: {num_inference_steps: 3}
    output: image
"""
)


@pytest.fixture
def fake(tmp_path: Path, no_leftovers: None) -> Path:
    """A folder with deploy.yaml of fake engines."""
    (tmp_path / "deploy.yaml").write_text(FAKE)
    return tmp_path


def test_one_prompt_is_answered_saved_and_timed(fake: Path) -> None:
    command = (MASTER, "launch", "deploy.yaml", "--prompt", "a red star", "--param", "seed=7", "--save", "out.png")
    done = run(*command, cwd=fake)
    assert done.status == 0, done.err
    assert (fake / "out.txt").read_text() == "echo: a red star\n"
    pixels = Image.open(fake / "out.png").tobytes()
    assert pixels == drawing(b"echo: a red star", 7)
    lines = done.out.splitlines()
    assert lines[:4] == [
        "thinker: echo: a red star",
        f"painter: 1 image of {SIZE}x{SIZE}, seed 7",
        "saved out.txt",
        "saved out.png",
    ]
    assert lines[4] == "where the time went (seconds)"
    assert lines[5].split()[:5] == ["stage", "queue", "pull", "run", "sum"]
    assert [line.split()[0] for line in lines[6:]] == ["thinker", "painter", "between", "total"]
    total = float(lines[-1].split()[-1])
    parts = [float(re.findall(r"\d+\.\d{3}", line)[-1 if "between" in line else 3]) for line in lines[6:9]]
    assert abs(total - sum(parts)) < 0.01  # rounding


def test_piped_output_has_no_escape_codes_and_progress_is_apart(fake: Path) -> None:
    done = run(MASTER, "launch", "deploy.yaml", "--prompt", "x", cwd=fake, env={"TERM": "xterm-256color"})
    assert ESCAPE not in done.out + done.err
    assert "\r" not in done.out + done.err
    assert "waiting" not in done.out
    assert "waiting for stage thinker (0 of 1 replicas)" in done.err.splitlines()
    assert re.search(r"^ready after \d+\.\d s$", done.err, re.MULTILINE)
    assert "painter: started" in done.err.splitlines()
    assert "nothing was saved; pass --save FILE to keep the outputs" in done.out
    assert sorted(path.name for path in fake.iterdir()) == ["deploy.yaml"]


def test_set_and_param_reach_the_stages(fake: Path) -> None:
    command = (MASTER, "launch", "deploy.yaml", "--prompt", "one two three", "--save", "new/out.png")
    done = run(*command, "--set", "stages.painter.output=null", "--param", "max_tokens=2", cwd=fake)
    assert done.status == 0, done.err
    assert (fake / "new" / "out.txt").read_text() == "echo: one\n"
    assert [path.name for path in (fake / "new").iterdir()] == ["out.txt"]


def test_prompt_needs_no_free_port_of_its_own(fake: Path) -> None:
    """Two at once with one deploy, whose address only one of them could have."""
    (fake / "deploy.yaml").write_text(FAKE.replace("127.0.0.1:0", "127.0.0.1:39571"))
    command = [MASTER, "launch", str(fake / "deploy.yaml"), "--prompt", "x"]
    with Process(command, fake / "one", PLAIN) as one, Process(command, fake / "two", PLAIN) as two:
        assert (one.wait(), two.wait()) == (0, 0), one.output + two.output


def test_prompt_waits_for_a_stage_from_elsewhere_and_says_how_to_start_it(fake: Path) -> None:
    command = [MASTER, "launch", str(fake / "deploy.yaml"), "--prompt", "x", "--set", "stages.painter.local=0"]
    with Process(command, fake / "log", PLAIN) as process:
        line = process.until_says("stage painter needs 1 more from elsewhere: omni-stage --master ")
        master = line.partition("--master ")[2].split()[0]
        with omni_stage(master, "painter", fake / "stage", "--exit-with-master") as stage:
            assert process.wait() == 0, process.output
            assert stage.wait() == 0
        assert "painter: 1 image of 8x8" in process.output


@pytest.mark.skipif(shutil.which("script") is None, reason="there is no `script`")
def test_terminal_shows_bars_and_a_table(fake: Path) -> None:
    """In a terminal of its own, as `script` makes one."""
    command = f"stty cols 120; exec {MASTER} launch {fake}/deploy.yaml --prompt 'a star'"
    with Process(["script", "-qec", command, "/dev/null"], fake / "log", {**PLAIN, "TERM": "xterm"}) as process:
        assert process.wait() == 0, process.output
        shown = process.output
    assert ESCAPE in shown
    assert "waiting for stage painter (0 of 1 replicas)" in shown
    assert re.search("painter.*━", shown)
    assert "where the time went" in shown
    assert re.search(r"─{40}", shown)


@pytest.mark.parametrize(
    ("prompt", "words"), [("raise", "as the test asked"), ("refuse", "as the test asked"), ("leave", "thinker")]
)
def test_request_that_fails_ends_with_its_message(fake: Path, prompt: str, words: str) -> None:
    done = run(MASTER, "launch", "deploy.yaml", "--prompt", prompt, "--save", "out.png", cwd=fake)
    assert done.status == (2 if prompt == "refuse" else 1)
    assert words in done.err.splitlines()[-1]
    assert done.err.splitlines()[-1].startswith("error: ")
    assert "Traceback" not in done.err
    assert done.out == ""
    assert not (fake / "out.png").exists()


def test_stage_that_cannot_load_ends_the_launch_with_its_reason(fake: Path) -> None:
    for further in ((), ("--prompt", "x")):
        done = run(
            *(MASTER, "launch", "deploy.yaml", "--set", "stages.painter.engine.options.load=fail", *further), cwd=fake
        )
        assert done.status == 1
        assert done.err.splitlines()[-1].startswith("error: ")
        assert "this engine cannot load, as the test asked" in done.err.splitlines()[-1]


def test_stage_whose_process_dies_at_once_ends_the_launch(fake: Path) -> None:
    done = run(*(MASTER, "launch", "deploy.yaml", "--set", "stages.painter.env={PYTHONHOME: /nonexistent}"), cwd=fake)
    assert done.status == 1
    assert done.err.splitlines()[-1].startswith("error: stage painter/0: process ")


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("state", ["loading", "running"])
def test_interrupted_prompt_leaves_nothing(fake: Path, state: str, number: int, status: int) -> None:
    slow = ["--set", "stages.painter.engine.options.load=hang"] if state == "loading" else []
    command = [MASTER, "launch", str(fake / "deploy.yaml"), "--prompt", "hang", *slow]
    with Process(command, fake / "log", PLAIN) as process:
        process.until_says("pretending to load" if state == "loading" else "thinker: started")
        process.signal(number)
        assert process.wait() == status
        assert "Traceback" not in process.output


def test_folder_of_a_language_model_answers(models: Path, tmp_path: Path) -> None:
    command = (MASTER, "launch", models / "scripted", "--prompt", "Hello", "--save", tmp_path / "out")
    done = run(*command, cwd=tmp_path)
    assert done.status == 0, done.err
    assert (tmp_path / "out.txt").read_text() == "The boat🎨 of漢字, thenEND and it.\n"


def test_folder_of_a_diffusion_pipeline_draws(models: Path, tmp_path: Path) -> None:
    more = ("--param", "num_inference_steps=2", "--param", "num_images=2", "--param", "seed=5")
    done = run(MASTER, "launch", models / "sd", "--prompt", "a star", "--save", "out.webp", *more, cwd=tmp_path)
    assert done.status == 0, done.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out-1.webp", "out-2.webp"]
    assert "2 images of 64x64, seeds 5, 6" in done.out
    assert Image.open(tmp_path / "out-1.webp").size == (64, 64)
