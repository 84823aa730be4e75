"""What changes logits before one is picked: penalties, bias, tokens that may not come now. For all rows at once.

Order and meaning are those of transformers (repetition) and of the OpenAI API (presence, frequency, bias): the repetition
penalty counts prompt and answer, the other two only the answer.
"""

from collections.abc import Sequence

import numpy as np
import torch

from stages.ar.sampling import Picker, Tally


def needed(picker: Picker) -> bool:
    """Whether this row's logits change now."""
    rule = picker.rule
    return (
        rule.penalised
        or bool(rule.logit_bias)
        or bool(rule.bad_words)
        or picker.matcher is not None
        or picker.answered < rule.min_tokens
    )


def apply(logits: torch.Tensor, pickers: Sequence[Picker]) -> torch.Tensor:
    """`logits` (S, V) of any float dtype, to (S, V) float32 in new memory; -inf for what may not come."""
    scores = logits.to(torch.float32, copy=True)
    penalised = [row for row, picker in enumerate(pickers) if picker.rule.penalised]
    if penalised:
        _penalise(scores, penalised, [pickers[row] for row in penalised])
    _bias(scores, pickers)
    _forbid(scores, pickers)
    return scores


def _penalise(scores: torch.Tensor, rows: Sequence[int], pickers: Sequence[Picker]) -> None:
    """Only where there were tokens: a few hundred of each row."""
    tallies = [_tally(picker) for picker in pickers]
    sizes = [tally.size for tally in tallies]
    device = scores.device

    def spread(values: list[float]) -> torch.Tensor:
        return torch.from_numpy(np.repeat(np.array(values, dtype=np.float32), sizes)).to(device)

    where = torch.from_numpy(np.repeat(np.array(rows), sizes)).to(device)
    tokens = torch.from_numpy(np.concatenate([one.tokens[: one.size] for one in tallies])).to(device)
    counts = torch.from_numpy(np.concatenate([one.counts[: one.size] for one in tallies])).to(device)
    repetition = spread([one.rule.repetition_penalty for one in pickers])
    presence = spread([one.rule.presence_penalty for one in pickers])
    frequency = spread([one.rule.frequency_penalty for one in pickers])
    part = scores[where, tokens]
    part = torch.where(part < 0, part * repetition, part / repetition)
    scores[where, tokens] = part - presence * (counts > 0) - frequency * counts


def _tally(picker: Picker) -> Tally:
    """A row's tally, brought up to date: usually by one token."""
    tally = picker.tally
    if tally is None:
        room = 2 * len(picker.tokens) + 64
        tally = picker.tally = Tally(np.zeros(room, np.int64), np.zeros(room, np.float32), {}, picker.unknown)
    for index in range(tally.read, len(picker.tokens)):
        token = picker.tokens[index]
        place = tally.place.setdefault(token, tally.size)
        if place == len(tally.tokens):
            tally.tokens = np.concatenate([tally.tokens, np.zeros_like(tally.tokens)])
            tally.counts = np.concatenate([tally.counts, np.zeros_like(tally.counts)])
        tally.tokens[place] = token
        tally.counts[place] += index >= picker.prompt
    tally.read = len(picker.tokens)
    return tally


def _bias(scores: torch.Tensor, pickers: Sequence[Picker]) -> None:
    rows, tokens, biases = [], [], []
    for row, picker in enumerate(pickers):
        for token, bias in picker.rule.logit_bias.items():
            rows.append(row)
            tokens.append(token)
            biases.append(bias)
    if rows:
        device = scores.device
        where = (torch.tensor(rows, device=device), torch.tensor(tokens, device=device))
        scores.index_put_(where, torch.tensor(biases, device=device), accumulate=True)


def _forbid(scores: torch.Tensor, pickers: Sequence[Picker]) -> None:
    rows, tokens = [], []
    for row, picker in enumerate(pickers):
        if picker.matcher is not None:
            picker.matcher.mask(scores[row])
        forbidden = _ends_of_bad_words(picker)
        if picker.answered < picker.rule.min_tokens:
            forbidden += picker.rule.ends
        rows += [row] * len(forbidden)
        tokens += forbidden
    if rows:
        where = (torch.tensor(rows, device=scores.device), torch.tensor(tokens, device=scores.device))
        scores.index_put_(where, torch.tensor(float("-inf"), device=scores.device))


def _ends_of_bad_words(picker: Picker) -> list[int]:
    """The tokens that would complete one now."""
    return [
        word[-1]
        for word in picker.rule.bad_words
        if len(word) == 1 or (picker.answered >= len(word) - 1 and tuple(picker.tokens[1 - len(word) :]) == word[:-1])
    ]
