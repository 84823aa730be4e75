"""What diffusers' step caches remember, kept apart by request.

The library keeps the memory of a cache in hooks on the shared modules, under a context name such as `cond`, and drops it all
when any call of any pipeline ends. Two requests in flight would read each other's. So here the hooks hold nothing between
two calls: a call's own memory is put in before it is made and taken out after it.

Invariants
- Outside of `Slots.holding` the hooks refer to no request's tensors. What a request remembers goes when the request goes.
- A call that raises has changed nothing: it works on copies, which become the memory only when it has succeeded.
- A memory belongs to one request, one denoiser and one context: the conditional and the unconditional calls of guidance
  never share one, also for those caches that the library keeps without a context.
"""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from diffusers import MagCacheConfig
from diffusers.hooks.faster_cache import FasterCacheBlockState, FasterCacheDenoiserState
from diffusers.hooks.hooks import CacheContext, StateManager
from diffusers.hooks.pyramid_attention_broadcast import PyramidAttentionBroadcastState

from proto.params import Json

Memory = Sequence[Json]
"""One state a slot, in the order of the slots; None where nothing is remembered yet."""

_CONTEXTLESS = (PyramidAttentionBroadcastState, FasterCacheDenoiserState, FasterCacheBlockState)


class Slots:
    """The places in one module's hooks where its cache keeps what it remembers."""

    def __init__(self, module: torch.nn.Module) -> None:
        hooks = [hook for part in module.modules() for hook in _hooks(part)]
        managers = [entry for hook in hooks for entry in vars(hook).values() if isinstance(entry, StateManager)]
        self._managers = list({id(manager): manager for manager in managers}.values())  # some are shared by hooks
        self._bare = [hook for hook in hooks if isinstance(vars(hook).get("state"), _CONTEXTLESS)]
        self._blank = [copy.copy(hook.state) for hook in self._bare]
        self._configured = [hook for hook in hooks if isinstance(vars(hook).get("config"), MagCacheConfig)]

    def __len__(self) -> int:
        return len(self._managers) + len(self._bare)

    def configure(self, config: MagCacheConfig) -> None:
        """The one config that depends on the request: on how many steps it takes."""
        for hook in self._configured:
            hook.config = config

    @contextmanager
    def holding(self, memory: Memory, context: CacheContext) -> Iterator[list[Json]]:
        """The hooks remember `memory` (empty: nothing yet). Gives a list that is filled, if nothing raises, with what
        they remember after the call."""
        self._put([_own(state) for state in memory] or [None] * len(self), context)
        after: list[Json] = []
        try:
            yield after
            after += [manager._state_cache.get(context.name) for manager in self._managers]
            after += [hook.state for hook in self._bare]
        finally:
            self._put([None] * len(self), None)

    def _put(self, memory: Memory, context: CacheContext | None) -> None:
        for manager, state in zip(self._managers, memory, strict=False):
            manager._state_cache = {} if state is None or context is None else {context.name: state}
            manager.set_context(context)
        for hook, blank, state in zip(self._bare, self._blank, memory[len(self._managers) :], strict=True):
            hook.state = copy.copy(blank) if state is None else state


def _hooks(module: torch.nn.Module) -> list[Json]:
    registry = vars(module).get("_diffusers_hook")
    return [] if registry is None else list(registry.hooks.values())


def _own(state: Json) -> Json:
    """A copy that can change without changing the original: the library replaces tensors, it never writes into them."""
    mine = copy.copy(state)
    for name, value in vars(mine).items() if mine is not None else ():
        if isinstance(value, dict | list):
            setattr(mine, name, copy.copy(value))
    return mine
