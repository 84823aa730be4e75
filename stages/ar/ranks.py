"""The AR stage on several ranks: the weights are shared out by the model's own plan, so each rank has some of the heads.

Transformers shards the checkpoint as it loads (`tp_plan="auto"`). Each rank then has the same runner as a stage of one
process, over pages that hold its own heads. The first one schedules, picks the tokens, and tells the others which tokens of
which sequences to compute, in which pages.

Invariant: every rank computes the same chunks on the same pages. What depends on a rank's own memory is agreed upon when the
stage starts (`stages.ar.pool`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import msgspec
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedConfig

from proto.deploy import ArStage, ArTask
from proto.errors import StageFailed, StartError
from proto.ids import RequestId
from stages.ar.runner import LOGITS_ONLY, Output, Runner, Slept, Wish
from stages.ar.scheduler import Chunk, Track
from stages.demo.models import resolve_model
from stages.devices import usable_device
from stages.engine import LoadContext
from stages.parallel.distributed import join, side_by_side
from stages.parallel.group import Group

ROLE: Final = "stages.ar.follower:follow"
_KEYS: Final = ("k_proj", "qkv_proj", "query_key_value", "c_attn")
"""What models call the layer that makes the keys, as a plan names it."""


def lead(context: LoadContext) -> tuple[Group, LoadContext]:
    """Start the other ranks and become the first; with what to load from then on. Raises `StartError` if the model cannot
    be shared out."""
    spec = context.spec
    assert isinstance(spec, ArStage)
    if spec.model.path is not None:
        folder = str(resolve_model(spec.model.path, context.report))  # once, and not in every rank at the same time
        check_plan(context, folder, spec)
        model = msgspec.structs.replace(spec.model, path=folder)
        context = replace(context, spec=msgspec.structs.replace(spec, model=model))
    group = Group(context, ROLE)
    try:
        join(group.seat, usable_device(context), group.listener)
    except Exception as error:
        group.close()
        raise _refusal(context, f"its ranks have not come together: {error}") from error
    return group, context


def check_plan(context: LoadContext, folder: str, spec: ArStage) -> None:
    """Whether transformers can shard this model for the stage's ranks. Raises `StartError` with the reason if it cannot."""
    degree = spec.parallel.tensor
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        with torch.device("meta"):
            kind = AutoModelForCausalLM if spec.engine.task is ArTask.GENERATE else AutoModel
            model = kind.from_config(config)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise StartError(
            f"stage {context.stage}: model.path {folder!r} is not a causal language model that transformers can load"
            f" for several ranks: {error}",
            stage=context.stage,
            field="model.path",
        ) from error
    name = type(model).__name__
    plan = {key: style for key, style in model.tp_plan.items() if key != "lm_head"}
    if not plan:
        raise _refusal(
            context, f"transformers has no plan to share {name} out among ranks (no base_model_tp_plan); take it away"
        )
    heads = key_value_heads(config)
    if any(key.endswith(_KEYS) and style == "colwise" for key, style in plan.items()) and heads % degree:
        raise _refusal(
            context,
            f"{name} has {heads} key-value heads, which {degree} ranks cannot share evenly; use one of {_divisors(heads)}",
        )


def key_value_heads(config: PreTrainedConfig) -> int:
    """Of one layer, in all ranks together."""
    text = config.get_text_config(decoder=True).to_dict()
    return int(text.get("num_key_value_heads") or text.get("num_attention_heads") or text.get("n_head") or 1)


def _divisors(number: int) -> str:
    return ", ".join(str(one) for one in range(1, number + 1) if number % one == 0)


def _refusal(context: LoadContext, problem: str) -> StartError:
    field = "parallel.tensor"
    return StartError(f"stage {context.stage}: {field}: {problem}", stage=context.stage, field=field)


# --- what the first rank tells the others -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Part:
    """A chunk, as much of it as another rank needs. `pages` follow the first `known` of the track's, which it has."""

    track: int
    start: int
    tokens: tuple[int, ...]
    last: bool
    known: int
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Run:
    """Compute these chunks. `gone` are tracks that will not come again."""

    parts: tuple[Part, ...]
    wish: Wish
    gone: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Embed:
    """These embeddings (T, D), on the CPU, stand for a track's first tokens."""

    track: int
    embeds: torch.Tensor


@dataclass(frozen=True, slots=True)
class GiveKv:
    """Give this rank's heads of a track's keys and values to the first one."""

    track: int
    layer: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Wipe:
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Sleep:
    """Give memory back."""


@dataclass(frozen=True, slots=True)
class Wake:
    """Have it again."""


