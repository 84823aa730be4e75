"""What callers may send and what they get: strict structs in OpenAI's spelling. Data only.

Structs hold types; the ranges of what goes on to a stage stand in `proto.params`, once. A field that OpenAI has and
that means nothing here is in a `REFUSED` table: harmless at its default, refused with a remedy otherwise. Any other
name is an error. Answers carry OpenAI's fields, and a few of ours where its clients ignore them (`id`, `seed`).
"""

from typing import Annotated, Final, Literal, TypeVar

import msgspec
from msgspec import Meta

from omni.api.decode import Refused
from proto.params import Json


class _Body(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of every request. None is "not set" everywhere, as in OpenAI's API."""


# --- POST /v1/chat/completions ----------------------------------------------------------------------------------------


class CalledBody(_Body, frozen=True):
    name: Annotated[str, Meta(min_length=1, max_length=256)]
    arguments: str  # a JSON object


class ToolCallBody(_Body, frozen=True):
    """A call that an earlier answer made."""

    function: CalledBody
    id: Annotated[str, Meta(max_length=256)] = ""
    type: Literal["function"] = "function"
    index: int | None = None  # as streams number them; not used


class MessageBody(_Body, frozen=True):
    """One message. An earlier answer may be sent back whole: its empty fields are accepted."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[dict[str, Json]] | None = None
    name: Annotated[str, Meta(max_length=256)] | None = None  # for chat templates that have a place for it
    tool_calls: Annotated[list[ToolCallBody], Meta(max_length=1024)] | None = None
    tool_call_id: Annotated[str, Meta(max_length=256)] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # the same in another spelling
    refusal: None = None
    images: list[dict[str, Json]] | None = None  # of an earlier answer: accepted, not used
    audio: None = None
    function_call: None = None
    annotations: Annotated[list[Json], Meta(max_length=0)] | None = None


class FunctionBody(_Body, frozen=True):
    """`strict` is accepted and not used."""

    name: Annotated[str, Meta(min_length=1, max_length=256)]
    description: str | None = None
    parameters: dict[str, Json] | None = None
    strict: bool | None = None


class ToolBody(_Body, frozen=True):
    function: FunctionBody
    type: Literal["function"] = "function"


class StreamOptions(_Body, frozen=True):
    include_usage: bool | None = None
    include_obfuscation: Literal[None] = None


class JsonSchema(_Body, frozen=True):
    """`strict` is accepted: answers follow the schema either way."""

    name: str
    schema: dict[str, Json] | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(_Body, frozen=True):
    """OpenAI's: any JSON object, or JSON of a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class ChatBody(_Body, frozen=True):
    model: str
    messages: Annotated[list[MessageBody], Meta(min_length=1, max_length=10_000)]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    bad_words: list[str] | None = None
    n: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    prompt_logprobs: int | None = None
    response_format: ResponseFormat | None = None
    regex: str | None = None
    grammar: str | None = None
    cache_salt: str | None = None
    tools: Annotated[list[ToolBody], Meta(max_length=1024)] | None = None
    tool_choice: str | dict[str, Json] | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Json] | None = None  # what the model's chat template takes: enable_thinking
    resumable: bool | None = None
    lora: str | None = None
    lora_scale: float | None = None
    modalities: list[Literal["text", "image"]] | None = None  # ["text", "image"]: what the answer says is drawn too
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None  # this and the next three: accepted, not used
    safety_identifier: str | None = None
    metadata: dict[str, str] | None = None
    prompt_cache_key: str | None = None


_NO_TOOLS: Final = "say it with tools"

CHAT_REFUSED: Final[dict[str, Refused]] = {
    "audio": Refused((), "this route answers with text and images"),
    "functions": Refused(([],), _NO_TOOLS),
    "function_call": Refused(("none", "auto"), _NO_TOOLS),
    "web_search_options": Refused((), "this server searches nothing"),
    "prediction": Refused((), "leave it out"),
    "reasoning_effort": Refused(("none",), "leave it out"),
    "verbosity": Refused(("medium",), "ask for it in the prompt"),
    "moderation": Refused((), "this server does not moderate"),
    "store": Refused((False,), "this server stores nothing"),
    "service_tier": Refused(("auto", "default"), "there is one tier"),
    "prompt_cache_retention": Refused(("in_memory",), "leave it out"),
    "prompt_cache_options": Refused((), "leave it out"),
}


class ChatUsage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class CalledFunction(msgspec.Struct, frozen=True):
    name: str
    arguments: str


class CallItem(msgspec.Struct, frozen=True):
    id: str
    function: CalledFunction
    index: int | msgspec.UnsetType = msgspec.UNSET  # in streams
    type: Literal["function"] = "function"


class ImageUrl(msgspec.Struct, frozen=True):
    """`url` is a data URL: the picture itself."""

    url: str


class ImagePart(msgspec.Struct, frozen=True):
    """Of `images` in an answer; not of OpenAI's."""

    image_url: ImageUrl
    type: Literal["image_url"] = "image_url"


