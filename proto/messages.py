"""Every message that crosses a socket: one tagged union per lane and direction.

Control lane: small and rare (hello, heartbeat, abort, call). Data lane: requests, results and tensors. "Up" is stage to
master. Nothing here is ever resolved by name at run time: a decoder knows its union, and refuses everything else.
Each message names the epoch of the replica that sends or gets it; `seq` numbers a request's messages from one stage.
"""

import enum
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from proto.deploy import LimitsSpec, StageSpec
from proto.errors import ErrorCode, ErrorInfo
from proto.figures import Figures
from proto.ids import CallId, Epoch, EventId, LeaseId, PullId, RequestId, Session, StageName
from proto.params import Json, Params, check_json
from proto.tensors import TensorRef

PROTOCOL: Final = 1
"""Raised whenever a message changes its meaning. Peers with another number are refused."""

MAX_FRAMES: Final = 4096
"""Tensor frames in one message, and tensors in one payload."""

Short = Annotated[str, Meta(max_length=256)]
Note = Annotated[str, Meta(max_length=4096)]
Index = Annotated[int, Meta(ge=0, le=65535)]
Number = Annotated[int, Meta(ge=0)]


class _Message(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True, tag=True, tag_field="t"
):
    """Base of every message and of every value inside one."""


class DataMessage(_Message, frozen=True, kw_only=True):
    """Base of the data lane's messages, which alone may have tensor frames."""

    tensors: Annotated[tuple[TensorRef, ...], Meta(max_length=MAX_FRAMES)] = ()  # tensor i is frame i behind the header


# --- values: what inputs and outputs are made of ----------------------------------------------------------------------


