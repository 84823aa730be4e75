"""Says what is in a picture: flat things on a flat background, by colour and by outline. numpy (and Pillow, to stretch); it knows no model.

Things are found by their colour: pixels nearer to it than to any other of the palette, in connected pieces that are more
than an edge. A thing's outline is compared with shapes that are given here as formulas, and with characters as a font has
them; the one that covers it best names it, if it covers it well.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from stages.diffusion.painter.captions import Caption, Relation
from stages.diffusion.painter.scenes import CHARACTERS, COLOURS, SHAPES

Pixels = np.ndarray
"""uint8 (height, width, 3)."""

GRID: Final = 48
LEAST_AREA: Final = 14
LEAST_COVER: Final = 0.6
FAR: Final = 10.0
"""How far a thing may be from its place in pixels, up or down, left or right; places of captions are 14 apart."""

NEAR: Final = 95.0
"""How far from its colour a pixel may be, in RGB."""


@dataclass(frozen=True, slots=True)
class Found:
    """A thing: its centre and area in pixels, and how well `shape` covers it (intersection over union)."""

    colour: str
    shape: str
    x: float
    y: float
    area: int
    cover: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """`things` says of each thing of the caption whether it is there, in colour and shape; `relation` is None where the
    caption has no two things, and else says whether the largest things of their colours stand so, of whatever shape; `places`
    says whether each thing that is there is about where the layout has it. `extra` counts further things."""

    background: bool
    things: tuple[bool, ...]
    relation: bool | None
    places: bool
    extra: int

    @property
    def all_right(self) -> bool:
        return self.background and all(self.things) and self.relation is not False and self.places and not self.extra


def judge(picture: Pixels, caption: Caption) -> Verdict:
    """How the picture fits the caption."""
    behind = background_of(picture)
    found = things_in(picture, behind)
    characters = caption.kind == "character"
    matched: list[Found | None] = []
    left = list(found)
    for thing in caption.layout.things:
        shape = thing.shape
        fits = [one for one in left if one.colour == thing.colour and _looks(picture, behind, one, characters) == shape]
        best = max(fits, key=lambda one: one.area, default=None)
        if best is not None:
            left.remove(best)
        matched.append(best)
    relation = None
    if caption.relation is not None:
        relation = _holds(caption.relation, caption.layout.things[0].colour, caption.layout.things[1].colour, found)
    verdicts = tuple(one is not None for one in matched)
    places = all(
        one is None or max(abs(one.x - x * picture.shape[1]), abs(one.y - y * picture.shape[0])) < FAR
        for one, (x, y) in zip(matched, caption.layout.centres, strict=True)
    )
    return Verdict(behind == caption.layout.background, verdicts, relation, places, len(left) if all(verdicts) else 0)


def _looks(picture: Pixels, behind: str, one: Found, character: bool) -> str:
    return character_of(picture, behind, one) if character else one.shape


def background_of(picture: Pixels) -> str:
    """The colour that most of the outermost two rows and columns have."""
    nearest, _ = _nearest(picture)
    edge = np.concatenate([nearest[:2].ravel(), nearest[-2:].ravel(), nearest[:, :2].ravel(), nearest[:, -2:].ravel()])
    return list(COLOURS)[int(np.bincount(edge, minlength=len(COLOURS)).argmax())]


def things_in(picture: Pixels, behind: str) -> list[Found]:
    """All things, the largest first."""
    nearest, distance = _nearest(picture)
    found = []
    for number, colour in enumerate(COLOURS):
        if colour == behind:
            continue
        mask = (nearest == number) & (distance < NEAR)
        for piece in _pieces(mask):
            if piece.sum() < LEAST_AREA or not _core(piece):
                continue
            outline = _outline(picture, piece, colour, behind)
            shape, cover = _best(outline, _shapes())
            rows, columns = np.nonzero(outline)
            middle = (float(columns.min() + columns.max()) / 2, float(rows.min() + rows.max()) / 2)
            found.append(Found(colour, shape if cover >= LEAST_COVER else "?", *middle, int(outline.sum()), cover))
    return sorted(found, key=lambda one: -one.area)


def character_of(picture: Pixels, behind: str, one: Found) -> str:
    """The character that a thing looks like most."""
    nearest, distance = _nearest(picture)
    mask = (nearest == list(COLOURS).index(one.colour)) & (distance < NEAR)
    name, cover = _best(_outline(picture, mask, one.colour, behind), _characters())
    return name if cover >= LEAST_COVER else "?"


def _holds(relation: Relation, first: str, second: str, found: Sequence[Found]) -> bool:
    """Whether the largest thing of the first colour is where the relation says, seen from the second's."""
    one = next((thing for thing in found if thing.colour == first), None)
    other = next((thing for thing in found if thing.colour == second), None)
    if one is None or other is None:
        return False
    right, down = one.x - other.x, one.y - other.y
    return {
        Relation.LEFT: -right > abs(down),
        Relation.RIGHT: right > abs(down),
        Relation.ABOVE: -down > abs(right),
        Relation.BELOW: down > abs(right),
    }[relation]


def _nearest(picture: Pixels) -> tuple[np.ndarray, np.ndarray]:
    """For each pixel the number of the nearest colour, and how far it is."""
    palette = np.array(list(COLOURS.values()), dtype=np.float32)
    distances = np.linalg.norm(picture[:, :, None, :].astype(np.float32) - palette, axis=-1)
    return distances.argmin(axis=-1), distances.min(axis=-1)


