"""Makes the planned calls: one by itself exactly as its pipeline meant it, several joined into one, too many rows in parts.

Invariant: `run` gives one result a call or raises; it keeps nothing. A call that raised in company has not been answered.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

import torch

from proto.params import Json
from stages.diffusion import collate
from stages.diffusion.collate import Form
from stages.diffusion.parking import Call
from stages.diffusion.scheduler import Phase


class Runner:
    """`forwards` counts the calls made, by phase."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.forwards: Counter[Phase] = Counter()

    def run(self, calls: Sequence[Call], forms: Sequence[Form], max_rows: int) -> list[Json]:
        """The result of each call, all of one bucket. Raises what the call raised, or `collate.CannotSplit`."""
        if len(calls) > 1:
            made = self._make(calls[0], collate.join(calls, forms))
            results = collate.split(made, forms)
        elif calls[0].site.divisible and forms[0].rules is not None and forms[0].rows > max_rows:
            results = [self._in_parts(calls[0], forms[0], max_rows)]
        else:
            self.forwards[calls[0].site.phase] += 1
            results = [_without_kv(calls[0], calls[0].make())]
        if self._device.type != "cpu":
            torch.accelerator.synchronize()  # or the host would run ahead, and a step seem done that is not
        return results

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


def lacks_memory(error: BaseException) -> bool:
    """Whether fewer rows might have gone well."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and ("out of memory" in text or "not enough memory" in text)


def _without_kv(call: Call, value: Json) -> Json:
    """Language models that encode prompts also give their KV cache, which nobody reads who did not ask for it."""
    asked = {"past_key_values", "use_cache"} & set(call.arguments)
    if call.site.phase is Phase.ENCODE and not asked and isinstance(value, Mapping) and "past_key_values" in value:
        return type(value)(**{name: entry for name, entry in value.items() if name != "past_key_values"})
    return value
