"""Calls of several requests made as one: the arguments joined row by row, the result split again."""

from collections.abc import Mapping, Sequence

import torch
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution

from proto.params import Json
from stages.diffusion.forms import Form
from stages.diffusion.parking import Call
from stages.diffusion.rules import List, NoMask, Rule, lengthened


class CannotSplit(Exception):
    """The result of a joined call does not say which part of it is whose."""


def join(calls: Sequence[Call], forms: Sequence[Form]) -> dict[str, Json]:
    """The arguments of one call for all of `calls`, which have one bucket."""
    rules = forms[0].rules
    assert rules is not None
    rows = [form.rows for form in forms]
    joined = {name: rule.join([call.arguments.get(name) for call in calls], rows) for name, rule in rules.items()}
    if len({form.exact for form in forms}) > 1:
        joined.update(_masks_for_all(calls, rows, rules))
    return {name: value for name, value in joined.items() if value is not None or name in calls[0].arguments}


def _masks_for_all(calls: Sequence[Call], rows: Sequence[int], rules: Mapping[str, Rule]) -> dict[str, torch.Tensor]:
    """Masks for embeddings of different lengths that came without one."""
    masks = {}
    for name, mask_name in calls[0].site.traits.masked.items():
        if not isinstance(rules.get(mask_name), NoMask):
            continue
        values = [call.arguments[name] for call in calls]
        longest = max(value.shape[1] for value in values)
        if any(value.shape[1] != longest for value in values):
            ones = [value.new_ones(value.shape[:2], dtype=torch.bool) for value in values]
            masks[mask_name] = torch.cat([lengthened(one, longest) for one in ones])
    return masks


def narrow(call: Call, form: Form, start: int, stop: int) -> dict[str, Json]:
    """The call's arguments for its rows `start` to `stop` only."""
    assert form.rules is not None
    values = {name: rule.narrow(call.arguments.get(name), start, stop) for name, rule in form.rules.items()}
    return {name: value for name, value in values.items() if name in call.arguments}


def split(value: Json, forms: Sequence[Form]) -> list[Json]:
    """Each call's part of a joined call's result. A list has one entry a row if an argument was such a list. Raises
    `CannotSplit`."""
    rules = forms[0].rules or {}
    ragged = any(isinstance(rule, List) and rule.ragged for rule in rules.values())
    return _split(value, [form.rows for form in forms], ragged)


def _split(value: Json, rows: Sequence[int], ragged: bool) -> list[Json]:
    total = sum(rows)
    if isinstance(value, torch.Tensor) and value.ndim and value.shape[0] == total:
        return list(value.split(list(rows)))
    if ragged and isinstance(value, list) and len(value) == total:
        starts = [sum(rows[:k]) for k in range(len(rows))]
        return [value[start : start + n] for start, n in zip(starts, rows, strict=True)]
    if isinstance(value, Mapping):
        fields = {name: _split(entry, rows, ragged) for name, entry in value.items()}
        return [_rebuilt(value, {name: field[k] for name, field in fields.items()}) for k in range(len(rows))]
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        places = [_split(entry, rows, ragged) for entry in value]
        return [type(value)(place[k] for place in places) for k in range(len(rows))]
    if isinstance(value, DiagonalGaussianDistribution):  # what VAEs encode to; each request draws from its own
        parts = _split(value.parameters, rows, ragged)
        return [DiagonalGaussianDistribution(part, value.deterministic) for part in parts]
    if value is None or isinstance(value, bool | int | float | str):
        return [value] * len(rows)
    raise CannotSplit(f"a {type(value).__name__} of {total} rows")


def concatenate(parts: Sequence[Json]) -> Json:
    """The result of one call from those of its rows' parts. Raises `CannotSplit`."""
    first = parts[0]
    if isinstance(first, torch.Tensor) and first.ndim:
        return torch.cat(tuple(parts))
    if isinstance(first, Mapping):
        return _rebuilt(first, {name: concatenate([part[name] for part in parts]) for name in first})
    if isinstance(first, tuple):
        return tuple(concatenate(place) for place in zip(*parts, strict=True))
    if isinstance(first, list):
        return [entry for part in parts for entry in part]
    if first is None or isinstance(first, bool | int | float | str):
        return first
    raise CannotSplit(f"a {type(first).__name__}")


def _rebuilt(like: Mapping[str, Json], parts: Mapping[str, Json]) -> Json:
    """A dict, or one of the libraries' output classes, which are dicts that take their fields as arguments."""
    return dict(parts) if type(like) is dict else type(like)(**parts)
