"""From what a pipeline returned to the job's outputs: values for the caller, payloads for edges.

Pictures are taken as PIL images and videos as floats, so that their bytes are those of the stock call.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from PIL.Image import Image

from proto.deploy import OUTPUTS, Kind
from proto.errors import InvalidRequest, StageFailed
from proto.messages import Audio, Images, Tensor, Value, Video
from proto.numpy_tensors import to_wire as numpy_to_wire
from proto.params import DiffusionParams, Json
from proto.tensors import WireTensor
from proto.torch_tensors import to_wire
from stages.diffusion.loading import Painter
from stages.diffusion.signature import FRAME_RATES
from stages.engine import Finished, Job, OutgoingPayload

_RETURNED = {"image": ("images", "image"), "video": ("frames", "videos", "video"), "audio": ("audios", "audio")}


@dataclass(frozen=True, slots=True)
class Artifact:
    """One output, once: `value(index)` for the caller when its tensor is the index-th, `meta` for an edge."""

    kind: Kind
    tensor: WireTensor
    value: Callable[[int], Value]
    meta: Mapping[str, Json]


def wants_latents_only(job: Job) -> bool:
    return {*job.emit, *job.publish} == {"latents"}


def output_type(job: Job, painter: Painter) -> str | None:
    """The pipeline's `output_type` for this job, or None if it has no such argument."""
    if "output_type" not in painter.signature:
        return None
    if wants_latents_only(job):
        return "latent"
    return "pil" if painter.recipe.media == ("image",) else "np"


def collect(
    returned: Json,
    last_latents: torch.Tensor | None,
    job: Job,
    params: DiffusionParams,
    seeds: tuple[int, ...],
    painter: Painter,
    made: Mapping[str, Artifact],
) -> dict[str, Artifact]:
    """The artifacts that the job asked for. `returned` is the pipeline's output object, `last_latents` its last step's;
    `made` are artifacts that there are already."""
    artifacts: dict[str, Artifact] = {}
    for name in dict.fromkeys((*job.emit, *job.publish)):
        if name in made:
            artifacts[name] = made[name]
        elif name == "latents":
            latents = _returned(returned, *_RETURNED, painter=painter) if wants_latents_only(job) else last_latents
            artifacts[name] = _latents(latents, painter)
        else:
            artifacts[name] = artifact(name, returned, params, seeds, painter)
    return artifacts


def artifact(name: str, returned: Json, params: DiffusionParams, seeds: tuple[int, ...], painter: Painter) -> Artifact:
    """One decoded output of what a call returned or yielded."""
    value = _returned(returned, name, painter=painter)
    if name == "image":
        return _images(value, seeds)
    if name == "video":
        return _video(value, _fps(params, painter), seeds)
    return _audio(value, painter.recipe.sample_rate or 0, seeds)


def finish(job: Job, artifacts: Mapping[str, Artifact], detail: Mapping[str, float]) -> Finished:
    """The terminal event: `emit` as values, `publish` as payloads."""
    return Finished(
        request=job.request,
        outputs={name: artifacts[name].value(index) for index, name in enumerate(job.emit)},
        tensors=[artifacts[name].tensor for name in job.emit],
        payloads={
            name: OutgoingPayload(artifacts[name].kind, {name: artifacts[name].tensor}, artifacts[name].meta)
            for name in job.publish
        },
        detail=detail,
    )


def _returned(returned: Json, *names: str, painter: Painter) -> Json:
    """The first field of the pipeline's output object that belongs to one of the outputs; or all of what is no object but
    the images, frames or samples alone."""
    if painter.recipe.read is not None:
        returned = painter.recipe.read(returned)
    if isinstance(returned, Image | np.ndarray | torch.Tensor | list):
        return [returned] if isinstance(returned, Image) else returned
    for name in names:
        for key in _RETURNED[name]:
            if isinstance(returned, Mapping) and key in returned:
                return returned[key]
    raise StageFailed(
        f"stage {painter.stage}: {painter.info.model} returned {type(returned).__name__} without {' or '.join(names)}",
        stage=painter.stage,
    )


def _images(images: Json, seeds: tuple[int, ...]) -> Artifact:
    pixels = np.stack([_pixels(image) for image in _flat(images)])
    return Artifact(Kind.IMAGE, numpy_to_wire(pixels), lambda i: Images(tensor=i, seeds=seeds), {"seeds": list(seeds)})


def _flat(images: Json) -> list[Image]:
    """Pipelines that draw layers return a list of images for each prompt."""
    return [one for image in images for one in (_flat(image) if isinstance(image, list) else [image])]


def _pixels(image: Image) -> NDArray[np.uint8]:
    return np.asarray(image if image.mode in ("RGB", "RGBA") else image.convert("RGB"))


def _video(frames: Json, fps: float, seeds: tuple[int, ...]) -> Artifact:
    """`frames`: floats in 0..1, (n, frames, height, width, 3)."""
    values = frames.float().cpu().numpy() if isinstance(frames, torch.Tensor) else np.asarray(frames)
    pixels = (values * 255).round().astype(np.uint8)
    meta = {"fps": fps, "seeds": list(seeds)}
    return Artifact(Kind.VIDEO, numpy_to_wire(pixels), lambda i: Video(tensor=i, fps=fps, seeds=seeds), meta)


def _audio(audio: Json, rate: int, seeds: tuple[int, ...]) -> Artifact:
    """`audio`: (n, samples), (n, channels, samples), or a list of n of either without the n. Some pipelines cut it down to
    nothing where few seconds are asked for: `InvalidRequest`."""
    rows = [one.float().cpu().numpy() if isinstance(one, torch.Tensor) else np.asarray(one) for one in audio]
    stacked = np.stack(rows)
    if not stacked.size:
        raise InvalidRequest(
            "the sound asked for is so short that it has no samples; ask for more seconds", field="seconds"
        )
    waves = stacked.reshape(len(rows), -1, stacked.shape[-1]).astype(np.float32).clip(-1.0, 1.0)
    meta = {"sample_rate": rate, "seeds": list(seeds)}
    return Artifact(Kind.AUDIO, numpy_to_wire(waves), lambda i: Audio(tensor=i, sample_rate=rate, seeds=seeds), meta)


def _latents(latents: Json, painter: Painter) -> Artifact:
    if not isinstance(latents, torch.Tensor):
        raise StageFailed(f"stage {painter.stage}: {painter.info.model} gave no latents", stage=painter.stage)
    return Artifact(OUTPUTS["diffusion"]["latents"], to_wire(latents), lambda i: Tensor(tensor=i), {})


def _fps(params: DiffusionParams, painter: Painter) -> float:
    """The frame rate asked for, else the pipeline's default, else its family's."""
    name = painter.signature.first(*FRAME_RATES)
    asked = (params.extra or {}).get(name, painter.signature.defaults.get(name)) if name else None
    return float(asked) if isinstance(asked, int | float) else painter.recipe.fps
