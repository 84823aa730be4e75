"""Calls of several requests made as one: what may go together, the arguments joined row by row, the result split again.

`classify` reads a call's arguments once into a form: for each argument the rule by which it is joined. Two calls with the
same `bucket` have the same form, and content that one row would force on the others is part of it. Joining never copies one
request's value over another's; what cannot be read so makes the call `alone`.

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

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import torch
from torch.nn.functional import pad

from proto.params import Json
from stages.diffusion import library
from stages.diffusion.content import Opaque, freeze
from stages.diffusion.parking import Call
from stages.diffusion.traits import Traits


class CannotSplit(Exception):
    """The result of a joined call does not say which part of it is whose."""


class Rule(Protocol):
    """How one argument of several calls becomes one. `key`: equal for arguments that can be joined. `exact`: of those,
    equal for the ones that need no padding."""

    @property
    def key(self) -> Hashable: ...

    @property
    def exact(self) -> Hashable: ...

    def join(self, values: Sequence[Json], rows: Sequence[int]) -> Json: ...

    def narrow(self, value: Json, start: int, stop: int) -> Json: ...


@dataclass(frozen=True, slots=True)
class Form:
    """A call, read. `rules` is None for one that can only be made alone."""

    site: str
    rows: int
    bucket: Hashable
    exact: Hashable
    rules: Mapping[str, Rule] | None


# --- rules ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Rows:
    """A tensor with one entry a row."""

    key: Hashable
    exact: Hashable = None

    def join(self, values: Sequence[Json], rows: Sequence[int]) -> Json:
        return torch.cat(tuple(values))

    def narrow(self, value: Json, start: int, stop: int) -> Json:
        return value[start:stop]


@dataclass(frozen=True, slots=True)
class _Spread:
    """A timestep that holds for all rows of its call."""

    key: Hashable
    exact: Hashable = None

    def join(self, values: Sequence[Json], rows: Sequence[int]) -> Json:
        return torch.cat([value.reshape(-1).expand(n) for value, n in zip(values, rows, strict=True)])

    def narrow(self, value: Json, start: int, stop: int) -> Json:
        return value if value.numel() == 1 else value[start:stop]


@dataclass(frozen=True, slots=True)
class _Same:
    """Equal in all calls, so anybody's will do."""

    key: Hashable
    exact: Hashable = None

    def join(self, values: Sequence[Json], rows: Sequence[int]) -> Json:
        return values[0]

    def narrow(self, value: Json, start: int, stop: int) -> Json:
        return value


@dataclass(frozen=True, slots=True)
class _List:
    """A list with one entry a row; `ragged` if the entries are tensors of whatever shapes."""

    key: Hashable
    exact: Hashable = None
    ragged: bool = False

    def join(self, values: Sequence[Json], rows: Sequence[int]) -> Json:
        return [entry for value in values for entry in value]

    def narrow(self, value: Json, start: int, stop: int) -> Json:
        return value[start:stop]


@dataclass(frozen=True, slots=True)
class _Padded:
    """Embeddings (rows, tokens, ...) or their mask (rows, tokens): zeros up to the longest."""

    key: Hashable
    exact: Hashable

    def join(self, values: Sequence[Json], rows: Sequence[int]) -> Json:
        longest = max(value.shape[1] for value in values)
        return torch.cat([_lengthened(value, longest) for value in values])

    def narrow(self, value: Json, start: int, stop: int) -> Json:
        return value[start:stop]


@dataclass(frozen=True, slots=True)
class _Nested:
    """A dict, or a tuple or list as a dict of its places."""

    kind: type
    parts: Mapping[Hashable, Rule]
    key: Hashable
    exact: Hashable

    def join(self, values: Sequence[Json], rows: Sequence[int]) -> Json:
        joined = {at: rule.join([value[at] for value in values], rows) for at, rule in self.parts.items()}
        return joined if self.kind is dict else self.kind(joined.values())

    def narrow(self, value: Json, start: int, stop: int) -> Json:
        narrowed = {at: rule.narrow(value[at], start, stop) for at, rule in self.parts.items()}
        return narrowed if self.kind is dict else self.kind(narrowed.values())


_INERT: Final = "inert"
_NOTHING: Final = _Same(None)


def _lengthened(value: torch.Tensor, length: int) -> torch.Tensor:
    missing = length - value.shape[1]
    return pad(value, (*(0, 0) * (value.ndim - 2), 0, missing)) if missing else value


# --- reading a call ---------------------------------------------------------------------------------------------------


def classify(call: Call) -> Form:
    """The call's form. Content of shared arguments is hashed here."""
    rows = rows_of(call)
    rules: dict[str, Rule] = {}
    try:
        if call.rest:
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
        if name not in before or not _fits(rules[name], before[name], value, form.site):
            return False
    return True


