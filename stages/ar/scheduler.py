"""Which tokens of which sequences go into the next forward. Pure: no tensors, no clock, no requests' contents.

Continuous batching: `schedule` gives every running sequence its next token, cuts what is left of the token budget into
chunks of prompts, and lets waiting sequences in while there are seats and pages. Tokens of answers come first, so a long
prompt delays them by the time of one step of `max_batched_tokens`, never more.

Order: by `rank`, which is arrival and priority together: each level of priority is worth `OVERTAKING` places. So a
sequence can be overtaken, but only by so many: nobody waits for ever.

When pages run out, the running sequence that ranks last gives back all of its own (preemption by recompute): it waits
again, at its old rank, and its tokens, answer included, are read again later. `add` refuses what could never fit, so the
first in rank can always go on, and everything ends.

A track that has ended an answer and may go on later *rests*: it keeps its pages, in no seat, until it is resumed with more
tokens and waits again. Pages of those who rest, or wait and have some, are taken first when they run out, the longest idle ones
before others; they are then computed again like a preempted one's.

Invariants: a track is in exactly one of waiting, running, resting and none; those that own pages own enough for every
token computed, and others have none computed; a plan has at most `max_batched_tokens` tokens and one chunk a track; `commit` follows each `schedule`.
"""

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from proto.errors import InvalidRequest
from proto.ids import RequestId
from stages.ar.kv_blocks import Hash, KvBlocks, hash_blocks

OVERTAKING: Final = 64
"""How many later arrivals one level of priority lets a sequence overtake."""


@dataclass(frozen=True, slots=True)
class Limits:
    """`max_seqs` sequences at one time, `max_batched_tokens` tokens in one forward."""

    max_seqs: int
    max_batched_tokens: int
    prefix_caching: bool = True


