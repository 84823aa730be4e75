"""The first step of a request, made once more to see what its denoiser is told: with the request's own words, or with others.

Texts are encoded as always: as scheduled work, in company, from the prompt cache. The denoiser's calls are noted and answered with
zeros; only where no result of this request is known yet, which has as many rows as theirs, they are made.
"""

import dataclasses
from collections.abc import Callable, Mapping

import msgspec
import torch

from proto.ids import RequestId
from proto.messages import PromptChange, Text
from proto.params import DiffusionParams, Json
from stages.diffusion import arguments
from stages.diffusion.conditions import MadeCall
from stages.diffusion.forms import rows_of
from stages.diffusion.loading import Painter
from stages.diffusion.parking import PAUSE, Call
from stages.diffusion.request import PaintRequest
from stages.diffusion.scheduler import Phase
from stages.engine import Job


class Rehearsal:
    """`owner` is the request that it is made for, `calls` those noted so far."""

    def __init__(self, name: RequestId, owner: PaintRequest, job: Job) -> None:
        assert isinstance(job.params, DiffusionParams)
        params = msgspec.structs.replace(
            job.params, seed=job.params.seed or 0
        )  # all of a request's start from one noise
        self.owner = owner
        self.paint = PaintRequest(dataclasses.replace(job, request=name, params=params), params, owner.painter)
        self.calls: list[MadeCall] = []
        self.over = False

    def next_call(self, answered: Callable[[PaintRequest, Call], bool]) -> Call | None:
        """From where it stands to the next call that must be made; None if the first step has been made. `answered` says
        whether a text is encoded already. Raises what the pipeline raises."""
        call = self.paint.call
        while call is not None and not self._ends_at(call):
            if call.site.phase is Phase.DENOISE:
                self.calls.append(MadeCall(call.site, dict(call.arguments)))
                rows, known = self.owner.results.get(call.site.name, (0, None))
                if rows != rows_of(call):
                    return call
                call.answer(_blank(known))
            elif not answered(self.paint, call):
                return call
            call = self.paint.resume()
        if call is None:
            self.paint.check()
        return None

    def _ends_at(self, call: Call) -> bool:
        return call.site is PAUSE or call.site.phase is Phase.DECODE or bool(self.paint.take_steps())

    def end(self) -> None:
        """It is not needed any more; its time is its owner's."""
        self.paint.abort()
        for phase, seconds in self.paint.meter.seconds.items():
            self.owner.meter.seconds[phase] += seconds
        self.owner.meter.cache_hits += self.paint.meter.cache_hits


def changed(job: Job, change: PromptChange, painter: Painter) -> Job:
    """The job as it would have been with the change. Raises `InvalidRequest` if the pipeline could not run that."""
    assert isinstance(job.params, DiffusionParams)
    inputs, params = dict(job.inputs), job.params
    if change.prompt is not None:
        inputs["prompt"] = Text(text=change.prompt)
    if change.negative_prompt is not None and "negative_prompt" in inputs:
        inputs["negative_prompt"] = Text(text=change.negative_prompt)
    elif change.negative_prompt is not None:
        params = msgspec.structs.replace(params, negative_prompt=change.negative_prompt)
    if change.guidance_scale is not None:
        params = msgspec.structs.replace(params, guidance_scale=change.guidance_scale)
    new = dataclasses.replace(job, inputs=inputs, params=params)
    arguments.check(new, painter)
    return new


def _blank(value: Json) -> Json:
    """Zeros of the same form."""
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value)
    if isinstance(value, Mapping):
        parts = {name: _blank(entry) for name, entry in value.items()}
        return parts if type(value) is dict else type(value)(**parts)
    if type(value) in (list, tuple):
        return type(value)(_blank(entry) for entry in value)
    return value
