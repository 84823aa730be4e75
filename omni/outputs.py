"""What a caller gets: typed events while a request runs, and typed outputs when it is done.

Arrays are numpy; PIL images and files are made only when asked for, so that nobody pays for what they do not look at.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from omni import encoding
from proto.deploy import Kind
from proto.ids import EventId, RequestId, StageName
from proto.messages import Answer, Timings, TokenLogprobs, ToolCall, UpdateState, Usage

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
    reasoning: str = ""  # what the model thought before it said `text`
    tool_calls: tuple[ToolCall, ...] = ()

    @property
    def texts(self) -> tuple[str, ...]:
        """All answers, in their order."""
        return (self.text, *(one.text for one in self.more))


class _Saved:
    """What can be written to a file. `form` is a name from `omni.encoding.FORMS`; None is the usual one of the kind."""

    __slots__ = ()
    kind: ClassVar[Kind]

    def encode(self, index: int = 0, form: str | None = None) -> bytes:
        raise NotImplementedError

    def save(self, path: str | Path, index: int = 0) -> Path:
        """Write item `index` to a file whose suffix says the form. Raises `InvalidRequest` for a suffix that the kind has
        no form for, or one that needs an extra."""
        path = Path(path)
        form = encoding.check_form(self.kind, path.suffix.lower().removeprefix("."), "path")
        path.write_bytes(self.encode(index, form.name))
        return path

    def _form(self, form: str | None) -> str:
        return encoding.check_form(self.kind, form, "form").name


@dataclass(frozen=True, slots=True)
class ImageOutput(_Saved):
    """`array` is uint8 (n, height, width, 3 or 4); `seeds[k]` makes image k again alone."""

    kind: ClassVar[Kind] = Kind.IMAGE
    array: "NDArray[np.uint8]"
    seeds: tuple[int, ...] = ()

    @property
    def images(self) -> "list[Image]":
        from PIL import Image

        return [Image.fromarray(one) for one in self.array]

    def encode(self, index: int = 0, form: str | None = None) -> bytes:
        """Image `index` as the bytes of a file: png, jpeg or webp."""
        return encoding.image_file(self.array[index], self._form(form))


@dataclass(frozen=True, slots=True)
class AudioOutput(_Saved):
    """`array` is float32 in -1..1, (n, channels, samples)."""

    kind: ClassVar[Kind] = Kind.AUDIO
    array: "NDArray[np.float32]"
    sample_rate: int
    seeds: tuple[int, ...] = ()

    def encode(self, index: int = 0, form: str | None = None) -> bytes:
        """Item `index` with 16 bits a sample: wav, flac (extra `audio`), or pcm, which has no header."""
        return encoding.audio_file(self.array[index], self.sample_rate, "pcm" if form == "pcm" else self._form(form))


@dataclass(frozen=True, slots=True)
class VideoOutput(_Saved):
    """`array` is uint8 (n, frames, height, width, 3)."""

    kind: ClassVar[Kind] = Kind.VIDEO
    array: "NDArray[np.uint8]"
    fps: float
    seeds: tuple[int, ...] = ()

    def encode(self, index: int = 0, form: str | None = None) -> bytes:
        """Video `index` as mp4 (extra `video`), or as an animated webp or gif."""
        return encoding.video_file(self.array[index], self.fps, self._form(form))


@dataclass(frozen=True, slots=True)
class TensorOutput(_Saved):
    """Latents or another tensor, as the stage gave it (bfloat16 comes as float32). It is one item, whatever its shape."""

    kind: ClassVar[Kind] = Kind.LATENTS
    array: "NDArray[np.generic]"

    def encode(self, index: int = 0, form: str | None = None) -> bytes:
        """The whole tensor as npy or safetensors."""
        return encoding.tensor_file(self.array, self._form(form))


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
    reasoning: str = ""  # more of what the model thinks
    tool_calls: tuple[ToolCall, ...] = ()  # whole ones


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
class StagePartial:
    """A part of an output before its end, from a pipeline that gives such. With `append` the parts, joined along their
    frames or samples, are the output; without it each takes the place of the one before, and a slow caller may miss some."""

    request: RequestId
    stage: StageName
    index: int
    output: Output
    append: bool


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
    StageStarted
    | TextDelta
    | StageProgress
    | StagePreview
    | StagePartial
    | StageUpdated
    | StagePaused
    | StageDone
    | RequestOutput
)
