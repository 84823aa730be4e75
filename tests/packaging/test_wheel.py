"""The wheel: what is in it, and that it lives beside proto-plus, which owns the import name `proto` too."""

import email
import importlib.metadata
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("launch", "omni", "proto", "stages")
MODEL_LIBRARIES = {"accelerate", "diffusers", "gguf", "safetensors", "torch", "transformers"}


def run(command: Sequence[str | Path], cwd: Path) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, f"{command} failed:\n{done.stdout}\n{done.stderr}"
    return done.stdout


def source_files() -> list[str]:
    """The files of the checkout that git does not ignore."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("needs a git checkout, to know which files are the project's")
    listed = run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], ROOT).split("\0")
    return sorted(name for name in listed if name and (ROOT / name).is_file())


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a clean copy of the sources."""
    copy = tmp_path_factory.mktemp("source")
    for name in source_files():
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, copy / name)
    out = tmp_path_factory.mktemp("dist")
    isolation = ["--no-isolation"] if setuptools_is_new_enough() else []
    run([sys.executable, "-m", "build", "--wheel", *isolation, "--outdir", out, copy], copy)
    (built,) = out.glob("*.whl")
    return built


def setuptools_is_new_enough() -> bool:
    """Whether the backend that pyproject.toml asks for is here already, so that building needs no download."""
    try:
        return int(importlib.metadata.version("setuptools").split(".")[0]) >= 77
    except importlib.metadata.PackageNotFoundError:
        return False


@pytest.fixture(scope="module")
def names(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


def dist_info(wheel: Path, name: str) -> str:
    with zipfile.ZipFile(wheel) as archive:
        (path,) = [entry for entry in archive.namelist() if entry.endswith(f".dist-info/{name}")]
        return archive.read(path).decode()


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new environment with the wheel, proto-plus, and our dependencies except the model libraries."""
    place = tmp_path_factory.mktemp("venv")
    run([sys.executable, "-m", "venv", place], place)
    python = place / "bin" / "python"
    needs = email.message_from_string(dist_info(wheel, "METADATA")).get_all("Requires-Dist", [])
    light = [need for need in needs if "extra ==" not in need and re.split(r"[^\w-]", need)[0] not in MODEL_LIBRARIES]
    run([python, "-m", "pip", "install", "-q", "--no-deps", wheel], place)
    run([python, "-m", "pip", "install", "-q", "proto-plus", *light], place)
    return python


def test_the_wheel_holds_our_packages_and_nothing_else(names: list[str]) -> None:
    top = {name.split("/")[0] for name in names}
    assert {name for name in top if not name.endswith(".dist-info")} == set(PACKAGES)
    assert not [name for name in names if "test" in name or "__pycache__" in name or ".ci" in name]


def test_the_wheel_holds_every_source_file_and_config(names: list[str]) -> None:
    sources = {
        name for name in source_files() if name.endswith(".py") and name.startswith(tuple(f"{p}/" for p in PACKAGES))
    }
    assert {name for name in names if name.endswith(".py")} == sources
    configs = {f"omni/{name}" for name in source_files() if re.fullmatch(r"configs/[^/]+\.yaml", name)}
    assert configs
    assert {name for name in names if name.endswith(".yaml")} == configs
    assert "omni/py.typed" in names


def test_the_wheel_holds_the_painters_weights_and_their_card(wheel: Path, names: list[str]) -> None:
    folder = "stages/diffusion/painter/weights"
    theirs = {name for name in source_files() if name.startswith(f"{folder}/")}
    assert {name for name in names if name.startswith(f"{folder}/")} == theirs
    assert f"{folder}/transformer/diffusion_pytorch_model.safetensors" in theirs
    with zipfile.ZipFile(wheel) as archive:
        assert b"license: apache-2.0" in archive.read(f"{folder}/README.md")
        assert sum(archive.getinfo(name).file_size for name in theirs) < 25_000_000


def test_names_that_others_own_get_no_init(names: list[str]) -> None:
    assert not {f"{package}/__init__.py" for package in ("launch", "proto", "stages")} & set(names)


def test_the_commands_are_declared(wheel: Path) -> None:
    entry_points = dist_info(wheel, "entry_points.txt")
    assert "omni-master = launch.master:main" in entry_points
    assert "omni-stage = launch.stage:main" in entry_points


def test_the_licence_and_the_readme_go_along(wheel: Path, names: list[str]) -> None:
    metadata = email.message_from_string(dist_info(wheel, "METADATA"))
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata.get_payload().strip()
    assert any(name.endswith("/LICENSE") for name in names)


def test_no_file_of_proto_plus_is_overwritten(python: Path, names: list[str]) -> None:
    code = "import importlib.metadata as m; print(*m.files('proto-plus'), sep='\\n')"
    theirs = set(run([python, "-c", code], python.parent).split())
    assert "proto/message.py" in theirs
    assert not theirs & set(names)


def test_proto_plus_works_beside_us(python: Path) -> None:
    code = """
import proto
class Song(proto.Message):
    title = proto.Field(proto.STRING, number=1)
assert Song.deserialize(Song.serialize(Song(title="x"))).title == "x"
from proto.framing import CONTROL_UP
from proto.messages import Goodbye
assert CONTROL_UP.decode(CONTROL_UP.encode(Goodbye(epoch=3)))[0].epoch == 3
print(proto.__file__)
"""
    assert run([python, "-c", code], python.parent).strip().endswith("proto/__init__.py")


def test_our_modules_come_first_just_as_well(python: Path) -> None:
    run([python, "-c", "import proto.messages, proto.deploy, omni, proto; proto.Message"], python.parent)


def test_the_public_names_are_there_without_model_libraries(python: Path) -> None:
    code = "import omni, sys; [getattr(omni, n) for n in omni.__all__]; print('torch' in sys.modules, *omni.__all__)"
    said = run([python, "-c", code], python.parent).split()
    assert said[0] == "False"
    assert {"Omni", "AsyncOmni"} <= set(said)


@pytest.mark.parametrize("command", ["omni-master", "omni-stage"])
def test_the_commands_help_without_model_libraries(python: Path, command: str) -> None:
    assert "Usage" in run([python.parent / command, "--help"], python.parent)


def test_uninstalling_us_leaves_proto_plus_whole(python: Path) -> None:
    """The last of the module: it takes the wheel out again."""
    run([python, "-m", "pip", "uninstall", "-q", "-y", "omni-pipeline"], python.parent)
    run([python, "-c", "import proto; proto.Message"], python.parent)
    run([python, "-m", "pip", "check"], python.parent)
