"""What a denoiser is told of the prompt, found in its arguments by comparing, and changed there step by step.

No signature says which arguments hang on the prompt. So the first step of the same request is made with the old and with the
new prompt (`stages.diffusion.rehearsal`), and what differs between the two is what the prompt decides: embeddings, pooled ones,
masks, lengths, at whatever depth. In the running request each of these is known by its content, and the new one put in its
place: the whole argument or, where guidance took rows away, row by row.

Invariant: a call's arguments are replaced all together or not at all (`CannotChange`), and nothing else of it is touched.
"""

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from proto.params import Json
from stages.diffusion import library
from stages.diffusion.content import Opaque, freeze
from stages.diffusion.forms import rows_of
from stages.diffusion.parking import Call, Site
from stages.diffusion.rules import lengthened
from stages.diffusion.traits import Traits

Path = tuple[str | int, ...]
"""Where a leaf stands: an argument's name, then keys and places inside."""


class CannotChange(Exception):
    """The update does not fit the request, for a reason that its caller can read."""


@dataclass(frozen=True, slots=True)
class MadeCall:
    """A denoiser's call of a first step, as the pipeline would have made it."""

    site: Site
    arguments: Mapping[str, Json]


@dataclass(slots=True)
class Place:
    """One leaf: what stood there when the transition began, and what stands there in its end. `through` is `goal` as it is
    mixed, which may be longer (`_padded`)."""

    start: Json
    goal: Json
    through: Json
    weight: float = 0.0  # of the last mixture
    mixture: Json = None

    def at(self, weight: float) -> Json:
        """`goal` at 1, and before that a share of it."""
        if weight >= 1.0:
            return self.goal
        if weight != self.weight:
            self.weight, self.mixture = weight, mixed(self.start, self.through, weight)
        return self.mixture


Key = tuple[int | None, Path, Hashable]
"""Number of the call in its step (None: any), path (names only, if any call), content."""


class Conditions:
    """The leaves of one request's calls that its prompt decides, by their content in the calls as the pipeline makes them.
    `names` are the arguments that they stand in."""

    def __init__(self, places: Mapping[Key, Place], names: frozenset[str]) -> None:
        self._places = places
        self.names = names

    def applied(self, call: Call, number: int, weight: float) -> dict[str, Json]:
        """The arguments of the `number`-th call of a step, changed. Raises `CannotChange` for a call that is not known."""
        return {
            name: self._rebuilt((name,), value, number, weight) if name in self.names else value
            for name, value in call.arguments.items()
        }

    def start(self, key: Key, otherwise: Json) -> Json:
        """Where another transition begins at this place, once this one has ended."""
        place = self._places.get(key)
        return otherwise if place is None else place.goal

    def _rebuilt(self, path: Path, value: Json, number: int, weight: float) -> Json:
        if type(value) is dict:
            return {name: self._rebuilt((*path, name), part, number, weight) for name, part in value.items()}
        if type(value) in (list, tuple):
            return type(value)(self._rebuilt((*path, at), part, number, weight) for at, part in enumerate(value))
        place = self._place(path, value, number)
        return self._by_rows(path, value, number, weight) if place is None else place.at(weight)

    def _place(self, path: Path, value: Json, number: int) -> Place | None:
        content = _content(value)
        found = self._places.get((number, path, content))
        return self._places.get((None, _names(path), content)) if found is None else found

    def _by_rows(self, path: Path, value: Json, number: int, weight: float) -> Json:
        found = [self._place(path, row, number) for row in value] if _has_rows(value) else []
        rows = [place.at(weight) for place in found if place is not None]
        if not rows or len(rows) < len(found):
            where = ".".join(map(str, path))
            raise CannotChange(
                f"its denoiser's {where} is not what the prompt gave at the first step, so none can follow it"
            )
        return torch.stack(rows)


def find(
    before: Sequence[MadeCall], after: Sequence[MadeCall], now: Conditions | None, *, mix: bool
) -> Conditions | None:
    """The way from `now` (None: `before`) to `after`; None if there is none, since nothing differs.

    `before` and `after` are the calls of a first step with the request's own and with the new prompt. With `mix` every place
    can be mixed. Raises `CannotChange` if they differ in more than content, or `mix` is not possible.
    """
    if not before:
        raise CannotChange("its denoiser is none that is known here")
    if [(c.site, _rows(c)) for c in before] != [(c.site, _rows(c)) for c in after]:
        raise CannotChange(_OTHER_CALLS)
    pairs = [pair for number, calls in enumerate(zip(before, after, strict=True)) for pair in _pairs(number, *calls)]
    names = frozenset(str(key[1][0]) for key, old, new in pairs if _content(old) != _content(new))
    names |= frozenset() if now is None else now.names
    if not names:
        return None
    traits = before[0].site.traits
    names |= {mask for embeds, mask in traits.masked.items() if embeds in names}
    places: dict[Key, Place] = {}
    for key, old, new in pairs:
        if key[1][0] in names:
            places[key] = Place(old if now is None else now.start(key, old), new, new)
    if mix:
        _pad(places, traits)
        for place in places.values():
            mixed(place.start, place.through, 0.5)  # raises what it would raise later
    return Conditions({**places, **_general(pairs, places)}, names)


