"""Calls to an engine: a table of methods with typed arguments, read strictly, refused with the field and the nearest name."""

from collections.abc import Callable, Mapping
from typing import Generic, Protocol, TypeVar

import msgspec

from proto.errors import InvalidRequest
from proto.ids import StageName
from proto.params import Json
from proto.suggest import hint

Args = TypeVar("Args", bound=msgspec.Struct)


class Method(Protocol):
    def __call__(self, stage: StageName, method: str, args: Mapping[str, Json]) -> Json: ...


class Handler(Generic[Args]):
    """One method: what it takes, and what it does. `run` may raise an `OmniError`, which its caller is told."""

    def __init__(self, args: type[Args], run: Callable[[Args], Json]) -> None:
        self._args = args
        self._run = run

    def __call__(self, stage: StageName, method: str, args: Mapping[str, Json]) -> Json:
        known = [field.name for field in msgspec.structs.fields(self._args)]
        for name in args:
            if name not in known:
                words = hint(name, known, "arguments")
                raise _refusal(stage, f"call {method!r} takes no {name!r}; {words}", name)
        for field in msgspec.structs.fields(self._args):
            if field.required and field.name not in args:
                raise _refusal(stage, f"call {method!r} needs {field.name!r}", field.name)
        try:
            read = msgspec.convert(args, self._args, strict=True)
        except msgspec.ValidationError as error:
            reason, _, where = str(error).partition(" - at `$.")
            field_name = where.rstrip("`")
            value = f", got {args[field_name]!r:.100}" if field_name in args else ""
            raise _refusal(stage, f"call {method!r}: {field_name}: {reason}{value}", field_name) from None
        return msgspec.to_builtins(self._run(read))


class Calls:
    """The methods of one loaded engine."""

    def __init__(self, stage: StageName, methods: Mapping[str, Method]) -> None:
        self._stage = stage
        self._methods = methods

    def call(self, method: str, args: Mapping[str, Json]) -> Json:
        """The method's answer as plain data. Raises `InvalidRequest` naming the field, or what the method raises."""
        handler = self._methods.get(method)
        if handler is None:
            words = hint(method, [str(name) for name in self._methods], "methods")
            raise _refusal(self._stage, f"there is no method {method!r}; {words}", "method")
        return handler(self._stage, method, args)


def _refusal(stage: StageName, problem: str, field: str) -> InvalidRequest:
    return InvalidRequest(f"stage {stage}: {problem}", stage=stage, field=field)
