"""Reading calls: which of them may go together, and by which rule each argument is joined.

`classify` reads a call's arguments into a form. Two calls with the same `bucket` have the same form, and content that one row
would force on the others is part of it. What cannot be read makes the call one that is made alone.

| argument | joined by |
|---|---|
| tensor with one entry a row | concatenation |
| one timestep for all rows | spreading it over the request's rows, then concatenation |
| shared tensor or list | equal content only, by hash |
| embeddings with a mask | concatenation, padded and masked where lengths differ |
| list with one entry a row | concatenation of the lists, of whatever shapes |
| dict, tuple, list | the same, inside |
| plain value | equal values only |
| anything else | not joined: the call is made alone |
"""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Final

import torch

from proto.params import Json
from stages.diffusion import library
from stages.diffusion.content import Opaque, freeze
from stages.diffusion.parking import Call
from stages.diffusion.rules import INERT, NOTHING, List, Nested, NoMask, Padded, Rows, Rule, Same, Spread
from stages.diffusion.traits import Traits


@dataclass(frozen=True, slots=True)
class Form:
    """A call, read. `rules` is None for one that can only be made alone."""

    site: str
    rows: int
    bucket: Hashable
    exact: Hashable
    rules: Mapping[str, Rule] | None


def classify(call: Call) -> Form:
    """The call's form. Content of shared arguments is hashed here."""
    rows = rows_of(call)
    rules: dict[str, Rule] = {}
    try:
        if call.rest or call.inside is not None:
            raise Opaque
        for name, value in call.arguments.items():
            rules[name] = _rule(call, name, value, rows)
        _complete_masks(call.arguments, call.site.traits, rules)
    except Opaque:
        return Form(call.site.name, rows, None, None, None)
    names = sorted(rules)
    bucket = (call.site.name, *((name, rules[name].key) for name in names))
    return Form(call.site.name, rows, bucket, tuple(rules[name].exact for name in names), rules)


class Forms:
    """Reads the calls of one request. A call that is like one of the last two, but for the values in its rows, has its
    form; a tensor that is the same object has the same content."""

    def __init__(self) -> None:
        self._last: list[tuple[dict[str, Json], Form]] = []

    def read(self, call: Call) -> Form:
        for arguments, form in self._last:
            if form.site == call.site.name and _fits_all(form, arguments, call):
                return form
        form = classify(call)
        if form.rules is not None:
            self._last = [({n: _snapshot(v) for n, v in call.arguments.items()}, form), *self._last[:1]]
        return form


def _fits_all(form: Form, before: Mapping[str, Json], call: Call) -> bool:
    now, rules = call.arguments, form.rules
    if rules is None or call.rest or len(now) != len(before):
        return False
    for name, value in now.items():
        if name not in before:
            return False
        last = before[name]
        if value is last and type(value) in _CONTENT_IS_IDENTITY:
            continue
        if not _fits(rules[name], last, value, form.site):
            return False
    return True


_CONTENT_IS_IDENTITY: Final = frozenset((torch.Tensor, type(None), bool, int, float, str))
"""Types of which the same object has the same content; a tensor because that is how calls are read here."""
_OF_ROWS: Final = (Rows, Spread, Padded)


def _fits(rule: Rule, before: Json, now: Json, site: str) -> bool:
    if isinstance(now, torch.Tensor):
        if now is before:
            return True
        of_rows = isinstance(rule, _OF_ROWS) and isinstance(before, torch.Tensor)
        return of_rows and now.shape == before.shape and now.dtype is before.dtype
    if type(now) is not type(before):
        return False
    if isinstance(rule, Nested):
        parts = now if isinstance(now, dict) else dict(enumerate(now))
        return len(now) == len(rule.parts) and all(
            at in parts and _fits(one, before[at], parts[at], site) for at, one in rule.parts.items()
        )
    if isinstance(now, list | tuple | dict):
        return len(now) == len(before) and not any(map(_holds_tensors, now)) and bool(now == before)
    if rule.key == INERT:
        return library.is_inert(site, now)
    return now is None or (isinstance(now, bool | int | float | str) and now == before)


