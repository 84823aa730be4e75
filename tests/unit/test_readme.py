"""The README's reference is the code's: every key of the deploy stands in it with its default, and nothing else does."""

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from launch.deploy_file import load_deploy
from launch.flatten import flatten
from launch.units import parse
from omni.api.app import create_app
from proto.deploy import ArStage, Deploy, DiffusionStage, Kind, Link
from proto.ids import StageName
from proto.params import Json
from tests.api.fake_pipeline import FakePipeline

README = (Path(__file__).resolve().parents[2] / "README.md").read_text()
ROW = re.compile(r"^\| `([a-z][\w.]*(?:NAME|INPUT)?[\w.]*)` \| (`[^`]*`|–|required) \| (.+) \|$", re.MULTILINE)


def documented() -> dict[str, str]:
    section = README.split("### YAML reference")[1].split("\n## ")[0]
    return {key: default.strip("`") for key, default, _ in ROW.findall(section)}


def deploy() -> Deploy:
    draw = DiffusionStage(inputs={"prompt": Link(source="text.text")}, output=Kind.IMAGE)
    return Deploy(name="p", stages={StageName("text"): ArStage(), StageName("draw"): draw})


def real() -> dict[str, tuple[Json, str | None]]:
    """Every key of the structs, with its default and unit; stage names and inputs written as in the README."""
    keys: dict[str, tuple[Json, str | None]] = {}
    for leaf in flatten(deploy()):
        key = re.sub(r"^stages\.(text|draw)", "stages.NAME", leaf.path).replace("inputs.prompt", "inputs.INPUT")
        keys.setdefault(key, (leaf.value, leaf.unit))
    del keys["stages.NAME.inputs"]
    return keys


def test_every_key_of_the_deploy_is_in_the_reference_and_no_other() -> None:
    assert set(documented()) == set(real())


@pytest.mark.parametrize("key", sorted(real()))
def test_the_reference_gives_the_default(key: str) -> None:
    value, unit = real()[key]
    written = documented()[key]
    if key in ("name", "stages.NAME.kind", "stages.NAME.inputs.INPUT.from"):
        assert written == "required"
    elif value is None or key == "stages.NAME.output":
        assert written == "–"
    elif unit is not None:
        assert parse(written, unit) == value
    else:
        assert (written if isinstance(value, str) else yaml.safe_load(written)) == value


def test_every_route_is_in_the_readme_and_no_other() -> None:
    routes = {route.path for route in create_app(FakePipeline(deploy())).routes}  # type: ignore[attr-defined]
    routes = {re.sub(r"\{(\w+)(?::\w+)?\}", lambda match: match[1].upper(), path) for path in routes}
    told = set(re.findall(r"`(?:GET|POST) (/[\w/]+)`", README))
    assert told == routes


def test_the_files_that_the_readme_names_exist() -> None:
    root = Path(__file__).resolve().parents[2]
    named = set(re.findall(r"`((?:omni|stages|proto|launch|configs|tests)/[\w/.]+\.\w+)`", README))
    assert named
    assert not [name for name in named if not (root / name).exists()]


def blocks(language: str) -> list[str]:
    found = re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    assert found
    return found


def test_every_block_of_code_ends() -> None:
    fences = re.findall(r"^```(\w*)$", README, re.MULTILINE)
    assert all(not fence for fence in fences[1::2]), "a block begins inside another one"
    assert len(fences) % 2 == 0


@pytest.mark.parametrize("text", blocks("yaml"))
def test_every_deploy_in_the_readme_loads(text: str, tmp_path: Path) -> None:
    file = tmp_path / "deploy.yaml"
    file.write_text(text.replace("vllm/bin/python", sys.executable))
    assert load_deploy(file, check_paths=False).deploy.stages


@pytest.mark.parametrize("text", blocks("python"))
def test_python_of_the_readme_is_python(text: str) -> None:
    compile(text, "README.md", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_commands_of_the_readme_are_shell() -> None:
    subprocess.run(["bash", "-n"], input="\n".join(blocks("bash")), text=True, check=True)


def test_links_within_the_readme_lead_somewhere() -> None:
    titles = re.findall(r"^#+ (.+)$", README, re.MULTILINE)
    anchors = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}
    assert not [link for link in re.findall(r"\]\(#([^)]+)\)", README) if link not in anchors]
    files = [link for link in re.findall(r"\]\(([^)]+)\)", README) if not link.startswith(("#", "http"))]
    assert files
    assert not [link for link in files if not (Path(__file__).resolve().parents[2] / link).exists()]
