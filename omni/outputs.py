"""What a caller gets: typed events while a request runs, and typed outputs when it is done.

Arrays are numpy; PIL images are made only when asked for, so that nobody pays for what they do not look at.
"""

import io
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from proto.ids import EventId, RequestId, StageName
from proto.messages import Answer, Timings, TokenLogprobs, UpdateState, Usage

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from PIL.Image import Image


@dataclass(frozen=True, slots=True)
class TextOutput:
    """`logprobs` are those of every token of the answer, if they were asked for, `prompt_logprobs` those of the prompt's
    tokens but the first. `more` are further answers, where several were asked for."""

    text: str
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    more: tuple[Answer, ...] = ()

    @property
    def texts(self) -> tuple[str, ...]:
        """All answers, in their order."""
        return (self.text, *(one.text for one in self.more))


@dataclass(frozen=True, slots=True)
class ImageOutput:
    """`array` is uint8 (n, height, width, 3 or 4); `seeds[k]` makes image k again alone."""

    array: "NDArray[np.uint8]"
    seeds: tuple[int, ...] = ()

    @property
    def images(self) -> "list[Image]":
        from PIL import Image

        return [Image.fromarray(one) for one in self.array]

    def encode(self, index: int = 0, image_format: str = "png") -> bytes:
        """Image `index` as the bytes of a file: png, jpeg or webp."""
        out = io.BytesIO()
        image = self.images[index]
        if image_format == "jpeg" and image.mode == "RGBA":
            image = image.convert("RGB")
        image.save(out, format=image_format)
        return out.getvalue()


@dataclass(frozen=True, slots=True)
class AudioOutput:
    """`array` is float32 in -1..1, (n, channels, samples)."""

    array: "NDArray[np.float32]"
    sample_rate: int
    seeds: tuple[int, ...] = ()

    def encode(self, index: int = 0) -> bytes:
        """Item `index` as a 16-bit PCM WAV file."""
        import wave

        import numpy as np

        samples = np.clip(self.array[index], -1.0, 1.0)
        out = io.BytesIO()
        with wave.open(out, "wb") as file:
            file.setnchannels(samples.shape[0])
            file.setsampwidth(2)
            file.setframerate(self.sample_rate)
            file.writeframes((samples.T * 32767).astype("<i2").tobytes())
        return out.getvalue()


@dataclass(frozen=True, slots=True)
class VideoOutput:
    """`array` is uint8 (n, frames, height, width, 3)."""

    array: "NDArray[np.uint8]"
    fps: float
    seeds: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class TensorOutput:
    """Latents or another tensor, as the stage gave it (bfloat16 comes as float32)."""

    array: "NDArray[np.generic]"


@dataclass(frozen=True, slots=True)
class TokensOutput:
    ids: tuple[int, ...]


Output = TextOutput | ImageOutput | AudioOutput | VideoOutput | TensorOutput | TokensOutput


@dataclass(frozen=True, slots=True)
class StageStarted:
    """The request left a stage's queue."""

    request: RequestId
    stage: StageName
    queue_s: float


@dataclass(frozen=True, slots=True)
class TextDelta:
    """More of a stage's text. The deltas of a choice, joined, are that answer in its `TextOutput`."""

    request: RequestId
    stage: StageName
    text: str
    logprobs: tuple[TokenLogprobs, ...] = ()  # of the tokens since the delta before
    choice: int = 0  # which of several answers


@dataclass(frozen=True, slots=True)
class StageProgress:
    request: RequestId
    stage: StageName
    step: int
    total: int


@dataclass(frozen=True, slots=True)
class StagePreview:
    """A small picture of the work so far, uint8 (n, height, width, 3)."""

    request: RequestId
    stage: StageName
    step: int
    array: "NDArray[np.uint8]"


@dataclass(frozen=True, slots=True)
class StageUpdated:
    """How an update of the request stands. After COMPLETED or REFUSED (for `reason`) no more is heard of it. `step` is the
    denoising step, counted from 0, from which it counts. `stage` is "" if no stage could be meant."""

    request: RequestId
    stage: StageName
    event: EventId
    state: UpdateState
    reason: str = ""
    step: int | None = None

    @property
    def ends(self) -> bool:
        return self.state is not UpdateState.STARTED


@dataclass(frozen=True, slots=True)
class StagePaused:
    """A resumable request has ended an answer and waits for an update: more input, or its close."""

    request: RequestId
    stage: StageName
    finish_reason: str
    usage: Usage


@dataclass(frozen=True, slots=True)
class StageDone:
    """A stage is done with the request. `output` is None for a stage whose output was not asked for."""

    request: RequestId
    stage: StageName
    output: Output | None
    finish_reason: str
    usage: Usage
    timings: Timings


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The last event of a request that succeeded. `total_s` runs from acceptance to here."""

    request: RequestId
    stages: dict[StageName, StageDone] = field(default_factory=dict)
    total_s: float = 0.0

    @property
    def outputs(self) -> dict[StageName, Output]:
        return {name: done.output for name, done in self.stages.items() if done.output is not None}

    @property
    def text(self) -> str | None:
        """The text of the last stage that gave one."""
        texts = [out.text for out in self.outputs.values() if isinstance(out, TextOutput)]
        return texts[-1] if texts else None

    @property
    def images(self) -> "list[Image]":
        """All images of all stages."""
        return [image for out in self.outputs.values() if isinstance(out, ImageOutput) for image in out.images]


RequestEvent = (
    StageStarted | TextDelta | StageProgress | StagePreview | StageUpdated | StagePaused | StageDone | RequestOutput
)
