"""One request at work: its data, and how one more token changes it. No policy, no model."""

import time
from dataclasses import dataclass, field

import torch

from proto.messages import TokenLogprobs, Usage
from proto.tensors import WireTensor
from stages.ar.detokenizer import Detokenizer
from stages.ar.sampling import Picker
from stages.ar.scheduler import Track
from stages.engine import Job

PREFILL_OUTPUTS = frozenset({"hidden", "kv"})
"""Outputs that are there as soon as the prompt has been read."""


@dataclass(slots=True)
class Clocks:
    """Moments on `time.perf_counter`, None before they come. `read`: the prompt had been
    read; `first` and `last`: tokens came."""

    arrived: float = field(default_factory=time.perf_counter)
    started: float | None = None
    read: float | None = None
    first: float | None = None
    last: float | None = None

    def detail(self, now: float) -> dict[str, float]:
        """For `Finished.detail`: seconds. `first_token` counts from the arrival, waiting included."""
        started = now if self.started is None else self.started
        read = now if self.read is None else self.read
        parts = {"prefill": read - started, "decode": now - read}
        return parts if self.first is None else parts | {"first_token": self.first - self.arrived}


@dataclass(slots=True, kw_only=True)
class Sequence:
    """`track.tokens` is the prompt, `prompt` tokens long, and then the answer."""

    job: Job
    prompt: int
    max_tokens: int
    track: Track
    picker: Picker
    detokenizer: Detokenizer
    hidden: list[torch.Tensor] = field(default_factory=list)  # of the prompt's chunks so far, (1, count, D)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    told: int = 0  # of `logprobs`, sent with a delta
    visible: list[WireTensor] = field(default_factory=list)  # tensors that the caller gets
    read: bool = False  # the prompt has been read, and what it gives has been given
    finish_reason: str | None = None
    clocks: Clocks = field(default_factory=Clocks)

    @property
    def wanted(self) -> frozenset[str]:
        """Every output that the job asks for."""
        return frozenset(self.job.emit) | frozenset(self.job.publish)

    @property
    def prefill_only(self) -> bool:
        """Nothing is asked for that needs a generated token."""
        return self.wanted <= PREFILL_OUTPUTS

    @property
    def answer(self) -> tuple[int, ...]:
        """The ids of the answer so far, an end-of-sequence token included."""
        return tuple(self.track.tokens[self.prompt :])

    def accept(self, token: int) -> str:
        """Take the next token in; the text that may be sent now. Sets `finish_reason` if it is the last one."""
        self.track.tokens.append(token)
        if self.picker.matcher is not None:
            self.picker.matcher.accept(token)
        answered = len(self.track.tokens) - self.prompt
        if token in self.picker.rule.ends:
            self.finish_reason = "stop"
            return self.detokenizer.finish()
        delta = self.detokenizer.push(token, may_stop=answered >= self.picker.rule.min_tokens)
        if self.detokenizer.stopped:
            self.finish_reason = "stop"
        elif answered >= self.max_tokens:
            self.finish_reason = "length"
            delta += self.detokenizer.finish()
        return delta

    @property
    def usage(self) -> Usage:
        """Generated tokens include an end-of-sequence token and those of a stop string, as in vLLM."""
        return Usage(prompt_tokens=self.prompt, completion_tokens=len(self.track.tokens) - self.prompt)
