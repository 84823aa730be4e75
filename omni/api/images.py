"""POST /v1/images/generations: the images of one diffusion stage, as base64.

The stages before it run too. `seed` goes to every stage that the images need, the other settings to the stage that
draws. Files are made and read in threads, never on the loop.
"""

import asyncio
import base64
import re
from collections.abc import Mapping
from dataclasses import dataclass
from io import BytesIO
from time import time
from typing import TYPE_CHECKING, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from omni.api import bodies
from omni.api.catalog import Catalog
from omni.api.decode import convert, drop_harmless, read_object, show
from omni.api.lifetime import Lifetime, while_connected
from omni.api.params import Spelling, caller_spelling, one_of, per_stage
from omni.api.requests import HEADER, Requests
from omni.outputs import ImageOutput, RequestOutput, TextOutput
from omni.pipeline import Pipeline
from omni.request import GenerateRequest
from proto.deploy import Kind
from proto.errors import InvalidRequest, StageFailed
from proto.ids import StageName
from proto.params import MAX_PIXELS_A_SIDE, DiffusionParams, Json

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

ROUTE: Final = "/v1/images/generations"
_SIZE: Final = re.compile(r"([1-9][0-9]{0,4})x([1-9][0-9]{0,4})")
_DATA_URL: Final = re.compile(r"data:image/[a-z+.-]{1,32};base64,", re.IGNORECASE)
_INPUT_FORMATS: Final = ("PNG", "JPEG", "WEBP")
_MAX_INPUT_PIXELS: Final = 64 << 20
"""A small file can unpack to a huge picture; larger ones are refused before they are unpacked."""


@dataclass(frozen=True, slots=True)
class ImagesCall:
    """One checked call. `writer` is the stage whose text is the revised prompt."""

    id: str
    created: int
    stage: StageName
    writer: StageName | None
    request: GenerateRequest
    spelling: Spelling
    output_format: str


class Images:
    def __init__(self, pipeline: Pipeline, catalog: Catalog, lifetime: Lifetime, requests: Requests) -> None:
        self._pipeline: Final = pipeline
        self._catalog: Final = catalog
        self._lifetime: Final = lifetime
        self._requests: Final = requests

    async def generate(self, http: Request) -> Response:
        data = await read_object(http, self._pipeline.deploy.api.max_body_bytes)
        call = await self._check(data, self._requests.new_id(http, "img"))
        running = self._pipeline.generate(call.request)
        with caller_spelling(call.spelling), self._requests.running(call.id, running):
            output = await while_connected(http, self._lifetime.last(running))
        body = await asyncio.to_thread(_encode, call, output)
        return Response(body, media_type="application/json", headers={HEADER: call.id})

    async def _check(self, data: dict[str, Json], name: str) -> ImagesCall:
        drop_harmless(data, bodies.IMAGES_REFUSED)
        body = convert(data, bodies.ImagesBody, known=bodies.IMAGES_REFUSED)
        if not body.prompt.strip():
            raise InvalidRequest("prompt is empty; say what to draw", field="prompt")
        if body.response_format == "url":
            raise InvalidRequest(
                "response_format='url' is not supported: this server keeps no files; use 'b64_json'",
                field="response_format",
            )
        stage = self._catalog.stage_for(body.model, Kind.IMAGE, ROUTE)
        spelling: Spelling = {"images": "image"}
        params = _diffusion(body, spelling)
        convert(params, DiffusionParams, spelling=spelling)
        self._check_count(body.n)
        writer = self._catalog.writer_for(stage)
        request = GenerateRequest(
            prompt=body.prompt,
            images=None if body.image is None else await asyncio.to_thread(_decode_image, body.image),
            outputs=(stage,) if writer is None else (writer, stage),
            params=per_stage(self._pipeline, self._catalog, stage, params),
        )
        return ImagesCall(name, int(time()), stage, writer, request, spelling, body.output_format or "png")

    def _check_count(self, n: int | None) -> None:
        most = self._pipeline.deploy.limits.max_images
        if n is not None and n > most:
            raise InvalidRequest(f"n: at most {most} images a request; the value is {n}", field="n")


