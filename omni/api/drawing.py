"""From the body of a route that draws to a checked call of the pipeline.

The stages before the one that draws run too. `seed` goes to every stage that the output needs, the other settings to the
stage that draws. Pictures are decoded in threads, never on the loop.
"""

import asyncio
import re
from collections.abc import Mapping
from dataclasses import dataclass
from time import time
from typing import TYPE_CHECKING, Final

from omni import pictures
from omni.api import bodies
from omni.api.catalog import Catalog
from omni.api.decode import convert, show
from omni.api.params import Spelling, one_of, per_stage
from omni.encoding import Form
from omni.pipeline import Pipeline
from omni.request import GenerateRequest
from proto.deploy import Kind
from proto.errors import InvalidRequest
from proto.ids import StageName
from proto.messages import StageInfo
from proto.params import DiffusionParams, Json

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_SIZE: Final = re.compile(r"([1-9][0-9]{0,4})x([1-9][0-9]{0,4})")
_FRAME_RATES: Final = ("fps", "frame_rate", "target_fps")
_FRAMES: Final = ("num_frames", "video_length")
_LENGTHS: Final = ("audio_end_in_s", "audio_length_in_s", "audio_duration")
PREFIX: Final = {Kind.IMAGE: "img", Kind.VIDEO: "video", Kind.AUDIO: "audio", Kind.LATENTS: "latents"}


@dataclass(frozen=True, slots=True)
class DrawCall:
    """One checked call. `writer` is the stage whose text is the revised prompt. `events` begins the names of a stream's
    events. `fps` is what a video's file is to say, where the caller asked."""

    id: str
    created: int
    kind: Kind
    stage: StageName
    writer: StageName | None
    request: GenerateRequest
    spelling: Spelling
    form: Form
    events: str
    stream: bool = False
    as_file: bool = False
    fps: float | None = None


class Drawing:
    def __init__(self, pipeline: Pipeline, catalog: Catalog) -> None:
        self._pipeline: Final = pipeline
        self._catalog: Final = catalog

    async def call(
        self,
        name: str,
        body: bodies.DrawBody,
        kind: Kind,
        route: str,
        form: Form,
        *,
        events: str,
        previews: int | None = None,
        stream: bool = False,
        as_file: bool = False,
    ) -> DrawCall:
        """Raises `InvalidRequest`, `NotServable` or `UnknownModel`."""
        if not body.prompt.strip():
            raise InvalidRequest("prompt is empty; say what to draw", field="prompt")
        stage = self._catalog.stage_for(body.model, kind, route)
        info = self._pipeline.infos.get(stage) or StageInfo()
        spelling: Spelling = {"images": "image"}
        params = _params(body, spelling)
        extra = {**(body.extra or {}), **_timing(body, info, spelling)}
        if extra:
            params["extra"] = extra
        if previews is not None:
            params["previews"] = previews
            spelling["previews"] = "partial_images"
        convert(params, DiffusionParams, spelling=spelling)
        self._check_count(body.n, as_file)
        images, mask = await self._pictures(body, info)
        writer = self._catalog.writer_for(stage)
        request = GenerateRequest(
            prompt=body.prompt,
            images=images,
            mask=mask,
            outputs=(stage,) if writer is None else (writer, stage),
            params=per_stage(self._pipeline, self._catalog, stage, params),
        )
        return DrawCall(
            id=name,
            created=int(time()),
            kind=kind,
            stage=stage,
            writer=writer,
            request=request,
            spelling=spelling,
            form=form,
            events=events,
            stream=stream,
            as_file=as_file,
            fps=body.fps if isinstance(body, bodies.VideosBody) else None,
        )

    def _check_count(self, n: int | None, as_file: bool) -> None:
        most = self._pipeline.deploy.limits.max_images
        if n is not None and n > most:
            raise InvalidRequest(f"n: at most {most} images a request; the value is {n}", field="n")
        if as_file and n is not None and n > 1:
            raise InvalidRequest(
                f"n: response_format='file' answers with one file; the value is {n}; use 'b64_json'", field="n"
            )

    async def _pictures(
        self, body: bodies.DrawBody, info: StageInfo
    ) -> "tuple[tuple[NDArray[np.uint8], ...] | None, NDArray[np.uint8] | None]":
        """The images, and the mask: the caller's, or for a stage that needs one the transparency of the first image."""
        if not isinstance(body, bodies.PictureBody):
            return None, None
        field, image = one_of(("image", body.image), ("input_reference", _reference(body)))
        if image is None and body.mask is None:
            return None, None
        given = image if isinstance(image, list) else [image]
        most = self._pipeline.deploy.limits.max_images
        if len(given) > most:
            raise InvalidRequest(f"{field}: at most {most} images a request; there are {len(given)}", field=field)
        sources = [] if image is None else [_source(one, field) for one in given]
        images = await asyncio.to_thread(pictures.read_pictures, sources, field) if sources else None
        mask = None
        if body.mask is not None:
            mask = await asyncio.to_thread(pictures.read_mask, _source(body.mask, "mask"), "mask")
        elif images and images[0].shape[2] == 4 and "mask_image" in info.inputs:
            mask = pictures.mask_of(images[0])
        return images, mask


