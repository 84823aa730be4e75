"""Parts of an output on their way to a caller who is slow."""

import asyncio

import numpy as np
import pytest

from omni.events import Completed, PartArrived
from omni.outputs import ImageOutput, RequestEvent, RequestOutput, StagePartial, VideoOutput
from omni.stream import RequestStream
from proto.errors import StageFailed
from proto.ids import RequestId, StageName
from proto.messages import Images, Partial, Text, Video
from proto.numpy_tensors import to_wire
from proto.tensors import WireTensor

PAINTER = StageName("painter")


def taken(stream: RequestStream) -> list[RequestEvent]:
    async def all_of_them() -> list[RequestEvent]:
        events = [await stream.next()]
        while not isinstance(events[-1], RequestOutput):
            events.append(await stream.next())
        return events

    return asyncio.run(all_of_them())


def pixels(value: int) -> WireTensor:
    return to_wire(np.full((1, 2, 4, 4, 3), value, np.uint8))


def test_pieces_all_wait_for_a_slow_caller() -> None:
    stream = RequestStream(RequestId("r"))
    for index in range(3):
        part = Partial(index=index, value=Video(tensor=0, fps=8.0), append=True)
        stream.push(PartArrived(PAINTER, "video", part, [pixels(index)]))
    stream.push(Completed(1.0))
    *parts, _ = taken(stream)
    assert [(part.index, part.append) for part in parts if isinstance(part, StagePartial)] == [
        *((0, True), (1, True), (2, True))
    ]
    for index, part in enumerate(parts):
        assert isinstance(part, StagePartial)
        assert isinstance(part.output, VideoOutput)
        assert part.output.array.max() == index


def test_of_versions_a_slow_caller_gets_the_last() -> None:
    stream = RequestStream(RequestId("r"))
    for index in range(3):
        picture = to_wire(np.full((1, 4, 4, 3), index, np.uint8))
        stream.push(PartArrived(PAINTER, "image", Partial(index=index, value=Images(tensor=0)), [picture]))
    stream.push(Completed(1.0))
    only, _ = taken(stream)
    assert isinstance(only, StagePartial)
    assert isinstance(only.output, ImageOutput)
    assert (only.index, only.output.array.max()) == (2, 2)


def test_a_part_of_nothing_fails_the_request_and_names_the_stage() -> None:
    stream = RequestStream(RequestId("r"))
    stream.push(PartArrived(PAINTER, "video", Partial(index=0, value=Video(tensor=3, fps=1.0)), [pixels(1)]))
    with pytest.raises(StageFailed, match="stage painter sent a broken output"):
        taken(stream)
    stream = RequestStream(RequestId("s"))
    stream.push(PartArrived(PAINTER, "text", Partial(index=0, value=Text(text="part")), []))
    stream.push(Completed(1.0))
    assert isinstance(taken(stream)[0], StagePartial)
