"""The painter's data: what captions say is what is drawn, and what is held out is never trained on."""

import random
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import islice

import numpy as np
import pytest

from stages.diffusion.painter.captions import (
    COLOUR_WORDS,
    HELD_OUT_OPENINGS,
    HELD_OUT_PAIRS,
    NEVER_HELD_OUT,
    Caption,
    Captions,
    Relation,
    Split,
)
from stages.diffusion.painter.scenes import CHARACTERS, COLOURS, SHAPES, Layout, Thing, place, render
from tests.painter.checker import judge

_COLOUR = "|".join(word for words in COLOUR_WORDS.values() for word in words)
SAID_ONLY_IN_TESTS = (
    *("^just ", "^a canvas with ", " beside ", " up above ", " down below ", " underneath ", " hovering above "),
    *(
        " next to .* next to ",
        "a column with ",
        f"over a (?:{_COLOUR}) backdrop",
        "everything behind is",
        "upon a field of",
    ),
)


def drawn(caption: Caption, seed: int = 0) -> np.ndarray:
    return pictured(caption.layout, seed)


def pictured(layout: Layout, seed: int = 0) -> np.ndarray:
    return render(layout.background, place(layout, random.Random(seed)))


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
        assert not any(re.search(words, caption.text, re.IGNORECASE) for words in SAID_ONLY_IN_TESTS), caption.text


def test_captions_for_tests_use_held_out_pairs_and_phrasings() -> None:
    tests = several(Split.TEST, 1000)
    seen = {(one.colour, one.shape) for caption in tests for one in caption.layout.things}
    assert seen >= HELD_OUT_PAIRS
    for words in SAID_ONLY_IN_TESTS:
        assert any(re.search(words, caption.text, re.IGNORECASE) for caption in tests), words
    said = {caption.text for caption in tests if caption.kind not in NEVER_HELD_OUT}
    assert not said & {caption.text for caption in several(Split.TRAIN, 3000)}


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


def unused(layout: Layout) -> str:
    """A colour that can be told from all that the layout has."""
    taken = {layout.background, *(one.colour for one in layout.things), "navy", "black", "brown"}
    return next(colour for colour in COLOURS if colour not in taken)


def with_first(layout: Layout, **change: str) -> Layout:
    return replace(layout, things=(replace(layout.things[0], **change), *layout.things[1:]))


CHANGES: dict[str, tuple[str, Callable[[Layout], Layout]]] = {
    "another colour": ("one", lambda layout: with_first(layout, colour=unused(layout))),
    "another shape": (
        "two",
        lambda layout: with_first(layout, shape=SHAPES[(SHAPES.index(layout.things[0].shape) + 3) % len(SHAPES)]),
    ),
    "another letter": (
        "character",
        lambda layout: with_first(layout, shape="E" if layout.things[0].shape != "E" else "O"),
    ),
    "another background": ("two", lambda layout: replace(layout, background=unused(layout))),
    "things that changed places": ("two", lambda layout: replace(layout, centres=layout.centres[::-1])),
    "a column for a row": ("three", lambda layout: replace(layout, centres=tuple((y, x) for x, y in layout.centres))),
    "another corner": ("placed", lambda layout: replace(layout, centres=((0.73, 0.27),))),
    "one thing more": (
        "one",
        lambda layout: replace(
            layout,
            things=(layout.things[0], Thing(unused(layout), "circle")),
            centres=((0.4, 0.4), (0.85, 0.85)),
            radius=8.0,
        ),
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_the_checker_sees_a_single_change(change: str) -> None:
    kind, changed = CHANGES[change]
    source = Captions(Split.TEST, 5)
    for _ in range(25):
        caption = source.draw(kind)
        if change != "another corner" or caption.layout.centres[0] != (0.73, 0.27):
            assert not judge(pictured(changed(caption.layout)), caption).all_right, caption.text


def test_the_checker_refuses_noise_and_an_empty_picture() -> None:
    caption = Captions(Split.TEST, 0).draw("one")
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    plain = np.full((64, 64, 3), COLOURS[caption.layout.background], dtype=np.uint8)
    assert not any(judge(noise, caption).things)
    assert not any(judge(plain, caption).things)


def test_scenes_and_captions_need_no_torch() -> None:
    code = "import sys, stages.diffusion.painter.captions; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
