"""The deploy: everything that one YAML file says, as frozen structs. `launch.deploy_file` reads it, strictly.

Defaults stand here and nowhere else. A field's docs are the comment beside it; the README's table is checked against
this file by a test. Durations are seconds and sizes are bytes; in YAML both may carry a unit ("10s", "500ms", "2GiB").
"""

import enum
from collections.abc import Sequence
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from proto.ids import StageName
from proto.params import MAX_PIXELS_A_SIDE, DiffusionParams, SamplingParams
from proto.step_cache import StepCacheSpec

DURATION: Final = "duration"
SIZE: Final = "size"
SHORTHAND: Final = "shorthand"

Seconds = Annotated[float, Meta(gt=0, extra={"unit": DURATION})]
Bytes = Annotated[int, Meta(ge=1, extra={"unit": SIZE})]
SizeOrZero = Annotated[int, Meta(ge=0, extra={"unit": SIZE})]
Count = Annotated[int, Meta(ge=1)]
Replicas = Annotated[int, Meta(ge=1, le=1024)]
Port = Annotated[int, Meta(ge=0, le=65535)]
_NAME = Meta(pattern=r"^[A-Za-z][A-Za-z0-9_-]{0,63}$")
Name = Annotated[str, _NAME]


class Kind(enum.Enum):
    """What travels along an edge, and what a visible output is."""

    TEXT = "text"
    TOKENS = "tokens"
    HIDDEN = "hidden"
    KV = "kv"
    LATENTS = "latents"
    IMAGE = "image"
    AUDIO = "audio"
    VIDEO = "video"


class Balance(enum.Enum):
    RANDOM = "random"
    ROUND_ROBIN = "round-robin"
    LEAST_LOADED = "least-loaded"


class Via(enum.Enum):
    AUTO = "auto"  # the best way that both ends have; today that is the master
    MASTER = "master"


class OnPayloadLoss(enum.Enum):
    FAIL = "fail"


class ArTask(enum.Enum):
    GENERATE = "generate"
    ENCODE = "encode"


class HiddenTokens(enum.Enum):
    ALL = "all"
    LAST = "last"


class KvAt(enum.Enum):
    PREFILL = "prefill"
    TOKEN = "token"
    END = "end"


class Compile(enum.Enum):
    NONE = "none"
    REGIONAL = "regional"  # the repeated blocks, one compilation for all of them
    FULL = "full"  # the denoiser's whole forward


class Offload(enum.Enum):
    NONE = "none"
    MODEL = "model"  # one model at a time is on the device, the others are in host memory
    SEQUENTIAL = "sequential"  # one layer at a time
    GROUP = "group"  # one layer at a time, the next one on its way


class Quantizer(enum.Enum):
    TORCHAO = "torchao"
    QUANTO = "quanto"
    BITSANDBYTES = "bitsandbytes"
    GGUF = "gguf"


class _Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of every mapping in the deploy."""


class MasterSpec(_Section, frozen=True):
    bind: str = "tcp://127.0.0.1:5570"  # control socket; port 0 lets the system pick one
    data_port: Port = 0  # data socket, same address; 0 lets the system pick one
    heartbeat: Seconds = 1.0  # how often stages report progress
    suspect_after: Seconds = 3.0  # silence after which a replica gets no new work
    dead_after: Seconds = 10.0  # silence after which its requests are given up
    load_stall: Seconds = 300.0  # a loading stage that reports nothing for so long has failed
    insecure: bool = False  # allow addresses other than loopback without authentication


class ApiSpec(_Section, frozen=True):
    host: str = "127.0.0.1"  # address of the HTTP API
    port: Port = 8091  # 0 lets the system pick one
    max_body_bytes: Bytes = 32 << 20  # larger HTTP bodies get 413
    job_ttl: Seconds = 3600.0  # what a job of /v1/videos gave is kept so long
    job_bytes: Bytes = 512 << 20  # of all of them together; the oldest go first
    admin: bool = False  # callers may use the operator's routes: load adapters, put stages to sleep, ...


class LimitsSpec(_Section, frozen=True):
    max_requests: Count = 256  # requests at work in stages at one time
    max_queued: Annotated[int, Meta(ge=0)] = 256  # requests waiting for that; beyond it callers get 429
    max_payload_bytes: Bytes = 2 << 30  # one payload on one edge
    max_frame_bytes: Bytes = 1 << 30  # one ZeroMQ frame
    max_prompt_chars: Count = 100_000  # prompt or all chat messages together
    max_images: Count = 10  # images in one request
    request_timeout: Seconds | None = None  # a request still running after so long fails with 504


class QuantizationSpec(_Section, frozen=True):
    """How one component's weights are stored in fewer bits. `transformer: torchao` is short for `{method: torchao}`."""

    method: Annotated[Quantizer, Meta(extra={SHORTHAND: True})]  # torchao, quanto, bitsandbytes or gguf
    weights: str | None = None  # one of QUANTIZED[method]; default: the first of them
    keep: tuple[str, ...] = ()  # modules that are not converted, by name
    file: str | None = None  # gguf: the file with the weights, inside the pipeline folder


