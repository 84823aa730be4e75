"""One request at work: its data, and how one more token changes it. No policy, no model."""

import time
from dataclasses import dataclass, field

from transformers import Cache

from proto.messages import Usage
from proto.tensors import WireTensor
from stages.ar.detokenizer import Detokenizer
from stages.ar.sampling import Sampler
from stages.engine import Job

PREFILL_OUTPUTS = frozenset({"hidden", "kv"})
"""Outputs that are there as soon as the prompt has been read."""


@dataclass(slots=True)
class Clocks:
    """Seconds of this sequence's own work; `first_token` counts from its arrival, waiting included."""

    arrived: float = field(default_factory=time.perf_counter)
    prefill: float = 0.0
    decode: float = 0.0
    first_token: float | None = None

    def detail(self) -> dict[str, float]:
        """For `Finished.detail`."""
        parts = {"prefill": self.prefill, "decode": self.decode}
        return parts if self.first_token is None else parts | {"first_token": self.first_token}


@dataclass(slots=True, kw_only=True)
class Sequence:
    """`prompt` and `generated` are token ids; `cache` holds the keys and values of all of them but the last one."""

    job: Job
    prompt: tuple[int, ...]
    max_tokens: int
    sampler: Sampler
    detokenizer: Detokenizer
    generated: list[int] = field(default_factory=list)
    cache: Cache | None = None
    visible: list[WireTensor] = field(default_factory=list)  # tensors that the caller gets
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

    def accept(self, token: int, eos: frozenset[int]) -> str:
        """Take the next token in; the text that may be sent now. Sets `finish_reason` if it is the last one."""
        self.generated.append(token)
        if token in eos:
            self.finish_reason = "stop"
            return self.detokenizer.finish()
        delta = self.detokenizer.push(token)
        if self.detokenizer.stopped:
            self.finish_reason = "stop"
        elif len(self.generated) >= self.max_tokens:
            self.finish_reason = "length"
            delta += self.detokenizer.finish()
        return delta

    @property
    def usage(self) -> Usage:
        """Generated tokens include an end-of-sequence token and those of a stop string, as in vLLM."""
        return Usage(prompt_tokens=len(self.prompt), completion_tokens=len(self.generated))