class TokenChance(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A token's text and its natural log probability. Text that is no whole character is U+FFFD."""

    token: str
    logprob: float


class TokenLogprobs(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One token of an answer, and the likeliest ones in its place, the likeliest first."""

    token: str
    logprob: float
    top: tuple[TokenChance, ...] = ()


class ToolCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A function that the model calls. `arguments` is a JSON object as text; `id` is what its caller knows it by."""

    name: Short
    arguments: str
    id: Short = ""


class Answer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One of several answers to a prompt."""

    text: str
    finish_reason: Short
    logprobs: tuple[TokenLogprobs, ...] = ()
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()


class Text(_Message, frozen=True, tag="text"):
    text: str
    logprobs: tuple[TokenLogprobs, ...] = ()  # of every token of an answer, if they were asked for
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # of the prompt's tokens but the first, if they were asked for
    more: tuple[Answer, ...] = ()  # answers 1 and on, where several were asked for; this is answer 0
    reasoning: str = ""  # what the model thought before it said `text`
    tool_calls: tuple[ToolCall, ...] = ()


class ChatMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """`tool_calls` and `reasoning` are an earlier answer's; a message of role `tool` is what call `tool_call_id` gave."""

    role: Short
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    reasoning: str = ""
    tool_call_id: Short = ""
    name: Short = ""

    @property
    def size(self) -> int:
        """Characters."""
        return (
            len(self.content) + len(self.reasoning) + sum(len(one.name) + len(one.arguments) for one in self.tool_calls)
        )


class Chat(_Message, frozen=True, tag="chat"):
    """`tools` are functions that the answer may call, in OpenAI's form; `template` goes to the chat template as it is."""

    messages: tuple[ChatMessage, ...]
    tools: tuple[dict[str, Json], ...] = ()
    template: dict[str, Json] = {}

    def __post_init__(self) -> None:
        for tool in self.tools:
            check_json(tool, "tools")
        if self.template:
            check_json(self.template, "template")


class Tokens(_Message, frozen=True, tag="tokens"):
    ids: tuple[int, ...]


class Tensor(_Message, frozen=True, tag="tensor"):
    """Latents, embeddings or any other tensor, as it is."""

    tensor: Index


class Images(_Message, frozen=True, tag="images"):
    """uint8, shape (n, height, width, 3 or 4); of a mask (1, height, width, 1). `seeds[k]` makes image k again alone.
    Among inputs, `more` are further images, of sizes of their own."""

    tensor: Index
    seeds: tuple[int, ...] = ()
    more: Annotated[tuple[Index, ...], Meta(max_length=MAX_FRAMES)] = ()


class Audio(_Message, frozen=True, tag="audio"):
    """float32 in -1..1, shape (n, channels, samples)."""

    tensor: Index
    sample_rate: Number
    seeds: tuple[int, ...] = ()


class Video(_Message, frozen=True, tag="video"):
    """uint8, shape (n, frames, height, width, 3)."""

    tensor: Index
    fps: float
    seeds: tuple[int, ...] = ()


class PayloadTensor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One named tensor of a payload. `checksum` is XXH3-64 of its bytes."""

    name: Short
    ref: TensorRef
    checksum: Number


class Payload(_Message, frozen=True, tag="payload"):
    """A descriptor: tensors that wait at their source under a lease until somebody pulls them.

    `kind` is the edge's kind, `meta` what the consumer must know to use them (for KV: layer numbers, heads, head size,
    tokens, position offset). `source` and `epoch` say who holds them.
    """

    lease: LeaseId
    source: StageName
    replica: Number
    epoch: Epoch
    kind: Short
    items: Annotated[tuple[PayloadTensor, ...], Meta(max_length=MAX_FRAMES)]
    meta: dict[str, Json] = {}

    def __post_init__(self) -> None:
        if self.meta:
            check_json(self.meta, "meta")

    @property
    def nbytes(self) -> int:
        return sum(item.ref.nbytes for item in self.items)


Value = Text | Chat | Tokens | Tensor | Images | Audio | Video | Payload


# --- updates: what a running request may be told ----------------------------------------------------------------------


class PromptChange(_Message, frozen=True, tag="prompt"):
    """Other words for a stage that draws: from its next step on, or by a linear transition that ends with the
    `transition_steps`-th step from then. None leaves a field as it is."""

    prompt: str | None = None
    negative_prompt: str | None = None
    guidance_scale: Annotated[float, Meta(ge=0, le=100)] | None = None
    transition_steps: Annotated[int, Meta(ge=0, le=1000)] = 0


class MoreInput(_Message, frozen=True, tag="input"):
    """More for a resumable sequence to read, once its answer has ended; with `close` there will be nothing after it."""

    input: Text | Chat | Tokens | None = None
    close: bool = False


Change = PromptChange | MoreInput


# --- partial outputs --------------------------------------------------------------------------------------------------


class Usage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    prompt_tokens: Number = 0
    completion_tokens: Number = 0


class Started(_Message, frozen=True, tag="started"):
    """The request left the stage's queue after `queue_s` seconds."""

    queue_s: float


class TextDelta(_Message, frozen=True, tag="delta"):
    """More of the answer. The deltas of a request, joined, are its text."""

    text: str
    logprobs: tuple[TokenLogprobs, ...] = ()  # of the tokens since the delta before; the last ones come with the `Text`
    choice: Number = 0  # the answer that it is of
    reasoning: str = ""  # more of what the model thinks
    tool_calls: tuple[ToolCall, ...] = ()  # whole ones


class Progress(_Message, frozen=True, tag="step"):
    """`step` of `total` is done."""

    step: Number
    total: Number


class Preview(_Message, frozen=True, tag="preview"):
    """A small picture of the work so far: uint8 (n, height, width, 3)."""

    step: Number
    tensor: Index


class Partial(_Message, frozen=True, tag="partial"):
    """A part of an output before its end, as the pipeline yielded it. `index` counts them. With `append` the parts,
    joined, are the output (pieces of a video or of sound); without it each takes the place of the one before."""

    index: Number
    value: Value
    append: bool = False


class UpdateState(enum.Enum):
    """What became of an update. The last two end it, and one of them always comes."""

    STARTED = "started"  # the stage works by it from now on
    COMPLETED = "completed"  # nothing of what was before is left
    REFUSED = "refused"


class Updated(_Message, frozen=True, tag="updated"):
    """How an update of the request stands. `step` is the step from which it counts, of stages that have steps."""

    event: EventId
    state: UpdateState
    reason: Note = ""  # of a refusal
    step: Number | None = None


class Paused(_Message, frozen=True, tag="paused"):
    """A resumable request has ended an answer, and waits for more input."""

    finish_reason: Short
    usage: Usage  # so far


Part = Started | TextDelta | Progress | Preview | Partial | Updated | Paused


class Timings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Seconds, measured by the stage. `detail` holds the engine's own parts (encode, denoise, decode,
    first_token) and its counts (steps, rows, cache_hits, peak_memory_bytes)."""

    queue_s: float = 0.0  # received to started
    run_s: float = 0.0  # started to finished
    pull_s: float = 0.0  # waiting for payloads
    detail: dict[str, float] = {}


class StageInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a loaded stage says of itself, so that the master can refuse what it could not do."""

    model: str = ""  # class of the model or pipeline
    parameters: Number = 0
    dtype: str = ""
    device: str = ""
    inputs: tuple[str, ...] = ()  # inputs that it takes, by the names in `proto.deploy.INPUTS`
    outputs: tuple[str, ...] = ()  # outputs that it can give
    accepts: tuple[str, ...] = ()  # names allowed in `params.extra`
    params: tuple[str, ...] | None = None  # fields of its params that mean something to it; None is all
    size_multiple: Number = 1  # width and height must be multiples of it
    default_width: int | None = None
    default_height: int | None = None
    default_steps: int | None = None
    fps: float | None = None  # of its videos, unless another frame rate is asked for
    frame_step: Number = 1  # videos have k * frame_step + 1 frames
    context_length: int | None = None
    loras: tuple[str, ...] = ()  # adapters that requests may name
    asleep: bool = False  # it takes no requests until it is woken