def _pieces(mask: np.ndarray) -> list[np.ndarray]:
    """Connected pieces, diagonals included."""
    left = mask.copy()
    pieces = []
    while left.any():
        piece = np.zeros_like(left)
        piece[tuple(np.argwhere(left)[0])] = True
        while True:
            grown = _grown(piece) & left
            if grown.sum() == piece.sum():
                break
            piece = grown
        pieces.append(piece)
        left &= ~piece
    return pieces


def _grown(mask: np.ndarray) -> np.ndarray:
    padded = np.pad(mask, 1)
    high, wide = mask.shape
    return np.any([padded[y : y + high, x : x + wide] for y in range(3) for x in range(3)], axis=0)


def _core(piece: np.ndarray) -> bool:
    """Whether three pixels at least have the piece on all four sides: a blended edge is one pixel wide."""
    padded = np.pad(piece, 1).astype(int)
    sides = padded[:-2, 1:-1] + padded[2:, 1:-1] + padded[1:-1, :-2] + padded[1:-1, 2:]
    return bool((piece & (sides == 4)).sum() >= 3)


def _outline(picture: Pixels, piece: np.ndarray, colour: str, behind: str) -> np.ndarray:
    """Where the thing covers at least half of a pixel, its blended edge included."""
    fore, back = np.array(COLOURS[colour], dtype=np.float32), np.array(COLOURS[behind], dtype=np.float32)
    along = (picture.astype(np.float32) - back) @ (fore - back) / float((fore - back) @ (fore - back))
    off = np.linalg.norm(picture - back - along[:, :, None] * (fore - back), axis=-1)
    return (along > 0.5) & (off < 60) & _grown(piece) | piece


def _best(outline: np.ndarray, known: dict[str, tuple[np.ndarray, float]]) -> tuple[str, float]:
    """The known form that covers the outline best, both stretched to the same box; a box of other proportions costs."""
    rows, columns = np.nonzero(outline)
    cut = outline[rows.min() : rows.max() + 1, columns.min() : columns.max() + 1]
    proportion = cut.shape[1] / cut.shape[0]
    scaled = _stretched(cut)
    covers = {}
    for name, (form, usual) in known.items():
        cover = float((form & scaled).sum() / (form | scaled).sum())
        covers[name] = cover * min(1.0, min(proportion / usual, usual / proportion) + 0.15)
    name = max(covers, key=lambda one: covers[one])
    return name, covers[name]


def _stretched(mask: np.ndarray) -> np.ndarray:
    image = Image.fromarray(mask.astype(np.uint8) * 255).resize((GRID, GRID), Image.Resampling.BILINEAR)
    return np.asarray(image) > 127


@cache
def _shapes() -> dict[str, tuple[np.ndarray, float]]:
    """Of each shape its form in its own box, and the box's width over its height."""
    return {name: _boxed(_inside(name)) for name in SHAPES}


@cache
def _characters() -> dict[str, tuple[np.ndarray, float]]:
    forms = {}
    for character in CHARACTERS:
        image = Image.new("L", (300, 300))
        ImageDraw.Draw(image).text((150, 150), character, fill=255, font=ImageFont.load_default(200), anchor="mm")
        forms[character] = _boxed(np.asarray(image) > 127)
    return forms


def _boxed(mask: np.ndarray) -> tuple[np.ndarray, float]:
    rows, columns = np.nonzero(mask)
    cut = mask[rows.min() : rows.max() + 1, columns.min() : columns.max() + 1]
    return _stretched(cut), cut.shape[1] / cut.shape[0]


def _inside(name: str) -> np.ndarray:
    """A shape as a formula, on a fine grid of -1 to 1; y grows downwards."""
    y, x = np.mgrid[-1:1:201j, -1:1:201j]
    far, angle = np.hypot(x, y), np.arctan2(x, -y)
    fifth = 2 * np.pi / 5
    turn = np.abs((angle + fifth / 2) % fifth - fifth / 2)  # from the nearest tip of a star
    over, up = 0.42 * np.cos(np.pi / 5) - 1, 0.42 * np.sin(np.pi / 5)  # from a tip to the notch beside it
    edge = up / (np.cos(turn) * up - np.sin(turn) * over)
    formulas: dict[str, Callable[[], np.ndarray]] = {
        "circle": lambda: far <= 1,
        "oval": lambda: np.hypot(x, y / 0.55) <= 1,
        "square": lambda: (np.abs(x) <= 0.85) & (np.abs(y) <= 0.85),
        "triangle": lambda: (y <= 0.8) & (np.abs(x) <= (y + 1) / 1.8),
        "diamond": lambda: np.abs(x) / 0.72 + np.abs(y) <= 1,
        "ring": lambda: (far <= 1) & (far >= 0.62),
        "cross": lambda: (np.abs(x) <= 0.3) | (np.abs(y) <= 0.3),
        "star": lambda: far <= edge,
        "heart": lambda: (
            (np.hypot(np.abs(x) - 0.48, y + 0.33) <= 0.52) | ((np.abs(x) <= (1 - y) * 0.87) & (y >= -0.15))
        ),
        "crescent": lambda: (far <= 1) & (np.hypot(x - 0.4, y) > 0.85),
    }
    return formulas[name]()