def _reference(body: bodies.PictureBody) -> Json:
    return body.input_reference if isinstance(body, bodies.VideoJobBody) else None


def _source(value: Json, field: str) -> str | bytes:
    """The text or bytes of one picture."""
    if isinstance(value, dict) and "file_id" in value:
        raise InvalidRequest(f"{field}: this server keeps no files; send the picture itself", field=field)
    if isinstance(value, dict):
        value = value.get("image_url")
        value = value.get("url") if isinstance(value, dict) else value
    if not isinstance(value, str | bytes):
        words = "base64, a data URL, a file of a form, or an object with `image_url`"
        raise InvalidRequest(f"{field}: {show(value)} is no picture; send {words}", field=field)
    return value


def _params(body: bodies.DrawBody, spelling: Spelling) -> dict[str, Json]:
    """The stage's parameters that the caller set. Renames are noted in `spelling`."""
    steps_name, steps = one_of(("num_inference_steps", body.num_inference_steps), ("steps", body.steps))
    guidance_name, guidance = one_of(("guidance_scale", body.guidance_scale), ("guidance", body.guidance))
    spelling.update(num_images="n", num_inference_steps=steps_name, guidance_scale=guidance_name)
    params: dict[str, Json] = {
        "num_inference_steps": steps,
        "guidance_scale": guidance,
        "negative_prompt": body.negative_prompt,
        "num_images": body.n,
        "seed": body.seed,
        "lora": body.lora,
        "lora_scale": body.lora_scale,
    }
    if isinstance(body, bodies.PictureBody):
        width, height = _width_and_height(body, spelling)
        params.update(width=width, height=height, strength=body.strength)
    return {name: value for name, value in params.items() if value is not None}


def _width_and_height(body: bodies.PictureBody, spelling: Spelling) -> tuple[int | None, int | None]:
    if body.size is None or body.size == "auto":
        return body.width, body.height
    if body.width is not None or body.height is not None:
        raise InvalidRequest("size and width, height are one setting; send one of them", field="size")
    match = _SIZE.fullmatch(body.size)
    if match is None:
        raise InvalidRequest(
            f"size={show(body.size)} is not WIDTHxHEIGHT in pixels, such as 512x512, or auto", field="size"
        )
    spelling["width"] = spelling["height"] = "size"
    return int(match[1]), int(match[2])


def _timing(body: bodies.DrawBody, info: StageInfo, spelling: Spelling) -> Mapping[str, Json]:
    """The pipeline's own arguments for how long a video or sound is, by its own names."""
    if isinstance(body, bodies.AudioBody) and body.seconds is not None:
        return {_own(_LENGTHS, info, "seconds", spelling): body.seconds}
    if not isinstance(body, bodies.VideosBody):
        return {}
    found: dict[str, Json] = {}
    rate = next((name for name in _FRAME_RATES if name in info.accepts), None)
    if body.fps is not None and rate is not None:
        found[rate] = int(body.fps) if body.fps.is_integer() else body.fps
    frames = body.num_frames
    if body.seconds is not None:
        if frames is not None:
            raise InvalidRequest("seconds and num_frames are one setting; send one of them", field="seconds")
        steps = round((body.seconds * (body.fps or info.fps or 16.0) - 1) / info.frame_step)
        frames = max(0, steps) * info.frame_step + 1
    if frames is not None:
        field = "num_frames" if body.num_frames is not None else "seconds"
        found[_own(_FRAMES, info, field, spelling)] = frames
    return found


def _own(names: tuple[str, ...], info: StageInfo, field: str, spelling: Spelling) -> str:
    """The pipeline's word for it. Raises `InvalidRequest` if it has none."""
    name = next((name for name in names if name in info.accepts), None)
    if name is None:
        model = info.model or "the stage"
        raise InvalidRequest(f"{field}: {model} has no argument for it; leave it out", field=field)
    spelling.setdefault(name, field)
    return name
