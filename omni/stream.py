"""The caller's end of one request: news in, typed events out. Belongs to the caller's event loop.

Invariant: what waits here is bounded by the number of stages, outputs and updates, however slow the caller is: text of one
stage is joined, and only the latest progress and preview of a stage are kept. Parts of an output that are to be joined all wait:
together they are as large as the output.
"""

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Final, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from omni.answers import Answers
from omni.events import CallDone, Completed, Errored, PartArrived, RequestNews, StageFinished
from omni.outputs import (
    AudioOutput,
    ImageOutput,
    Output,
    RequestEvent,
    RequestOutput,
    StageDone,
    StagePartial,
    StagePaused,
    StagePreview,
    StageProgress,
    StageStarted,
    StageUpdated,
    TensorOutput,
    TextDelta,
    TextOutput,
    TokensOutput,
    VideoOutput,
)
from omni.plan import RequestPlan
from proto import messages
from proto.errors import ProtocolError, StageFailed, to_exception
from proto.framing import tensor_at
from proto.ids import RequestId, StageName
from proto.messages import (
    Audio,
    Images,
    Partial,
    Paused,
    Preview,
    Progress,
    Started,
    Tensor,
    Text,
    Tokens,
    Updated,
    Value,
    Video,
)
from proto.numpy_tensors import from_wire
from proto.tensors import WireTensor


class RequestStream:
    """Filled by the engine (`push`), emptied by the caller (`next`)."""

    def __init__(self, request: RequestId) -> None:
        self.request = request
        self.over = False  # the terminal news has come, or nobody waits for it
        self.plan: RequestPlan | None = None  # once it has been sent
        self._waiting: deque[RequestNews] = deque()
        self._stages: dict[StageName, StageDone] = {}
        self._wake: asyncio.Future[None] | None = None
        self.updates = Answers(request)

    def push(self, news: RequestNews) -> None:
        """News that come after the terminal one are for the answers to updates only."""
        if self._heard_before(news) or self.over:
            return
        self.over = isinstance(news, Completed | Errored)
        if not self._merged(news):
            self._waiting.append(news)
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    def _heard_before(self, news: RequestNews) -> bool:
        """Whether it is an answer to an update, and no news. Tells those who wait for it."""
        if not isinstance(news, PartArrived) or not isinstance(news.part, Updated):
            return False
        return not self.updates.hear(news.stage, news.part)

    def _merged(self, news: RequestNews) -> bool:
        """Join with what the caller has not taken yet, where that loses nothing."""
        if not self._waiting or not isinstance(news, PartArrived):
            return False
        last = self._waiting[-1]
        if not isinstance(last, PartArrived) or (last.stage, last.output) != (news.stage, news.output):
            return False
        if isinstance(last.part, messages.TextDelta) and isinstance(news.part, messages.TextDelta):
            if last.part.choice != news.part.choice:
                return False
            joined = messages.TextDelta(
                text=last.part.text + news.part.text,
                logprobs=last.part.logprobs + news.part.logprobs,
                choice=news.part.choice,
                reasoning=last.part.reasoning + news.part.reasoning,
                tool_calls=last.part.tool_calls + news.part.tool_calls,
            )
            self._waiting[-1] = PartArrived(news.stage, news.output, joined)
            return True
        if type(last.part) is type(news.part) and isinstance(news.part, Progress | Preview):
            self._waiting[-1] = news
            return True
        if isinstance(last.part, Partial) and isinstance(news.part, Partial) and not news.part.append:
            self._waiting[-1] = news
            return True
        return False

    async def next(self) -> RequestEvent:
        """The next event. After the `RequestOutput` there is none. Raises the `OmniError` of a request that failed."""
        while not self._waiting:
            self._wake = asyncio.get_running_loop().create_future()
            await self._wake
            self._wake = None
        return self._event(self._waiting.popleft())

    def _event(self, news: RequestNews) -> RequestEvent:
        if isinstance(news, PartArrived):
            return self._part(news)
        if isinstance(news, StageFinished):
            outputs = [_checked(value, news.tensors, news.stage) for value in news.outputs.values()]
            done = StageDone(
                self.request, news.stage, outputs[0] if outputs else None, news.finish_reason, news.usage, news.timings
            )
            self._stages[news.stage] = done
            return done
        if isinstance(news, Errored):
            raise to_exception(news.error)
        return RequestOutput(self.request, self._stages, news.total_s)

    def _part(self, news: PartArrived) -> RequestEvent:
        part = news.part
        if isinstance(part, messages.TextDelta):
            return TextDelta(
                self.request, news.stage, part.text, part.logprobs, part.choice, part.reasoning, part.tool_calls
            )
        if isinstance(part, Progress):
            return StageProgress(self.request, news.stage, part.step, part.total)
        if isinstance(part, Started):
            return StageStarted(self.request, news.stage, part.queue_s)
        if isinstance(part, Updated):
            return StageUpdated(self.request, news.stage, part.event, part.state, part.reason, part.step)
        if isinstance(part, Paused):
            return StagePaused(self.request, news.stage, part.finish_reason, part.usage)
        if isinstance(part, Partial):
            output = _checked(part.value, news.tensors, news.stage)
            return StagePartial(self.request, news.stage, part.index, output, part.append)
        return StagePreview(self.request, news.stage, part.step, _pixels(part.tensor, news.tensors))


