"""Bodies that may hold files: multipart/form-data as browsers and OpenAI's client send it, or JSON.

A form becomes the same object that JSON would be: `image[]` and repeated names are lists, `extra[name]` is a mapping, files
are bytes. Values of a form are text, so they are converted without `strict`. Invariant: as in `omni.api.decode`, no more
than `limit` bytes of a body are held; a form is taken apart off the loop when it is large.
"""

import asyncio
from dataclasses import dataclass, field
from typing import Final

import msgspec
from starlette.requests import Request

from omni.api.decode import IN_A_THREAD, cut, media_type_of, read_bytes, read_object
from proto.errors import InvalidRequest
from proto.params import Json

FORM: Final = "multipart/form-data"
MAX_PARTS: Final = 256
_JSON_FIELDS: Final = frozenset({"extra"})


@dataclass(frozen=True, slots=True)
class Body:
    """`strict`: its values have types of their own."""

    data: dict[str, Json]
    strict: bool


async def read_body(request: Request, limit: int) -> Body:
    """Raises `HttpError` (413, 415), `InvalidRequest` or `ClientGone`."""
    if media_type_of(request) != FORM:
        return Body(await read_object(request, limit), strict=True)
    raw = await read_bytes(request, limit)
    content_type = request.headers["content-type"]
    if len(raw) > IN_A_THREAD:
        return Body(await asyncio.to_thread(read_form, raw, content_type), strict=False)
    return Body(read_form(raw, content_type), strict=False)


@dataclass(slots=True)
class _Part:
    header: bytearray = field(default_factory=bytearray)
    value: bytearray = field(default_factory=bytearray)
    headers: dict[bytes, bytes] = field(default_factory=dict)
    data: bytearray = field(default_factory=bytearray)


def read_form(raw: bytes, content_type: str) -> dict[str, Json]:
    """The fields of a form. Raises `InvalidRequest` for bytes that are none."""
    from python_multipart.multipart import parse_options_header

    _, options = parse_options_header(content_type)
    if not options.get(b"boundary"):
        raise InvalidRequest("the body is no form: its Content-Type has no boundary")
    fields: dict[str, Json] = {}
    for part in _parts(raw, options[b"boundary"]):
        _, disposition = parse_options_header(part.headers.get(b"content-disposition"))
        name = disposition.get(b"name", b"").decode("utf-8", "replace")
        if not name:
            raise InvalidRequest("the body is no form: one of its parts has no name")
        _add(fields, name, _value(part, name, is_file=b"filename" in disposition))
    return fields


def _parts(raw: bytes, boundary: bytes) -> list[_Part]:
    from python_multipart.exceptions import FormParserError
    from python_multipart.multipart import MultipartParser

    parts: list[_Part] = []
    done = False

    def begin() -> None:
        if len(parts) == MAX_PARTS:
            raise InvalidRequest(f"the form has more than {MAX_PARTS} parts; send fewer")
        parts.append(_Part())

    def end_header() -> None:
        part = parts[-1]
        part.headers[bytes(part.header).lower()] = bytes(part.value)
        part.header, part.value = bytearray(), bytearray()

    def end() -> None:
        nonlocal done
        done = True

    parser = MultipartParser(
        boundary,
        {
            "on_part_begin": begin,
            "on_header_field": lambda data, start, stop: parts[-1].header.extend(data[start:stop]),
            "on_header_value": lambda data, start, stop: parts[-1].value.extend(data[start:stop]),
            "on_header_end": end_header,
            "on_part_data": lambda data, start, stop: parts[-1].data.extend(memoryview(data)[start:stop]),
            "on_end": end,
        },
    )
    try:
        parser.write(raw)
        parser.finalize()
    except FormParserError as error:
        raise InvalidRequest(f"the body is no whole form: {cut(str(error))}") from None
    if not done:
        raise InvalidRequest("the body is no whole form: its end is missing")
    return parts


def _value(part: _Part, name: str, *, is_file: bool) -> Json:
    if is_file:
        return bytes(part.data)
    try:
        return part.data.decode("utf-8")
    except UnicodeDecodeError:
        raise InvalidRequest(f"{cut(name)}: this field of the form is no text", field=cut(name)) from None


def _add(fields: dict[str, Json], name: str, value: Json) -> None:
    """`name[]` adds to a list, `name[key]` to a mapping; a name that comes again makes a list."""
    stem, bracket, key = name.partition("[")
    key = key.removesuffix("]")
    if bracket and key:
        inner = fields.setdefault(stem, {})
        if not isinstance(inner, dict):
            raise InvalidRequest(f"{cut(stem)} is given twice, in two ways", field=cut(stem))
        inner[key] = _from_json(value) if stem in _JSON_FIELDS else value
    elif bracket:
        several = fields.setdefault(stem, [])
        fields[stem] = [*(several if isinstance(several, list) else [several]), value]
    elif name in fields:
        before = fields[name]
        fields[name] = [*(before if isinstance(before, list) else [before]), value]
    else:
        fields[name] = _from_json(value) if name in _JSON_FIELDS else value


def _from_json(value: Json) -> Json:
    """Text that is JSON says a number, a list and so on; any other is itself."""
    try:
        return msgspec.json.decode(value) if isinstance(value, str) else value
    except (msgspec.MsgspecError, RecursionError):
        return value
