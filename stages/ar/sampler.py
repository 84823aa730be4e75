"""One token for each row of a step's logits, for all rows at once.

The likeliest token is looked for in two steps: the largest of every `BLOCK` neighbours, then inside the first block that
has it; the likeliest k and the token of a draw in groups of `GROUP` tokens that lie far apart, which is what a processor
adds up fastest. On one core, for 64 rows of 49,152, torch's own argmax takes 19 ms and its topk 20. A draw takes one random number of its request's own generator, and is the first token at
which the sum of probabilities passes it: over the likeliest tokens in their order where `top_k` or `top_p` cut the rest
off, else over the vocabulary. So a row costs what its own rule asks for, and gives what it would give alone.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch.nn import functional as F
from transformers import TopKLogitsWarper, TopPLogitsWarper, TypicalLogitsWarper

from stages.ar import penalties
from stages.ar.native import picking
from stages.ar.sampling import Picker

BLOCK: Final = 1024
GROUP: Final = 32
FEW: Final = 128
"""`top_p` first looks among so many of the likeliest tokens; rows that need more are sorted whole."""


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Of one token: its own log probability, and the likeliest tokens with theirs. Of the model, before any setting."""

    token: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Picked:
    """`tokens[i]` is None where row i's logits are not numbers."""

    tokens: tuple[int | None, ...]
    logprobs: tuple[Logprobs | None, ...] = ()


def sample(logits: torch.Tensor, pickers: Sequence[Picker]) -> Picked:
    """The next token of each row. `logits`: (S, V), any float dtype and device, not changed."""
    if not pickers:
        return Picked(())
    changed = [row for row, one in enumerate(pickers) if penalties.needed(one)]
    scores = logits
    if changed:
        scores = _with(logits, changed, penalties.apply(_rows(logits, changed), [pickers[row] for row in changed]))
    uniform = [0.0 if one.rule.greedy else _uniform(one) for one in pickers]
    picked = (_pick_in_c if picking.usable(scores) else _pick)(scores, pickers, uniform)
    return Picked(picked, _logprobs(logits, pickers, picked))


def _uniform(picker: Picker) -> float:
    return float(torch.rand((), generator=picker.generator, dtype=torch.float64))


def _pick(scores: torch.Tensor, pickers: Sequence[Picker], uniform: Sequence[float]) -> tuple[int | None, ...]:
    tokens, best = argmax(scores)
    drawn = [row for row, one in enumerate(pickers) if not one.rule.greedy]
    if drawn:
        tokens[torch.tensor(drawn, device=tokens.device)] = _draw(
            _rows(scores, drawn), [pickers[row] for row in drawn], [uniform[row] for row in drawn]
        )
    numbers = torch.isfinite(best).tolist()
    return tuple(token if fine else None for token, fine in zip(tokens.tolist(), numbers, strict=True))


def _pick_in_c(scores: torch.Tensor, pickers: Sequence[Picker], uniform: Sequence[float]) -> tuple[int | None, ...]:
    """What asks for more than C has is drawn as everywhere."""
    tokens, states = picking.pick(scores, [one.rule for one in pickers], uniform, FEW)
    rest = [
        row
        for row, one in enumerate(pickers)
        if states[row] != picking.NO_NUMBERS and (states[row] != picking.FINE or one.rule.typical_p < 1)
    ]
    rest = [row for row in rest if not pickers[row].rule.greedy]
    if rest:
        drawn = _draw(_rows(scores, rest), [pickers[row] for row in rest], [uniform[row] for row in rest]).tolist()
        for row, token in zip(rest, drawn, strict=True):
            tokens[row] = token
    return tuple(None if state == picking.NO_NUMBERS else token for token, state in zip(tokens, states, strict=True))


