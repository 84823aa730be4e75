"""Chats that ask for a picture too (`modalities: ["text", "image"]`): one stage writes a caption, another draws it.

Where the caption's text leads to the drawing stage along the deploy's links, one request gives both. Where the links carry
something else of the writing stage, such as keys and values of a prompt, the caption becomes the prompt of a second request.
Invariant: the picture is of the very words that the answer says.
"""

import asyncio
import base64
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from omni.api import bodies
from omni.api.catalog import Catalog
from omni.api.lifetime import Lifetime
from omni.outputs import ImageOutput, RequestOutput
from omni.pipeline import Pipeline
from omni.request import GenerateRequest
from proto.deploy import ArStage, Kind
from proto.errors import InvalidRequest, StageFailed
from proto.ids import StageName
from proto.messages import ChatMessage
from proto.params import Json

IMAGE: Final = "image"


@dataclass(frozen=True, slots=True)
class Drawing:
    """What is to be drawn of an answer: by `painter`, in the same request or (`afterwards`) in one of its own."""

    writer: StageName
    painter: StageName
    afterwards: bool
    params: Mapping[StageName, Mapping[str, Json]]

    @property
    def outputs(self) -> tuple[StageName, ...]:
        """Of the first request."""
        return (self.writer,) if self.afterwards else (self.writer, self.painter)


def drawing_for(body: bodies.ChatBody, writer: StageName, catalog: Catalog, route: str) -> Drawing | None:
    """None for a chat that asks for words alone. Raises `InvalidRequest`, or `NotServable` where nothing draws."""
    if body.modalities is None or IMAGE not in body.modalities:
        return None
    if "text" not in body.modalities:
        problem = 'a chat answers with text at least; send ["text", "image"], or use /v1/images/generations'
        raise InvalidRequest(f"modalities: {problem}", field="modalities")
    if (body.n or 1) > 1 or body.resumable:
        field = "n" if (body.n or 1) > 1 else "resumable"
        raise InvalidRequest(f"{field} cannot go with an image: one answer is drawn", field=field)
    painter = catalog.stage_for(None, Kind.IMAGE, route)
    afterwards = not catalog.leads_to(writer, painter)
    params: dict[StageName, dict[str, Json]] = {painter: {"seed": body.seed}} if body.seed is not None else {}
    return Drawing(writer, painter, afterwards, params)


def instructed(
    messages: tuple[ChatMessage, ...], pipeline: Pipeline, drawing: Drawing | None
) -> tuple[ChatMessage, ...]:
    """The messages, behind the deploy's `prompt.caption` and its examples if they have no system message of their own."""
    spec = pipeline.deploy.stages[drawing.writer] if drawing is not None else None
    if not isinstance(spec, ArStage) or any(message.role == "system" for message in messages):
        return messages
    caption = spec.prompt.caption
    before = [] if caption is None else [ChatMessage("system", caption)]
    for said, answer in spec.prompt.caption_examples.items():
        before += [ChatMessage("user", said), ChatMessage("assistant", answer)]
    return (*before, *messages)


async def draw(
    drawing: Drawing, output: RequestOutput, text: str, pipeline: Pipeline, lifetime: Lifetime
) -> list[bodies.ImagePart]:
    """The pictures of an answer: those of its own request, or of a second one. Raises what that fails with."""
    if drawing.afterwards:
        caption = text.strip()
        if not caption:
            raise StageFailed(f"stage {drawing.writer} wrote nothing to draw from; ask again", stage=drawing.writer)
        request = GenerateRequest(prompt=caption, outputs=(drawing.painter,), params=drawing.params)
        output = await lifetime.last(pipeline.generate(request))
    drawn = output.outputs.get(drawing.painter)
    if not isinstance(drawn, ImageOutput):
        raise StageFailed(f"stage {drawing.painter} gave no image", stage=drawing.painter)
    return await asyncio.to_thread(_parts, drawn)


def _parts(drawn: ImageOutput) -> list[bodies.ImagePart]:
    files = [base64.b64encode(drawn.encode(at, "png")).decode("ascii") for at in range(len(drawn.array))]
    return [bodies.ImagePart(bodies.ImageUrl(f"data:image/png;base64,{file}")) for file in files]