def _fits(rule: Rule, before: Json, now: Json, site: str) -> bool:
    if isinstance(now, torch.Tensor):
        if now is before:
            return True
        of_rows = isinstance(rule, _Rows | _Spread | _Padded) and isinstance(before, torch.Tensor)
        return of_rows and now.shape == before.shape and now.dtype is before.dtype
    if type(now) is not type(before):
        return False
    if isinstance(rule, _Nested):
        parts = now if isinstance(now, dict) else dict(enumerate(now))
        return len(now) == len(rule.parts) and all(
            at in parts and _fits(one, before[at], parts[at], site) for at, one in rule.parts.items()
        )
    if isinstance(now, list | tuple | dict):
        return len(now) == len(before) and not any(map(_holds_tensors, now)) and bool(now == before)
    if rule.key == _INERT:
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
        return _NOTHING
    traits = call.site.traits
    if name in traits.lists and isinstance(value, list) and len(value) == rows:
        return _List(("list", tuple(_entry(entry) for entry in value[:1])), ragged=True)
    if name in traits.shared:
        return _shared(value, rows)
    if name in traits.masked and isinstance(value, torch.Tensor) and value.ndim > 1 and value.shape[0] == rows:
        return _Padded(("padded", value.dtype, value.shape[2:]), value.shape[1])
    if isinstance(value, torch.Tensor):
        return _tensor(name, value, rows, traits)
    if isinstance(value, Mapping):
        return _nested(call, name, dict, dict(value), rows)
    if isinstance(value, list | tuple):
        return _nested(call, name, type(value), dict(enumerate(value)), rows)
    if library.is_inert(call.site.name, value):
        return _Same(_INERT)
    return _Same(freeze(value))


def _entry(entry: Json) -> Hashable:
    """What all entries of a ragged list have in common."""
    return (entry.dtype, entry.ndim) if isinstance(entry, torch.Tensor) else freeze(entry)


def _tensor(name: str, value: torch.Tensor, rows: int, traits: Traits) -> Rule:
    if name in traits.timesteps and value.numel() == 1 and value.ndim < 2:
        return _Spread(("rows", value.dtype, torch.Size()))
    if value.ndim and value.shape[0] == rows:
        return _Rows(("rows", value.dtype, value.shape[1:]))
    return _Same(freeze(value))


def _shared(value: Json, rows: int) -> Rule:
    """A list that says the same for each row goes with others that say it, however many rows they have."""
    if isinstance(value, list) and len(value) == rows and len({freeze(entry) for entry in value}) == 1:
        return _List(("each", freeze(value[0])))
    return _Same(freeze(value))


def _nested(call: Call, name: str, kind: type, parts: Mapping[Hashable, Json], rows: int) -> Rule:
    if kind not in (dict, list, tuple):
        raise Opaque  # a named tuple or some such
    rules = {at: _rule(call, at if isinstance(at, str) else name, part, rows) for at, part in parts.items()}
    return _Nested(
        kind,
        rules,
        (kind.__name__, tuple((at, rule.key) for at, rule in rules.items())),
        tuple(rule.exact for rule in rules.values()),
    )


def _complete_masks(arguments: Mapping[str, Json], traits: Traits, rules: dict[str, Rule]) -> None:
    """Embeddings may be padded only where their mask can say so; one that is missing is all ones."""
    for name, mask_name in traits.masked.items():
        rule = rules.get(name)
        if not isinstance(rule, _Padded):
            continue
        mask = arguments.get(mask_name)
        if mask is None:
            rules[mask_name] = _NoMask(rule.exact)
        elif isinstance(mask, torch.Tensor) and mask.shape == arguments[name].shape[:2]:
            rules[mask_name] = _Padded(("mask", mask.dtype), mask.shape[1])
        else:
            rules[name] = _Rows(("rows", arguments[name].dtype, arguments[name].shape[1:]))


@dataclass(frozen=True, slots=True)
class _NoMask:
    """No mask, as long as all lengths are equal. The embeddings' lengths are its `exact`."""

    exact: Hashable
    key: Hashable = "no mask"

    def join(self, values: Sequence[Json], rows: Sequence[int]) -> Json:
        return None

    def narrow(self, value: Json, start: int, stop: int) -> Json:
        return None


# --- joining and splitting --------------------------------------------------------------------------------------------


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
        if not isinstance(rules.get(mask_name), _NoMask):
            continue
        values = [call.arguments[name] for call in calls]
        longest = max(value.shape[1] for value in values)
        if any(value.shape[1] != longest for value in values):
            ones = [value.new_ones(value.shape[:2], dtype=torch.bool) for value in values]
            masks[mask_name] = torch.cat([_lengthened(one, longest) for one in ones])
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
    ragged = any(isinstance(rule, _List) and rule.ragged for rule in rules.values())
    return _split(value, [form.rows for form in forms], ragged)


def _split(value: Json, rows: Sequence[int], ragged: bool) -> list[Json]:
    total = sum(rows)
    if isinstance(value, torch.Tensor) and value.ndim and value.shape[0] == total:
        return list(value.split(list(rows)))
    if ragged and isinstance(value, list) and len(value) == total:
        starts = [sum(rows[:k]) for k in range(len(rows))]
        return [value[start : start + n] for start, n in zip(starts, rows, strict=True)]
    if isinstance(value, Mapping):
        parts = {name: _split(entry, rows, ragged) for name, entry in value.items()}
        return [_rebuilt(value, {name: part[k] for name, part in parts.items()}) for k in range(len(rows))]
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        places = [_split(entry, rows, ragged) for entry in value]
        return [type(value)(place[k] for place in places) for k in range(len(rows))]
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
