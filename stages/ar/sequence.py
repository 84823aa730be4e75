"""One request at work: its data, and how one more token changes it. No policy, no model."""

import time
from collections import deque
from dataclasses import dataclass, field

import torch

from proto.ids import EventId
from proto.messages import Chat, MoreInput, TokenLogprobs, Usage
from proto.tensors import WireTensor
from stages.ar.detokenizer import Detokenizer
from stages.ar.prompt import Prompt
from stages.ar.response import Delta, Response, joined
from stages.ar.sampling import Picker
from stages.ar.scheduler import Track
from stages.engine import Job

PREFILL_OUTPUTS = frozenset({"hidden", "kv"})
"""Outputs that can be there as soon as the prompt has been read."""


@dataclass(slots=True)
class Clocks:
    """Moments on `time.perf_counter`, None before they come. `read`: the (first) prompt had been read; `first` and `last`:
    tokens came, the latter in the present turn of a resumable request."""

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
    """`track.tokens` is the prompt, `prompt` tokens long, and then the answer. `prefill_only`: nothing is asked for that
    needs a generated token. `embeds` (T, D) stand for the prompt's tokens, if it is given as such."""

    job: Job
    prompt: int
    max_tokens: int
    track: Track
    picker: Picker
    detokenizer: Detokenizer
    response: Response
    read_prompt: Prompt
    deltas: list[Delta] = field(default_factory=list)  # the answer so far
    prefill_only: bool = False
    embeds: torch.Tensor | None = None
    choice: int = 0  # which of several answers to the prompt it is
    family: "Family | None" = None  # of several answers
    kv_due: int | None = None  # `kv` goes when so many tokens are computed
    kv_given: bool = False
    scores: list[TokenLogprobs] = field(default_factory=list)  # of the prompt's tokens but the first
    hidden: list[torch.Tensor] = field(default_factory=list)  # of the prompt's chunks so far, (1, count, D)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    told: int = 0  # of `logprobs`, sent with a delta
    visible: list[WireTensor] = field(default_factory=list)  # tensors that the caller gets
    read: bool = False  # the prompt has been read, and what it gives has been given
    finish_reason: str | None = None
    turns: "Turns | None" = None  # of a resumable request
    clocks: Clocks = field(default_factory=Clocks)

    @property
    def wanted(self) -> frozenset[str]:
        """Every output that the job asks for."""
        return frozenset(self.job.emit) | frozenset(self.job.publish)

    @property
    def answer(self) -> tuple[int, ...]:
        """The ids of the answer so far, an end-of-sequence token included; of a resumable request those of all answers."""
        earlier = () if self.turns is None else self.turns.answered
        return (*earlier, *self.track.tokens[self.prompt :])

    def goes_on(self, token: int) -> bool:
        """Whether there is another one after it, as far as the number of this one tells: a stop string may still end it."""
        return token not in self.picker.rule.ends and len(self.track.tokens) + 1 - self.prompt < self.max_tokens

    def take(self, token: int) -> None:
        """It is the next one. `tell` follows, before the one after it."""
        self.track.tokens.append(token)
        if self.picker.matcher is not None:
            self.picker.matcher.accept(token)

    def tell(self, token: int) -> Delta:
        """What may be sent now that it has been taken. Sets `finish_reason` if it is the last one."""
        delta = self.response.push(self._text(token))
        if self.finish_reason is not None:
            delta += self.response.finish()
        if delta:
            self.deltas.append(delta)
        return delta

    @property
    def said(self) -> Delta:
        """All of the answer so far."""
        return joined(self.deltas)

    def _text(self, token: int) -> str:
        """The text that the token adds."""
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

    def ended(self) -> "list[Sequence]":
        """It has ended: all answers of its request, by choice, if it was the last of them; else none."""
        if self.family is None:
            return [self]
        self.family.done[self.choice] = self
        return [self.family.done[choice] for choice in range(self.family.of)] if self.family.whole else []

    @property
    def usage(self) -> Usage:
        """Generated tokens include an end-of-sequence token and those of a stop string, as in vLLM."""
        generated = len(self.track.tokens) - self.prompt
        if self.turns is None:
            return Usage(prompt_tokens=self.prompt, completion_tokens=generated)
        earlier = len(self.turns.answered)
        return Usage(prompt_tokens=max(1, self.prompt - earlier), completion_tokens=earlier + generated)

    def go_on(self, following: "Following", picker: Picker, detokenizer: Detokenizer, response: Response) -> None:
        """A resumable request has more to read, which `track` has already; its next answer follows."""
        assert self.turns is not None
        self.turns.said_before = len(self.deltas)
        self.turns.chat = following.chat
        self.max_tokens = following.max_tokens
        self.read_prompt, self.picker, self.detokenizer, self.response = following.prompt, picker, detokenizer, response
        self.read, self.finish_reason = False, None
        self.clocks.last = None  # how long it rested is no time between tokens


@dataclass(slots=True)
class Family:
    """Several answers to one prompt. `of` are due; `done` are those that have ended, by their choice."""

    of: int
    done: dict[int, Sequence] = field(default_factory=dict)

    @property
    def whole(self) -> bool:
        return len(self.done) == self.of


@dataclass(slots=True)
class Turns:
    """What a resumable request has beside its present turn. `chat`: all messages, if its prompt is a conversation. `inbox`:
    what it is to read next. `reading`: the update that it is reading. `closing`: nothing follows its present answer."""

    chat: Chat | None
    inbox: deque[tuple[EventId, MoreInput]] = field(default_factory=deque)
    reading: EventId | None = None
    closing: bool = False
    answered: tuple[int, ...] = ()  # ids of the answers before this one
    said_before: int = 0  # of the sequence's deltas
    rests_until: float = 0.0  # on `time.monotonic`


@dataclass(frozen=True, slots=True)
class Following:
    """The next turn: all that will have been read by then, and how long its answer may be."""

    prompt: Prompt
    chat: Chat | None
    max_tokens: int