def _holds_tensors(entry: Json) -> bool:
    return isinstance(entry, torch.Tensor | list | dict)


def _snapshot(value: Json) -> Json:
    """The value, with lists and dicts of its own: their owners may change them."""
    if type(value) is dict:
        return {name: _snapshot(entry) for name, entry in value.items()}
    return [_snapshot(entry) for entry in value] if type(value) is list else value


def rows_of(call: Call) -> int:
    """Rows of the call: of its first argument that has any, in the order of the parameters."""
    for name in (*call.site.names, *call.arguments):
        value = call.arguments.get(name)
        if isinstance(value, torch.Tensor) and value.ndim:
            return int(value.shape[0])
        if isinstance(value, list) and value:
            return len(value)
    return 1


def _rule(call: Call, name: str, value: Json, rows: int) -> Rule:
    if value is None:
        return NOTHING
    traits = call.site.traits
    if name in traits.lists and isinstance(value, list) and len(value) == rows:
        return List(("list", tuple(_entry(entry) for entry in value[:1])), ragged=True)
    if name in traits.shared:
        return _shared(value, rows)
    if name in traits.masked and isinstance(value, torch.Tensor) and value.ndim > 1 and value.shape[0] == rows:
        return Padded(("padded", value.dtype, value.shape[2:]), value.shape[1])
    if isinstance(value, torch.Tensor):
        return _tensor(name, value, rows, traits)
    if isinstance(value, Mapping):
        return _nested(call, name, dict, dict(value), rows)
    if isinstance(value, list | tuple):
        return _nested(call, name, type(value), dict(enumerate(value)), rows)
    if library.is_inert(call.site.name, value):
        return Same(INERT)
    return Same(freeze(value))


def _entry(entry: Json) -> Hashable:
    """What all entries of a ragged list have in common."""
    return (entry.dtype, entry.ndim) if isinstance(entry, torch.Tensor) else freeze(entry)


def _tensor(name: str, value: torch.Tensor, rows: int, traits: Traits) -> Rule:
    if name in traits.timesteps and value.numel() == 1 and value.ndim < 2:
        return Spread(("rows", value.dtype, torch.Size()))
    if value.ndim and value.shape[0] == rows:
        return Rows(("rows", value.dtype, value.shape[1:]))
    return Same(freeze(value))


def _shared(value: Json, rows: int) -> Rule:
    """A list that says the same for each row goes with others that say it, however many rows they have."""
    if isinstance(value, list) and len(value) == rows and len({freeze(entry) for entry in value}) == 1:
        return List(("each", freeze(value[0])))
    return Same(freeze(value))


def _nested(call: Call, name: str, kind: type, parts: Mapping[Hashable, Json], rows: int) -> Rule:
    if kind not in (dict, list, tuple):
        raise Opaque  # a named tuple or some such
    rules = {at: _rule(call, at if isinstance(at, str) else name, part, rows) for at, part in parts.items()}
    return Nested(
        kind,
        rules,
        (kind.__name__, tuple((at, rule.key) for at, rule in rules.items())),
        tuple(rule.exact for rule in rules.values()),
    )


def _complete_masks(arguments: Mapping[str, Json], traits: Traits, rules: dict[str, Rule]) -> None:
    """Embeddings may be padded only where their mask can say so; one that is missing is all ones."""
    for name, mask_name in traits.masked.items():
        rule = rules.get(name)
        if not isinstance(rule, Padded):
            continue
        mask = arguments.get(mask_name)
        if mask is None:
            rules[mask_name] = NoMask(rule.exact)
        elif isinstance(mask, torch.Tensor) and mask.shape == arguments[name].shape[:2]:
            rules[mask_name] = Padded(("mask", mask.dtype), mask.shape[1])
        else:
            rules[name] = Rows(("rows", arguments[name].dtype, arguments[name].shape[1:]))