class AnswerMessage(msgspec.Struct, frozen=True):
    content: str | None
    role: Literal["assistant"] = "assistant"
    refusal: None = None
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    tool_calls: list[CallItem] | msgspec.UnsetType = msgspec.UNSET
    images: list[ImagePart] | msgspec.UnsetType = msgspec.UNSET


class TopLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: None = None


class ContentLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    top_logprobs: list[TopLogprob]
    bytes: None = None


class ChoiceLogprobs(msgspec.Struct, frozen=True):
    content: list[ContentLogprob]
    refusal: None = None


class Choice(msgspec.Struct, frozen=True):
    message: AnswerMessage
    finish_reason: str
    index: int = 0
    logprobs: ChoiceLogprobs | None = None


class ChatAnswer(msgspec.Struct, frozen=True):
    id: str
    created: int
    model: str
    choices: list[Choice]
    usage: ChatUsage
    prompt_logprobs: ChoiceLogprobs | msgspec.UnsetType = msgspec.UNSET  # not of OpenAI's
    object: Literal["chat.completion"] = "chat.completion"


class Delta(msgspec.Struct, frozen=True, omit_defaults=True):
    content: str | None = None
    role: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[CallItem] | None = None
    images: list[ImagePart] | None = None


class ChunkChoice(msgspec.Struct, frozen=True):
    delta: Delta
    finish_reason: str | None = None
    index: int = 0
    logprobs: ChoiceLogprobs | None = None


class UpdateTold(msgspec.Struct, frozen=True, omit_defaults=True):
    """How an update of the request stands: started, completed or refused."""

    event: str
    state: str
    reason: str | None = None
    step: int | None = None


class ChatChunk(msgspec.Struct, frozen=True):
    """`usage` is left out unless asked for; then it is null in every chunk but the last. A chunk that tells of an update has
    no choices."""

    id: str
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: ChatUsage | msgspec.UnsetType | None = msgspec.UNSET
    update: UpdateTold | msgspec.UnsetType = msgspec.UNSET
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"


# --- POST /v1/images/..., /v1/videos/generations, /v1/audio/generations, /v1/latents/generations ----------------------


class DrawBody(_Body, frozen=True):
    """What every route takes that asks a diffusion stage. `extra` holds further arguments of its pipeline by name."""

    prompt: str
    model: str | None = None
    n: int | None = None
    seed: int | None = None
    num_inference_steps: int | None = None
    steps: int | None = None
    guidance_scale: float | None = None
    guidance: float | None = None
    negative_prompt: str | None = None
    lora: str | None = None
    lora_scale: float | None = None
    extra: dict[str, Json] | None = None
    user: str | None = None  # this and the next: accepted, not used
    safety_identifier: str | None = None


class PictureBody(DrawBody, frozen=True):
    """With pictures to start from. Each of `image` and `mask` is a file of a form, base64, a data URL, or an object with
    an `image_url` that is one; `image` may be a list. In `mask` what is transparent, or white, is painted anew."""

    size: str | None = None  # "512x768" or "auto"
    width: int | None = None
    height: int | None = None
    image: Json = None
    mask: Json = None
    strength: float | None = None  # how far from `image`, 0..1


class ImagesBody(PictureBody, frozen=True):
    response_format: Literal["b64_json", "url"] | None = None
    output_format: Literal["png", "jpeg", "webp"] | None = None
    stream: bool | None = None
    partial_images: Annotated[int, Meta(ge=0, le=3)] | None = None  # OpenAI's range


B = TypeVar("B", bound=DrawBody)
ResultForm = Literal["b64_json", "file", "url"]


class VideosBody(PictureBody, frozen=True):
    """`seconds` is another way to say `num_frames`."""

    num_frames: Annotated[int, Meta(ge=1, le=100_000)] | None = None
    fps: Annotated[float, Meta(gt=0, le=1000)] | None = None
    seconds: Annotated[float, Meta(gt=0, le=3600)] | None = None
    response_format: ResultForm | None = None
    output_format: str | None = None  # mp4, webp, gif
    stream: bool | None = None


class VideoJobBody(VideosBody, frozen=True):
    """OpenAI's word for the image is `input_reference`."""

    input_reference: Json = None


class VideoJobError(msgspec.Struct, frozen=True):
    code: str
    message: str


class VideoJob(msgspec.Struct, frozen=True):
    """OpenAI's. `size` and `seconds` are known when it is done."""

    id: str
    created_at: int
    status: str
    progress: int
    model: str
    prompt: str | None
    seconds: str
    size: str
    completed_at: int | None = None
    expires_at: int | None = None
    error: VideoJobError | None = None
    remixed_from_video_id: None = None
    object: Literal["video"] = "video"


class VideoList(msgspec.Struct, frozen=True):
    data: list[VideoJob]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: Literal["list"] = "list"


class VideoDeleted(msgspec.Struct, frozen=True):
    id: str
    deleted: bool = True
    object: Literal["video.deleted"] = "video.deleted"


