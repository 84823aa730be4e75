"""`explain` prints every resolved value as YAML would write it, and where it came from."""

import io
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from launch import units
from launch.deploy_file import load_deploy
from launch.explain import explain, show, written
from launch.flatten import Leaf
from launch.yaml_tree import parse, plain
from proto.deploy import DURATION, SIZE
from proto.params import Json

TEXT = """\
name: demo
stages:
  thinker:
    kind: ar
    model: {path: demo://smollm2-135m-instruct}
    defaults: {stop: [END, "on: x"], extra: {a: 1e-4, b: {c: yes}}, top_k: null}
    output: text
  painter:
    kind: diffusion
    model: {path: demo://tiny-painter}
    inputs: {prompt: thinker.text}
    edge:
      deadline: 1500ms
    output: image
limits: {max_payload_bytes: 512MB}
"""


@pytest.fixture
def deploy_path(tmp_path: Path) -> Path:
    path = tmp_path / "d.yaml"
    path.write_text(TEXT)
    return path


def test_each_value_has_its_origin(deploy_path: Path) -> None:
    rows = {key: (value, origin) for key, value, origin in explain(load_deploy(deploy_path, ["api.port=0"]))}
    assert rows["name"] == ("demo", f"{deploy_path}:1")
    assert rows["stages.thinker.kind"] == ("ar", f"{deploy_path}:4")
    assert rows["stages.thinker.defaults.stop"] == ("[END, 'on: x']", f"{deploy_path}:6")
    assert rows["stages.thinker.defaults.extra.a"] == ("0.0001", f"{deploy_path}:6")
    assert rows["stages.thinker.defaults.extra.b.c"] == ("'yes'", f"{deploy_path}:6")
    assert rows["stages.thinker.defaults.top_k"] == ("null", f"{deploy_path}:6")
    assert rows["stages.thinker.defaults.top_p"] == ("null", "model default")
    assert rows["stages.thinker.engine.max_num_seqs"] == ("16", "default")
    assert rows["stages.painter.inputs.prompt.from"] == ("thinker.text", f"{deploy_path}:11")
    assert rows["stages.painter.edge.deadline"] == ("1.5s", f"{deploy_path}:13")
    assert rows["stages.painter.edge.lease"] == ("600s", "default")
    assert rows["stages.painter.devices"] == ("[cpu]", "default")
    assert rows["api.port"] == ("0", "--set")
    assert rows["master.insecure"] == ("false", "default")
    assert rows["limits.max_payload_bytes"] == ("512MB", f"{deploy_path}:15")
    assert rows["limits.max_frame_bytes"] == ("1GiB", "default")
    assert not any(key.endswith(".type") for key in rows)


def test_what_is_explained_can_be_loaded_again_and_is_the_same(deploy_path: Path, tmp_path: Path) -> None:
    first = load_deploy(deploy_path)
    tree: dict[str, Json] = {}
    for key, value, _ in explain(first):
        *above, last = key.split(".")
        node = tree
        for part in above:
            node = node.setdefault(part, {})
        node[last] = plain(parse(value, "", []))
    again = tmp_path / "again.yaml"
    again.write_text(yaml.safe_dump(tree, sort_keys=False))
    assert load_deploy(again).deploy == first.deploy


def test_piped_it_is_plain_lines(deploy_path: Path) -> None:
    out = io.StringIO()
    show(load_deploy(deploy_path), Console(file=out, width=40))
    lines = out.getvalue().splitlines()
    assert f"stages.painter.edge.deadline: 1.5s  # {deploy_path}:13" in lines
    assert len(lines) == len(explain(load_deploy(deploy_path)))


def test_on_a_terminal_it_is_a_table(deploy_path: Path) -> None:
    out = io.StringIO()
    show(load_deploy(deploy_path), Console(file=out, width=200, force_terminal=True, color_system=None))
    (line,) = (line for line in out.getvalue().splitlines() if "stages.painter.edge.deadline" in line)
    assert "1.5s" in line
    assert f"{deploy_path}:13" in line


scalars = (
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False)
)
data = st.recursive(scalars | st.text(), lambda inner: st.lists(inner, max_size=4), max_leaves=8)


@given(data)
def test_any_value_reads_back_as_itself(value: Json) -> None:
    text = written(Leaf("x", value))
    assert "\n" not in text
    again = plain(parse(text, "", []))
    assert again == value
    assert type(again) is type(value)


@given(st.floats(1e-9, 1e12))
def test_any_duration_reads_back_as_itself(seconds: float) -> None:
    assert _read(units.format_value(seconds, DURATION), DURATION) == seconds


@given(st.integers(1, 2**63 - 1) | st.integers(0, 60).map(lambda power: 1 << power))
def test_any_size_reads_back_as_itself(size: int) -> None:
    again = _read(units.format_value(size, SIZE), SIZE)
    assert again == size
    assert isinstance(again, int)


def _read(text: str, unit: str) -> float | None:
    return units.parse(text, unit)