QUANTIZED: Final[dict[Quantizer, tuple[str, ...]]] = {
    Quantizer.TORCHAO: ("int8", "int8_dynamic", "int4", "float8", "float8_dynamic"),
    Quantizer.QUANTO: ("int8", "int4", "int2", "float8"),
    Quantizer.BITSANDBYTES: ("nf4", "fp4", "int8"),
    Quantizer.GGUF: (),
}
"""What each method can make of weights; the first is the default. A GGUF file has been made already."""


class ModelSpec(_Section, frozen=True):
    path: str | None = None  # checkpoint folder, GGUF file, or demo://NAME
    tokenizer: str | None = None  # folder of an AR stage's tokenizer; default: where the model is
    dtype: Annotated[str, Meta(pattern="^(auto|float32|bfloat16|float16)$")] = "auto"
    pipeline_class: str | None = None  # diffusers class to use instead of the one in model_index.json
    custom_pipeline: str | None = None  # file or folder (pipeline.py) with the code of the pipeline's class
    trust_remote_code: bool = False  # run Python code that comes with the model, with all rights of the stage
    quantization: dict[str, QuantizationSpec] = {}  # diffusion: by component: {transformer: torchao}


class Link(_Section, frozen=True, rename={"source": "from"}):
    """One input: `stage.output`. With `companion`, each request also sends a second, unconditional prompt through the
    source stage for classifier-free guidance; both are admitted together and fail together."""

    source: Annotated[str, Meta(extra={SHORTHAND: True})]  # "thinker.text"
    companion: str | None = None  # request field that holds the companion's prompt: negative_prompt


class EdgeSpec(_Section, frozen=True):
    """How payloads travel to this stage, and how long it keeps its own."""

    via: Via = Via.AUTO  # auto or master: the ways that payloads can take
    deadline: Seconds = 10.0  # this stage, as a consumer, gives a payload up after so long
    lease: Seconds = 600.0  # this stage, as a source, keeps a payload that nobody took for so long
    on_payload_loss: OnPayloadLoss = OnPayloadLoss.FAIL  # the request fails with 502


class ContextParallelSpec(_Section, frozen=True):
    """Ways to share out the tokens of a picture or video. Their product is the number of ranks."""

    ulysses: Count = 1  # each rank attends with some of the heads
    ring: Count = 1  # keys and values go round the ranks


class ArParallelSpec(_Section, frozen=True):
    """One replica as a group of processes, its ranks, with one device each."""

    tensor: Count = 1  # ranks that share out the weights
    timeout: Seconds = 300.0  # a replica ends if one of its ranks takes longer than that for its part of a forward

    @property
    def degree(self) -> int:
        """Ranks of a replica."""
        return self.tensor


class DiffusionParallelSpec(_Section, frozen=True):
    """One replica as a group of processes, its ranks, with one device each."""

    tensor: Count = 1  # ranks that share out the denoiser's weights
    context: ContextParallelSpec = ContextParallelSpec()  # or ranks that share out its tokens
    timeout: Seconds = 300.0  # a replica ends if one of its ranks takes longer than that for its part of a forward

    @property
    def degree(self) -> int:
        """Ranks of a replica."""
        return self.tensor * self.context.ulysses * self.context.ring


class PromptSpec(_Section, frozen=True):
    """Words put around a plain prompt before the AR stage sees it. Chat messages are never touched, but see `caption`.

    `caption` and `caption_examples` are for chats that ask for an image too and have no system message of their own.
    """

    chat: bool = True  # a plain prompt goes through the tokenizer's chat template; false: `template` is all there is
    system: str | None = None  # system message of a plain prompt
    template: str = "{prompt}"  # {prompt} stands for what came in
    caption: str | None = None  # their system message
    caption_examples: dict[str, str] = {}  # turns before theirs: what a user says, and the caption for it


class LoraSpec(_Section, frozen=True):
    path: Annotated[str, Meta(min_length=1, extra={SHORTHAND: True})]  # folder or safetensors file
    weight_name: str | None = None  # file in the folder


