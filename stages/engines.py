"""Which engine a stage runs: ours for its kind, or the one that `engine.use` names. The only place that turns a name from
the deploy into code; the deploy is the operator's own file, handed on by an authenticated or loopback master."""

from collections.abc import Callable
from importlib import import_module
from typing import Final

from proto.deploy import StageSpec, kind_of
from proto.errors import StartError
from stages.engine import Engine

BUILTIN: Final = {"ar": "stages.ar.engine:ArEngine", "diffusion": "stages.diffusion.engine:DiffusionEngine"}

NAMED: Final = {"vllm": "stages.ar.vllm_engine:VllmEngine"}
_MEMBERS: Final = ("load", "has_work", "submit", "step", "abort", "call", "stats", "close")


def engine_factory(spec: StageSpec) -> Callable[[], Engine]:
    """Makes the engine when called, in the thread that will own it: its imports (torch) are slow. Raises `StartError`."""
    path = BUILTIN[kind_of(spec)] if spec.engine.use == "builtin" else NAMED.get(spec.engine.use, spec.engine.use)

    def make() -> Engine:
        module, _, name = path.partition(":")
        try:
            found = getattr(import_module(module), name)
        except Exception as error:
            raise _problem(path, f"cannot be loaded: {type(error).__name__}: {error}") from error
        missing = [one for one in _MEMBERS if one not in dir(found)]
        if missing and isinstance(found, type):
            raise _problem(path, f"is no engine: it has no {', '.join(missing)} (see stages.engine)")
        try:
            engine: Engine = found()
        except Exception as error:
            raise _problem(path, f"cannot be made: {type(error).__name__}: {error}") from error
        missing = [one for one in _MEMBERS if one not in dir(engine)]
        if missing:
            raise _problem(path, f"gives no engine: it has no {', '.join(missing)} (see stages.engine)")
        return engine

    return make


def _problem(path: str, text: str) -> StartError:
    return StartError(f"engine.use: {path} {text}", field="engine.use")
