"""What a request will take of the memory, known before it starts: fitted to small requests drawn when the stage loads.

    bytes of a phase = fixed + per area x area + per frame x area x frames

`area` is of all images of the request, in pixels; of what has no size, like sound, it is how many there are.

At any time one call is made, and every request at work holds its latents and embeddings. So the stage keeps to its budget if
what all hold and what the call takes are no more than that: the scheduler sees to it. A request that would not fit even
alone is refused with the numbers. Pure: the measuring is done by `stages.diffusion.trials`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from proto.errors import InvalidRequest
from proto.ids import StageName
from stages.diffusion.scheduler import Need, Phase

PIXELS: Final = "pixels"
ITEMS: Final = "items"

_LEAST_RATE: Final = 12.0
"""Bytes a pixel that a phase takes at least by this reckoning: one finished picture as floats. Where what was measured
drowns in noise, large requests must not seem to be free."""
_HELD_COPIES: Final = 3
"""Of what its denoiser was given, a request holds the latents, the prediction and what its scheduler remembers."""


class Amount(NamedTuple):
    """What memory grows with."""

    area: int
    frames: int = 1

    @property
    def total(self) -> int:
        return self.area * self.frames


class Plane(NamedTuple):
    """Bytes by amount."""

    fixed: float
    area: float
    total: float

    def at(self, amount: Amount) -> int:
        return round(self.fixed + self.area * amount.area + self.total * amount.total)


@dataclass(frozen=True, slots=True)
class Measured:
    """One request drawn alone: bytes above the idle stage's by phase, and what it `held` between its calls."""

    amount: Amount
    peaks: Mapping[Phase, int]
    held: int


@dataclass(frozen=True, slots=True)
class Profile:
    """Fitted: see the module's docstring."""

    phases: Mapping[Phase, Plane]
    held: Plane

    def need(self, amount: Amount) -> Need:
        held = self.held.at(amount)
        return Need(held, {phase: max(held, plane.at(amount)) - held for phase, plane in self.phases.items()})


def fit(measured: Sequence[Measured]) -> Profile:
    """To a small request, a larger one, and one of more frames; the last or the last two may be missing. What grows with an
    amount that was not varied is taken to grow with it from nothing."""
    amounts = [one.amount for one in measured]
    phases = {phase: _plane(amounts, [one.peaks[phase] for one in measured], _LEAST_RATE) for phase in Phase}
    return Profile(phases, _plane(amounts, [_HELD_COPIES * one.held for one in measured], 0.0))


def _plane(amounts: Sequence[Amount], sizes: Sequence[int], least: float) -> Plane:
    """Noise may let more seem to take less: then the plane is flat in that direction, and nowhere below what was seen."""
    by_total = by_area = 0.0
    if len(amounts) == 1:
        by_total = sizes[0] / amounts[0].total
    if len(amounts) > 2:
        by_total = max(0.0, (sizes[2] - sizes[1]) / (amounts[2].total - amounts[1].total))
    by_total = max(least, by_total)
    if len(amounts) > 1:
        more = sizes[1] - sizes[0] - by_total * (amounts[1].total - amounts[0].total)
        by_area = max(0.0, more / (amounts[1].area - amounts[0].area))
    seen = zip(amounts, sizes, strict=True)
    fixed = max(size - by_area * amount.area - by_total * amount.total for amount, size in seen)
    return Plane(max(0.0, fixed), by_area, by_total)


@dataclass(frozen=True, slots=True)
class Budget:
    """`total`: bytes that all requests together may take. `unit`: what areas are counted in, pixels or items. `by_image`:
    what is drawn has the size of the request's picture."""

    stage: StageName
    model: str
    profile: Profile
    total: int
    unit: str
    by_image: bool = False

    def need(self, amount: Amount) -> Need:
        """Of a request. Raises `InvalidRequest` with the numbers if it would not fit even alone."""
        need = self.profile.need(amount)
        if need.peak <= self.total:
            return need
        frames = f" in {amount.frames} frames" if amount.frames > 1 else ""
        raise InvalidRequest(
            f"stage {self.stage}: {self.model} would take {mib(need.peak)} of memory for {amount.area} {self.unit}{frames},"
            f" most of it to {need.worst.value}; its budget is {mib(self.total)}: {self._remedy(amount.frames)}",
            stage=self.stage,
            field="image" if self.by_image else "width" if self.unit == PIXELS else "num_images",
        )

    def largest(self, frames: int = 1) -> int:
        """The largest area that fits; 0 if none does."""
        fits, beyond = 0, 1
        while beyond < 1 << 48 and self._fits(Amount(beyond, frames)):
            fits, beyond = beyond, 2 * beyond
        while beyond - fits > 1:
            middle = (fits + beyond) // 2
            fits, beyond = (middle, beyond) if self._fits(Amount(middle, frames)) else (fits, middle)
        return fits

    def _fits(self, amount: Amount) -> bool:
        return self.profile.need(amount).peak <= self.total

    def _remedy(self, frames: int) -> str:
        largest = self.largest(frames)
        if not largest:
            return "nothing of that kind fits into it; raise engine.memory"
        more = " or frames" if frames > 1 else ""
        return f"ask for {largest} {self.unit} at most (smaller images{more}, or fewer), or raise engine.memory"


def mib(size: int) -> str:
    return f"{size / 2**20:,.0f} MiB" if size >= 2**20 else f"{size:,} bytes"
