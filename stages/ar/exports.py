"""What other stages get of a sequence: hidden states and keys and values, as tensors for an edge.

Keys and values are copied out of the pages, which go on to others; hidden states are the model's own tensors.
"""

from collections.abc import Sequence as Many
from dataclasses import dataclass

import torch

from proto.deploy import ArEngineSpec, HiddenTokens, Kind, KvAt
from proto.errors import StageFailed
from proto.torch_tensors import to_wire
from stages.ar.runner import Output, Runner, Wish
from stages.ar.sampler import Logprobs, chances
from stages.ar.scheduler import Chunk, Track
from stages.ar.sequence import Sequence
from stages.engine import Event, OutgoingPayload, Publish


@dataclass(frozen=True, slots=True)
class Exports:
    """Takes out of the forwards what was asked for beyond tokens. `kv_layers` are the layers that `kv` holds,
    `hidden_layers` those of `hidden`, and `kv_token` the id after which `kv` goes, if it waits for one.

    Invariant: what is taken out of a prompt starts again when its reading does (after a preemption).
    """

    runner: Runner
    spec: ArEngineSpec
    kv_layers: tuple[int, ...]
    hidden_layers: tuple[int, ...]
    kv_token: int | None

    def wish(self, chunks: Many[Chunk], sequences: Many[Sequence]) -> Wish:
        """What the forward of these chunks must give."""
        hidden = any(_wants_hidden(one) for one in sequences)
        scored = frozenset(number for number, one in enumerate(sequences) if _wants_scores(one))
        return Wish(self.hidden_layers if hidden else (), scored)

    def keep(self, sequence: Sequence, chunk: Chunk, output: Output, number: int) -> list[tuple[int, Logprobs]]:
        """Take what the forward gave of a prompt's chunk: states are kept; tokens and their chances are returned."""
        if chunk.start == 0:
            sequence.hidden.clear()
            sequence.scores.clear()
        if output.hidden and _wants_hidden(sequence):
            states = output.hidden[number][:, : max(0, sequence.prompt - chunk.start)]
            if self.spec.hidden_tokens is HiddenTokens.LAST:
                sequence.hidden.clear()
                states = states[:, -1:]
            else:
                states = states[:, max(0, self.spec.hidden_skip - chunk.start) :]
            sequence.hidden.append(states)
        if number not in output.scores or not _wants_scores(sequence):
            return []
        asked = sequence.picker.rule.prompt_logprobs or 0
        follow = sequence.track.tokens[chunk.start + 1 : min(chunk.end + 1, sequence.prompt)]
        found = chances(output.scores[number][: len(follow)], follow, [asked] * len(follow))
        return list(zip(follow, found, strict=True))

    def prompt_read(self, sequence: Sequence) -> list[Event]:
        """Everything that the prompt gives, now that it has been read."""
        job, events = sequence.job, list[Event]()
        if sequence.hidden:
            whole = torch.cat(sequence.hidden, dim=1) if len(sequence.hidden) > 1 else sequence.hidden[0]
            payload = hidden_payload(whole, self.hidden_layers)
            sequence.hidden.clear()
            if "hidden" in job.publish:
                events.append(Publish(job.request, "hidden", payload))
            if "hidden" in job.emit:
                sequence.visible.append(payload.tensors["hidden"])
        if "kv" in job.publish and self.spec.kv_at is KvAt.PREFILL:
            events.append(self._kv(sequence, sequence.prompt))
        return events

    def said(self, sequence: Sequence, token: int) -> None:
        """A token has come: it may be the one that `kv` waits for."""
        if token == self.kv_token and sequence.kv_due is None:
            sequence.kv_due = len(sequence.track.tokens)

    def owes_kv(self, sequence: Sequence) -> bool:
        """Its pages are still to be read."""
        return "kv" in sequence.job.publish and not sequence.kv_given

    def computed(self, sequence: Sequence) -> list[Event]:
        """More tokens have been computed: `kv` may be due."""
        due = sequence.kv_due
        if due is None or sequence.kv_given or sequence.track.computed < due:
            return []
        return [self._kv(sequence, due)]

    def ended(self, sequence: Sequence) -> list[Event]:
        """The answer is whole. Its last token has not been computed, for nothing follows it. Raises `StageFailed` if the
        token that `kv` waits for did not come."""
        if not self.owes_kv(sequence):
            return []
        if self.spec.kv_at is KvAt.TOKEN and sequence.kv_due is None:
            raise StageFailed(
                f"the answer ended without the token {self.spec.kv_token!r} at which its kv goes to the next stage"
                " (engine.kv_token)"
            )
        return [self._kv(sequence, min(sequence.track.computed, sequence.kv_due or sequence.track.computed))]

    def _kv(self, sequence: Sequence, tokens: int) -> Event:
        sequence.kv_given = True
        payload = kv_payload(self.runner, sequence.track, self.kv_layers, tokens, prompt=sequence.prompt)
        return Publish(sequence.job.request, "kv", payload)


def _wants_hidden(sequence: Sequence) -> bool:
    return not sequence.read and "hidden" in sequence.wanted


def _wants_scores(sequence: Sequence) -> bool:
    return not sequence.read and sequence.picker.rule.prompt_logprobs is not None


def hidden_payload(hidden: torch.Tensor, layers: tuple[int, ...] = (-1,)) -> OutgoingPayload:
    """Tensor `hidden`: states of the prompt's tokens, (1, T, D), those of several layers side by side. `layers` are
    places in transformers' `hidden_states`; -1 is the last one, after the final norm."""
    meta = {
        "tokens": hidden.shape[1],
        "size": hidden.shape[2],
        "dtype": _name(hidden.dtype),
        "layers": list(layers),
    }
    return OutgoingPayload(Kind.HIDDEN, {"hidden": to_wire(hidden)}, meta)


def kv_payload(
    runner: Runner, track: Track, layers: tuple[int, ...], tokens: int, *, prompt: int | None = None
) -> OutgoingPayload:
    """Tensors `k.<layer>` and `v.<layer>`, (1, kv_heads, T, head_dim), keys with their positions already applied.

    `position_offset` is the position of the first token, `prompt` how many of the tokens are the prompt's, and `prefill`
    says that they are the prompt's and no more.
    Raises `StageFailed` for a layer that does not keep every token.
    """
    tensors = {}
    shape: torch.Size | None = None
    dtype = ""
    for layer in layers:
        keys, values = runner.keys_and_values(track, layer, tokens)
        tensors[f"k.{layer}"], tensors[f"v.{layer}"] = to_wire(keys), to_wire(values)
        if shape is None:
            shape, dtype = keys.shape, _name(keys.dtype)
    if shape is None:
        raise StageFailed("engine.kv_layers is empty", field="engine.kv_layers")
    meta = {
        "layers": list(layers),
        "heads": shape[1],
        "head_dim": shape[3],
        "tokens": tokens,
        "dtype": dtype,
        "position_offset": 0,
        "prompt": tokens if prompt is None else prompt,
        "prefill": prompt is None or tokens == prompt,
    }
    return OutgoingPayload(Kind.KV, tensors, meta)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