# --- control lane, up -------------------------------------------------------------------------------------------------


class Hello(_Message, frozen=True, tag="hello"):
    """The first message on a control connection. `nonce` makes a repeated Hello harmless."""

    protocol: int
    build: Short
    stage: StageName
    nonce: Short
    host: Short
    pid: Number
    replica: Number | None = None  # None: any free slot
    devices: tuple[Short, ...] = ()
    config_hash: Short | None = None  # of the stage config that the worker has loaded already, if any
    previous: Session | None = None  # its last session: if the master still keeps a slot for it, that one is free


class LoadProgress(_Message, frozen=True, tag="loading"):
    epoch: Epoch
    note: Note
    done: float | None = None  # 0..1


class Ready(_Message, frozen=True, tag="ready"):
    epoch: Epoch
    info: StageInfo
    load_s: float


class InfoChanged(_Message, frozen=True, tag="info"):
    """What the stage says of itself from now on: a call has changed it. Sent before that call's answer."""

    epoch: Epoch
    info: StageInfo


class LoadFailed(_Message, frozen=True, tag="load_failed"):
    epoch: Epoch
    error: Note


class Heartbeat(_Message, frozen=True, tag="beat"):
    """`steps` is the engine thread's own counter: it stands still when the engine does."""

    epoch: Epoch
    steps: Number
    queued: Number
    running: Number
    step_s: float = 0.0  # moving average
    leases: Number = 0
    lease_bytes: Number = 0
    rss_bytes: Number = 0
    figures: Figures = Figures()


class Aborted(_Message, frozen=True, tag="aborted"):
    """The request will use this replica no more, whether or not it was there."""

    epoch: Epoch
    request: RequestId


class CallReply(_Message, frozen=True, tag="reply"):
    epoch: Epoch
    call: CallId
    ok: bool
    value: Json = None
    error: Note = ""
    code: ErrorCode | None = None  # of the error, where it is known
    field: str | None = None  # the argument that it names

    def __post_init__(self) -> None:
        check_json(self.value, "value")


class Leaving(_Message, frozen=True, tag="leaving"):
    """No new work, please. What is here will be finished."""

    epoch: Epoch


class Goodbye(_Message, frozen=True, tag="goodbye"):
    """The last message of an epoch."""

    epoch: Epoch
    reason: Note = ""


ControlUp = (
    Hello | LoadProgress | Ready | InfoChanged | LoadFailed | Heartbeat | Aborted | CallReply | Leaving | Goodbye
)


# --- control lane, down -----------------------------------------------------------------------------------------------


class Welcome(_Message, frozen=True, tag="welcome"):
    """The slot is yours. The stage's whole config is here: a headless worker has no YAML."""

    session: Session
    epoch: Epoch
    replica: Number
    pipeline: Short
    spec: StageSpec
    limits: LimitsSpec
    publishes: tuple[str, ...]  # outputs that some edge takes from this stage
    data_port: Number  # on the address that the worker reached the control socket by
    heartbeat_s: float
    config_hash: Short


class Refuse(_Message, frozen=True, tag="refuse"):
    """`code`: protocol | stage | slot | session | stopping. With `retry`, asking again later may work."""

    code: Short
    reason: Note
    retry: bool = False


