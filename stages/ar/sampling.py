"""How one request's tokens are picked: every value decided, and what changes from token to token. Data, no arithmetic.

`stages.ar.penalties` and `stages.ar.sampler` do the arithmetic, for all rows of a step at once.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import GenerationConfig

from proto.params import SamplingParams
from stages.ar.grammar import Matcher


@dataclass(frozen=True, slots=True)
class SamplingRule:
    """Every value decided. `temperature` 0 is greedy, `top_k` 0 and `top_p` 1 are off; `seed` None is a random one.

    `ends` are the tokens that end the answer, `bad_words` token sequences that are never completed.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    bad_words: tuple[tuple[int, ...], ...] = ()
    ends: frozenset[int] = frozenset()
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    seed: int | None = None

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def penalised(self) -> bool:
        """It needs to know which tokens there were."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


def decide(
    params: SamplingParams,
    generation: GenerationConfig,
    eos: frozenset[int] = frozenset(),
    encode: Callable[[str], Sequence[int]] | None = None,
) -> SamplingRule:
    """What the request sets holds; the rest comes from the model's generation_config.json.

    That file's temperature, top_k, top_p, min_p and typical_p count only if it says `do_sample`; otherwise the default is
    greedy with all of them off. Its repetition_penalty always counts. `encode` turns bad words into tokens.
    """
    sampled = bool(generation.do_sample)

    def pick(asked: float | None, models: float | None, otherwise: float) -> float:
        return asked if asked is not None else models if models is not None else otherwise

    return SamplingRule(
        temperature=pick(params.temperature, (generation.temperature or 1.0) if sampled else None, 0.0),
        top_k=int(pick(params.top_k, generation.top_k if sampled else None, 0)),
        top_p=pick(params.top_p, generation.top_p if sampled else None, 1.0),
        min_p=pick(params.min_p, generation.min_p if sampled else None, 0.0),
        typical_p=pick(params.typical_p, generation.typical_p if sampled else None, 1.0),
        repetition_penalty=pick(params.repetition_penalty, generation.repetition_penalty, 1.0),
        presence_penalty=params.presence_penalty or 0.0,
        frequency_penalty=params.frequency_penalty or 0.0,
        logit_bias={int(token): bias for token, bias in (params.logit_bias or {}).items()},
        bad_words=_bad_words(params.bad_words or (), encode),
        ends=(frozenset() if params.ignore_eos else eos) | frozenset(params.stop_token_ids or ()),
        min_tokens=params.min_tokens or 0,
        logprobs=params.logprobs,
        prompt_logprobs=params.prompt_logprobs,
        seed=params.seed,
    )


def _bad_words(words: Sequence[str], encode: Callable[[str], Sequence[int]] | None) -> tuple[tuple[int, ...], ...]:
    """Each word as it is, and as it is after a space: the two ways in which a tokenizer writes it."""
    if encode is None:
        return ()
    forms = [form for word in words for form in dict.fromkeys((word, " " + word.lstrip()))]
    return tuple(dict.fromkeys(tuple(ids) for form in forms if (ids := encode(form))))


@dataclass(slots=True)
class Tally:
    """The first `size` of `tokens` are the different ones of prompt and answer, `counts` how often the answer has each."""

    tokens: NDArray[np.int64]
    counts: NDArray[np.float32]
    place: dict[int, int]
    read: int  # tokens of prompt and answer that are in it

    @property
    def size(self) -> int:
        return len(self.place)


@dataclass(slots=True, eq=False)
class Picker:
    """One request's side of the sampler. `tokens` is its own list, prompt then answer; the answer starts at `prompt`.

    Invariant: what it draws depends on its rule, its tokens and its logits, and on nothing that others do.
    """

    rule: SamplingRule
    tokens: list[int]
    prompt: int
    generator: torch.Generator
    matcher: Matcher | None = None
    unknown: int = 0  # of the first tokens, those that are only places of embeddings
    tally: Tally | None = None  # kept by `stages.ar.penalties`

    @property
    def answered(self) -> int:
        return len(self.tokens) - self.prompt


def picker(rule: SamplingRule, tokens: list[int], matcher: Matcher | None = None, *, unknown: int = 0) -> Picker:
    """For a request with this prompt. Its random numbers come from the CPU: one for each token, whatever the device."""
    generator = torch.Generator()
    if rule.seed is None:
        generator.seed()
    else:
        generator.manual_seed(rule.seed)
    return Picker(rule, tokens, len(tokens), generator, matcher, unknown)
