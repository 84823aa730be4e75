"""From logits to one token. The steps and their order are transformers' own, so is each step's code.

repetition penalty, then, unless greedy: temperature, top_k, top_p, softmax, one draw. All on the CPU in float32 with a
generator of the request's own: a seed gives the same tokens on every device that gives the same logits, whoever else runs.
"""

from dataclasses import dataclass

import torch
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from proto.errors import StageFailed
from proto.params import SamplingParams


@dataclass(frozen=True, slots=True)
class SamplingRule:
    """Every value decided. `temperature` 0 is greedy, `top_k` 0 and `top_p` 1 are off; `seed` None is a random one."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    seed: int | None = None


def decide(params: SamplingParams, generation: GenerationConfig) -> SamplingRule:
    """What the request sets holds; the rest comes from the model's generation_config.json.

    That file's temperature, top_k and top_p count only if it says `do_sample`; otherwise the default is greedy with
    top_k and top_p off. Its repetition_penalty always counts.
    """
    sampled = bool(generation.do_sample)

    def pick(asked: float | None, models: float | None, otherwise: float) -> float:
        return asked if asked is not None else models if models is not None else otherwise

    return SamplingRule(
        temperature=pick(params.temperature, (generation.temperature or 1.0) if sampled else None, 0.0),
        top_k=int(pick(params.top_k, generation.top_k if sampled else None, 0)),
        top_p=pick(params.top_p, generation.top_p if sampled else None, 1.0),
        repetition_penalty=pick(params.repetition_penalty, generation.repetition_penalty, 1.0),
        seed=params.seed,
    )


class Sampler:
    """Picks the tokens of one sequence. Its only state is the generator."""

    def __init__(self, rule: SamplingRule) -> None:
        self._greedy = rule.temperature == 0
        self._steps = _steps(rule)
        self._generator = torch.Generator()
        if rule.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(rule.seed)

    def sample(self, ids: torch.Tensor, logits: torch.Tensor) -> int:
        """The next token after `ids`: int64, shape (1, T), on the CPU. `logits`: any float dtype and device, shape (1, V).

        Raises `StageFailed` if a logit is not a number.
        """
        scores = logits.to(device="cpu", dtype=torch.float32, copy=True)
        if scores.isnan().any():
            raise StageFailed(
                "the model gave logits that are not numbers; if its dtype is float16, try bfloat16 or float32"
            )
        scores = self._steps(ids, scores)
        if self._greedy:
            return int(scores.argmax(dim=-1).item())
        return int(torch.multinomial(scores.softmax(dim=-1), 1, generator=self._generator).item())


def _steps(rule: SamplingRule) -> LogitsProcessorList:
    steps = LogitsProcessorList()
    if rule.repetition_penalty != 1.0:
        steps.append(RepetitionPenaltyLogitsProcessor(rule.repetition_penalty))
    if rule.temperature == 0:
        return steps
    if rule.temperature != 1.0:
        steps.append(TemperatureLogitsWarper(rule.temperature))
    if rule.top_k:
        steps.append(TopKLogitsWarper(rule.top_k))
    if rule.top_p < 1.0:
        steps.append(TopPLogitsWarper(rule.top_p))
    return steps