def _diffusion(body: bodies.ImagesBody, spelling: Spelling) -> dict[str, Json]:
    """The stage's parameters that the caller set. Renames are noted in `spelling`."""
    width, height = body.width, body.height
    if body.size is not None and body.size != "auto":
        if width is not None or height is not None:
            raise InvalidRequest("size and width, height are one setting; send one of them", field="size")
        width, height = _size(body.size)
        spelling["width"] = spelling["height"] = "size"
    steps_name, steps = one_of(("num_inference_steps", body.num_inference_steps), ("steps", body.steps))
    guidance_name, guidance = one_of(("guidance_scale", body.guidance_scale), ("guidance", body.guidance))
    spelling.update(num_images="n", num_inference_steps=steps_name, guidance_scale=guidance_name)
    params: dict[str, Json] = {
        "width": width,
        "height": height,
        "num_inference_steps": steps,
        "guidance_scale": guidance,
        "negative_prompt": body.negative_prompt,
        "num_images": body.n,
        "seed": body.seed,
        "strength": body.strength,
        "lora": body.lora,
        "lora_scale": body.lora_scale,
    }
    return {name: value for name, value in params.items() if value is not None}


def _size(size: str) -> tuple[int, int]:
    match = _SIZE.fullmatch(size)
    if match is None:
        raise InvalidRequest(f"size={show(size)} is not WIDTHxHEIGHT in pixels, such as 512x512, or auto", field="size")
    return int(match[1]), int(match[2])


def _decode_image(text: str) -> "NDArray[np.uint8]":
    """uint8 (1, height, width, 3). Raises `InvalidRequest` for anything that is not a png, jpeg or webp file."""
    import numpy as np
    from PIL import Image, ImageOps

    if text[:8].lower().startswith(("http://", "https://")):
        raise InvalidRequest("image: URLs are not fetched; send base64 or a data URL", field="image")
    prefix = _DATA_URL.match(text)
    try:
        raw = base64.b64decode("".join(text[prefix.end() if prefix else 0 :].split()), validate=True)
    except ValueError:
        raise InvalidRequest("image: this is not base64, nor a data URL with base64", field="image") from None
    try:
        with Image.open(BytesIO(raw), formats=_INPUT_FORMATS) as image:
            _check_dimensions(*image.size)
            upright = ImageOps.exif_transpose(image).convert("RGB")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        raise InvalidRequest("image: this is not a whole png, jpeg or webp file", field="image") from None
    return np.asarray(upright, dtype=np.uint8)[None]


def _check_dimensions(width: int, height: int) -> None:
    if max(width, height) > MAX_PIXELS_A_SIDE or width * height > _MAX_INPUT_PIXELS:
        raise InvalidRequest(f"image: {width}x{height} pixels is too large; send a smaller one", field="image")


def _encode(call: ImagesCall, output: RequestOutput) -> bytes:
    """The whole answer, ready to send. Slow, so in a thread."""
    outputs: Mapping[StageName, object] = output.outputs
    drawn = outputs.get(call.stage)
    if not isinstance(drawn, ImageOutput):
        raise StageFailed(f"stage {call.stage} gave no image", stage=call.stage)
    written = None if call.writer is None else outputs.get(call.writer)
    revised = written.text if isinstance(written, TextOutput) else None
    count, height, width = drawn.array.shape[:3]
    items = [
        bodies.ImageItem(
            base64.b64encode(drawn.encode(index, call.output_format)).decode("ascii"),
            drawn.seeds[index] if index < len(drawn.seeds) else None,
            revised,
        )
        for index in range(count)
    ]
    return msgspec.json.encode(
        bodies.ImagesAnswer(call.id, call.created, items, call.output_format, f"{width}x{height}")
    )
