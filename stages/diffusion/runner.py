"""Makes the planned calls: one by itself exactly as its pipeline meant it, several joined into one, too many rows in parts.

Invariant: `run` gives one result a call or raises; it keeps nothing. A call that raised in company has not been answered.

Nobody vouches that the rows of an unknown model do not see one another. So the first groups of each site are checked: one
member's call is made once more by itself, and a site where that gives something else is never shared again.
"""

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from typing import Final

import torch
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from transformers import Cache

from proto.params import Json
from stages.diffusion import collate
from stages.diffusion.collate import CannotSplit
from stages.diffusion.forms import Form
from stages.diffusion.parking import PAUSE, Call
from stages.diffusion.scheduler import Phase

CHECKS: Final = 8
"""Buckets of a site whose first group is checked."""
_TOLERANCE: Final = {torch.float32: 1e-3, torch.float64: 1e-3}
_ROUGH: Final = 0.05
"""Allowed error of half precision, relative to the whole result: rows that mix, or take another's place, are far off it."""


class RowsMix(Exception):
    """In company a call gives something else than by itself."""


class Runner:
    """`forwards` counts the calls made, by phase; `checks` those made once more. `alone` are sites not to be shared."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._checked: dict[str, set[Hashable]] = {}
        self.forwards: Counter[Phase] = Counter()
        self.checks = 0
        self.alone: set[str] = set()

    def run(self, calls: Sequence[Call], forms: Sequence[Form], max_rows: int) -> list[Json]:
        """The result of each call, all of one bucket. Raises what the call raised, `RowsMix` or `collate.CannotSplit`; after
        the last two the site is in `alone`."""
        if calls[0].site is PAUSE:
            return [None] * len(calls)
        if len(calls) > 1:
            results = self._together(calls, forms)
        elif calls[0].site.divisible and forms[0].rules is not None and forms[0].rows > max_rows:
            results = [self._in_parts(calls[0], forms[0], max_rows)]
        else:
            self.forwards[calls[0].site.phase] += 1
            results = [_without_kv(calls[0], calls[0].make())]
        if self._device.type != "cpu":
            torch.accelerator.synchronize()  # or the host would run ahead, and a step seem done that is not
        return results

    def _together(self, calls: Sequence[Call], forms: Sequence[Form]) -> list[Json]:
        site = calls[0].site.name
        made = self._make(calls[0], collate.join(calls, forms))
        try:
            results = collate.split(made, forms)
            checked = self._checked.setdefault(site, set())
            if len(checked) < CHECKS and forms[0].bucket not in checked:
                self.checks += 1
                _check(calls[-1], results[-1])
                checked.add(forms[0].bucket)
        except (CannotSplit, RowsMix):
            self.alone.add(site)
            raise
        return results

    def forget(self) -> None:
        """The counts, not what was found out about sites."""
        self.forwards.clear()
        self.checks = 0

    def release_memory(self) -> None:
        """After a lack of it: give cached blocks back to the accelerator."""
        if self._device.type != "cpu":
            torch.accelerator.empty_cache()

    def _in_parts(self, call: Call, form: Form, max_rows: int) -> Json:
        starts = range(0, form.rows, max_rows)
        parts = [
            self._make(call, collate.narrow(call, form, start, min(start + max_rows, form.rows))) for start in starts
        ]
        return collate.concatenate(parts)

    def _make(self, call: Call, arguments: Mapping[str, Json]) -> Json:
        self.forwards[call.site.phase] += 1
        return _without_kv(call, call.site.function(**arguments))


def _check(call: Call, result: Json) -> None:
    """The last member's call by itself. It is the one that would be wrong if the first row's arguments served for all."""
    for ours, alone in zip(_tensors(result), _tensors(_without_kv(call, call.make())), strict=True):
        if ours.shape == alone.shape and bool(alone.isnan().any()):
            continue  # not a number either way: nothing to compare
        error = (ours.double() - alone.double()).norm() / alone.double().norm().clamp(min=1e-12)
        if not error <= _TOLERANCE.get(alone.dtype, _ROUGH):
            raise RowsMix(
                f"{call.site.name} gives a result that is {float(error):.2g} off when requests share its calls"
            )


def _tensors(value: Json) -> list[torch.Tensor]:
    """The floating-point tensors inside."""
    if isinstance(value, torch.Tensor):
        return [value] if value.is_floating_point() else []
    if isinstance(value, DiagonalGaussianDistribution):
        return [value.parameters]
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return [tensor for part in parts for tensor in _tensors(part)]


def lacks_memory(error: BaseException) -> bool:
    """Whether fewer rows might have gone well."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and ("out of memory" in text or "not enough memory" in text)


def _without_kv(call: Call, value: Json) -> Json:
    """Language models that encode prompts also give their KV cache, which nobody reads who did not ask for it."""
    asked = {"past_key_values", "cache", "use_cache"} & set(call.arguments)
    if call.site.phase is not Phase.ENCODE or asked or not isinstance(value, Mapping):
        return value
    kept = {name: entry for name, entry in value.items() if not isinstance(entry, Cache)}
    return value if len(kept) == len(value) else type(value)(**kept)
