"""From the bytes of an HTTP body to a strict struct, with errors that name the field, the value and the remedy.

Invariant: no more than `limit` bytes of a body are ever held, whatever its headers claim.
"""

import asyncio
import json
import re
from collections.abc import Iterable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request

from omni.api.errors import ClientGone, HttpError
from proto.errors import InvalidRequest
from proto.params import Json
from proto.suggest import nearest

T = TypeVar("T", bound=msgspec.Struct)

IN_A_THREAD: Final = 256 << 10
"""Bytes; larger bodies are parsed off the loop."""

_LINGER_S: Final = 2.0
_shower: Final = json.JSONEncoder(ensure_ascii=False, default=lambda value: f"{len(value)} bytes")  # a form's file
_LONGEST: Final = 80
"""Characters of a caller's own words in a message."""

_AT: Final = " - at `"
_UNKNOWN: Final = "Object contains unknown field `"
_MISSING: Final = "Object missing required field `"
_STEP: Final = re.compile(r"\[(\d+)\]|\.?([^.\[\]]+)")


@dataclass(frozen=True, slots=True)
class Refused:
    """A field of OpenAI's API that changes nothing here at the values in `harmless`, and is refused at any other."""

    harmless: tuple[Json, ...]
    remedy: str


async def read_object(request: Request, limit: int) -> dict[str, Json]:
    """The body as one JSON object. Raises `HttpError` (413, 415), `InvalidRequest` or `ClientGone`."""
    media_type = media_type_of(request)
    if media_type != "application/json":
        raise HttpError(
            415,
            f"Content-Type is {media_type!r}; send the body as application/json",
            code="unsupported_media_type",
        )
    body = await read_bytes(request, limit)
    data = await asyncio.to_thread(_parse, body) if len(body) > IN_A_THREAD else _parse(body)
    if not isinstance(data, dict):
        raise InvalidRequest("the body is not a JSON object")
    return data


def media_type_of(request: Request) -> str:
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


async def read_bytes(request: Request, limit: int) -> bytes:
    """The body. Of one that is too large a little more is read and thrown away, for a short time: a client that is
    cut off while it sends does not read the answer."""
    declared = request.headers.get("content-length", "")
    too_large = declared.isdecimal() and int(declared) > limit
    chunks: list[bytes] = []
    size = 0
    patience = asyncio.timeout(_LINGER_S if too_large else None)
    try:
        async with patience, aclosing(request.stream()) as stream:
            async for chunk in stream:
                size += len(chunk)
                if size > limit and not too_large:
                    too_large = True
                    patience.reschedule(asyncio.get_running_loop().time() + _LINGER_S)
                if size > 2 * limit:
                    break
                if too_large:
                    chunks.clear()
                else:
                    chunks.append(chunk)
    except ClientDisconnect as error:
        raise ClientGone from error
    except TimeoutError:
        pass  # it is too large, whatever else would come
    if not too_large:
        return b"".join(chunks)
    raise HttpError(
        413,
        f"the body is larger than {limit} bytes; send less, or raise api.max_body_bytes in the deploy",
        code="request_too_large",
        headers={"connection": "close"},
    )


def _parse(body: bytes) -> Json:
    try:
        return msgspec.json.decode(body)
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply") from None
    except msgspec.MsgspecError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from None


def drop_harmless(data: dict[str, Json], table: Mapping[str, Refused]) -> None:
    """Take the fields of `table` out of `data`, or raise `InvalidRequest` for one that asks for something."""
    for name in [name for name in data if name in table]:
        value, rule = data.pop(name), table[name]
        if value is not None and not any(_same(value, harmless) for harmless in rule.harmless):
            raise InvalidRequest(f"{name}={show(value)} is not supported here; {rule.remedy}", field=name)


def _same(value: Json, other: Json) -> bool:
    return isinstance(value, bool) == isinstance(other, bool) and bool(value == other)


def convert(
    data: Mapping[str, Json],
    struct: type[T],
    *,
    spelling: Mapping[str, str] | None = None,
    known: Iterable[str] = (),
    strict: bool = True,
) -> T:
    """`data` as a `struct`, strictly, or with the text of a form taken for what it says. `spelling` gives the caller's names of fields that were renamed, `known` further
    names that a mistyped one may have meant. Raises `InvalidRequest`."""
    fields = {field.encode_name for field in msgspec.structs.fields(struct)}
    for name in data:
        if name not in fields:  # not left to msgspec: the name is the caller's, and its message would have to be parsed
            raise InvalidRequest(f"unknown field {cut(name)!r}{_nearest(name, [*fields, *known])}", field=cut(name))
    try:
        return msgspec.convert(data, struct, strict=strict)
    except msgspec.ValidationError as error:
        raise _explain(str(error), data, spelling or {}) from None


def _explain(text: str, data: Mapping[str, Json], spelling: Mapping[str, str]) -> InvalidRequest:
    """msgspec's words in ours. Paths hold field names and indices alone, so the last one in the text is not a caller's."""
    reason, path = text.rsplit(_AT, 1) if _AT in text else (text, "")
    path = path.removesuffix("`").removeprefix("key` in `").partition("[...]")[0]  # in a map msgspec does not say where
    path = path.removeprefix("$").removeprefix(".")
    for start, words in ((_UNKNOWN, "unknown field {0!r}"), (_MISSING, "{0} is missing")):
        if reason.startswith(start):
            name = cut(reason.removeprefix(start).removesuffix("`"))
            field = f"{path}.{name}" if path else name
            return InvalidRequest(words.format(field), field=field)
    field = spelling.get(path, path)
    seen = show(_at(data, path))
    return InvalidRequest(
        f"{field}: {reason[:1].lower()}{reason[1:].replace('`', '')}; the value is {seen}", field=field
    )


def _nearest(name: str, names: list[str]) -> str:
    if len(name) > _LONGEST:
        return ""
    meant = nearest(name, names)
    return f"; did you mean {meant!r}?" if meant is not None else ""


def _at(data: Json, path: str) -> Json:
    for index, key in _STEP.findall(path):
        data = data[int(index)] if index else data.get(key)
    return data


def show(value: Json) -> str:
    """A value of the caller's, short enough for a message. Takes no longer for a value that is large."""
    if isinstance(value, str):
        return cut(json.dumps(value[: _LONGEST + 1], ensure_ascii=False))
    text = ""
    for piece in _shower.iterencode(value):  # lazily
        text += piece[: _LONGEST + 1]
        if len(text) > _LONGEST:
            break
    return cut(text)


def cut(text: str) -> str:
    """A caller's own words, short enough for a message."""
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."
