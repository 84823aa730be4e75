"""What the commands say of themselves, and what they refuse at once: in words, with exit status 2, and nothing started.

The first stage of the deploy would leave a file behind if it were started.
"""

import re
from pathlib import Path

import pytest

from launch.master import app as master
from launch.stage import app as stage
from tests.cli.commands import HEADER, MASTER, STAGE, call, run

ESCAPE = "\x1b"

OPTIONS = {
    "launch": ("--set", "--prompt", "--save", "--param", "--verbose", "-v", "--help"),
    "explain": ("--set", "--help"),
    "call": ("--replica", "--timeout", "--url", "--help"),
    "status": ("--url", "--json", "--help"),
}
STAGE_OPTIONS = (
    *("--master", "--stage", "--replica", "--devices", "--threads", "--insecure", "--exit-with-master"),
    *("--verbose", "-v", "--quiet", "-q", "--help"),
)

GOOD = HEADER + (
    """
stages:
  thinker:
    kind: ar
    engine: {use: tests.cli.witness:Witness, options: {file: "FOLDER/started"}}
    output: text
  painter:
    kind: diffusion
    engine: {use: tests.fakes.engines:FakeDiffusion}
    inputs: {prompt: thinker.text}
    output: image
"""
)


@pytest.fixture
def deploy(tmp_path: Path) -> Path:
    path = tmp_path / "deploy.yaml"
    path.write_text(GOOD.replace("FOLDER", str(tmp_path)))
    return path


def options_in(text: str) -> set[str]:
    return set(re.findall(r"(?<![\w-])--?[a-z][a-z-]*", text))


@pytest.mark.parametrize("command", OPTIONS)
def test_help_of_the_master_names_every_option(command: str, tmp_path: Path) -> None:
    done = call(master, command, "--help", cwd=tmp_path)
    assert done.status == 0
    assert set(OPTIONS[command]) <= options_in(done.out)
    assert ESCAPE not in done.out
    assert "no-" not in done.out  # no switch that only says the default


def test_help_of_the_stage_names_every_option_and_hides_what_is_not_for_users(tmp_path: Path) -> None:
    done = run(STAGE, "--help", cwd=tmp_path)
    assert done.status == 0
    assert set(STAGE_OPTIONS) <= options_in(done.out)
    assert "parent" not in done.out


def test_help_says_what_each_command_is_for_and_shows_an_example(tmp_path: Path) -> None:
    for arguments in ((), ("--help",)):
        listed = call(master, *arguments, cwd=tmp_path)
        text = listed.out + listed.err
        assert all(re.search(rf"{command} +[A-Z]", text) for command in OPTIONS)
    launch = call(master, "launch", "--help", cwd=tmp_path).out
    assert 'omni-master launch demo --prompt "a red star" --save out.png' in launch
    assert "130" in launch
    assert "omni-stage --master tcp://127.0.0.1:5570 --stage painter" in call(stage, "--help", cwd=tmp_path).out


def refused(deploy: Path, *arguments: str, status: int = 2) -> str:
    """The one line that says why, and nothing was started."""
    done = call(master, *arguments, cwd=deploy.parent)
    assert done.status == status, done
    assert done.out == ""
    assert "Traceback" not in done.err
    assert not (deploy.parent / "started").exists()
    return done.err