class GroupRunner:
    """The first rank's runner: a `Runner` that has all ranks do what it is asked for. `heads` are the key-value heads of a
    layer in all ranks together."""

    def __init__(self, group: Group, runner: Runner, heads: int) -> None:
        self.paged = runner.paged
        self._group = group
        self._runner = runner
        self._heads = heads
        self._tracks: dict[int, tuple[int, Track]] = {}  # by the track's id: the name that it has among the ranks
        self._pages: dict[int, tuple[list[int], int]] = {}  # by name: a list of pages, and how many the others have
        self._named = 0
        self._gone: list[int] = []

    def run(self, chunks: Sequence[Chunk], wish: Wish = LOGITS_ONLY) -> Output:
        command = Run(tuple(self._part(chunk) for chunk in chunks), wish, tuple(self._gone))
        self._gone.clear()
        return self._group.run(command, lambda: self._runner.run(chunks, wish))

    def embed(self, track: Track, embeds: torch.Tensor) -> None:
        self._group.run(Embed(self._name(track), embeds.cpu()), lambda: self._runner.embed(track, embeds))

    def keys_and_values(self, track: Track, layer: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        command = GiveKv(self._name(track), layer, tokens)
        return self._group.run(command, lambda: whole_kv(self._runner, track, layer, tokens, self._heads))

    def wipe(self, pages: Sequence[int]) -> None:
        self._group.run(Wipe(tuple(pages)), lambda: self._runner.wipe(pages))

    def sleep(self) -> Slept:
        """What this rank gave back."""
        return self._group.run(Sleep(), self._runner.sleep)

    def wake(self) -> None:
        self._group.run(Wake(), self._runner.wake)

    def forget(self, track: Track) -> None:
        self._runner.forget(track)
        found = self._tracks.pop(id(track), None)
        if found is not None:
            self._pages.pop(found[0], None)
            self._gone.append(found[0])

    def _name(self, track: Track) -> int:
        found = self._tracks.get(id(track))
        if found is None:
            self._named += 1
            found = self._tracks[id(track)] = (self._named, track)
        return found[0]

    def _part(self, chunk: Chunk) -> Part:
        track, name = chunk.track, self._name(chunk.track)
        pages, known = self._pages.get(name, (track.pages, 0))
        if pages is not track.pages or known > len(track.pages):
            known = 0
        self._pages[name] = (track.pages, len(track.pages))
        tokens = tuple(track.tokens[chunk.start : chunk.end])
        return Part(name, chunk.start, tokens, chunk.last, known, tuple(track.pages[known:]))


class FollowingRunner:
    """Another rank's: does what the first one says, on tracks that hold what it has been told of them."""

    def __init__(self, runner: Runner, heads: int) -> None:
        self._runner = runner
        self._heads = heads
        self._tracks: dict[int, Track] = {}

    def do(self, command: object) -> None:
        """One command of the first rank's. Raises what the runner raises."""
        match command:
            case Run(parts, wish, gone):
                for name in gone:
                    self._runner.forget(self._tracks.pop(name))
                chunks = [self._chunk(part) for part in parts]
                here = {id(chunk.track) for chunk in chunks}
                for track in self._tracks.values():
                    track.seated = id(track) in here
                self._runner.run(chunks, wish)
            case Embed(name, embeds):
                self._runner.embed(self._track(name), embeds)
            case GiveKv(name, layer, tokens):
                whole_kv(self._runner, self._tracks[name], layer, tokens, self._heads)
            case Sleep():
                self._runner.sleep()
            case Wake():
                self._runner.wake()
            case Wipe(pages):
                self._runner.wipe(pages)
            case _:
                raise TypeError(f"{command} is no command for a rank of an AR stage")

    def _track(self, name: int) -> Track:
        return self._tracks.setdefault(name, Track(RequestId(str(name)), [], longest=0))

    def _chunk(self, part: Part) -> Chunk:
        track = self._track(part.track)
        end = part.start + len(part.tokens)
        track.tokens.extend([0] * (end - len(track.tokens)))  # what comes before was computed elsewhere: a known prefix
        track.tokens[part.start : end] = part.tokens
        if part.known:
            track.pages[part.known :] = part.pages
        else:
            track.pages = list(part.pages)  # a new list, so that whoever has copied the old one reads all of it again
        return Chunk(track, part.start, len(part.tokens), part.last)


def whole_kv(runner: Runner, track: Track, layer: int, tokens: int, heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A layer's keys and values with the heads of all ranks, which must all call it. Raises `StageFailed` where the ranks'
    shares do not make up the model's heads."""
    keys, values = runner.keys_and_values(track, layer, tokens)
    mine, ranks = keys.shape[1], torch.distributed.get_world_size()
    if mine == heads:
        return keys, values
    if mine * ranks != heads:
        raise StageFailed(
            f"layer {layer} keeps {mine} of {heads} heads in each of {ranks} ranks, which is no even share of them",
            field="engine.kv_layers",
        )
    return side_by_side(keys, 1), side_by_side(values, 1)
