"""A deploy with `engine: vllm`: what vLLM cannot do is refused at its place, before any process starts."""

from pathlib import Path

import pytest

from launch.deploy_file import load_deploy
from proto.deploy import ArStage
from proto.errors import DeployError

AR = """\
name: demo
stages:
  thinker:
    kind: ar
    model: {path: demo://smollm2-135m-instruct}
    output: text
    engine: {use: vllm, MORE}
    REST
"""


def write(tmp_path: Path, more: str = "", rest: str = "") -> Path:
    path = tmp_path / "demo.yaml"
    path.write_text(AR.replace(", MORE", f", {more}" if more else "").replace("REST", rest))
    return path


def test_the_short_form_says_it_all(tmp_path: Path) -> None:
    path = write(tmp_path)
    path.write_text(path.read_text().replace("{use: vllm}", "vllm"))
    stage = load_deploy(path).deploy.stages["thinker"]
    assert isinstance(stage, ArStage)
    assert stage.engine.use == "vllm"


@pytest.mark.parametrize(
    ("more", "rest", "words"),
    [
        ("task: encode", "", "stages.thinker.engine.task: vLLM only generates"),
        ("pack_weights: true", "", "stages.thinker.engine.pack_weights: is for the built-in engine"),
        ("kv_layers: [0]", "", "stages.thinker.engine.kv_layers: is for the built-in engine"),
        ("", "defaults: {typical_p: 0.5}", "stages.thinker.defaults.typical_p: vLLM has nothing for it"),
        ("", "python: /no/such/python", "stages.thinker.python: '/no/such/python' is no program"),
        (
            "",
            "\n  painter:\n    kind: diffusion\n    model: {path: demo://tiny-painter}\n"
            "    inputs: {prompt_embeds: thinker.hidden}\n    output: image",
            "stages.painter.inputs.prompt_embeds.from: thinker.hidden: vLLM gives text and tokens only",
        ),
        (
            "",
            "\n  painter:\n    kind: diffusion\n    model: {path: demo://tiny-painter}\n    engine: vllm\n    output: image",
            "stages.painter.engine.use: vLLM runs language models",
        ),
    ],
)
def test_what_vllm_cannot_do_is_refused_where_it_stands(tmp_path: Path, more: str, rest: str, words: str) -> None:
    with pytest.raises(DeployError) as refused:
        load_deploy(write(tmp_path, more, rest))
    assert words in str(refused.value)
