"""POST /v1/images/generations and /v1/images/edits, and their cousins for videos, sound and latents.

    POST /v1/images/generations, /v1/images/edits   pictures, in OpenAI's shapes
    POST /v1/videos/generations                     mp4, or animated webp or gif
    POST /v1/audio/generations                      wav or flac
    POST /v1/latents/generations                    npy or safetensors

Bodies are JSON or forms with files. An answer is JSON with base64, with `response_format: file` the file itself, or with
`stream` server-sent events: parts and previews as they come, then the items. The first byte of a stream is sent when there
is something to send, so a request that is refused or fails before that still gets its proper status.
"""

import asyncio
import functools
from collections.abc import AsyncGenerator
from typing import Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from omni.api import answers, bodies
from omni.api.catalog import Catalog
from omni.api.decode import convert, drop_harmless
from omni.api.drawing import PREFIX, DrawCall, Drawing
from omni.api.errors import error_answer, log_bug
from omni.api.lifetime import Events, Lifetime, while_connected
from omni.api.params import caller_spelling
from omni.api.requests import Requests
from omni.api.sse import line, open_stream
from omni.api.uploads import Body, read_body
from omni.encoding import check_form
from omni.outputs import RequestEvent, RequestOutput, StagePartial, StagePreview
from omni.pipeline import Pipeline
from proto.deploy import Kind
from proto.errors import InvalidRequest, OmniError

ROUTE: Final = "/v1/images/generations"
EDITS: Final = "/v1/images/edits"
VIDEOS: Final = "/v1/videos/generations"
AUDIO: Final = "/v1/audio/generations"
LATENTS: Final = "/v1/latents/generations"


class Images:
    def __init__(self, pipeline: Pipeline, catalog: Catalog, lifetime: Lifetime, requests: Requests) -> None:
        self._pipeline: Final = pipeline
        self._drawing: Final = Drawing(pipeline, catalog)
        self._lifetime: Final = lifetime
        self._requests: Final = requests

    async def generate(self, http: Request) -> Response:
        return await self._images(http, ROUTE, "image_generation")

    async def edit(self, http: Request) -> Response:
        return await self._images(http, EDITS, "image_edit")

    async def videos(self, http: Request) -> Response:
        body = _converted(await self._read(http), bodies.VideosBody)
        return await self._media(http, body, Kind.VIDEO, VIDEOS)

    async def audio(self, http: Request) -> Response:
        return await self._media(http, _converted(await self._read(http), bodies.AudioBody), Kind.AUDIO, AUDIO)

    async def latents(self, http: Request) -> Response:
        return await self._media(http, _converted(await self._read(http), bodies.LatentsBody), Kind.LATENTS, LATENTS)

    async def _read(self, http: Request) -> Body:
        return await read_body(http, self._pipeline.deploy.api.max_body_bytes)

    async def _images(self, http: Request, route: str, events: str) -> Response:
        read = await self._read(http)
        drop_harmless(read.data, bodies.IMAGES_REFUSED)
        body = convert(read.data, bodies.ImagesBody, known=bodies.IMAGES_REFUSED, strict=read.strict)
        if route == EDITS and body.image is None:
            raise InvalidRequest("image is missing; send the picture to edit", field="image")
        if body.response_format == "url":
            raise _no_url()
        if body.partial_images and not body.stream:
            raise InvalidRequest("partial_images needs stream=true", field="partial_images")
        call = await self._drawing.call(
            self._requests.new_id(http, PREFIX[Kind.IMAGE]),
            body,
            Kind.IMAGE,
            route,
            check_form(Kind.IMAGE, body.output_format or "png"),
            events=events,
            previews=body.partial_images,
            stream=bool(body.stream),
        )
        return await self._run(http, call)

    async def _media(
        self, http: Request, body: bodies.VideosBody | bodies.AudioBody | bodies.LatentsBody, kind: Kind, route: str
    ) -> Response:
        if body.response_format == "url":
            raise _no_url()
        stream = not isinstance(body, bodies.LatentsBody) and bool(body.stream)
        as_file = body.response_format == "file"
        if stream and as_file:
            raise InvalidRequest("response_format='file' is one answer; leave stream out", field="stream")
        form = check_form(kind, body.output_format)
        events = f"{kind.value}_generation"
        name = self._requests.new_id(http, PREFIX[kind])
        call = await self._drawing.call(name, body, kind, route, form, events=events, stream=stream, as_file=as_file)
        return await self._run(http, call)

    async def _run(self, http: Request, call: DrawCall) -> Response:
        events = self._pipeline.generate(call.request)
        if call.stream:
            first = functools.partial(self._next, call, events)
            lines = functools.partial(self._lines, call, events=events)
            return await open_stream(http, self._requests, call.id, call.spelling, events, first, lines)
        with caller_spelling(call.spelling), self._requests.running(call.id, events):
            output = await while_connected(http, self._lifetime.last(events))
        return await asyncio.to_thread(answers.answer, call, output)

    async def _next(self, call: DrawCall, events: Events) -> RequestEvent:
        """The next event that the caller is told of."""
        while True:
            event = await self._lifetime.next(events)
            if isinstance(event, RequestOutput):
                return event
            if isinstance(event, StagePartial | StagePreview) and event.stage == call.stage:
                return event

    async def _lines(self, call: DrawCall, event: RequestEvent, events: Events) -> AsyncGenerator[bytes, None]:
        """The stream. Once begun, an error can only be one more event, and the last."""
        try:
            number = 0
            while isinstance(event, StagePartial | StagePreview):
                for data in await asyncio.to_thread(answers.partial, call, event, number):
                    yield line(data)
                number += 1
                event = await self._next(call, events)
            assert isinstance(event, RequestOutput)
            for data in await asyncio.to_thread(answers.completed, call, event):
                yield line(data)
        except OmniError as error:
            yield line(msgspec.json.encode(error_answer(error.info)))
        except Exception:  # noqa: BLE001 the status is sent already: only an event can tell the caller
            log_bug()
            yield line(msgspec.json.encode(error_answer(OmniError("internal error").info)))


def _converted(read: Body, struct: type[bodies.B]) -> bodies.B:
    drop_harmless(read.data, bodies.MEDIA_REFUSED)
    return convert(read.data, struct, known=bodies.MEDIA_REFUSED, strict=read.strict)


def _no_url() -> InvalidRequest:
    return InvalidRequest(
        "response_format='url' is not supported: this server keeps no files; use 'b64_json'", field="response_format"
    )
