"""Switches of a diffusion stage: what the deploy file may say, and what it is refused for before any process starts."""

from pathlib import Path

import pytest

from launch.flatten import flatten
from proto.deploy import Compile, DiffusionStage, Offload, QuantizationSpec, Quantizer
from proto.ids import StageName
from proto.step_cache import FirstBlockCache, MagCache, PyramidAttentionBroadcast, TaylorSeer
from tests.unit.test_deploy_file import load, painter, refused


def stage(tmp_path: Path, text: str) -> DiffusionStage:
    found = load(tmp_path, painter(text)).deploy.stage(StageName("painter"))
    assert isinstance(found, DiffusionStage)
    return found


def test_every_switch_can_be_written(tmp_path: Path) -> None:
    engine = stage(tmp_path, "devices: [cuda:0]\nengine: {compile: regional, attention: native, offload: model}").engine
    assert (engine.compile, engine.attention, engine.offload) == (Compile.REGIONAL, "native", Offload.MODEL)


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("{method: first_block, threshold: 0.1}", FirstBlockCache(threshold=0.1)),
        ("{method: mag, ratios: [1, 1.2, 0.9]}", MagCache(ratios=(1.0, 1.2, 0.9))),
        ("{method: taylorseer, max_order: 2}", TaylorSeer(max_order=2)),
        (
            "{method: pab, spatial_attention_block_skip_range: null, cross_attention_block_skip_range: 4}",
            PyramidAttentionBroadcast(spatial_attention_block_skip_range=None, cross_attention_block_skip_range=4),
        ),
    ],
)
def test_a_step_cache_is_told_by_its_method(tmp_path: Path, text: str, spec: object) -> None:
    assert stage(tmp_path, f"engine: {{step_cache: {text}}}").engine.step_cache == spec


def test_quantization_is_told_by_component_in_short_or_in_full(tmp_path: Path) -> None:
    text = "{unet: torchao, text_encoder: {method: quanto, weights: int4}}"
    found = load(tmp_path, painter(""), f"stages.painter.model.quantization={text}").deploy
    assert found.stage(StageName("painter")).model.quantization == {
        "unet": QuantizationSpec(method=Quantizer.TORCHAO),
        "text_encoder": QuantizationSpec(method=Quantizer.QUANTO, weights="int4"),
    }


def test_a_step_cache_is_shown_with_all_it_says(tmp_path: Path) -> None:
    deploy = load(tmp_path, painter("engine: {step_cache: {method: first_block}}")).deploy
    shown = {leaf.path: leaf.value for leaf in flatten(deploy)}
    assert shown["stages.painter.engine.step_cache.method"] == "first_block"
    assert shown["stages.painter.engine.step_cache.threshold"] == 0.05


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("engine: {compile: fast}", "expected one of none, regional, full, found 'fast'"),
        ("engine: {offload: modle}", "found 'modle'; did you mean 'model'?"),
        (
            "engine: {offload: model}",
            "offload: model moves weights between host memory and an accelerator, and `devices`",
        ),
        ("engine: {step_cache: {threshold: 0.1}}", "step_cache.method: missing; one of first_block, mag, taylorseer,"),
        ("engine: {step_cache: {method: first}}", "did you mean 'first_block'?"),
        ("engine: {step_cache: {method: mag, max_order: 2}}", "unknown key; only those of method taylorseer have it"),
        ("engine: {step_cache: {method: first_block, threshold: 0}}", "expected a number > 0, found 0"),
        (
            "engine: {step_cache: {method: pab, spatial_attention_block_skip_range: null}}",
            "must be set, or there is nothing to skip",
        ),
        ("engine: {step_cache: {method: pab, from_timestep: 900}}", "800 is not above `from_timestep` (900)"),
        ("engine: {step_cache: {method: taylorseer, cache_identifiers: ['(']}}", "is no regular expression"),
        ("engine: {compile: full, step_cache: {method: mag}}", "compile: a `step_cache` decides at each step"),
        ("devices: [cuda]\nengine: {compile: full, offload: group}", "moves layers inside of what would be compiled"),
    ],
)
def test_a_wrong_switch_is_refused_with_its_remedy(tmp_path: Path, text: str, problem: str) -> None:
    told = refused(tmp_path, painter(text))
    assert len(told) == 1, told
    assert problem in told[0]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{transformer: torchoa}", "did you mean 'torchao'?"),
        ("{transformer: {method: quanto, weights: int7}}", "quanto does not make 'int7'"),
        ("{transformer: {method: gguf}}", "transformer.file: missing; the GGUF file"),
        ("{transformer: {method: gguf, file: ../x.gguf}}", "must be a path inside the pipeline folder"),
        ("{transformer: {method: torchao, file: x.gguf}}", "only gguf reads a file"),
        ("{transformer: bitsandbytes}", "bitsandbytes is for accelerators"),
    ],
)
def test_a_wrong_quantization_is_refused_with_its_remedy(tmp_path: Path, text: str, problem: str) -> None:
    told = refused(tmp_path, painter(""), f"stages.painter.model.quantization={text}")
    assert len(told) == 1, told
    assert problem in told[0]


def test_a_language_model_has_no_quantization_of_components(tmp_path: Path) -> None:
    told = refused(tmp_path, painter(""), "stages.thinker.model.quantization={transformer: torchao}")
    assert len(told) == 1, told
    assert "only stages of kind diffusion have it" in told[0]