_OTHER_CALLS: Final = "it would turn guidance on or off, or change the number of rows, which a request at work cannot"


def mixed(start: Json, goal: Json, weight: float) -> Json:
    """`weight` of the goal and the rest of the start: numbers linearly; masks let through what either does. Raises
    `CannotChange`."""
    if isinstance(start, torch.Tensor) and isinstance(goal, torch.Tensor):
        return _mixed_tensors(start, goal, weight)
    if _content(start) == _content(goal):
        return goal
    if type(start) is float and type(goal) is float:
        return start + weight * (goal - start)
    raise CannotChange("there is nothing between its conditions and the new ones; set transition_steps to 0")


def _mixed_tensors(start: torch.Tensor, goal: torch.Tensor, weight: float) -> torch.Tensor:
    if start.shape != goal.shape:
        raise CannotChange(
            f"the new conditions have shape {tuple(goal.shape)}, and its own {tuple(start.shape)}: between prompts of"
            " different lengths this model has no transition; set transition_steps to 0"
        )
    if goal.is_floating_point():
        return torch.lerp(start, goal, weight)
    if goal.dtype is not torch.bool and not bool(((start | goal) <= 1).all() and ((start & goal) >= 0).all()):
        if torch.equal(start, goal):
            return goal
        raise CannotChange("there is nothing between its conditions and the new ones; set transition_steps to 0")
    return start | goal


# --- reading calls ----------------------------------------------------------------------------------------------------


def _content(value: Json) -> Hashable:
    try:
        return freeze(value)
    except Opaque:
        return "opaque", type(value).__name__


def _rows(call: MadeCall) -> int:
    return rows_of(Call(call.site, (), call.arguments))


def _has_rows(value: Json) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim > 1


def _names(path: Path) -> Path:
    return tuple(at for at in path if isinstance(at, str))


def _pairs(number: int, one: MadeCall, other: MadeCall) -> Iterator[tuple[Key, Json, Json]]:
    """The leaves of two calls, side by side, by their keys in the first."""
    old, new = dict(_leaves((), dict(one.arguments))), dict(_leaves((), dict(other.arguments)))
    if old.keys() != new.keys():
        raise CannotChange(_OTHER_CALLS)
    for path, value in old.items():
        content = _content(value)
        if content == ("opaque", type(value).__name__) and not library.is_inert(one.site.name, value):
            raise CannotChange(f"its denoiser takes a {type(value).__name__}, of which nothing is known")
        yield (number, path, content), value, new[path]


def _leaves(path: Path, value: Json) -> Iterator[tuple[Path, Json]]:
    """Everything inside that is no dict, list or tuple."""
    if type(value) is dict:
        for name, part in value.items():
            yield from _leaves((*path, name), part)
    elif type(value) in (list, tuple) and value:
        for at, part in enumerate(value):
            yield from _leaves((*path, at), part)
    else:
        yield path, value


def _general(pairs: Iterable[tuple[Key, Json, Json]], places: Mapping[Key, Place]) -> dict[Key, Place]:
    """Places by content alone, whole and by rows, for calls that come in another order or with fewer rows than in the first
    step. Content that stands for two things is left out."""
    found: dict[Key, Place] = {}
    twice: set[Key] = set()

    def add(path: Path, content: Json, place: Place) -> None:
        key = (None, _names(path), _content(content))
        known = found.setdefault(key, place)
        if _content((known.start, known.goal)) != _content((place.start, place.goal)):
            twice.add(key)

    for key, old, _ in pairs:
        place = places.get(key)
        if place is None:
            continue
        add(key[1], old, place)
        parts = (old, place.start, place.goal, place.through)
        if all(map(_has_rows, parts)) and len({len(part) for part in parts}) == 1:
            for row, start, goal, through in zip(*parts, strict=True):
                add(key[1], row, Place(start, goal, through))
    return {key: place for key, place in found.items() if key not in twice}


def _pad(places: Mapping[Key, Place], traits: Traits) -> None:
    """Embeddings of different lengths, and their masks, get the longer one's length for as long as they are mixed: what is
    not there yet grows out of zeros, and what will not be there shrinks to them."""
    by_path = {(number, path): place for (number, path, _), place in places.items()}
    for (number, path), place in by_path.items():
        mask_name = traits.masked.get(str(path[0])) if len(path) == 1 else None
        mask = by_path.get((number, (mask_name,))) if mask_name is not None else None
        start, goal = place.start, place.goal
        if mask is None or not (_has_rows(start) and _has_rows(goal)) or start.shape[1] == goal.shape[1]:
            continue
        longest = max(start.shape[1], goal.shape[1])
        mask.start = lengthened(_mask_of(mask.start, start), longest)
        mask.through = lengthened(_mask_of(mask.goal, goal), longest)
        place.start, place.through = lengthened(start, longest), lengthened(goal, longest)


def _mask_of(mask: Json, embeds: torch.Tensor) -> torch.Tensor:
    """A mask that is missing is all ones."""
    if isinstance(mask, torch.Tensor):
        return mask
    return embeds.new_ones(embeds.shape[:2], dtype=torch.bool)
