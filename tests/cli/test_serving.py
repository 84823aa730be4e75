"""`omni-master launch DEPLOY` until it is interrupted, `omni-master status` beside it, `omni-stage` joining it."""

import contextlib
import json
import os
import signal
import socket
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.api.cases import CHAT, IMAGES
from tests.cli.commands import HEADER, MASTER, PLAIN, Served, run
from tests.pipeline.harness import PATIENCE_S, Process, omni_stage, until

DEPLOY = HEADER + (
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
    max_replicas: 2
    output: image
"""
)
HANG = ("--set", "stages.painter.engine.options.load=hang")
CHAT_BODY = {"model": "test", "messages": [{"role": "user", "content": "x"}]}


@pytest.fixture(scope="module")
def deploy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("serving") / "deploy.yaml"
    path.write_text(DEPLOY)
    return path


@pytest.fixture(scope="module")
def served(deploy: Path) -> Iterator[Served]:
    with Served(deploy, deploy.with_name("log")) as served:
        yield served.until_ready()


@pytest.fixture
def loading(deploy: Path, tmp_path: Path) -> Iterator[Served]:
    """Never ready: its painter loads for ever."""
    with Served(deploy, tmp_path / "loading", *HANG) as loading:
        loading.until_says("pretending to load")
        yield loading


def address_for_stages(served: Served) -> str:
    """As the launch prints it for whoever wants to add a replica."""
    line = served.until_says("room for 1 more of stage painter: omni-stage --master ")
    return line.partition("--master ")[2].split()[0]


def test_serving_says_where_and_when_it_is_ready_in_plain_lines(served: Served) -> None:
    lines = served.output.splitlines()
    assert f"API: {served.url} (not ready yet)" in lines
    assert any(line.startswith("waiting for stage painter (0 of 1 replicas)") for line in lines)
    assert any(line.startswith("ready after ") and line.endswith(f"{served.url}/v1 (Ctrl-C ends)") for line in lines)
    assert "\x1b" not in served.output
    assert httpx.post(served.url + CHAT, json=CHAT_BODY).status_code == 200
    assert httpx.post(served.url + IMAGES, json={"prompt": "x"}).status_code == 200


def test_status_is_a_table_that_grep_can_read(served: Served, tmp_path: Path) -> None:
    done = run(MASTER, "status", "--url", served.url, cwd=tmp_path)
    assert done.status == 0, done.err
    lines = done.out.splitlines()
    assert lines[0].startswith("test: ready, up ")
    assert lines[1].split()[:3] == ["replica", "state", "host"]
    replicas = {line.split()[0]: line.split()[1] for line in lines[2:4]}
    assert replicas == {"thinker/0": "ready", "painter/0": "ready"}
    assert str(served.replica("painter").pid) in lines[3].split()
    assert "\x1b" not in done.out


def test_status_as_json_is_the_apis(served: Served, tmp_path: Path) -> None:
    done = run(MASTER, "status", "--json", "--url", f"{served.url}/", cwd=tmp_path)
    assert done.status == 0
    found = json.loads(done.out)
    assert found["ready"] is True
    assert [stage["stage"] for stage in found["stages"]] == ["thinker", "painter"]


def test_a_stage_is_called_from_a_shell(deploy: Path, tmp_path: Path) -> None:
    with Served(deploy, tmp_path / "log", "--set", "api.admin=true") as served:
        served.until_ready()
        done = run(MASTER, "call", "thinker", "echo", "a=[1, 2]", "b=yes", "--url", served.url, cwd=tmp_path)
        assert done.status == 0, done.err
        assert json.loads(done.out)["0"]["args"] == {"a": [1, 2], "b": "yes"}
        for wrong, words in ((("thinker", "sing"), "replica 0: no method 'sing'"), (("tinker", "echo"), "'thinker'")):
            done = run(MASTER, "call", *wrong, "--url", served.url, cwd=tmp_path)
            assert (done.status, done.out) == (2, "")
            assert words in done.err
        done = run(
            MASTER, "call", "thinker", "hang", "seconds=3", "--timeout", "0.2", "--url", served.url, cwd=tmp_path
        )
        assert done.status == 1
        assert "replica 0: " in done.err


def test_calls_from_a_shell_need_the_deploys_leave(served: Served, tmp_path: Path) -> None:
    done = run(MASTER, "call", "thinker", "echo", "--url", served.url, cwd=tmp_path)
    assert done.status == 2
    assert "api.admin" in done.err


def test_stage_from_another_terminal_is_shown_and_leaves_again(served: Served, tmp_path: Path) -> None:
    with omni_stage(address_for_stages(served), "painter", tmp_path / "stage") as stage:
        until(
            lambda: run(MASTER, "status", "--url", served.url, cwd=tmp_path).out.count("painter/1  ready"),
            "it is shown",
        )
        stage.signal(signal.SIGINT)
        assert stage.wait() == 0
    until(lambda: "painter/1" not in run(MASTER, "status", "--url", served.url, cwd=tmp_path).out, "it is gone")


@pytest.mark.parametrize(
    ("stage", "further", "words"),
    [("paintr", (), "paintr"), ("painter", ("--replica", "7"), "7")],
    ids=["a stage that is not in the deploy", "a slot that there is not"],
)
def test_stage_that_the_master_refuses_ends_with_the_reason(
    served: Served, tmp_path: Path, stage: str, further: tuple[str, ...], words: str
) -> None:
    with omni_stage(address_for_stages(served), stage, tmp_path / "stage", *further) as process:
        assert process.wait() == 2
        said = process.output
    assert "refuses" in said
    assert words in said
    assert "Traceback" not in said


def test_port_that_is_taken_is_named_before_any_stage_starts(served: Served, deploy: Path, tmp_path: Path) -> None:
    port = httpx.URL(served.url).port
    done = run(MASTER, "launch", deploy, "--set", f"api.port={port}", cwd=tmp_path)
    assert done.status == 2
    assert f"cannot listen on 127.0.0.1 port {port}" in done.err
    assert "api.port" in done.err
    assert "waiting" not in done.err
    master = address_for_stages(served)
    done = run(MASTER, "launch", deploy, "--set", f"master.bind={master}", cwd=tmp_path)
    assert done.status == 1
    assert f"error: master.bind {master}: " in done.err.splitlines()[-1]
    assert "in use" in done.err.splitlines()[-1]
    assert "Traceback" not in done.err
    assert served.status().ready


def test_status_of_a_pipeline_that_is_not_ready_says_what_is_missing(loading: Served, tmp_path: Path) -> None:
    done = run(MASTER, "status", "--url", loading.url, cwd=tmp_path)
    assert done.status == 1
    assert done.out.startswith("test: not ready")
    assert "painter/0 loading: pretending to load" in done.out
    assert httpx.get(f"{loading.url}/health/live").status_code == 200
    assert httpx.get(f"{loading.url}/health/ready").status_code == 503
    assert httpx.post(loading.url + IMAGES, json={"prompt": "x"}).status_code == 503


def test_status_of_something_else_says_so(deploy: Path, tmp_path: Path) -> None:
    with Process([sys.executable, "-m", "http.server", "0"], tmp_path / "log", PLAIN) as other:
        url = other.until_says("(http://").partition("(")[2].rstrip("/) .")
        done = run(MASTER, "status", "--url", url.replace("0.0.0.0", "127.0.0.1"), cwd=tmp_path)
    assert done.status == 2
    assert done.err.startswith("error: no pipeline answers at ")


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupt_while_a_stage_loads_leaves_nothing(
    no_leftovers: None, loading: Served, number: int, status: int
) -> None:
    assert len(loading.children()) == 2
    assert loading.stop(number) == status
    assert "Traceback" not in loading.output
    assert "stopping" in loading.output.splitlines()


def test_interrupt_while_serving_ends_requests_and_leaves_the_port_free(
    no_leftovers: None, deploy: Path, tmp_path: Path
) -> None:
    with Served(deploy, tmp_path / "log") as served:
        served.until_ready()
        body = {"model": "test", "messages": [{"role": "user", "content": "hang"}]}
        with ThreadPoolExecutor() as pool:
            asking = pool.submit(httpx.post, served.url + CHAT, json=body, timeout=PATIENCE_S)
            until(lambda: served.replica("thinker").in_flight, "it runs")
            assert served.stop() == 130
            answer = asking.result()
    assert answer.status_code == 503
    assert "shutting down" in answer.json()["error"]["message"]
    port = httpx.URL(served.url).port
    with Served(deploy, tmp_path / "again", "--set", f"api.port={port}") as again:
        assert again.url == served.url
        again.until_ready()
        assert again.stop() == 130


def test_second_interrupt_ends_too(no_leftovers: None, loading: Served) -> None:
    children = loading.children()
    loading.signal(signal.SIGINT)
    loading.until_says("stopping")
    os.kill(loading.pid, signal.SIGINT)
    assert loading.wait() != 0
    until(lambda: not [pid for pid in children if Path(f"/proc/{pid}").exists()], "the stages are gone")


@pytest.mark.parametrize("closed", ["0", "1", "2", "0 1", "1 2", "0 1 2"])
def test_it_serves_also_where_its_starter_has_closed_the_standard_streams(
    closed: str, deploy: Path, tmp_path: Path
) -> None:
    with socket.socket() as sock:  # it cannot say which port it took
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    command = [MASTER, "launch", str(deploy), "--set", f"api.port={port}"]
    shell = ["sh", "-c", 'exec "$@" ' + " ".join(f"{number}>&-" for number in closed.split()), "sh", *command]
    with Process(shell, tmp_path / "log", PLAIN) as process:

        def ready() -> bool:
            with contextlib.suppress(httpx.TransportError):
                return httpx.get(f"http://127.0.0.1:{port}/health/ready").status_code == 200
            return False

        until(ready, "it is ready")
        answer = httpx.post(f"http://127.0.0.1:{port}{IMAGES}", json={"prompt": "x"})
        assert answer.status_code == 200, answer.text
        process.signal(signal.SIGTERM)
        assert process.wait() == 143
        assert "Assertion" not in process.output
        assert "Traceback" not in process.output
