"""What a caller may set, per kind of stage. Strict and ranged: a value that passes here is one that a stage can use.

None means "not set": the deploy's `defaults` apply, and below them the model's own. So a 0 is always honoured.
"""

from typing import Annotated, Any, NamedTuple, TypeAlias

import msgspec
from msgspec import Meta

Json: TypeAlias = Any
"""User-supplied data: None, bool, int, float, str, list or dict of these. It is carried, never interpreted by the wire."""

MAX_JSON_DEPTH = 32
MAX_JSON_ITEMS = 100_000
MAX_SEED = 2**63 - 1
MAX_COUNT = 2**31 - 1
"""Of tokens: more than any model has, and what every library here can count."""

MAX_PIXELS_A_SIDE = 16384


def check_json(value: Json, where: str) -> None:
    """Raise `ValueError` unless `value` is plain data, not deeper or larger than can be handled without harm.

    msgpack and Python can say more than JSON: raw bytes, timestamps, extension types, keys that are not strings. Structs
    that carry data call this when they are made, so a peer cannot send it and our own code cannot either.
    """
    level, seen = [value], 0
    for _ in range(MAX_JSON_DEPTH):
        below: list[Json] = []
        for item in level:
            if isinstance(item, dict):
                if not all(isinstance(key, str) for key in item):
                    raise ValueError(f"`{where}` has a key that is not a string; data may have string keys only")
                below.extend(item.values())
            elif isinstance(item, list | tuple):
                below.extend(item)
            elif item is not None and not isinstance(item, bool | int | float | str):
                raise ValueError(
                    f"`{where}` holds a {type(item).__name__}; data is made of null, booleans, numbers, strings, lists and maps"
                )
        seen += len(below)
        if seen > MAX_JSON_ITEMS:
            raise ValueError(f"`{where}` has more than {MAX_JSON_ITEMS} items")
        if not below:
            return
        level = below
    raise ValueError(f"`{where}` is nested more than {MAX_JSON_DEPTH} levels deep")


TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
TokenKey = Annotated[str, Meta(pattern=r"^[0-9]{1,10}$")]
"""A token id as JSON has it where it is a key."""

Words = Annotated[str, Meta(min_length=1, max_length=256)]


LoraName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
"""No dots at the start and no slashes: adapters' names become names of files and of modules."""

LoraChoice = Annotated[str, Meta(pattern=r"^([A-Za-z0-9][A-Za-z0-9._-]{0,63})?$")]
"""Empty: none, where the deploy's defaults name one."""

LoraScale = Annotated[float, Meta(ge=-10, le=10)]


class SamplingParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, tag="ar"):
    """How an AR stage picks tokens. Meanings follow the OpenAI API and `transformers.GenerationConfig`.

    `extra` is for engines that are not ours; a name that the engine did not declare is refused before any work.
    """

    max_tokens: Annotated[int, Meta(ge=1, le=MAX_COUNT)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None  # 0 is greedy
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=0, le=MAX_COUNT)] | None = None  # 0 is off
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None  # least probability, as a share of the likeliest token's
    typical_p: Annotated[float, Meta(gt=0, le=1)] | None = None  # 1 is off
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None  # of tokens that the answer has
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None  # for each time that the answer has them
    logit_bias: Annotated[dict[TokenKey, Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=1024)] | None = None
    bad_words: Annotated[tuple[Words, ...], Meta(max_length=256)] | None = None  # never said
    seed: Annotated[int, Meta(ge=0, le=MAX_SEED)] | None = None
    stop: Annotated[tuple[Annotated[str, Meta(min_length=1, max_length=256)], ...], Meta(max_length=64)] | None = None
    stop_token_ids: Annotated[tuple[TokenId, ...], Meta(max_length=256)] | None = None  # each ends the answer
    min_tokens: Annotated[int, Meta(ge=0, le=MAX_COUNT)] | None = None  # before so many, no token may end the answer
    ignore_eos: bool | None = None  # the model's own end-of-sequence tokens do not end the answer
    n: Annotated[int, Meta(ge=1, le=128)] | None = None  # answers; number k uses the seed `seed + k`
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None  # of each token, and of so many alternatives
    prompt_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None  # the same of the prompt's tokens but the first
    json_schema: dict[str, Json] | None = None  # the answer is JSON of this schema; {} is any object
    regex: Annotated[str, Meta(min_length=1, max_length=16384)] | None = None  # the answer matches it, whole
    grammar: Annotated[str, Meta(min_length=1, max_length=65536)] | None = None  # Lark; the answer is in its language
    priority: Annotated[int, Meta(ge=-100, le=100)] | None = None  # higher is served sooner
    cache_salt: Annotated[str, Meta(max_length=256)] | None = None  # prefixes are shared only with the same salt
    resumable: bool | None = None  # keep it when its answer has ended, for more input, until it is closed
    lora: LoraChoice | None = None  # a loaded adapter; "" is none
    lora_scale: LoraScale | None = None  # of its effect; 1 if not set
    extra: dict[str, Json] | None = None

    def __post_init__(self) -> None:
        if self.extra is not None:
            check_json(self.extra, "extra")
        if self.json_schema is not None:
            check_json(self.json_schema, "json_schema")


class DiffusionParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, tag="diffusion"):
    """How a diffusion stage draws. Names and meanings follow diffusers' pipelines.

    Image k of `num_images` uses the seed `seed + k`, so that it can be made again alone. `extra` holds further
    arguments of the pipeline's `__call__`; a name that the pipeline does not have is refused before any work.
    """

    width: Annotated[int, Meta(ge=1, le=MAX_PIXELS_A_SIDE)] | None = None
    height: Annotated[int, Meta(ge=1, le=MAX_PIXELS_A_SIDE)] | None = None
    num_inference_steps: Annotated[int, Meta(ge=1, le=1000)] | None = None
    guidance_scale: Annotated[float, Meta(ge=0, le=100)] | None = None
    negative_prompt: str | None = None
    num_images: Annotated[int, Meta(ge=1, le=1024)] | None = None
    seed: Annotated[int, Meta(ge=0, le=MAX_SEED)] | None = None
    strength: Annotated[float, Meta(ge=0, le=1)] | None = None
    lora: LoraChoice | None = None  # a loaded adapter; "" is none
    lora_scale: LoraScale | None = None  # of its effect; 1 if not set
    previews: Annotated[int, Meta(ge=0, le=100)] | None = None  # small pictures of the work so far, evenly spread
    extra: dict[str, Json] | None = None

    def __post_init__(self) -> None:
        if self.extra is not None:
            check_json(self.extra, "extra")


Params = SamplingParams | DiffusionParams


class LoraUse(NamedTuple):
    """An adapter and how strongly it is applied."""

    name: str
    scale: float


def lora_use(params: Params) -> LoraUse | None:
    """The adapter that a request is to be run with."""
    if not params.lora:
        return None
    return LoraUse(params.lora, 1.0 if params.lora_scale is None else params.lora_scale)


def set_fields(params: Params) -> dict[str, Json]:
    """What is set, by name: None means "not set" in every field."""
    return {name: value for name, value in msgspec.structs.asdict(params).items() if value is not None}
