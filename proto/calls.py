"""The calls that the built-in engines answer: their names, arguments and answers. Data only, the same for every kind.

An engine of another make may have calls of its own; those that it has of these mean the same. The four in `CHANGES` answer
with an `Offering`, by which the master knows which replica has what.
"""

import enum
from typing import Annotated, Final, TypeAlias

import msgspec
from msgspec import Meta

from proto.params import LoraName

FilePath: TypeAlias = Annotated[str, Meta(min_length=1, max_length=4096)]


class Method(enum.StrEnum):
    INFO = "info"  # what the stage says of itself
    STATS = "stats"
    CLEAR_CACHE = "clear_cache"  # diffusion: forget encoded prompts
    RESET_PREFIX_CACHE = "reset_prefix_cache"  # ar: forget all prefixes
    LOAD_LORA = "load_lora"
    UNLOAD_LORA = "unload_lora"
    LIST_LORAS = "list_loras"
    SLEEP = "sleep"
    WAKE = "wake"
    START_PROFILE = "start_profile"
    STOP_PROFILE = "stop_profile"


CHANGES: Final = frozenset({Method.LOAD_LORA, Method.UNLOAD_LORA, Method.SLEEP, Method.WAKE})
"""Calls after which a replica offers something else than before."""


class _Args(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Base of every call's arguments."""


class NoArgs(_Args, frozen=True):
    pass


class LoadLora(_Args, frozen=True):
    """`path`: a folder or a safetensors file on the worker's disk; `weight_name`: the file in the folder."""

    name: LoraName
    path: FilePath
    weight_name: FilePath | None = None


class UnloadLora(_Args, frozen=True):
    name: LoraName


class StartProfile(_Args, frozen=True):
    """`path`: the folder that the trace goes to, on the worker's disk; default: a new one for temporary files."""

    path: FilePath | None = None


class LoraInfo(msgspec.Struct, frozen=True):
    """A loaded adapter. `covers`: the components that it changes; `requests`: those under way that use it."""

    name: str
    path: str
    covers: tuple[str, ...]
    parameters: int
    requests: int


class Offering(msgspec.Struct, frozen=True):
    """What a replica offers from now on; more fields may stand beside these."""

    loras: dict[str, LoraInfo]
    asleep: bool


def offering(method: str, value: object) -> tuple[tuple[str, ...], bool] | None:
    """The adapters that a replica has and whether it is asleep, after it has answered one of `CHANGES`; None if it does
    not say."""
    if method not in CHANGES or not isinstance(value, dict):
        return None
    loras, asleep = value.get("loras"), value.get("asleep")
    if not isinstance(loras, dict) or not isinstance(asleep, bool):
        return None
    return tuple(str(name) for name in loras), asleep
