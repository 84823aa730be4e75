"""A request of ours in vLLM's words, and what vLLM's words mean in ours. Pure: no vLLM here.

Every sampling value is decided first, as for our own engine (`stages.ar.sampling.decide`), so that a deploy means the
same with either engine. vLLM serves lower priorities sooner; ours are higher.
"""

from collections.abc import Mapping, Sequence
from typing import Final, Protocol

import msgspec

from proto.errors import InvalidRequest
from proto.messages import TokenChance, TokenLogprobs
from proto.params import Json, SamplingParams
from stages.ar.sampling import SamplingRule

LACKING: Final = ("typical_p", "resumable", "lora", "lora_scale")
"""Fields of `SamplingParams` that vLLM has nothing for."""

FIELDS: Final = tuple(one for one in SamplingParams.__struct_fields__ if one not in (*LACKING, "extra"))
"""Fields that mean something to it."""

FORMS: Final = {"json_schema": "json", "regex": "regex", "grammar": "grammar"}
"""Our names and vLLM's for what the answer must look like."""


def sampling(params: SamplingParams, rule: SamplingRule, max_tokens: int) -> dict[str, object]:
    """Arguments of vLLM's `SamplingParams`, but for the forms and the kind of output. Raises `InvalidRequest`."""
    for name in LACKING:
        if getattr(params, name) not in (None, ""):
            raise InvalidRequest(f"vLLM has no {name}; leave it out, or use the built-in engine", field=name)
    if params.extra:
        raise InvalidRequest(f"params.extra holds {sorted(params.extra)}; vLLM is given none", field="extra")
    return {
        "n": params.n or 1,
        "max_tokens": max_tokens,
        "temperature": rule.temperature,
        "top_k": rule.top_k,
        "top_p": rule.top_p,
        "min_p": rule.min_p,
        "repetition_penalty": rule.repetition_penalty,
        "presence_penalty": rule.presence_penalty,
        "frequency_penalty": rule.frequency_penalty,
        "logit_bias": dict(rule.logit_bias) or None,
        "bad_words": list(params.bad_words or ()) or None,
        "stop": list(params.stop or ()),
        "stop_token_ids": list(params.stop_token_ids or ()),
        "min_tokens": min(rule.min_tokens, max_tokens),
        "ignore_eos": bool(params.ignore_eos),
        "logprobs": params.logprobs,
        "prompt_logprobs": params.prompt_logprobs,
        "seed": rule.seed,
    }


def form(params: SamplingParams) -> dict[str, object]:
    """Arguments of vLLM's `StructuredOutputsParams`; none if the answer may look like anything. Raises `InvalidRequest`."""
    given: dict[str, Json] = {
        "json_schema": params.json_schema,
        "regex": params.regex,
        "grammar": params.grammar,
    }
    named = [name for name, value in given.items() if value is not None]
    if len(named) > 1:
        raise InvalidRequest(f"{named[0]} and {named[1]} both say what the answer looks like; set one", field=named[1])
    if named == ["json_schema"]:
        return {"json": msgspec.json.encode(params.json_schema or {"type": "object"}).decode()}
    return {FORMS[name]: given[name] for name in named}


class Chance(Protocol):
    """vLLM's `Logprob`."""

    @property
    def logprob(self) -> float: ...
    @property
    def rank(self) -> int | None: ...
    @property
    def decoded_token(self) -> str | None: ...


def chances(
    tokens: Sequence[int], found: Sequence[Mapping[int, Chance] | None], count: int
) -> tuple[TokenLogprobs, ...]:
    """Of each token, with `count` alternatives. Positions that have none (the first of a prompt) are left out."""
    named = []
    for token, position in zip(tokens, found, strict=False):
        if not position:
            continue
        ranked = sorted(position.values(), key=lambda one: one.rank or 0)
        top = tuple(TokenChance(one.decoded_token or "", one.logprob) for one in ranked[:count])
        own = position[token]
        named.append(TokenLogprobs(own.decoded_token or "", own.logprob, top))
    return tuple(named)
