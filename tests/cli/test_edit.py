"""`omni-master launch DEPLOY --prompt TEXT --image FILE --mask FILE`, on a real inpainting pipeline in a process of its own."""

from pathlib import Path

import numpy as np
import torch
from diffusers import StableDiffusionInpaintPipeline
from PIL import Image

from tests.cli.commands import HEADER, MASTER, run

INPAINT = (
    HEADER
    + """
stages:
  painter:
    kind: diffusion
    model: {path: sd, pipeline_class: StableDiffusionInpaintPipeline, dtype: float32}
    threads: 1
    defaults: {num_inference_steps: 4, strength: 0.8, seed: 3}
    output: image
"""
)


def test_an_edit_is_what_the_stock_pipeline_makes_of_the_same_files(models: Path, no_leftovers: None) -> None:
    rng = np.random.default_rng(1)
    photo = Image.fromarray(rng.integers(0, 256, (64, 64, 3), dtype=np.uint8))
    mask = Image.new("L", (64, 64), 0)
    mask.paste(255, (32, 0, 64, 64))
    photo.save(models / "photo.png")
    mask.save(models / "mask.png")
    (models / "inpaint.yaml").write_text(INPAINT)
    command = (MASTER, "launch", "inpaint.yaml", "--prompt", "a sofa", "--image", "photo.png", "--mask", "mask.png")
    done = run(*command, "--save", "edited.png", cwd=models)
    assert done.status == 0, done.err
    pipe = StableDiffusionInpaintPipeline.from_pretrained(models / "sd", local_files_only=True)
    pipe.set_progress_bar_config(disable=True)
    expected = pipe(
        "a sofa", image=photo, mask_image=mask, num_inference_steps=4, strength=0.8,
        generator=torch.Generator().manual_seed(3),
    ).images[0]  # fmt: skip
    drawn = np.asarray(Image.open(models / "edited.png")).astype(int)
    assert np.abs(drawn - np.asarray(expected)).max() <= 1


def test_a_picture_that_cannot_be_read_is_refused_before_anything_starts(models: Path) -> None:
    (models / "inpaint.yaml").write_text(INPAINT)
    (models / "words.png").write_text("no picture")
    for more, words in (
        (("--image", "missing.png"), "--image: No such file or directory"),
        (("--image", "words.png"), "--image: this is not a whole png, jpeg or webp file"),
    ):
        done = run(MASTER, "launch", "inpaint.yaml", "--prompt", "x", *more, cwd=models)
        assert done.status == 2
        assert words in done.err
    done = run(MASTER, "launch", "inpaint.yaml", "--image", "words.png", cwd=models)
    assert done.status == 2
    assert "has no effect without --prompt" in done.err