class ArEngineSpec(_Section, frozen=True):
    use: Annotated[str, Meta(extra={SHORTHAND: True})] = "builtin"  # or vllm, or package.module:Class
    max_num_seqs: Count = 16  # sequences that run at one time
    max_num_batched_tokens: Count = (
        512  # tokens in one step: answers first, then chunks of prompts; at least max_num_seqs
    )
    block_size: Annotated[int, Meta(ge=1, le=1024)] = 16  # tokens in one page of the KV pool
    kv_cache_bytes: Bytes | None = None  # KV pool; default: what max_num_seqs may need, at most 1/4 of the free memory
    prefix_caching: bool = True  # prompts that start alike share their KV
    pack_weights: bool = False  # on a CPU: a second copy of the weights, for speed with several answers under way
    native: bool | None = None  # on a CPU: compute answers in C, compiled at the first start; default: where it can be
    overlap: bool | None = None  # a forward computes while the words of the one before are told; default: on CUDA
    compile: bool = False  # compile the model's layers when the stage starts: slower to start, faster to answer
    max_model_len: Count | None = None  # tokens of prompt and answer; default: what the model was made for
    task: ArTask = ArTask.GENERATE  # or encode: prompts are read for other stages, and nothing is answered
    # States that `hidden` holds, side by side: 0 the embeddings, k after layer k, -1 the last one, after its norm.
    hidden_layers: tuple[int, ...] | None = None  # default: [-1]
    hidden_tokens: HiddenTokens = HiddenTokens.ALL  # all or last: the prompt's tokens that `hidden` holds
    hidden_skip: Annotated[int, Meta(ge=0)] = 0  # so many tokens at the start are not in `hidden`: a template's own
    kv_layers: tuple[int, ...] | None = None  # layers whose KV goes on a `kv` edge; default: all
    kv_at: KvAt = KvAt.PREFILL  # when it goes: prefill, token (up to `kv_token`) or end (all but the last token)
    kv_token: Annotated[str, Meta(min_length=1)] | None = None  # one token of the tokenizer, such as <|im_end|>
    resume_timeout: Seconds = 600.0  # a resumable request that waits for more input so long is closed
    loras: dict[Name, LoraSpec] = {}  # adapters loaded when the stage starts, by name
    options: dict[str, bool | int | float | str] = {}  # for an engine that is not ours


class WarmupSpec(_Section, frozen=True):
    """A shape that is drawn when the stage loads, so that no request pays for what happens only the first time."""

    width: Annotated[int, Meta(ge=1, le=MAX_PIXELS_A_SIDE)] | None = None  # default: the model's own
    height: Annotated[int, Meta(ge=1, le=MAX_PIXELS_A_SIDE)] | None = None  # default: the model's own
    frames: Count | None = None  # of a video; default: the model's own
    steps: Annotated[int, Meta(ge=1, le=1000)] = 2  # denoising steps
    rows: Annotated[int, Meta(ge=1, le=64)] = 1  # requests of this shape, drawn together


class DiffusionEngineSpec(_Section, frozen=True):
    use: Annotated[str, Meta(extra={SHORTHAND: True})] = "builtin"  # or package.module:Class
    step_batching: bool = True  # requests join one another at any step; false: only those that start and end together
    batch_invariant: bool = False  # no forward is shared, so that no result depends on who else was there
    max_num_seqs: Count = 8  # requests that are denoised at one time
    max_rows: Count = 16  # rows of one shared call: images, twice that with guidance
    max_pixels: Count | None = None  # of all requests at work: width x height x frames x images; more wait, or get 400
    memory: Bytes | None = None  # what requests may take beside the weights; default: `memory_share` of what is free
    memory_share: Annotated[float, Meta(gt=0, le=1)] = 0.9  # of the memory that is free when the stage is loaded
    memory_profile: bool = True  # find out at the start what requests take, and refuse what is more than `memory`
    warmup: Annotated[tuple[WarmupSpec, ...], Meta(max_length=64)] = ()  # shapes to draw before the stage is ready
    admission_wait: Seconds | None = None  # an idle stage waits so long for company before it starts a request
    preview_every: Count | None = None  # send a small picture after every so many steps
    prompt_cache: SizeOrZero = 256 << 20  # encoded prompts that are kept, in bytes; 0 keeps none
    vae_slicing: bool = False  # decode one image at a time, with less memory
    vae_tiling: bool = False  # decode in tiles, with less memory
    loras: dict[Name, LoraSpec] = {}  # adapters loaded when the stage starts, by name
    recipe: str | None = None  # package.module:NAME, what is particular to the pipeline's family
    compile: Compile = Compile.NONE  # of the denoiser: none, regional or full; slow to start, faster to answer
    attention: str | None = None  # diffusers' attention backend for the denoiser: native, flash, sage, ...
    offload: Offload = Offload.NONE  # none, model, sequential or group: weights wait in host memory, not on the device
    step_cache: StepCacheSpec | None = None  # one of diffusers' caches of the denoiser, by its `method`
    options: dict[str, bool | int | float | str] = {}  # for an engine that is not ours