def _pixels(index: int, tensors: Sequence[WireTensor]) -> "NDArray[np.uint8]":
    array = from_wire(tensor_at(tensors, index))
    if array.dtype != np.uint8:
        raise ProtocolError(f"pixels are uint8, not {array.dtype}")
    return cast("NDArray[np.uint8]", array)


def _checked(value: Value, tensors: Sequence[WireTensor], stage: StageName) -> Output:
    try:
        return to_output(value, tensors)
    except ProtocolError as error:
        raise StageFailed(f"stage {stage} sent a broken output: {error}", stage=stage) from None


def to_output(value: Value, tensors: Sequence[WireTensor]) -> Output:
    """A value from a stage as what callers get. Raises `ProtocolError` when it names no tensor or one of a wrong type."""
    if isinstance(value, Text):
        return TextOutput(
            value.text, value.logprobs, value.prompt_logprobs, value.more, value.reasoning, value.tool_calls
        )
    if isinstance(value, Images):
        return ImageOutput(_pixels(value.tensor, tensors), value.seeds)
    if isinstance(value, Audio):
        samples = from_wire(tensor_at(tensors, value.tensor)).astype(np.float32, copy=False)
        return AudioOutput(samples, value.sample_rate, value.seeds)
    if isinstance(value, Video):
        return VideoOutput(_pixels(value.tensor, tensors), value.fps, value.seeds)
    if isinstance(value, Tokens):
        return TokensOutput(value.ids)
    if isinstance(value, Tensor):
        return TensorOutput(from_wire(tensor_at(tensors, value.tensor)))
    raise ProtocolError(f"a {type(value).__name__} value is no output")


class CallFailed(StageFailed):
    """A call that not every replica carried out: `errors` by replica, and `values` of those that did. `info.code` is
    the replicas' own where they agree."""

    def __init__(self, done: CallDone, stage: StageName, method: str) -> None:
        text = "; ".join(f"replica {replica}: {error}" for replica, error in sorted(done.errors.items()))
        if done.values:
            text += f"; done by {', '.join(str(replica) for replica in sorted(done.values))}"
        super().__init__(f"call {method!r} to stage {stage}: {text}", stage=stage)
        self.values: Final = done.values
        self.errors: Final = done.errors
        causes = {(info.code, info.field) for info in done.infos.values()}
        if len(causes) == 1 and set(done.infos) == set(done.errors):
            ((code, field),) = causes
            self.info = msgspec.structs.replace(self.info, code=code, field=field)
