"""What a training run shows of itself: its loss as a curve, and pictures of fixed prompts. PNG, drawn with Pillow."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import torch
from PIL import Image, ImageDraw

from stages.diffusion.painter.kv import Thinker
from stages.diffusion.painter.pipeline import PainterPipeline

SAMPLES: Final = (
    "a red star above a blue square",
    "a sunny yellow circle on a navy background",
    "a green heart",
    "a crimson disc to the left of a white triangle on gray",
    "a purple ring on a pink background",
    "an orange letter A",
    "a small black cross in the top left corner",
    "an azure crescent moon on black",
    "a turquoise diamond below an orange oval",
    "please draw a big brown square on yellow",
    "a pink heart, a green star and a blue circle",
    "a white 7 on a blue background",
    "a yellow triangle next to a red circle on a black background",
    "a chocolate brown donut against a yellow background",
    "an emerald star in the bottom right corner",
    "a violet box on top of a golden ball on white",
)


def sample_sheet(pipe: PainterPipeline, thinker: Thinker, prompts: Sequence[str], file: Path, *, zoom: int = 2) -> None:
    """Pictures of `prompts`, four in a row, each with the seed 0."""
    empty = thinker.cached("")
    pictures = [
        pipe(thinker.cached(prompt), empty, generator=torch.Generator("cpu").manual_seed(0)).images[0]
        for prompt in prompts
    ]
    side = pictures[0].width * zoom + 4
    sheet = Image.new("RGB", (4 * side + 4, math.ceil(len(pictures) / 4) * side + 4), "#888")
    for n, picture in enumerate(pictures):
        large = picture.resize((side - 4, side - 4), Image.Resampling.NEAREST)
        sheet.paste(large, (4 + n % 4 * side, 4 + n // 4 * side))
    sheet.save(file)


def loss_curve(losses: Sequence[float], file: Path, *, size: tuple[int, int] = (900, 360)) -> None:
    """The loss (log scale) over the steps, as means of 1/200 of the run."""
    width, height = size
    image = Image.new("RGB", size, "white")
    draw = ImageDraw.Draw(image)
    each = max(1, len(losses) // 200)
    means = [sum(part) / len(part) for part in (losses[n : n + each] for n in range(0, len(losses), each)) if part]
    logs = [math.log10(max(mean, 1e-6)) for mean in means]
    if len(logs) > 1:
        low, high = min(logs), max(max(logs), min(logs) + 1e-3)
        points = [
            (60 + (width - 80) * n / (len(logs) - 1), 20 + (height - 60) * (high - log) / (high - low))
            for n, log in enumerate(logs)
        ]
        draw.line(points, fill="#2060d0", width=2)
        draw.text((4, 16), f"{10**high:.4f}", fill="black")
        draw.text((4, height - 46), f"{10**low:.4f}", fill="black")
    draw.line([(60, 20), (60, height - 40), (width - 20, height - 40)], fill="black")
    draw.text((60, height - 30), f"loss over {len(losses)} steps", fill="black")
    image.save(file)