def argmax(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The first of the largest and its value, (S,) each; as `scores.max(-1)`, which is many times slower on a CPU."""
    size = scores.shape[1]
    if size < 4 * BLOCK or scores.device.type != "cpu":
        found = scores.max(-1)
        return found.indices, found.values
    whole = size // BLOCK
    blocks = scores[:, : whole * BLOCK].unflatten(1, (whole, BLOCK)).amax(-1)
    if whole * BLOCK < size:
        blocks = torch.cat([blocks, scores[:, whole * BLOCK :].amax(-1, keepdim=True)], 1)
    best = blocks.max(-1)
    begin = (best.indices * BLOCK).unsqueeze(1)
    places = begin.clamp(max=size - BLOCK) + torch.arange(
        BLOCK
    )  # the last block is read as a whole one that ends there
    inside = scores.gather(1, places).masked_fill_(places < begin, -torch.inf)
    return places.gather(1, inside.argmax(-1, keepdim=True)).squeeze(1), best.values


def top(scores: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The k largest and their tokens, each (S, k), the largest first."""
    k = min(k, scores.shape[1])
    if scores.shape[1] < 8 * k or scores.shape[1] < 8 * GROUP or scores.device.type != "cpu":
        found = scores.topk(k, -1)
        return found.values, found.indices
    groups = _per_group(scores, torch.amax)
    chosen = groups.topk(min(k, groups.shape[1]), -1).indices
    values, tokens = _inside(scores, chosen, -torch.inf)
    found = values.topk(k, -1)
    return found.values, tokens.gather(1, found.indices)


def _per_group(scores: torch.Tensor, reduce: Callable[..., torch.Tensor]) -> torch.Tensor:
    """(S, V) to (S, groups). Group g holds the tokens g, g + G, g + 2 G ...; the last V % GROUP tokens are groups alone."""
    many = scores.shape[1] // GROUP
    groups = reduce(scores[:, : many * GROUP].unflatten(1, (GROUP, many)), 1)
    if many * GROUP == scores.shape[1]:
        return groups
    return torch.cat([groups, scores[:, many * GROUP :]], 1)


def _inside(scores: torch.Tensor, groups: torch.Tensor, missing: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The values in these groups (S, g) and their tokens, (S, g * GROUP) each; `missing` where a group is shorter."""
    many = scores.shape[1] // GROUP
    alone = groups >= many
    first = torch.where(alone, groups + many * (GROUP - 1), groups)
    places = torch.arange(GROUP, device=groups.device)
    lacks = alone.unsqueeze(-1) & (places > 0)
    tokens = (first.unsqueeze(-1) + many * places).masked_fill(lacks, 0).flatten(1)
    return scores.gather(1, tokens).masked_fill(lacks.flatten(1), missing), tokens


# --- draws ------------------------------------------------------------------------------------------------------------


def _draw(scores: torch.Tensor, pickers: Sequence[Picker], numbers: Sequence[float]) -> torch.Tensor:
    """One token a row, (S,) int64; no row is greedy. `numbers` in [0, 1) decide."""
    device = scores.device
    uniform = torch.tensor(numbers, dtype=torch.float64, device=device)
    temperatures = torch.tensor([one.rule.temperature for one in pickers], device=device).unsqueeze(1)
    few = [row for row, one in enumerate(pickers) if _is_cut(one) and one.rule.typical_p >= 1]
    many = [row for row, one in enumerate(pickers) if not _is_cut(one) and one.rule.typical_p >= 1]
    slow = [row for row, one in enumerate(pickers) if one.rule.typical_p < 1]
    tokens = torch.zeros(len(pickers), dtype=torch.int64, device=device)
    if few:
        part = [pickers[row] for row in few]
        found, covered = _draw_few(_rows(scores, few), part, _rows(uniform, few), _rows(temperatures, few))
        tokens[torch.tensor(few, device=device)] = found
        slow += [row for row, fine in zip(few, covered, strict=True) if not fine]
    if slow:
        part = [pickers[row] for row in slow]
        cut = torch.cat([_cut_whole(scores[row : row + 1], one) for row, one in zip(slow, part, strict=True)])
        ones = torch.ones(len(slow), 1, device=device)
        tokens[torch.tensor(slow, device=device)] = _draw_many(cut, part, _rows(uniform, slow), ones)
    if many:
        part = [pickers[row] for row in many]
        tokens[torch.tensor(many, device=device)] = _draw_many(
            _rows(scores, many), part, _rows(uniform, many), _rows(temperatures, many)
        )
    return tokens


def _is_cut(picker: Picker) -> bool:
    return picker.rule.top_k > 0 or picker.rule.top_p < 1


def _draw_few(
    scores: torch.Tensor, pickers: Sequence[Picker], uniform: torch.Tensor, temperatures: torch.Tensor
) -> tuple[torch.Tensor, list[bool]]:
    """Draws among the likeliest, and whether these were enough."""
    vocabulary, device = scores.shape[1], scores.device
    wanted = [min(one.rule.top_k or FEW, vocabulary) for one in pickers]
    values, tokens = top(scores, max(wanted))
    values = values.float() / temperatures
    places = torch.arange(values.shape[1], device=device)
    k = torch.tensor(wanted, device=device).unsqueeze(1)
    top_p = torch.tensor([one.rule.top_p for one in pickers], dtype=torch.float64, device=device).unsqueeze(1)
    min_p = torch.tensor([one.rule.min_p for one in pickers], dtype=torch.float64, device=device).unsqueeze(1)
    weights = torch.exp((values - values[:, :1]).double()).masked_fill(places >= k, 0)
    sums = weights.cumsum(-1)
    totals = sums[:, -1:].clone()
    open_rows = [row for row, one in enumerate(pickers) if not one.rule.top_k]
    if open_rows:  # top_p alone: the sum is over the whole vocabulary
        where = torch.tensor(open_rows, device=device)
        rest = _weights(_rows(scores, open_rows), _rows(temperatures, open_rows))
        totals[where] = torch.maximum(totals[where], rest.sum(-1).double().unsqueeze(1))
    covered = (sums[:, -1:] >= top_p * totals) | (k >= vocabulary)
    keep = (sums - weights < top_p * totals) & (weights >= min_p)
    keep[:, 0] = True
    sums = (weights * keep).cumsum(-1)
    # k rows have their whole distribution here; an open row that was not covered is drawn again by the caller.
    covered |= torch.tensor([bool(one.rule.top_k) for one in pickers], device=device).unsqueeze(1)
    spot = torch.searchsorted(sums, uniform.unsqueeze(1) * sums[:, -1:], right=True)
    return tokens.gather(1, torch.minimum(spot, _last(sums))).squeeze(1), covered.squeeze(1).tolist()


def _draw_many(
    scores: torch.Tensor, pickers: Sequence[Picker], uniform: torch.Tensor, temperatures: torch.Tensor
) -> torch.Tensor:
    """Draws over the whole vocabulary: first a group, by the groups' sums, then a token in it."""
    weights = _weights(scores, temperatures)
    if any(one.rule.min_p > 0 for one in pickers):
        weights.masked_fill_(
            weights < torch.tensor([one.rule.min_p for one in pickers], device=scores.device)[:, None], 0
        )
    sums = _per_group(weights, torch.sum).double().cumsum(-1)
    target = uniform.unsqueeze(1) * sums[:, -1:]
    group = torch.searchsorted(sums, target, right=True).clamp(max=sums.shape[1] - 1)
    values, tokens = _inside(weights, group, 0)
    before = F.pad(sums, (1, 0)).gather(1, group)
    inside = values.double().cumsum(-1)
    spot = torch.searchsorted(inside, target - before, right=True)
    return tokens.gather(1, torch.minimum(spot, _last(inside))).squeeze(1)


def _last(sums: torch.Tensor) -> torch.Tensor:
    """Where running sums (S, n) reach their end, (S, 1): the last place that has any weight. Rounding may point beyond."""
    return (sums < sums[:, -1:]).sum(-1, keepdim=True)


def _weights(scores: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
    """(S, V) float32, the likeliest is 1: probabilities but for a factor."""
    scaled = scores.to(torch.float32, copy=True).div_(temperatures)
    return scaled.sub_(scaled.amax(-1, keepdim=True)).exp_()


def _cut_whole(scores: torch.Tensor, picker: Picker) -> torch.Tensor:
    """(1, V): top_k, top_p and typical_p by transformers' own code, for rows that need the whole vocabulary sorted."""
    rule = picker.rule
    scores = scores.float() / rule.temperature
    ids = torch.empty(1, 0, dtype=torch.int64, device=scores.device)
    if rule.top_k:
        scores = TopKLogitsWarper(rule.top_k)(ids, scores)
    if rule.top_p < 1:
        scores = TopPLogitsWarper(rule.top_p)(ids, scores)
    if rule.typical_p < 1:
        scores = TypicalLogitsWarper(rule.typical_p)(ids, scores)
    return scores


# --- rows -------------------------------------------------------------------------------------------------------------


def _rows(values: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """Those rows; no copy if they are all of them."""
    if len(rows) == values.shape[0]:
        return values
    return values[torch.tensor(rows, device=values.device)]


def _with(values: torch.Tensor, rows: Sequence[int], changed: torch.Tensor) -> torch.Tensor:
    if len(rows) == values.shape[0]:
        return changed
    out = values.to(torch.float32, copy=True)
    out[torch.tensor(rows, device=values.device)] = changed
    return out


def _logprobs(
    logits: torch.Tensor, pickers: Sequence[Picker], picked: Sequence[int | None]
) -> tuple[Logprobs | None, ...]:
    found: list[Logprobs | None] = [None] * len(pickers)
    rows = [row for row, one in enumerate(pickers) if one.rule.logprobs is not None and picked[row] is not None]
    if not rows:
        return tuple(found)
    numbers = [pickers[row].rule.logprobs or 0 for row in rows]
    chosen = [token for row in rows if (token := picked[row]) is not None]
    for row, one in zip(rows, chances(_rows(logits, rows), chosen, numbers), strict=True):
        found[row] = one
    return tuple(found)


def chances(logits: torch.Tensor, tokens: Sequence[int], numbers: Sequence[int]) -> list[Logprobs]:
    """Of one token a row, and of the `numbers[i]` likeliest ones. `logits`: (S, V), any float dtype."""
    logs = logits.float().log_softmax(-1)
    values, likeliest = top(logs, max(1, *numbers)) if numbers else (logs, logs)
    return [
        Logprobs(
            float(logs[row, token]),
            tuple(zip(likeliest[row, :number].tolist(), values[row, :number].tolist(), strict=True)),
        )
        for row, (token, number) in enumerate(zip(tokens, numbers, strict=True))
    ]
