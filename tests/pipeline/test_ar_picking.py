"""Tokens picked in C are those that PyTorch picks from the same numbers, row by row."""

import shutil

import pytest
import torch

from stages.ar import sampler
from stages.ar.native import picking
from stages.ar.native.library import library
from stages.ar.sampling import SamplingRule, picker

pytestmark = pytest.mark.skipif(
    not any(shutil.which(one) for one in ("cc", "gcc", "clang")), reason="there is no C compiler here"
)

RULES = {
    "greedy": SamplingRule(),
    "temperature": SamplingRule(temperature=0.8),
    "min_p": SamplingRule(temperature=1.3, min_p=0.02),
    "top_k": SamplingRule(temperature=0.7, top_k=40),
    "top_k and top_p": SamplingRule(temperature=1.0, top_k=50, top_p=0.9),
    "top_p": SamplingRule(temperature=0.6, top_p=0.8),
    "top_p of many": SamplingRule(temperature=2.0, top_p=0.99),
    "all of them": SamplingRule(temperature=0.9, top_k=300, top_p=0.95, min_p=0.01),
    "typical": SamplingRule(temperature=0.9, typical_p=0.6),
    "a top_k of nearly all": SamplingRule(temperature=0.9, top_k=4990),
}


@pytest.fixture(autouse=True)
def compiled() -> None:
    library()


def logits(vocabulary: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    ranks = torch.stack([torch.randperm(vocabulary, generator=generator) + 1 for _ in range(24)])
    noise = torch.randn(ranks.shape, generator=generator)
    return (-1.6 * ranks.log() + 0.3 * noise).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocabulary", [5000, 4096, 6017])
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_a_token_is_the_one_that_pytorch_picks(rule: SamplingRule, vocabulary: int, dtype: torch.dtype) -> None:
    scores = logits(vocabulary, dtype)
    pickers = [picker(rule, [1, 2, 3]) for _ in range(len(scores))]
    uniform = [(k + 0.37) / len(scores) for k in range(len(scores))]
    assert picking.usable(scores)
    found, expected = sampler._pick_in_c(scores, pickers, uniform), sampler._pick(scores, pickers, uniform)
    if dtype is torch.bfloat16:  # many tokens are level there: which of them comes first is open
        rows = range(len(scores))
        assert [scores[row, found[row]] for row in rows] == [scores[row, expected[row]] for row in rows]
    else:
        assert found == expected


def test_draws_follow_the_probabilities() -> None:
    scores = torch.full((1, 4096), -30.0)
    scores[0, [7, 100, 4095]] = torch.tensor([0.5, 0.3, 0.2]).log()
    rule = SamplingRule(temperature=1.0)
    seen = [sampler._pick_in_c(scores, [picker(rule, [1])], [k / 1000])[0] for k in range(1000)]
    assert [seen.count(token) for token in (7, 100, 4095)] == pytest.approx([500, 300, 200], abs=2)


def test_rows_that_are_not_numbers_are_told_and_do_not_touch_others() -> None:
    scores = logits(5000, torch.float32)[:4]
    alone = sampler._pick(scores, [picker(SamplingRule(), [1]) for _ in range(4)], [0.0] * 4)
    scores[1, 77] = float("nan")
    scores[2] = float("inf")
    found = sampler._pick_in_c(scores, [picker(SamplingRule(), [1]) for _ in range(4)], [0.0] * 4)
    assert found == (alone[0], None, None, alone[3])


def test_forbidden_tokens_never_come() -> None:
    scores = torch.full((2, 4096), -torch.inf)
    scores[:, 12] = -3.0
    rules = [SamplingRule(temperature=1.0), SamplingRule(temperature=1.0, top_p=0.9)]
    assert sampler._pick_in_c(scores, [picker(one, [1]) for one in rules], [0.999, 0.999]) == (12, 12)