class BeatAck(_Message, frozen=True, tag="beat_ack"):
    epoch: Epoch


class Abort(_Message, frozen=True, tag="abort"):
    epoch: Epoch
    request: RequestId


class Call(_Message, frozen=True, tag="call"):
    """`within_s`: a call whose turn has not come so long after its arrival is not run any more."""

    epoch: Epoch
    call: CallId
    method: Short
    args: dict[str, Json] = {}
    within_s: Annotated[float, Meta(gt=0)] | None = None

    def __post_init__(self) -> None:
        check_json(self.args, "args")


class Drain(_Message, frozen=True, tag="drain"):
    """Finish what is here, then say Goodbye and exit."""

    epoch: Epoch


class Shutdown(_Message, frozen=True, tag="shutdown"):
    """Exit now."""

    reason: Note = ""


ControlDown = Welcome | Refuse | BeatAck | Abort | Call | Drain | Shutdown


# --- data lane, up ----------------------------------------------------------------------------------------------------


class Attach(DataMessage, frozen=True, tag="attach"):
    """The first message on a data connection."""

    session: Session
    epoch: Epoch


class Chunk(DataMessage, frozen=True, tag="chunk"):
    request: RequestId
    epoch: Epoch
    seq: Number
    output: Short  # which output it is part of; "" for progress of the whole stage
    part: Part


class Published(DataMessage, frozen=True, tag="published"):
    """An output is there for the stages behind it, before the request is done here."""

    request: RequestId
    epoch: Epoch
    seq: Number
    output: Short
    value: Value


class Result(DataMessage, frozen=True, tag="result"):
    """The stage is done with the request. `outputs` holds every output in `Submit.emit` and `.publish` not sent before."""

    request: RequestId
    epoch: Epoch
    seq: Number
    outputs: dict[str, Value]
    finish_reason: Short = "stop"
    usage: Usage = Usage()
    timings: Timings = Timings()


class Failed(DataMessage, frozen=True, tag="failed"):
    request: RequestId
    epoch: Epoch
    seq: Number
    error: ErrorInfo


class Pull(DataMessage, frozen=True, tag="pull"):
    """Consumer to master to source: send me item `first` of that payload, and the next ones as far as one piece reaches.

    One piece is under way at a time, so that a slow consumer never fills anybody's memory.
    """

    epoch: Epoch
    pull: PullId
    request: RequestId
    lease: LeaseId
    source: StageName
    replica: Number
    source_epoch: Epoch
    first: Index = 0


class Piece(DataMessage, frozen=True, tag="piece"):
    """Source to master to consumer: items `first` and on of the lease, one frame each."""

    epoch: Epoch
    pull: PullId
    first: Index


class PullRefused(DataMessage, frozen=True, tag="pull_refused"):
    """Source (or master) to consumer: that payload cannot be had."""

    epoch: Epoch
    pull: PullId
    reason: Note


class Ack(DataMessage, frozen=True, tag="ack"):
    """Consumer to master: whole and correct. When every consumer has said so, the master releases the lease."""

    epoch: Epoch
    pull: PullId


class Nack(DataMessage, frozen=True, tag="nack"):
    """Consumer to master: not whole, not correct, or not in time."""

    epoch: Epoch
    pull: PullId
    reason: Note


DataUp = Attach | Chunk | Published | Result | Failed | Pull | Piece | PullRefused | Ack | Nack


# --- data lane, down --------------------------------------------------------------------------------------------------


class Attached(DataMessage, frozen=True, tag="attached"):
    epoch: Epoch


class Submit(DataMessage, frozen=True, tag="submit"):
    """Run one request. `emit` names outputs to stream and return to the caller, `publish` those that go on an edge."""

    request: RequestId
    epoch: Epoch
    inputs: dict[str, Value]
    params: Params
    emit: tuple[str, ...] = ()
    publish: tuple[str, ...] = ()


class Update(DataMessage, frozen=True, tag="update"):
    """Change a request that was submitted before, on this lane. Its `event` is answered by `Updated`, in the request's
    chunks, unless the request ends first."""

    request: RequestId
    epoch: Epoch
    event: EventId
    change: Change


class Release(DataMessage, frozen=True, tag="release"):
    """Nobody will pull that lease any more."""

    epoch: Epoch
    lease: LeaseId


DataDown = Attached | Submit | Update | Pull | Piece | PullRefused | Release
