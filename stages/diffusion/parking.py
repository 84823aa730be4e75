"""Where a pipeline in a fiber stops: at every forward of a denoiser and an encoder, and at every decode.

A `Site` stands for one such call of one component. `install` puts the sites into a pipeline's shared modules: a fiber that
comes to one parks there with a `Call`, and goes on with what the engine answers. Any other thread passes straight through.
"""

import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from diffusers import DiffusionPipeline
from diffusers.hooks import HookRegistry, ModelHook

from proto.params import Json
from stages.diffusion import library
from stages.diffusion.scheduler import Phase
from stages.diffusion.traits import Traits

_HOOK = "omni_park"


@dataclass(frozen=True, slots=True, eq=False)
class Site:
    """`function` makes the call; `names` are its positional parameters. `divisible`: rows do not see one another."""

    name: str
    phase: Phase
    function: Callable[..., Json]
    names: tuple[str, ...]
    traits: Traits
    divisible: bool = True


class Call:
    """A call that a fiber wants made, and what came of it. The site's arguments are as the pipeline gave them. `inside`:
    what must hold while it is made; such a call is its request's own, and is made alone and whole."""

    __slots__ = ("_answer", "_error", "arguments", "inside", "rest", "site")

    def __init__(self, site: Site, args: Sequence[Json], kwargs: Mapping[str, Json]) -> None:
        self.site = site
        self.arguments: Mapping[str, Json] = {**dict(zip(site.names, args, strict=False)), **kwargs} if args else kwargs
        self.rest = tuple(args[len(site.names) :])  # beyond the named ones
        self.inside: Callable[[], AbstractContextManager[None]] | None = None
        self._answer: Json = None
        self._error: BaseException | None = None

    def answer(self, value: Json) -> None:
        self._answer = value

    def fail(self, error: BaseException) -> None:
        self._error = error

    def take(self) -> Json:
        """In the fiber: the value, once, or the error raised."""
        error, self._error = self._error, None
        value, self._answer = self._answer, None
        self.arguments = {}  # tensors that nobody needs while the fiber goes on
        if error is not None:
            try:
                raise error
            finally:
                del error
        return value

    def make(self) -> Json:
        """Make the call by itself, exactly as the pipeline would have."""
        if self.inside is not None:
            with self.inside():
                return self._make()
        return self._make()

    def _make(self) -> Json:
        return self.site.function(*self.rest, **self.arguments) if not self.rest else self._make_with_rest()

    def _make_with_rest(self) -> Json:
        named = [self.arguments[name] for name in self.site.names]
        others = {name: value for name, value in self.arguments.items() if name not in self.site.names}
        return self.site.function(*named, *self.rest, **others)


class _Here(threading.local):
    park: Callable[[Call], None] | None = None


_here = _Here()


def enter(park: Callable[[Call], None]) -> None:
    """This thread is a fiber from now on: it stops at sites by calling `park`."""
    _here.park = park


def stop_at(site: Site, args: Sequence[Json] = (), kwargs: Mapping[str, Json] | None = None) -> Json:
    """Make the site's call: through the engine in a fiber, directly elsewhere."""
    if _here.park is None:
        return site.function(*args, **(kwargs or {}))
    call = Call(site, args, kwargs or {})
    _here.park(call)
    return call.take()


PAUSE = Site("pause", Phase.DENOISE, lambda: None, (), Traits())
"""A stop at which nothing is to be done, for steps that have no other."""


class _ParkHook(ModelHook):  # type: ignore[misc]  # the library has no types
    """`site` is set after registration: its function is the forward that the hook replaces."""

    site: Site

    def new_forward(self, module: torch.nn.Module, *args: Json, **kwargs: Json) -> Json:
        return stop_at(self.site, args, kwargs)


def install(pipe: DiffusionPipeline, traits: Traits) -> Callable[[], None]:
    """Put sites into the pipeline's modules; the function returned takes them out again."""
    undo = [_install_forward(name, module, phase, traits) for name, module, phase in _forwards(pipe)]
    undo += [_install_method(f"{n}.{method}", m, method, phase, traits) for n, m, method, phase in _methods(pipe)]

    def remove() -> None:
        for one in undo:
            one()

    return remove


def covers(pipe: DiffusionPipeline) -> bool:
    """Whether each of its modules has a site."""
    seen = {name for name, _, _ in _forwards(pipe)} | {name for name, _, _, _ in _methods(pipe)}
    return library.modules(pipe).keys() <= seen


def _forwards(pipe: DiffusionPipeline) -> list[tuple[str, torch.nn.Module, Phase]]:
    denoisers = [(name, module, Phase.DENOISE) for name, module in library.denoisers(pipe).items()]
    encoders = [(name, module, Phase.ENCODE) for name, module in library.encoders(pipe).items()]
    return [*denoisers, *encoders]


def _methods(pipe: DiffusionPipeline) -> list[tuple[str, torch.nn.Module, str, Phase]]:
    found = [(name, module) for name, module in library.autoencoders(pipe).items() if not library.recast(module)]
    phases = {"encode": Phase.ENCODE, "decode": Phase.DECODE}
    return [(n, m, method, phase) for n, m in found for method, phase in phases.items() if method in dir(m)]


def _install_forward(name: str, module: torch.nn.Module, phase: Phase, traits: Traits) -> Callable[[], None]:
    names = _positional(module.forward)
    registry = HookRegistry.check_if_exists_or_initialize(module)
    hook = _ParkHook()
    registry.register_hook(hook, _HOOK)
    hook.site = Site(name, phase, hook.fn_ref.original_forward, names, traits)
    return lambda: registry.remove_hook(_HOOK, recurse=False)


def _install_method(
    name: str, module: torch.nn.Module, method: str, phase: Phase, traits: Traits
) -> Callable[[], None]:
    function = getattr(module, method)
    site = Site(name, phase, function, _positional(function), traits, divisible=method == "decode")

    def stop(*args: Json, **kwargs: Json) -> Json:
        return stop_at(site, args, kwargs)

    object.__setattr__(module, method, stop)
    return lambda: object.__delattr__(module, method)


def _positional(function: Callable[..., Json]) -> tuple[str, ...]:
    parameters = inspect.signature(function).parameters.values()
    return tuple(p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD)
