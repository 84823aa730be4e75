"""`model.path` to a folder: demo models are made once, whole or not at all, by one process at a time."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from proto.errors import StartError
from stages.demo import models
from stages.demo.models import CACHE_BUILDERS, DemoModel, Report, cache_root, check_model, resolve_model


def quiet(note: str, done: float | None) -> None:
    """A report that nobody reads."""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OMNI_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def demo(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Path, Report], None], int], None]:
    def register(build: Callable[[Path, Report], None], version: int = 1) -> None:
        monkeypatch.setitem(CACHE_BUILDERS, "toy", DemoModel(version, build))

    return register


def write(folder: Path, report: Report) -> None:
    (folder / "config.json").write_text("{}")


def test_a_shipped_model_is_where_the_package_is_or_is_refused(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(models.SHIPPED, "toy", tmp_path / "weights")
    with pytest.raises(StartError, match="no weights came with this package"):
        resolve_model("demo://toy", quiet)
    (tmp_path / "weights").mkdir()
    assert resolve_model("demo://toy", quiet) == tmp_path / "weights"
    assert not cache.exists()


def test_a_demo_model_is_made_once_and_named_with_its_version(cache: Path, demo: Callable[..., None]) -> None:
    demo(write, version=3)
    folder = resolve_model("demo://toy", quiet)
    assert folder == cache / "toy-v3"
    (folder / "config.json").write_text("kept")
    assert (resolve_model("demo://toy", quiet) / "config.json").read_text() == "kept"
    demo(write, version=4)
    assert resolve_model("demo://toy", quiet) == cache / "toy-v4"


def test_a_build_that_fails_leaves_nothing_and_can_be_tried_again(cache: Path, demo: Callable[..., None]) -> None:
    def fail(folder: Path, report: Report) -> None:
        write(folder, report)
        raise StartError("no such package")

    demo(fail)
    with pytest.raises(StartError, match="no such package"):
        resolve_model("demo://toy", quiet)
    assert [path.name for path in cache.iterdir()] == ["toy-v1.lock"]
    demo(write)
    assert (resolve_model("demo://toy", quiet) / "config.json").exists()


def test_what_a_killed_build_left_is_cleared_away(cache: Path, demo: Callable[..., None]) -> None:
    (cache / ".toy-v1.killed").mkdir(parents=True)
    demo(write)
    resolve_model("demo://toy", quiet)
    assert sorted(path.name for path in cache.iterdir()) == ["toy-v1", "toy-v1.lock"]


def test_of_two_at_once_one_builds_and_the_other_waits_for_it(demo: Callable[..., None]) -> None:
    waiting, built = threading.Event(), []

    def build(folder: Path, report: Report) -> None:
        assert waiting.wait(30)
        built.append(folder)
        write(folder, report)

    def report(note: str, done: float | None) -> None:
        if "waiting" in note:
            waiting.set()

    demo(build)
    with ThreadPoolExecutor(2) as pool:
        first, second = (pool.submit(resolve_model, "demo://toy", report) for _ in range(2))
        assert first.result(60) == second.result(60)
    assert len(built) == 1


def test_other_paths_are_taken_as_they_are_if_they_exist(tmp_path: Path) -> None:
    assert resolve_model(str(tmp_path), quiet) == tmp_path
    with pytest.raises(StartError, match="is not there") as refusal:
        resolve_model(str(tmp_path / "none"), quiet)
    assert refusal.value.info.field == "model.path"


def test_an_unknown_demo_model_is_refused_with_the_nearest_name_and_nothing_is_built(cache: Path) -> None:
    with pytest.raises(StartError, match="did you mean 'tiny-painter'"):
        check_model("demo://tiny-paint")
    with pytest.raises(StartError, match="demo models: smollm2-135m-instruct"):
        check_model("demo://zzz")
    check_model("demo://tiny-painter")
    assert not cache.exists()


def test_a_cache_folder_that_cannot_be_made_is_named_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("OMNI_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(StartError, match="set OMNI_CACHE"):
        resolve_model("demo://tiny-painter", quiet)


def test_the_cache_is_where_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.delenv("OMNI_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_root() == Path("/home/someone/.cache/omni-pipeline")
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/cache")
    assert cache_root() == Path("/var/cache/omni-pipeline")
    monkeypatch.setenv("OMNI_CACHE", "/data/omni")
    assert models.cache_root() == Path("/data/omni")