class AudioBody(DrawBody, frozen=True):
    seconds: Annotated[float, Meta(gt=0, le=3600)] | None = None
    response_format: ResultForm | None = None
    output_format: str | None = None  # wav, flac
    stream: bool | None = None


class LatentsBody(PictureBody, frozen=True):
    response_format: ResultForm | None = None
    output_format: str | None = None  # npy, safetensors


_NO_FILM: Final = "this route makes still images"

IMAGES_REFUSED: Final[dict[str, Refused]] = {
    "quality": Refused(("auto", "standard"), "set steps"),
    "style": Refused((), "describe the style in the prompt"),
    "background": Refused(("auto", "opaque"), "use opaque"),
    "moderation": Refused(("auto", "low"), "leave it out"),
    "output_compression": Refused((), "leave it out"),
    "input_fidelity": Refused((), "set strength"),
    "markup": Refused((), "send a mask"),
    "complexity": Refused((), "leave it out"),
    "svg": Refused((), _NO_FILM),
    "frame_count": Refused((), _NO_FILM),
    "frame_duration_ms": Refused((), _NO_FILM),
}
MEDIA_REFUSED: Final[dict[str, Refused]] = {"quality": IMAGES_REFUSED["quality"]}


class ImageItem(msgspec.Struct, frozen=True, omit_defaults=True):
    """`seed` with n=1 makes this item again alone. `revised_prompt` is what an AR stage wrote for the painter."""

    b64_json: str
    seed: int | None = None
    revised_prompt: str | None = None


class MediaAnswer(msgspec.Struct, frozen=True, omit_defaults=True):
    """`size`: of pictures and videos. `shape` and `dtype`: of latents, which bfloat16 leaves as float32."""

    id: str
    created: int
    data: list[ImageItem]
    output_format: str
    size: str | None = None
    fps: float | None = None
    frames: int | None = None
    sample_rate: int | None = None
    seconds: float | None = None
    shape: list[int] | None = None
    dtype: str | None = None


class MediaEvent(msgspec.Struct, frozen=True, omit_defaults=True):
    """An event of a stream, in the shape of OpenAI's for images. Of several items each has its `index`. `append`: the
    parts, one after the other, are the item; without it each takes the place of the one before."""

    type: str
    b64_json: str
    created_at: int
    output_format: str
    size: str | None = None
    partial_image_index: int | None = None
    append: bool | None = None
    index: int = 0
    seed: int | None = None
    revised_prompt: str | None = None
    quality: str | None = None
    background: str | None = None


# --- POST /v1/requests/ID/updates -------------------------------------------------------------------------------------


class StageCallBody(_Body, frozen=True):
    """See `omni.pipeline.Pipeline.call`. Without `replicas`, all that are there."""

    stage: str
    method: str
    args: dict[str, Json] | None = None
    replicas: Annotated[list[int], Meta(min_length=1)] | None = None
    timeout_s: Annotated[float, Meta(gt=0, le=3600)] | None = None


class StageCallAnswer(msgspec.Struct, frozen=True):
    """Answers by replica."""

    stage: str
    method: str
    answers: dict[str, Json]
    object: Literal["stage.call"] = "stage.call"


class LoadLoraBody(_Body, frozen=True):
    """vLLM's names. `stage` may be left out where one stage alone takes adapters."""

    lora_name: str
    lora_path: str
    weight_name: str | None = None
    stage: str | None = None


class UnloadLoraBody(_Body, frozen=True):
    lora_name: str
    stage: str | None = None


class UpdateBody(_Body, frozen=True):
    """See `omni.request.UpdateRequest`. `wait`: for what the answer waits."""

    prompt: str | None = None
    messages: Annotated[list[MessageBody], Meta(max_length=10_000)] | None = None
    tokens: list[int] | None = None
    negative_prompt: str | None = None
    guidance_scale: float | None = None
    guidance: float | None = None
    transition_steps: int | None = None
    close: bool | None = None
    stage: str | None = None
    event: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    wait: Literal["accepted", "started", "completed"] = "started"


class UpdateAnswer(msgspec.Struct, frozen=True):
    """`state` is what `wait` asked for or, of an update that has gone further by then, `completed`."""

    request: str
    event: str
    state: str
    stage: str | None = None
    step: int | None = None
    object: Literal["request.update"] = "request.update"


# --- GET /v1/models, /health/ready ------------------------------------------------------------------------------------


class ModelItem(msgspec.Struct, frozen=True):
    id: str
    created: int
    object: Literal["model"] = "model"
    owned_by: Literal["omni"] = "omni"


class ModelList(msgspec.Struct, frozen=True):
    data: list[ModelItem]
    object: Literal["list"] = "list"


class WaitingStage(msgspec.Struct, frozen=True):
    stage: str
    ready: int
    wanted: int
    notes: list[str]  # last line of load progress of each replica that is not ready


class Readiness(msgspec.Struct, frozen=True):
    ready: bool
    message: str
    waiting: list[WaitingStage]
