"""The painter's data: what captions say is what is drawn, and what is held out is never trained on."""

import random
import subprocess
import sys
from itertools import islice

import numpy as np
import pytest

from stages.diffusion.painter.captions import (
    HELD_OUT_BACKGROUNDS,
    HELD_OUT_OPENINGS,
    HELD_OUT_PAIRS,
    Caption,
    Captions,
    Relation,
    Split,
)
from stages.diffusion.painter.scenes import CHARACTERS, COLOURS, SHAPES, place, render
from tests.painter.checker import judge


def drawn(caption: Caption, seed: int = 0) -> np.ndarray:
    return render(caption.layout.background, place(caption.layout, random.Random(seed)))


def several(split: Split, count: int, seed: int = 0) -> list[Caption]:
    source = Captions(split, seed)
    return [source.draw() for _ in range(count)]


def test_the_same_seed_gives_the_same_captions_and_the_same_pixels() -> None:
    first, again, other = (several(Split.TRAIN, 40, seed) for seed in (1, 1, 2))
    assert first == again
    assert first != other
    assert all(np.array_equal(drawn(a, 5), drawn(b, 5)) for a, b in zip(first, again, strict=True))


def test_training_never_says_what_is_held_out() -> None:
    for caption in several(Split.TRAIN, 3000):
        assert not any((one.colour, one.shape) in HELD_OUT_PAIRS for one in caption.layout.things)
        assert not any(caption.text.lower().startswith(opening) for opening in HELD_OUT_OPENINGS)
        assert "backdrop" not in caption.text
    assert any("backdrop" in words for words in HELD_OUT_BACKGROUNDS)


def test_captions_for_tests_use_held_out_pairs_and_phrasings() -> None:
    tests = several(Split.TEST, 1000)
    seen = {(one.colour, one.shape) for caption in tests for one in caption.layout.things}
    assert seen >= HELD_OUT_PAIRS
    assert any("backdrop" in caption.text for caption in tests)
    assert not {caption.text for caption in tests} & {caption.text for caption in several(Split.TRAIN, 3000)}


def test_every_colour_shape_character_and_relation_is_trained_on() -> None:
    train = several(Split.TRAIN, 4000)
    things = [one for caption in train for one in caption.layout.things]
    assert {one.colour for one in things} == set(COLOURS)
    assert {one.shape for one in things} == {*SHAPES, *CHARACTERS}
    assert {caption.relation for caption in train} == {None, *Relation}
    assert {caption.layout.background for caption in train} == set(COLOURS)


def test_the_checker_finds_what_was_drawn() -> None:
    captions = several(Split.TEST, 150)
    wrong = [caption.text for caption in captions if not judge(drawn(caption), caption).all_right]
    assert len(wrong) <= 1, wrong  # large things may touch


@pytest.mark.parametrize("kind", ["one", "two"])
def test_the_checker_refuses_the_picture_of_another_caption(kind: str) -> None:
    source = Captions(Split.TEST, 3)
    captions = list(islice((source.draw(kind) for _ in range(40)), 40))
    pictures = [drawn(caption) for caption in captions]
    fooled = [
        n
        for n, caption in enumerate(captions)
        if judge(pictures[n - 1], caption).all_right and n and caption != captions[n - 1]
    ]
    assert not fooled


def test_the_checker_refuses_noise_and_an_empty_picture() -> None:
    caption = Captions(Split.TEST, 0).draw("one")
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    plain = np.full((64, 64, 3), COLOURS[caption.layout.background], dtype=np.uint8)
    assert not any(judge(noise, caption).things)
    assert not any(judge(plain, caption).things)


def test_scenes_and_captions_need_no_torch() -> None:
    code = "import sys, stages.diffusion.painter.captions; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
