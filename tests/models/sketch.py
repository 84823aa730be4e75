"""A model that brings its own pipeline and denoiser, as a folder: `tests/models/own_code` beside random weights."""

import importlib.util
import json
import shutil
from pathlib import Path

import torch
from diffusers import DDIMScheduler, DiffusionPipeline, ModelMixin

from proto.params import Json

CODE = Path(__file__).with_name("own_code")


def build_sketch(folder: Path, seed: int = 0) -> Path:
    """The folder, as its author would publish it."""
    (folder / "unet").mkdir(parents=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        _own(CODE / "sketch_unet.py", "SketchUNet")().save_pretrained(folder / "unet")
    DDIMScheduler(clip_sample=True).save_pretrained(folder / "scheduler")
    shutil.copy(CODE / "sketch_unet.py", folder / "unet")
    shutil.copy(CODE / "pipeline.py", folder)
    index = {
        "_class_name": ["pipeline", "SketchPipeline"],
        "_diffusers_version": "0.42.1",
        "unet": ["sketch_unet", "SketchUNet"],
        "scheduler": ["diffusers", "DDIMScheduler"],
    }
    (folder / "model_index.json").write_text(json.dumps(index))
    return folder


def stock_sketch(folder: Path) -> DiffusionPipeline:
    """The same pipeline put together by hand, without anybody's loader."""
    unet = _own(CODE / "sketch_unet.py", "SketchUNet").from_pretrained(folder / "unet")
    scheduler = DDIMScheduler.from_pretrained(folder / "scheduler")
    pipe = _own(CODE / "pipeline.py", "SketchPipeline")(unet=unet, scheduler=scheduler)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def _own(file: Path, name: str) -> Json:
    spec = importlib.util.spec_from_file_location(f"own_{file.stem}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found: type[ModelMixin] = getattr(module, name)
    return found
