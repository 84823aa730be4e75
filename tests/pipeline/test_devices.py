"""A device that is not there is found before anything is loaded, by both engines, with the remedy."""

from pathlib import Path

import pytest
import torch

from proto.deploy import ArStage, DiffusionStage, LimitsSpec, ModelSpec, StageSpec
from proto.errors import StartError
from proto.ids import StageName
from stages.ar.engine import ArEngine
from stages.diffusion.engine import DiffusionEngine
from stages.engine import Engine, LoadContext
from tests.models.tiny_ar import build_tiny_llama
from tests.models.tiny_diffusion import build_tiny_sd

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="needs a host without CUDA")


@pytest.mark.parametrize("kind", ["ar", "diffusion"])
def test_a_device_that_is_not_there_is_refused_with_the_remedy(tmp_path: Path, kind: str) -> None:
    engine: Engine = ArEngine() if kind == "ar" else DiffusionEngine()
    folder = build_tiny_llama(tmp_path / "m") if kind == "ar" else build_tiny_sd(tmp_path / "m")
    model = ModelSpec(path=str(folder))
    spec: StageSpec = ArStage(model=model) if kind == "ar" else DiffusionStage(model=model)
    context = LoadContext(StageName("s"), spec, LimitsSpec(), "cuda:0", (), lambda note, done: None)
    with pytest.raises(StartError, match=r"device 'cuda:0' cannot be used here .*stages\.s\.devices") as refused:
        engine.load(context)
    assert refused.value.info.field == "devices"
