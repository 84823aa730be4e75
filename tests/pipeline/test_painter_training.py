"""Training a painter: it learns, shows what it does, and goes on where it was stopped."""

from dataclasses import replace

import pytest
import torch
from PIL import Image
from rich.console import Console

from stages.diffusion.painter.pipeline import PainterPipeline
from stages.diffusion.painter.train import Settings, run
from tests.models.tiny_ar import build_tiny_llama


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    folder = tmp_path_factory.mktemp("painter")
    return Settings(
        out=folder / "run",
        thinker=str(build_tiny_llama(folder / "llama")),
        layers=(0, 1),
        start=None,
        steps=30,
        decay=2,
        batch=4,
        rate=1e-2,
        muon_rate=1e-2,
        pool=16,
        refresh=4,
        seed=0,
        save_seconds=1e9,
        sample_every=1000,
        samples=("a red star", "a blue dot"),
    )


def state(settings: Settings) -> dict[str, object]:
    return torch.load(settings.out / "state.pt", weights_only=True)


def test_training_shows_itself_and_goes_on_where_it_was(settings: Settings) -> None:
    run(settings, Console(quiet=True))
    first = state(settings)
    assert first["step"] == len(first["losses"]) == 30
    assert sum(first["losses"][-10:]) < 0.8 * sum(first["losses"][:10])
    for name in ("loss.png", "samples.png"):
        Image.open(settings.out / name).verify()
    assert len((settings.out / "loss.csv").read_text().splitlines()) == 30
    run(replace(settings, steps=33), Console(quiet=True))
    second = state(settings)
    assert second["step"] == 33
    assert second["losses"][:30] == first["losses"]


def test_training_may_begin_with_the_weights_of_another(settings: Settings) -> None:
    weights = settings.out / "weights"
    begun = replace(settings, out=settings.out.with_name("other"), start=weights, steps=0)
    run(begun, Console(quiet=True))
    models = [PainterPipeline.from_pretrained(one).transformer for one in (weights, begun.out / "weights")]
    assert all(torch.equal(a, b) for a, b in zip(*(m.state_dict().values() for m in models), strict=True))
