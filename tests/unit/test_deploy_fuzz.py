"""Whatever the YAML, it is either loaded or refused with a `DeployError` that names a place; nothing else ever happens."""

from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from launch.deploy_file import load_deploy
from launch.yaml_tree import parse
from proto.errors import DeployError
from proto.params import Json

KEYS = [
    "name",
    "stages",
    "a",
    "b",
    "kind",
    "model",
    "path",
    "inputs",
    "prompt",
    "kv",
    "from",
    "companion",
    "output",
    "engine",
    "use",
    "options",
    "defaults",
    "extra",
    "edge",
    "via",
    "deadline",
    "replicas",
    "local",
    "devices",
    "env",
    "master",
    "bind",
    "limits",
    "max_payload_bytes",
    "api",
    "port",
    "x",
]
WORDS = [
    "ar",
    "diffusion",
    "text",
    "image",
    "a.text",
    "a.kv",
    "b.image",
    "demo://tiny-painter",
    "10s",
    "2GiB",
    "tcp://*:1",
]

values = st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(WORDS) | st.text(max_size=5)
trees = st.recursive(
    values,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=6),
    max_leaves=30,
)
links = st.dictionaries(st.sampled_from(["prompt", "kv", "x"]), trees | st.sampled_from(WORDS), max_size=2)
stages = st.fixed_dictionaries(
    {"kind": st.sampled_from(["ar", "diffusion", "x"])},
    optional={"model": trees, "inputs": links, "output": values, "engine": trees, "defaults": trees, "edge": trees},
)
deploys = st.fixed_dictionaries(
    {"name": values, "stages": st.dictionaries(st.sampled_from(["a", "b", "c"]), stages, max_size=3) | trees},
    optional={"master": trees, "limits": trees, "api": trees},
)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz") / "d.yaml"


def load_or_refuse(path: Path, text: str, *sets: str) -> None:
    path.write_text(text, "utf-8")
    try:
        load_deploy(path, sets)
    except DeployError as error:
        for line in str(error).splitlines():
            assert line.startswith((f"{path}:", "--set: "))


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(deploys, st.lists(st.tuples(st.lists(st.sampled_from(KEYS), min_size=1, max_size=5), values), max_size=2))
def test_any_tree_is_loaded_or_refused(path: Path, deploy: Json, sets: list[tuple[list[str], Json]]) -> None:
    overrides = [f"{'.'.join(keys)}={value}" for keys, value in sets]
    load_or_refuse(path, yaml.safe_dump(deploy, allow_unicode=True), *overrides)


@settings(deadline=None)
@given(st.text(alphabet=st.sampled_from("ab:-[]{}&*!|>?,#'\"% \n\t\x00\x07é"), max_size=60))
def test_any_text_is_loaded_or_refused(path: Path, text: str) -> None:
    load_or_refuse(path, text)


def test_a_small_file_that_unfolds_to_a_huge_one_is_refused_at_once() -> None:
    levels = [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12)]
    with pytest.raises(DeployError, match="more than 100000 values"):
        parse("\n".join(["a0: &a0 [x]", *levels]), "d.yaml", [])


@pytest.mark.parametrize("depth", [40, 70, 150, 250, 320, 400, 1000, 50_000])
@pytest.mark.parametrize(("start", "end"), [("[", "]"), ("{a: ", "}"), ("- ", "")], ids=["lists", "maps", "dashes"])
def test_deep_nesting_is_refused(path: Path, depth: int, start: str, end: str) -> None:
    text = f"name: x\nstages:\n  a:\n    kind: diffusion\n    defaults:\n      extra:\n        y:\n         {start * depth}1{end * depth}\n"
    path.write_text(text)
    with pytest.raises(DeployError, match=r"nested|longer than"):
        load_deploy(path)
