"""Training a painter: it learns, shows what it does, and goes on where it was stopped."""

import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image
from rich.console import Console

from stages.diffusion.painter.pipeline import PainterPipeline
from stages.diffusion.painter.train import Settings, run
from tests.models.tiny_ar import build_tiny_llama
from tests.pipeline.harness import Process, until


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
    run(settings, Console(quiet=True))  # has nothing to do, and keeps all it has read
    again = state(settings)
    for kept in (
        lambda s: s["model"],
        lambda s: s["average"],
        lambda s: s["muon"]["state"],
        lambda s: s["adam"]["state"],
    ):
        torch.testing.assert_close(kept(again), kept(first), rtol=0, atol=0)
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


def test_the_command_saves_when_it_is_told_to_stop(settings: Settings, tmp_path: Path) -> None:
    out = tmp_path / "run"
    small = ("--batch", "4", "--pool", "16", "--refresh", "4", "--save-seconds", "0", "--threads", "1")
    command = [sys.executable, "-m", "stages.diffusion.painter.train", "--out", str(out), "--layers", "0", "1", *small]
    with Process([*command, "--thinker", settings.thinker], tmp_path / "log") as training:
        until((out / "state.pt").exists, "a first checkpoint")
        training.signal(signal.SIGTERM)
        assert training.wait() == 0, training.output
    saved = torch.load(out / "state.pt", weights_only=True)
    assert saved["step"] == len(saved["losses"]) == len((out / "loss.csv").read_text().splitlines())
    Image.open(out / "samples.png").verify()
    assert PainterPipeline.from_pretrained(out / "weights").transformer.config.kv_layers == [0, 1]


@pytest.mark.slow
def test_compiled_training_loses_what_plain_training_does(settings: Settings) -> None:
    losses = []
    for compiled in (False, True):
        one = replace(settings, out=settings.out.with_name(f"compiled-{compiled}"), steps=4, compiled=compiled)
        run(one, Console(quiet=True))
        losses.append(torch.tensor(state(one)["losses"]))
    torch.testing.assert_close(losses[0], losses[1], rtol=0.02, atol=0.0)
