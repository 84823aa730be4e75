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


def engine_factory(spec: StageSpec) -> Callable[[], Engine]:
    """Makes the engine when called, in the thread that will own it: its imports (torch) are slow. Raises `StartError`."""
    path = BUILTIN[kind_of(spec)] if spec.engine.use == "builtin" else NAMED.get(spec.engine.use, spec.engine.use)

    def make() -> Engine:
        module, _, name = path.partition(":")
        try:
            engine: Engine = getattr(import_module(module), name)()
        except (ImportError, AttributeError) as error:
            raise StartError(f"engine.use: {path} cannot be loaded: {error}", field="engine.use") from error
        return engine

    return make
