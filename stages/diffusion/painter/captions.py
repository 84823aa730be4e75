"""Captions: many ways to say a scene. Endless and seeded; no model, no torch.

`Captions(split)` gives pairs of a text and the `Layout` that it describes. What is held out from training stands in one
place, `HELD_OUT_PAIRS` and the phrasings `HELD_OUT_FORMS`, `HELD_OUT_OPENINGS` and `HELD_OUT_BACKGROUNDS`: the training split
never says them, the test split always says at least one (but for captions of places and of characters). Where a caption says nothing: one thing is in the middle, two stand side by side in the
order of the caption, and the background is white.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from stages.diffusion.painter.scenes import CHARACTERS, COLOURS, SHAPES, TOO_CLOSE, Layout, Size, Thing

COLOUR_WORDS: Final[dict[str, tuple[str, ...]]] = {
    "red": ("red", "red", "crimson", "scarlet", "ruby red", "bright red", "cherry red"),
    "orange": ("orange", "orange", "tangerine", "bright orange", "pumpkin orange"),
    "yellow": ("yellow", "yellow", "sunny yellow", "lemon yellow", "bright yellow", "golden"),
    "green": ("green", "green", "emerald", "grass green", "forest green", "leaf green"),
    "turquoise": ("turquoise", "turquoise", "cyan", "teal", "aqua"),
    "blue": ("blue", "blue", "royal blue", "cobalt blue", "azure", "bright blue"),
    "navy": ("navy", "navy blue", "dark blue", "midnight blue"),
    "purple": ("purple", "purple", "violet", "plum", "grape purple"),
    "pink": ("pink", "pink", "rose pink", "light pink", "bubblegum pink"),
    "brown": ("brown", "brown", "chocolate brown", "chestnut brown", "coffee brown"),
    "black": ("black", "black", "jet black", "pitch black"),
    "gray": ("gray", "grey", "medium gray", "slate gray"),
    "white": ("white", "white", "snow white", "pure white"),
}

SHAPE_WORDS: Final[dict[str, tuple[str, ...]]] = {
    "circle": ("circle", "circle", "disc", "dot", "ball"),
    "square": ("square", "square", "box"),
    "triangle": ("triangle", "triangle", "three-sided shape"),
    "star": ("star", "star", "five-pointed star"),
    "heart": ("heart", "heart", "love heart"),
    "ring": ("ring", "ring", "hoop", "donut"),
    "cross": ("cross", "cross", "plus sign"),
    "crescent": ("crescent", "crescent moon", "moon"),
    "diamond": ("diamond", "diamond", "rhombus"),
    "oval": ("oval", "oval", "ellipse"),
}

SIZE_WORDS: Final[dict[Size, tuple[str, ...]]] = {
    Size.SMALL: ("small", "tiny", "little"),
    Size.MEDIUM: ("", "", "medium-sized"),
    Size.LARGE: ("large", "big", "huge"),
}

HELD_OUT_PAIRS: Final = frozenset(
    {
        ("red", "heart"), ("yellow", "star"), ("blue", "crescent"), ("green", "triangle"), ("purple", "ring"),
        ("orange", "square"), ("pink", "circle"), ("turquoise", "diamond"), ("brown", "cross"), ("gray", "oval"),
        ("white", "star"), ("navy", "square"), ("black", "heart"),
    }
)  # fmt: skip
"""Colour and shape never seen together in training."""


class Split(StrEnum):
    TRAIN = "train"
    TEST = "test"


class Relation(StrEnum):
    """Where the first of two things is, seen from the second."""

    LEFT = "left"
    RIGHT = "right"
    ABOVE = "above"
    BELOW = "below"


# {} takes the things; b is the background's words. The forms of a kind that are held out are marked.
ONE: Final = (
    "{0}",
    "draw {0}",
    "a picture of {0}",
    "please paint {0}",
    "{0}, flat colors",
    "an image showing {0}",
    "can you draw {0} for me?",
    "I want {0}",
    "a simple drawing of {0}",
    "just {0}",
    "show me {0}",
    "there is {0}",
    "paint me {0}, please",
    "a canvas with {0} painted",
)
PLACES: Final[dict[str, tuple[tuple[float, float], tuple[str, ...]]]] = {
    "middle": ((0.5, 0.5), ("in the middle", "in the center", "at the center of the picture", "in the centre")),
    "left": ((0.27, 0.5), ("on the left", "on the left side", "at the left edge")),
    "right": ((0.73, 0.5), ("on the right", "on the right side", "at the right edge")),
    "top": ((0.5, 0.27), ("at the top", "in the upper part", "at the top of the picture")),
    "bottom": ((0.5, 0.73), ("at the bottom", "in the lower part", "at the bottom of the picture")),
    "top left": ((0.27, 0.27), ("in the top left corner", "in the upper left", "in the top left")),
    "top right": ((0.73, 0.27), ("in the top right corner", "in the upper right", "in the top right")),
    "bottom left": ((0.27, 0.73), ("in the bottom left corner", "in the lower left", "in the bottom left")),
    "bottom right": ((0.73, 0.73), ("in the bottom right corner", "in the lower right", "in the bottom right")),
}
TWO: Final[dict[Relation, tuple[str, ...]]] = {
    Relation.LEFT: (
        "{0} left of {1}",
        "{0} to the left of {1}",
        "{0} and {1}",
        "{0} on the left side of {1}",
        "{0} next to {1}",
        "{0} on the left and {1} on the right",
        "{1} with {0} to its left",
        "{0} beside {1}",
        "on the left {0}, on the right {1}",
        "{1} on the right and {0} on the left",
        "left: {0}; right: {1}",
    ),
    Relation.RIGHT: (
        "{0} right of {1}",
        "{0} to the right of {1}",
        "{0} on the right side of {1}",
        "{0} on the right and {1} on the left",
        "{1} with {0} to its right",
        "on the right {0}, on the left {1}",
        "{1} on the left and {0} on the right",
        "right: {0}; left: {1}",
    ),
    Relation.ABOVE: (
        "{0} above {1}",
        "{0} over {1}",
        "{0} on top of {1}",
        "{0} at the top and {1} at the bottom",
        "{1} with {0} above it",
        "above {1} there is {0}",
        "{0} hovering above {1}",
        "{0} up above {1}",
        "top: {0}; bottom: {1}",
    ),
    Relation.BELOW: (
        "{0} below {1}",
        "{0} under {1}",
        "{0} beneath {1}",
        "{0} at the bottom and {1} at the top",
        "{1} with {0} below it",
        "below {1} there is {0}",
        "{0} underneath {1}",
        "{0} down below {1}",
        "bottom: {0}; top: {1}",
    ),
}
THREE: Final = (
    ("{0}, {1} and {2}", True),
    ("{0}, {1}, and {2} in a row", True),
    ("from left to right: {0}, {1}, {2}", True),
    ("{0} next to {1} next to {2}", True),
    ("{0} above {1} above {2}", False),
    ("from top to bottom: {0}, {1}, {2}", False),
    ("a stack of {0}, {1} and {2}", False),
    ("a column with {0}, {1} and {2}", False),
)
"""With whether they stand in a row (else in a column)."""
OPENINGS: Final = (
    "",
    "",
    "",
    "draw ",
    "a picture of ",
    "please paint ",
    "show me ",
    "I want to see ",
    "an image with ",
)
HELD_OUT_OPENINGS: Final = ("could you make ", "a small artwork showing ", "sketch ")
BACKGROUNDS: Final = (
    " on a {} background",
    " on {}",
    ", {} background",
    " against a {} background",
    " in front of {}",
    " with a {} background",
    ", the background is {}",
    " on a {} backdrop",
    " over a {} background",
    " with a backdrop of {}",
    ", with {} behind it",
    " with everything else {}",
    ", {} all around",
    " set against {}",
    ", the rest is {}",
    " against a {} backdrop",
    " in front of a {} backdrop",
    " on a plain {} backdrop",
    " over a plain {} background",
    " over a {} canvas",
    " on a {} canvas",
    " with {} in the background",
)
HELD_OUT_BACKGROUNDS: Final = (" over a {} backdrop", ", everything behind is {}", " upon a field of {}")
HELD_OUT_FORMS: Final = frozenset(
    {
        "just {0}", "a canvas with {0} painted",
        "{0} beside {1}", "{1} on the right and {0} on the left", "{1} on the left and {0} on the right",
        "{0} up above {1}", "{0} down below {1}", "{0} underneath {1}", "{0} hovering above {1}",
        "{0} next to {1} next to {2}", "a column with {0}, {1} and {2}",
    }
)  # fmt: skip

NEVER_HELD_OUT: Final = ("placed", "character")
"""Kinds of captions of which training may say what the test split says."""

_KINDS: Final[dict[str, float]] = {"one": 0.32, "placed": 0.11, "character": 0.23, "two": 0.27, "three": 0.07}
"""The share of each kind of caption."""

_COLOUR_LAST: Final = {"one": 0.1, "placed": 0.08, "character": 0.3}
"""How often such a caption says "a star in red"."""


@dataclass(frozen=True, slots=True)
class Caption:
    """`relation` is set for two things; `kind` is one of one, placed, character, two, three."""

    text: str
    layout: Layout
    kind: str
    relation: Relation | None = None


class Captions:
    """An endless, seeded source of captions of one split."""

    def __init__(self, split: Split, seed: int) -> None:
        self._held_out = split is Split.TEST
        self._rng = random.Random(f"{split}-{seed}")

    def draw(self, kind: str | None = None) -> Caption:
        """The next caption, of the given kind if one is given."""
        if kind is None:
            kind = self._rng.choices(list(_KINDS), list(_KINDS.values()))[0]
        while True:
            caption, held_out = self._attempt(kind)
            if held_out == self._held_out or (self._held_out and kind in NEVER_HELD_OUT):
                return caption

    def _attempt(self, kind: str) -> tuple[Caption, bool]:
        """A caption of everything, and whether something in it is held out."""
        rng = self._rng
        background, said = self._background()
        count = {"two": 2, "three": 3}.get(kind, 1)
        things = self._things(count, background, characters=kind == "character", sized=kind != "three")
        held_out = any((one.colour, one.shape) in HELD_OUT_PAIRS for one in things)
        words = [self._words(one, colour_last=rng.random() < _COLOUR_LAST.get(kind, 0.0)) for one in things]
        relation = None
        if kind == "two":
            relation = rng.choice(list(Relation))
            form = rng.choice(TWO[relation])
        elif kind == "three":
            form, row = rng.choice(THREE)
        elif kind == "placed":
            place = rng.choice(list(PLACES))
            form = "{0} " + rng.choice(PLACES[place][1])
        else:
            form = rng.choice(ONE)
        opening = ""
        if kind not in ("one", "character"):
            opening = rng.choice(HELD_OUT_OPENINGS if self._held_out and rng.random() < 0.3 else OPENINGS)
        held_out = held_out or form in HELD_OUT_FORMS or opening in HELD_OUT_OPENINGS
        behind = ""
        if said:
            unseen = self._held_out and rng.random() < 0.25
            behind = rng.choice(HELD_OUT_BACKGROUNDS if unseen else BACKGROUNDS).format(
                rng.choice(COLOUR_WORDS[background])
            )
            held_out = held_out or unseen
        text = self._joined(opening + form.format(*words), behind)
        if kind == "two":
            assert relation is not None
            layout = _pair(things, background, relation)
        elif kind == "three":
            layout = _line(things, background, row=row)
        elif kind == "placed":
            layout = Layout(things, (PLACES[place][0],), background, 11.0, 2.0)
        else:
            layout = Layout(things, ((0.5, 0.5),), background, 17.0, 4.0)
        return Caption(text, layout, kind, relation), held_out

    def _background(self) -> tuple[str, bool]:
        """Its colour, and whether the caption says it."""
        if self._rng.random() < 0.36:
            return "white", False
        return self._rng.choice(list(COLOURS)), True

    def _things(self, count: int, background: str, *, characters: bool, sized: bool) -> tuple[Thing, ...]:
        rng = self._rng
        things: list[Thing] = []
        while len(things) < count:
            colour = rng.choice(list(COLOURS))
            taken = [background, *(one.colour for one in things)]
            if colour in taken or any(frozenset({colour, other}) in TOO_CLOSE for other in taken):
                continue
            size = rng.choice(list(Size)) if sized and rng.random() < 0.3 else Size.MEDIUM
            things.append(Thing(colour, rng.choice(CHARACTERS if characters else SHAPES), size))
        return tuple(things)

    def _words(self, thing: Thing, *, colour_last: bool) -> str:
        rng = self._rng
        if thing.shape in CHARACTERS:
            sorts = ("digit", "number") if thing.shape.isdigit() else ("letter", "letter", "capital")
            noun = rng.choice((*(f"{sort} {thing.shape}" for sort in sorts), f'"{thing.shape}"', thing.shape))
        else:
            noun = rng.choice(SHAPE_WORDS[thing.shape])
        size, colour = rng.choice(SIZE_WORDS[thing.size]), rng.choice(COLOUR_WORDS[thing.colour])
        parts = [size, noun, "in", colour] if colour_last else [size, colour, noun]
        text = " ".join(part for part in parts if part)
        if colour_last and thing.shape in CHARACTERS:
            return f"the {text}"
        return f"{'an' if text[0] in 'aeiou' else 'a'} {text}"

    def _joined(self, said: str, behind: str) -> str:
        rng = self._rng
        text = said + behind if not said.endswith(("?", ".")) else said[:-1] + behind + said[-1]
        if rng.random() < 0.3:
            text = text[0].upper() + text[1:]
        if rng.random() < 0.15 and text[-1] not in "?.":
            text += "."
        return text


def _pair(things: Sequence[Thing], background: str, relation: Relation) -> Layout:
    first, second = (0.28, 0.5), (0.72, 0.5)
    if relation in (Relation.ABOVE, Relation.BELOW):
        first, second = (0.5, 0.28), (0.5, 0.72)
    if relation in (Relation.RIGHT, Relation.BELOW):
        first, second = second, first
    return Layout(tuple(things), (first, second), background, 11.0, 2.0)


def _line(things: Sequence[Thing], background: str, *, row: bool) -> Layout:
    along = (0.2, 0.5, 0.8)
    centres = tuple((part, 0.5) if row else (0.5, part) for part in along)
    return Layout(tuple(things), centres, background, 8.2, 1.0)