@dataclass(slots=True, eq=False)
class Track:
    """One sequence, as far as scheduling goes. `tokens` is the sequence's own list: prompt, then answer, growing.

    `longest` is the most tokens that it may ever have. `reads_cache` False has every token computed, for those who want
    more than logits from the prefill.
    """

    request: RequestId
    tokens: list[int]
    longest: int
    priority: int = 0  # higher goes first
    salt: str = ""
    lora: tuple[int, float] | None = None  # the adapter and its scale that its tokens are computed with
    reads_cache: bool = True
    rank: int = 0
    computed: int = 0  # tokens whose keys and values are in its pages
    hits: int = 0  # of these, how many came from the prefix cache when it was first let in
    preempted: int = 0  # times
    pages: list[int] = field(default_factory=list)
    hashes: list[Hash] = field(default_factory=list)
    started: bool = False
    seated: bool = False  # it runs

    @property
    def todo(self) -> int:
        return len(self.tokens) - self.computed


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens `start` to `start + count` of one track. `last` if they are all that there are: a token follows."""

    track: Track
    start: int
    count: int
    last: bool

    @property
    def end(self) -> int:
        return self.start + self.count


@dataclass(frozen=True, slots=True)
class Plan:
    """One forward. Chunks of one token come first. `started` are those let in for the first time."""

    chunks: tuple[Chunk, ...]
    started: tuple[Track, ...] = ()

    @property
    def tokens(self) -> int:
        return sum(chunk.count for chunk in self.chunks)


@dataclass(slots=True)
class Counters:
    """Since the start."""

    preemptions: int = 0
    prompt_tokens: int = 0  # of sequences let in for the first time
    hit_tokens: int = 0  # of these, found in the prefix cache
    resumed_tokens: int = 0  # that resumed sequences had when they went on
    kept_tokens: int = 0  # of these, not computed again


class Scheduler:
    def __init__(self, limits: Limits, blocks: KvBlocks) -> None:
        self.limits: Final = limits
        self.blocks: Final = blocks
        self.counters: Final = Counters()
        self._waiting: list[Track] = []  # by rank
        self._running: list[Track] = []  # by rank
        self._resting: list[Track] = []  # the longest resting one first
        self._arrivals = 0

    @property
    def waiting(self) -> Sequence[Track]:
        return self._waiting

    @property
    def running(self) -> Sequence[Track]:
        return self._running

    @property
    def resting(self) -> Sequence[Track]:
        return self._resting

    def add(self, track: Track) -> None:
        """Let it wait. Raises `InvalidRequest` with the numbers if the pool could not hold it even alone."""
        self.check_fits(track.longest)
        self._wait(track)

    def _wait(self, track: Track) -> None:
        self._arrivals += 1
        track.rank = self._arrivals - track.priority * OVERTAKING
        bisect.insort(self._waiting, track, key=_rank)

    def check_fits(self, longest: int) -> None:
        """Raises `InvalidRequest` if the pool could not hold so many tokens of one track."""
        pages = self.blocks.pages_for(longest)
        if pages > self.blocks.usable:
            raise InvalidRequest(
                f"prompt and answer may have {longest} tokens, which take {pages} KV pages of {self.blocks.size};"
                f" the pool has {self.blocks.usable}; lower max_tokens, shorten the prompt, or raise"
                " engine.kv_cache_bytes",
                field="max_tokens",
            )

    def rest(self, track: Track) -> None:
        """A track has ended an answer, and keeps its pages. It may have been preempted before the end was found."""
        (self._running if track.seated else self._waiting).remove(track)
        track.seated = False
        self._resting.append(track)

    def resume(self, track: Track, tokens: list[int], longest: int) -> int:
        """A resting track goes on with these tokens: what they have in common with its own need not be computed again.
        How many that is. Raises `InvalidRequest` as `add` does, and then nothing has changed."""
        self.check_fits(longest)
        kept = min(_common(track.tokens, tokens), track.computed, len(tokens) - 1)
        if kept < track.computed:  # pages that are shared are never written to, so only whole ones can be kept
            whole = kept // self.blocks.size
            self.blocks.release(track.pages[whole:])
            track.pages, kept = (
                track.pages[:whole],
                whole * self.blocks.size,
            )  # a new list: others have read the old one
        track.hashes = track.hashes[: kept // self.blocks.size]
        track.tokens, track.longest, track.computed = tokens, longest, kept
        self.counters.resumed_tokens += len(tokens)
        self.counters.kept_tokens += kept
        self._resting.remove(track)
        self._wait(track)
        return kept

    def start_over(self, track: Track) -> None:
        """What was computed of a waiting track is of no more use."""
        self._give_back(track)

    def schedule(self) -> Plan:
        """The next forward; empty if nothing waits or runs."""
        budget = self.limits.max_batched_tokens
        chunks: list[Chunk] = []
        before = self.counters.preemptions
        answers = [track for track in self._running if track.todo == 1]
        prompts = [track for track in self._running if track.todo != 1]
        for track in (*answers, *prompts):
            count = min(track.todo, budget)
            if count and track.seated and self._room(track, count, chunks):
                chunks.append(_chunk(track, count))
                budget -= count
        started = self._admit(budget, chunks) if self.counters.preemptions == before else ()
        chunks.sort(key=lambda chunk: chunk.count != 1)
        return Plan(tuple(chunks), started)

    def commit(self, chunks: Sequence[Chunk]) -> None:
        """These chunks of the plan are computed: their pages can be shared from now on."""
        size = self.blocks.size
        for chunk in chunks:
            track = chunk.track
            track.computed = chunk.end
            if not self.limits.prefix_caching or chunk.end // size == chunk.start // size:
                continue
            track.hashes = hash_blocks(track.tokens, size, known=track.hashes, salt=track.salt)
            for number in range(chunk.start // size, chunk.end // size):
                self.blocks.seal(track.pages[number], track.hashes[number])

    def remove(self, track: Track) -> None:
        """It is done, failed or not wanted any more, in whatever state it is."""
        for queue in (self._running, self._waiting, self._resting):
            if track in queue:
                queue.remove(track)
                self._give_back(track)
                return

    def condemn(self, track: Track) -> list[int]:
        """Pages that only this track has and whose content must not be used again. Remove it after they are wiped."""
        pages = [page for page in track.pages if self.blocks.sole(page)]
        self.blocks.unseal(pages)
        return pages

    def check(self) -> None:
        """Raise `AssertionError` unless the invariants hold. For tests."""
        self.blocks.check()
        tracks = [*self._waiting, *self._running, *self._resting]
        assert len({id(track) for track in tracks}) == len(tracks), "a track is in two places"
        assert len(self._running) <= self.limits.max_seqs, "too many run"
        for queue, seated in ((self._waiting, False), (self._running, True), (self._resting, False)):
            assert queue is self._resting or queue == sorted(queue, key=_rank), "out of order"
            assert all(track.seated is seated for track in queue), "a track is not where it says"
        owned = {page for track in tracks for page in track.pages}
        assert len(owned) == self.blocks.owned, "pages have owners that are not here"
        for track in tracks:
            assert len(track.pages) >= self.blocks.pages_for(track.computed), "a computed token has no page"
            assert len(set(track.pages)) == len(track.pages), "a track has one page twice"

    # --- pages --------------------------------------------------------------------------------------------------------

    def _room(self, track: Track, count: int, chunks: list[Chunk]) -> bool:
        """Pages for `count` more tokens of a running track, from those that rank after it if need be; else it is
        preempted itself and this is False."""
        lacking = self.blocks.pages_for(track.computed + count) - len(track.pages)
        while lacking > self.blocks.available:
            if self._take_idle():
                continue
            last = self._running[-1]
            self._preempt(last, chunks)
            if last is track:
                return False
        if lacking > 0:
            track.pages += self.blocks.allocate(lacking)
        return True

    def _take_idle(self, but: Track | None = None) -> bool:
        """Take the pages of one that does not run; whether there was one."""
        idle = (one for one in (*self._resting, *reversed(self._waiting)) if one.pages and one is not but)
        track = next(idle, None)
        if track is None:
            return False
        self._give_back(track)
        track.preempted += 1
        self.counters.preemptions += 1
        return True

    def _preempt(self, track: Track, chunks: list[Chunk]) -> None:
        self._running.remove(track)
        self._give_back(track)
        track.preempted += 1
        self.counters.preemptions += 1
        chunks[:] = [chunk for chunk in chunks if chunk.track is not track]
        bisect.insort(self._waiting, track, key=_rank)

    def _give_back(self, track: Track) -> None:
        self.blocks.release(track.pages)
        track.pages = []
        track.computed = 0
        track.seated = False

    # --- admission ----------------------------------------------------------------------------------------------------

    def _admit(self, budget: int, chunks: list[Chunk]) -> tuple[Track, ...]:
        """Let waiting tracks in, in order, while there is a seat, budget, and room for all of their tokens."""
        promised = sum(self.blocks.pages_for(len(track.tokens)) - len(track.pages) for track in self._running)
        started: list[Track] = []
        while budget and self._waiting and len(self._running) < self.limits.max_seqs:
            track = self._waiting[0]
            kept = bool(track.pages)
            found = track.pages if kept else self._cached(track)
            lacking = self.blocks.pages_for(len(track.tokens)) - len(found)
            if lacking + promised > self.blocks.available - (0 if kept else self.blocks.idle(found)):
                if self._take_idle(track):
                    continue  # what it had may have been found, or is free now
                break
            del self._waiting[0]
            if not kept:
                self.blocks.share(found)
                track.pages, track.computed = found, len(found) * self.blocks.size
            track.seated = True
            bisect.insort(self._running, track, key=_rank)
            count = min(track.todo, budget)
            now = self.blocks.pages_for(track.computed + count) - len(found)
            track.pages += self.blocks.allocate(now)
            promised += lacking - now
            budget -= count
            chunks.append(_chunk(track, count))
            if not track.started:
                self._start(track)
                started.append(track)
        return tuple(started)

    def _start(self, track: Track) -> None:
        track.started, track.hits = True, track.computed
        self.counters.prompt_tokens += len(track.tokens)
        self.counters.hit_tokens += track.hits

    def _cached(self, track: Track) -> list[int]:
        """Pages that hold the start of its tokens already; never all of them, for the last token gives the logits."""
        if not (self.limits.prefix_caching and track.reads_cache):
            return []
        track.hashes = hash_blocks(track.tokens, self.blocks.size, known=track.hashes, salt=track.salt)
        return self.blocks.find(track.hashes[: (len(track.tokens) - 1) // self.blocks.size])


def _chunk(track: Track, count: int) -> Chunk:
    return Chunk(track, track.computed, count, last=count == track.todo)


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two sequences have in common at their start."""
    length = min(len(one), len(other))
    return next((at for at in range(length) if one[at] != other[at]), length)


def _rank(track: Track) -> int:
    return track.rank