def test_broken_deploy_is_refused_in_one_go_with_file_line_stage_key_and_nearest_name(deploy: Path) -> None:
    deploy.write_text(
        """\
name: broken
stages:
  thinker:
    kind: ar
    engine: {use: tests.fakes.engines:FakeAr}
    defautls: {temperature: 0.7}
    replicas: many
  thinker:
    kind: ar
  painter:
    kind: diffusion
    engine: {use: tests.fakes.engines:FakeDiffusion}
    inputs: {prompt: writer.text}
    output: image
"""
    )
    for command in (("launch",), ("launch", "--prompt", "x"), ("explain",)):
        done = run(MASTER, *command, "deploy.yaml", cwd=deploy.parent)
        assert (done.status, done.out) == (2, "")
        said = done.err
        assert re.search(r"deploy\.yaml:6: .*thinker.*defautls.*did you mean 'defaults'", said)
        assert re.search(r"deploy\.yaml:7: .*thinker.*replicas", said)
        assert re.search(r"deploy\.yaml:8: .*thinker", said)
        assert re.search(r"deploy\.yaml:13: .*painter.*writer", said)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--set", "stages.paintr.replicas=2"), "did you mean 'painter'"),
        (("--set", "stages.painter.replicas=none"), "stages.painter.replicas"),
        (("--set", "replicas"), "KEY=VALUE"),
        (("--prompt", "x", "--param", "sede=7"), "did you mean 'seed'"),
        (("--prompt", "x", "--param", "seed"), "NAME=VALUE"),
        (("--prompt", "x", "--param", "seed=-1"), "seed"),
        (("--prompt", "x", "--param", "temperature=hot"), "temperature"),
        (("--prompt", " "), "prompt is empty"),
        (("--param", "seed=7"), "--param"),
        (("--save", "out.png"), "--save"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(
    deploy: Path, arguments: tuple[str, ...], words: str
) -> None:
    assert words in refused(deploy, "launch", "deploy.yaml", *arguments)


def test_missing_deploy_names_the_nearest(deploy: Path) -> None:
    assert "did you mean 'deploy.yaml'" in refused(deploy, "launch", "deplyo.yaml")
    assert "did you mean 'demo'" in refused(deploy, "launch", "dmeo")


def test_folder_that_is_no_model_says_what_is_needed(deploy: Path) -> None:
    (deploy.parent / "empty").mkdir()
    said = refused(deploy, "launch", "empty")
    assert "model_index.json" in said
    assert "config.json" in said


def test_explain_prints_each_value_with_its_origin_and_starts_nothing(deploy: Path) -> None:
    done = call(master, "explain", "deploy.yaml", "--set", "stages.painter.max_in_flight=9", cwd=deploy.parent)
    assert done.status == 0, done.err
    lines = done.out.splitlines()
    assert "stages.painter.max_in_flight: 9  # --set" in lines
    assert "stages.thinker.max_in_flight: 64  # default" in lines
    assert "name: test  # deploy.yaml:1" in lines
    assert ESCAPE not in done.out
    assert not (deploy.parent / "started").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--master", "nowhere", "--stage", "painter"), "tcp://HOST:PORT"),
        (("--master", "tcp://192.0.2.1:5570", "--stage", "painter"), "--insecure"),
        (("--master", "tcp://127.0.0.1:5570"), "--stage"),
        (("--master", "tcp://127.0.0.1:5570", "--stage", "painter", "--replica", "-1"), "--replica"),
    ],
)
def test_stage_refuses_what_cannot_work_with_a_remedy(arguments: tuple[str, ...], words: str, tmp_path: Path) -> None:
    done = call(stage, *arguments, cwd=tmp_path)
    assert done.status == 2
    assert words in done.err
    assert "Traceback" not in done.err


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "nonsense", "ftp://127.0.0.1"])
def test_status_of_nobody_says_so(url: str, tmp_path: Path) -> None:
    done = call(master, "status", "--url", url, cwd=tmp_path)
    assert done.status == 2
    assert done.err.startswith(f"error: no pipeline answers at {url}: ")
    assert "urlopen" not in done.err
    assert len(done.err.splitlines()) == 1


@pytest.mark.parametrize(
    "url", ["tcp://bad host;x:5570", "tcp://127.0.0.1:99999", "tcp://127.0.0.1:5570\n", "tcp://:5570", "ipc://x", "x"]
)
def test_master_address_that_cannot_be_is_refused_at_once(url: str, tmp_path: Path) -> None:
    done = run(STAGE, "--master", url, "--stage", "painter", "--insecure", cwd=tmp_path)
    assert done.status == 2
    assert "Traceback" not in done.out + done.err
