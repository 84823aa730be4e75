"""From what a pipeline gave to the answers of the routes that draw. Files are made here, so all of it runs in threads."""

import base64
from dataclasses import replace
from typing import Final

import msgspec
from msgspec.structs import replace as replaced
from starlette.responses import Response

from omni.api import bodies
from omni.api.drawing import DrawCall
from omni.api.requests import HEADER
from omni.outputs import (
    AudioOutput,
    ImageOutput,
    Output,
    RequestOutput,
    StagePartial,
    StagePreview,
    TensorOutput,
    TextOutput,
    VideoOutput,
)
from proto.deploy import Kind
from proto.errors import StageFailed

Drawn = ImageOutput | VideoOutput | AudioOutput | TensorOutput

_CLASSES: Final = {
    Kind.IMAGE: ImageOutput,
    Kind.VIDEO: VideoOutput,
    Kind.AUDIO: AudioOutput,
    Kind.LATENTS: TensorOutput,
}
_A: Final = {Kind.IMAGE: "no image", Kind.VIDEO: "no video", Kind.AUDIO: "no sound", Kind.LATENTS: "no latents"}


def answer(call: DrawCall, output: RequestOutput) -> Response:
    """The whole answer, ready to send: JSON, or the bytes of the one file."""
    drawn = _drawn(call, output)
    headers = {HEADER: call.id}
    if call.as_file:
        name = f"{call.id}{call.form.suffix}"
        headers["content-disposition"] = f'attachment; filename="{name}"'
        if (seed := _seed(drawn, 0)) is not None:
            headers["x-seed"] = str(seed)
        return Response(drawn.encode(0, call.form.name), media_type=call.form.media_type, headers=headers)
    revised = _revised(call, output)
    items = [bodies.ImageItem(_text(drawn, at, call), _seed(drawn, at), revised) for at in range(_count(drawn))]
    made = bodies.MediaAnswer(call.id, call.created, items, call.form.name)
    return Response(msgspec.json.encode(_with_facts(made, drawn)), media_type="application/json", headers=headers)


def files(call: DrawCall, output: RequestOutput) -> tuple[list[bytes], str, float]:
    """The files of all items, their size in words, and how many seconds each lasts."""
    drawn = _drawn(call, output)
    seconds = drawn.array.shape[1] / drawn.fps if isinstance(drawn, VideoOutput) else 0.0
    return [drawn.encode(at, call.form.name) for at in range(_count(drawn))], _size(drawn) or "", seconds


def completed(call: DrawCall, output: RequestOutput) -> list[bytes]:
    """The last events of a stream: one for each item."""
    drawn, revised = _drawn(call, output), _revised(call, output)
    events = [_event(call, drawn, at, "completed") for at in range(_count(drawn))]
    told = [replaced(event, seed=_seed(drawn, at), revised_prompt=revised) for at, event in enumerate(events)]
    return [msgspec.json.encode(event) for event in told]


def partial(call: DrawCall, event: StagePreview | StagePartial, number: int) -> list[bytes]:
    """The events for a preview or a part of the output, the `number`-th of its stream; none for what is no file of the
    call's kind."""
    drawn: Output = ImageOutput(event.array) if isinstance(event, StagePreview) else event.output
    if not isinstance(drawn, _CLASSES[call.kind]):
        return []
    assert isinstance(drawn, Drawn)
    append = event.append if isinstance(event, StagePartial) else False
    name = f"partial_{call.kind.value}"
    events = [_event(call, drawn, at, name) for at in range(_count(drawn))]
    told = [replaced(event, partial_image_index=number, append=append or None) for event in events]
    return [msgspec.json.encode(event) for event in told]


def _event(call: DrawCall, drawn: Drawn, at: int, name: str) -> bodies.MediaEvent:
    like_openai = call.kind is Kind.IMAGE
    return bodies.MediaEvent(
        type=f"{call.events}.{name}",
        b64_json=_text(drawn, at, call),
        created_at=call.created,
        output_format=call.form.name,
        size=_size(drawn),
        index=at,
        quality="auto" if like_openai else None,
        background="opaque" if like_openai else None,
    )


def _drawn(call: DrawCall, output: RequestOutput) -> Drawn:
    drawn = output.outputs.get(call.stage)
    if not isinstance(drawn, _CLASSES[call.kind]):
        raise StageFailed(f"stage {call.stage} gave {_A[call.kind]}", stage=call.stage)
    assert isinstance(drawn, Drawn)
    return replace(drawn, fps=call.fps) if isinstance(drawn, VideoOutput) and call.fps is not None else drawn


def _revised(call: DrawCall, output: RequestOutput) -> str | None:
    written = None if call.writer is None else output.outputs.get(call.writer)
    return written.text if isinstance(written, TextOutput) else None


def _count(drawn: Drawn) -> int:
    return 1 if isinstance(drawn, TensorOutput) else len(drawn.array)


def _seed(drawn: Drawn, at: int) -> int | None:
    return None if isinstance(drawn, TensorOutput) or at >= len(drawn.seeds) else drawn.seeds[at]


def _text(drawn: Drawn, at: int, call: DrawCall) -> str:
    return base64.b64encode(drawn.encode(at, call.form.name)).decode("ascii")


def _size(drawn: Drawn) -> str | None:
    if not isinstance(drawn, ImageOutput | VideoOutput):
        return None
    height, width = drawn.array.shape[-3:-1]
    return f"{width}x{height}"


def _with_facts(made: bodies.MediaAnswer, drawn: Drawn) -> bodies.MediaAnswer:
    """What the answer says of all items."""
    if isinstance(drawn, TensorOutput):
        return replaced(made, shape=list(drawn.array.shape), dtype=drawn.array.dtype.name)
    if isinstance(drawn, AudioOutput):
        seconds = drawn.array.shape[2] / max(1, drawn.sample_rate)
        return replaced(made, sample_rate=drawn.sample_rate, seconds=seconds)
    if isinstance(drawn, VideoOutput):
        return replaced(made, size=_size(drawn), fps=drawn.fps, frames=drawn.array.shape[1])
    return replaced(made, size=_size(drawn))
