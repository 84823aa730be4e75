"""The weights that are shipped draw as well as their card says, and only because of the keys and values that they get."""

import json
from pathlib import Path

import pytest

from stages.demo.models import SHIPPED
from stages.diffusion.engine import DiffusionEngine
from stages.diffusion.painter.kv import Thinker
from stages.diffusion.painter.train import LAYERS, load_thinker
from tests.painter.held_out import Scores, held_out_captions, load_painter, measure, of_another_caption, zeroed

COUNT = 64
MEASURED: Path = SHIPPED["painter"] / "measured.json"
"""What `tests.bench.bench_painter --write` found with many more captions."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def thinker() -> Thinker:
    return load_thinker("demo://smollm2-135m-instruct", LAYERS)


@pytest.fixture(scope="module")
def engine() -> DiffusionEngine:
    return load_painter("demo://painter")


@pytest.fixture(scope="module")
def own(engine: DiffusionEngine, thinker: Thinker) -> Scores:
    scores = measure(engine, thinker, held_out_captions(COUNT, seed=1))
    print(scores.row())
    return scores


def test_held_out_captions_are_drawn_as_well_as_the_card_says(own: Scores) -> None:
    """Three standard errors of so small a sample are allowed for."""
    card = json.loads(MEASURED.read_text())
    counts = {"one": COUNT // 2, "two": COUNT, "relation": COUNT // 2, "background": COUNT}
    for name, count in counts.items():
        share = card[name]
        assert getattr(own, name) >= share - 3 * (share * (1 - share) / count) ** 0.5, name


@pytest.mark.parametrize("control", [of_another_caption, zeroed])
def test_without_its_own_keys_and_values_a_caption_is_not_drawn(
    control: object, own: Scores, engine: DiffusionEngine, thinker: Thinker
) -> None:
    scores = measure(engine, thinker, held_out_captions(COUNT // 2, seed=1), control)
    print(scores.row())
    assert scores.background < own.background / 2
    assert scores.whole < max(own.whole / 4, 0.05)
