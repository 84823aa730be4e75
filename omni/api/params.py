"""How a caller's settings become per-stage parameters, and how a complaint about one gets the caller's name for it."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TypeAlias, TypeVar

from omni.api.catalog import Catalog
from omni.pipeline import Pipeline
from proto.errors import InvalidRequest
from proto.ids import StageName
from proto.params import Json

T = TypeVar("T")
Spelling: TypeAlias = dict[str, str]
"""Our name of a field -> the caller's."""


@contextmanager
def caller_spelling(spelling: Mapping[str, str]) -> Iterator[None]:
    """`InvalidRequest` leaves this block with its field, and the start of its message, in the caller's words."""
    try:
        yield
    except InvalidRequest as error:
        info = error.info
        ours = (info.field or "").rpartition(".")[2]
        theirs = spelling.get(ours)
        if theirs is None or theirs == info.field:
            raise
        named = re.search(rf"(?<!\w){re.escape(theirs)}(?!\w)", info.message)
        message = info.message if named else f"{theirs}: {info.message}"
        raise InvalidRequest(message, stage=info.stage, field=theirs, retry_after_s=info.retry_after_s) from None


def one_of(preferred: tuple[str, T | None], other: tuple[str, T | None]) -> tuple[str, T | None]:
    """The (name, value) that is set, of two names for one setting. Raises `InvalidRequest` if both are."""
    if preferred[1] is not None and other[1] is not None:
        raise InvalidRequest(f"{preferred[0]} and {other[0]} are one setting; send one of them", field=other[0])
    return other if other[1] is not None else preferred


def per_stage(
    pipeline: Pipeline, catalog: Catalog, stage: StageName, params: Mapping[str, Json]
) -> dict[StageName, dict[str, Json]]:
    """`params` for `stage`, and their seed for every stage before it that knows what to do with one."""
    given = {stage: dict(params)}
    if "seed" in params:
        for before in catalog.ancestors(stage):
            info = pipeline.infos.get(before)
            if info is None or info.params is None or "seed" in info.params:
                given[before] = {"seed": params["seed"]}
    return given
