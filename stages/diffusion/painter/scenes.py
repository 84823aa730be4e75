"""Scenes and how they are drawn: flat coloured shapes and single characters on a flat background. Pillow and numpy only.

A `Layout` says what a caption says: which things, where roughly, on which background. `place` chooses the rest (exact
places and sizes) from a seeded generator, `render` draws. Invariant: the same layout and seed give the same pixels.
"""

import math
import random
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from typing import Final

import numpy as np
from PIL import Image, ImageDraw, ImageFont

SIDE: Final = 64
"""Width and height of a picture in pixels."""

_SCALE: Final = 4  # drawn that much larger, then averaged, so that edges are smooth

COLOURS: Final[dict[str, tuple[int, int, int]]] = {
    "red": (220, 35, 40),
    "orange": (245, 135, 30),
    "yellow": (245, 215, 50),
    "green": (40, 165, 65),
    "turquoise": (50, 200, 200),
    "blue": (45, 95, 230),
    "navy": (20, 30, 95),
    "purple": (135, 55, 175),
    "pink": (250, 140, 185),
    "brown": (125, 75, 35),
    "black": (15, 15, 15),
    "gray": (140, 140, 140),
    "white": (250, 250, 250),
}

SHAPES: Final = ("circle", "square", "triangle", "star", "heart", "ring", "cross", "crescent", "diamond", "oval")

CHARACTERS: Final = "ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"

TOO_CLOSE: Final = frozenset({frozenset({"black", "navy"}), frozenset({"brown", "black"}), frozenset({"navy", "blue"})})
"""Pairs that are never put on one another or beside one another: they are hard to tell apart."""


class Size(StrEnum):
    SMALL = "small"
    MEDIUM = "medium"
    LARGE = "large"


@dataclass(frozen=True, slots=True)
class Thing:
    """`shape` is one of `SHAPES` or one character of `CHARACTERS`."""

    colour: str
    shape: str
    size: Size = Size.MEDIUM


@dataclass(frozen=True, slots=True)
class Layout:
    """Things with their centres, in parts of the picture's side from its top left corner; `radius` in pixels is a medium
    thing's, `jitter` in pixels is how far a centre may be off."""

    things: tuple[Thing, ...]
    centres: tuple[tuple[float, float], ...]
    background: str
    radius: float
    jitter: float


@dataclass(frozen=True, slots=True)
class Placed:
    """A thing where it is drawn; `x`, `y`, `radius` in pixels."""

    thing: Thing
    x: float
    y: float
    radius: float


_GROWTH: Final = {Size.SMALL: 0.62, Size.MEDIUM: 1.0, Size.LARGE: 1.4}


def place(layout: Layout, rng: random.Random) -> list[Placed]:
    """Exact places: each at most `jitter` from where the layout has it, or as near as it fits into the picture."""
    placed = []
    for thing, (x, y) in zip(layout.things, layout.centres, strict=True):
        radius = layout.radius * _GROWTH[thing.size] * rng.uniform(0.93, 1.07)
        low, high = radius + 1.5, SIDE - radius - 1.5
        at = [
            min(max(part * SIDE + rng.uniform(-layout.jitter, layout.jitter), low), high) if low < high else SIDE / 2
            for part in (x, y)
        ]
        placed.append(Placed(thing, at[0], at[1], radius))
    return placed


def render(background: str, placed: list[Placed]) -> np.ndarray[tuple[int, int, int], np.dtype[np.uint8]]:
    """uint8 (SIDE, SIDE, 3)."""
    image = Image.new("RGB", (SIDE * _SCALE, SIDE * _SCALE), COLOURS[background])
    draw = ImageDraw.Draw(image)
    for one in placed:
        _draw(draw, one, COLOURS[background])
    return np.asarray(image.reduce(_SCALE))


def _draw(draw: ImageDraw.ImageDraw, one: Placed, behind: tuple[int, int, int]) -> None:
    x, y, r = one.x * _SCALE, one.y * _SCALE, one.radius * _SCALE
    colour = COLOURS[one.thing.colour]
    match one.thing.shape:
        case "circle":
            draw.ellipse([x - r, y - r, x + r, y + r], fill=colour)
        case "oval":
            draw.ellipse([x - r, y - 0.55 * r, x + r, y + 0.55 * r], fill=colour)
        case "square":
            draw.rectangle([x - 0.85 * r, y - 0.85 * r, x + 0.85 * r, y + 0.85 * r], fill=colour)
        case "triangle":
            draw.polygon([(x, y - r), (x - r, y + 0.8 * r), (x + r, y + 0.8 * r)], fill=colour)
        case "diamond":
            draw.polygon([(x, y - r), (x - 0.72 * r, y), (x, y + r), (x + 0.72 * r, y)], fill=colour)
        case "ring":
            draw.ellipse([x - r, y - r, x + r, y + r], outline=colour, width=round(0.38 * r))
        case "cross":
            draw.rectangle([x - 0.3 * r, y - r, x + 0.3 * r, y + r], fill=colour)
            draw.rectangle([x - r, y - 0.3 * r, x + r, y + 0.3 * r], fill=colour)
        case "star":
            tips = [(r if n % 2 == 0 else 0.42 * r, n * math.pi / 5) for n in range(10)]
            draw.polygon([(x + d * math.sin(a), y - d * math.cos(a)) for d, a in tips], fill=colour)
        case "heart":
            draw.ellipse([x - r, y - 0.85 * r, x + 0.05 * r, y + 0.2 * r], fill=colour)
            draw.ellipse([x - 0.05 * r, y - 0.85 * r, x + r, y + 0.2 * r], fill=colour)
            draw.polygon(
                [(x - 0.93 * r, y - 0.08 * r), (x, y - 0.3 * r), (x + 0.93 * r, y - 0.08 * r), (x, y + r)], fill=colour
            )
        case "crescent":
            draw.ellipse([x - r, y - r, x + r, y + r], fill=colour)
            draw.ellipse([x - 0.45 * r, y - 0.85 * r, x + 1.25 * r, y + 0.85 * r], fill=behind)
        case character:
            draw.text((x, y), character, fill=colour, font=_font(round(2.4 * r)), anchor="mm", stroke_width=0.03 * r)


@cache
def _font(size: int) -> ImageFont.FreeTypeFont:
    font = ImageFont.load_default(size)  # comes with Pillow
    assert isinstance(font, ImageFont.FreeTypeFont)
    return font
