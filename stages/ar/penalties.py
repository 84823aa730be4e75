"""What changes logits before one is picked: penalties, bias, tokens that may not come now. For all rows at once.

Order and meaning are those of transformers (repetition) and of the OpenAI API (presence, frequency, bias): the repetition
penalty counts prompt and answer, the other two only the answer.
"""

from collections.abc import Sequence

import torch

from stages.ar.sampling import Picker


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
    vocabulary, device = scores.shape[1], scores.device
    for picker in pickers:
        _count(picker, vocabulary, device)
    counts = torch.stack([one.counts for one in pickers if one.counts is not None])
    seen = torch.stack([one.seen for one in pickers if one.seen is not None]) + counts > 0
    where = torch.tensor(rows, device=device)
    part = scores[where]
    repetition, presence, frequency = (
        torch.tensor(values, device=device).unsqueeze(1)
        for values in (
            [one.rule.repetition_penalty for one in pickers],
            [one.rule.presence_penalty for one in pickers],
            [one.rule.frequency_penalty for one in pickers],
        )
    )
    part = torch.where(seen, torch.where(part < 0, part * repetition, part / repetition), part)
    part -= presence * (counts > 0) + frequency * counts
    scores[where] = part


def _count(picker: Picker, vocabulary: int, device: torch.device) -> None:
    """Bring a row's counts up to date: usually by one token."""
    if picker.seen is None or picker.counts is None:
        picker.seen = torch.zeros(vocabulary, device=device)
        picker.seen[torch.tensor(picker.tokens[: picker.prompt], dtype=torch.int64, device=device)] = 1
        picker.counts = torch.zeros(vocabulary, device=device)
    for token in picker.tokens[picker.prompt + picker.counted :]:
        picker.counts[token] += 1
    picker.counted = picker.answered


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
