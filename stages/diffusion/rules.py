"""How one argument of several calls becomes one argument of a single call. One class for each form that arguments have.

Joining never copies one request's value over another's: whatever is not joined row by row is in the rule's key.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import torch
from torch.nn.functional import pad

from proto.params import Json

INERT: Final = "inert"
"""Key of an object that changes nothing."""


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
class Rows:
    """A tensor with one entry a row."""

    key: Hashable
    exact: Hashable = None

    def join(self, values: Sequence[Json], rows: Sequence[int]) -> Json:
        return torch.cat(tuple(values))

    def narrow(self, value: Json, start: int, stop: int) -> Json:
        return value[start:stop]


@dataclass(frozen=True, slots=True)
class Spread:
    """A timestep that holds for all rows of its call."""

    key: Hashable
    exact: Hashable = None

    def join(self, values: Sequence[Json], rows: Sequence[int]) -> Json:
        return torch.cat([value.reshape(-1).expand(n) for value, n in zip(values, rows, strict=True)])

    def narrow(self, value: Json, start: int, stop: int) -> Json:
        return value if value.numel() == 1 else value[start:stop]


@dataclass(frozen=True, slots=True)
class Same:
    """Equal in all calls, so anybody's will do."""

    key: Hashable
    exact: Hashable = None

    def join(self, values: Sequence[Json], rows: Sequence[int]) -> Json:
        return values[0]

    def narrow(self, value: Json, start: int, stop: int) -> Json:
        return value


@dataclass(frozen=True, slots=True)
class List:
    """A list with one entry a row; `ragged` if the entries are tensors of whatever shapes."""

    key: Hashable
    exact: Hashable = None
    ragged: bool = False

    def join(self, values: Sequence[Json], rows: Sequence[int]) -> Json:
        return [entry for value in values for entry in value]

    def narrow(self, value: Json, start: int, stop: int) -> Json:
        return value[start:stop]


@dataclass(frozen=True, slots=True)
class Padded:
    """Embeddings (rows, tokens, ...) or their mask (rows, tokens): zeros up to the longest."""

    key: Hashable
    exact: Hashable

    def join(self, values: Sequence[Json], rows: Sequence[int]) -> Json:
        longest = max(value.shape[1] for value in values)
        return torch.cat([lengthened(value, longest) for value in values])

    def narrow(self, value: Json, start: int, stop: int) -> Json:
        return value[start:stop]


@dataclass(frozen=True, slots=True)
class Nested:
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


NOTHING: Final = Same(None)


def lengthened(value: torch.Tensor, length: int) -> torch.Tensor:
    missing = length - value.shape[1]
    return pad(value, (*(0, 0) * (value.ndim - 2), 0, missing)) if missing else value


@dataclass(frozen=True, slots=True)
class NoMask:
    """No mask, as long as all lengths are equal. The embeddings' lengths are its `exact`."""

    exact: Hashable
    key: Hashable = "no mask"

    def join(self, values: Sequence[Json], rows: Sequence[int]) -> Json:
        return None

    def narrow(self, value: Json, start: int, stop: int) -> Json:
        return None