class _Stage(_Section, frozen=True, tag_field="kind"):
    model: ModelSpec = ModelSpec()
    devices: tuple[str, ...] = ("cpu",)  # one per rank of each local replica, reused in turn: cpu, cuda:0, mps
    replicas: Replicas = 1  # how many must be ready before requests are taken
    local: Annotated[int, Meta(ge=0)] | None = None  # how many of them the launcher starts here; default: all
    max_replicas: Replicas | None = None  # slots, for replicas that join later; default: `replicas`
    threads: Count | None = (
        None  # CPU threads of one replica; default: cores shared by the local replicas and their ranks
    )
    env: dict[str, str] = {}  # further environment of the local replicas
    python: str | None = None  # interpreter of the local replicas; default: the launcher's own
    inputs: dict[str, Link] = {}
    edge: EdgeSpec = EdgeSpec()
    output: Kind | None = None  # what a caller may ask of this stage
    balance: Balance = Balance.LEAST_LOADED  # least-loaded, round-robin or random
    max_in_flight: Count = 64  # requests that one replica may hold

    @property
    def slots(self) -> int:
        """Replica numbers 0..slots-1 may register."""
        return max(self.replicas, self.max_replicas or self.replicas)

    @property
    def local_replicas(self) -> int:
        return self.replicas if self.local is None else min(self.local, self.replicas)


class ArStage(_Stage, frozen=True, tag="ar"):
    """A causal language model."""

    engine: ArEngineSpec = ArEngineSpec()
    parallel: ArParallelSpec = ArParallelSpec()
    defaults: SamplingParams = SamplingParams()
    prompt: PromptSpec = PromptSpec()


class DiffusionStage(_Stage, frozen=True, tag="diffusion"):
    """A diffusers pipeline."""

    engine: DiffusionEngineSpec = DiffusionEngineSpec()
    parallel: DiffusionParallelSpec = DiffusionParallelSpec()
    defaults: DiffusionParams = DiffusionParams()


StageSpec = ArStage | DiffusionStage


class Deploy(_Section, frozen=True):
    name: Name
    stages: Annotated[dict[Annotated[StageName, _NAME], StageSpec], Meta(min_length=1, max_length=256)]
    master: MasterSpec = MasterSpec()
    api: ApiSpec = ApiSpec()
    limits: LimitsSpec = LimitsSpec()

    def stage(self, name: StageName) -> StageSpec:
        return self.stages[name]


OUTPUTS: Final[dict[str, dict[str, Kind]]] = {
    "ar": {"text": Kind.TEXT, "tokens": Kind.TOKENS, "hidden": Kind.HIDDEN, "kv": Kind.KV},
    "diffusion": {"image": Kind.IMAGE, "latents": Kind.LATENTS, "audio": Kind.AUDIO, "video": Kind.VIDEO},
}
"""What the stages of a kind can give, by the name after the dot in `stage.output`."""

INPUTS: Final[dict[str, dict[str, tuple[Kind, ...]]]] = {
    "ar": {"prompt": (Kind.TEXT,), "tokens": (Kind.TOKENS,), "prompt_embeds": (Kind.HIDDEN,)},
    "diffusion": {
        "prompt": (Kind.TEXT,),
        "negative_prompt": (Kind.TEXT,),
        "kv": (Kind.KV,),
        "image": (Kind.IMAGE,),
        "mask_image": (Kind.IMAGE,),
        "latents": (Kind.LATENTS,),
        "prompt_embeds": (Kind.HIDDEN,),
        "prior_token_ids": (Kind.TOKENS,),
        "generated_prompt_embeds": (Kind.HIDDEN,),
    },
}
"""What the stages of a kind can take, and the kinds of edge that fit each input."""

DEMO_MODELS: Final[dict[str, str]] = {
    "smollm2-135m-instruct": "ar",
    "tiny-painter": "diffusion",
    "painter": "diffusion",
}
"""The models that `demo://NAME` may name, and the kind of stage that each is for."""


def kind_of(stage: StageSpec) -> str:
    """The stage's tag in the YAML: ar or diffusion."""
    return "ar" if isinstance(stage, ArStage) else "diffusion"


def devices_of(devices: Sequence[str], degree: int, replica: int) -> tuple[str, ...]:
    """The devices of one replica, those of its ranks in order: `degree` that follow one another, handed out in turn."""
    first = replica % max(1, len(devices) // degree) * degree
    return tuple(devices[first : first + degree])
