"""From token ids to text that may be sent: whole characters only, and nothing that may yet turn out to be a stop string.

Two pure steps, no torch and no tokenizer library: `TextDecoder` turns ids into characters, `StopFilter` holds back what a
stop string might claim; `Detokenizer` joins them for one sequence.

Invariants: the deltas, joined, are the text, and do not depend on how the text was cut into tokens. A character whose
bytes are spread over several tokens comes out once, whole. The stop string that ends a text, and whatever follows it, is
never sent.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

Decode = Callable[[Sequence[int]], str]
"""Ids to text, without special tokens and without any tidying of spaces. Bytes that are no character become U+FFFD."""

REPLACEMENT = "\ufffd"


class TextDecoder:
    """Ids in, whole characters out.

    A tokenizer's text depends on the token before (a leading space), so the ids of the last delta are decoded again
    together with the new ones. Text that ends in U+FFFD may be half a character: that end waits for more tokens, and is
    dropped if none come. Bytes in the middle that never become a character are shown as U+FFFD, as the tokenizer has it.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._context: list[int] = []  # ids that have been sent and give the next ones their context
        self._context_text = ""
        self._open: list[int] = []  # ids since then
        self._sent = 0  # characters of the open ids that have been sent

    def push(self, token: int) -> str:
        """The text that `token` completes; often "", while a character is not whole."""
        self._open.append(token)
        text = self._decode(self._context + self._open)
        kept = text.startswith(self._context_text)  # else broken bytes spoilt characters that have been sent already
        text = text[len(self._context_text) :] if kept else self._decode(self._open)
        whole = text.rstrip(REPLACEMENT)
        delta = whole[self._sent :]
        if len(whole) < len(text):
            self._sent = max(self._sent, len(whole))
        elif text:
            self._context, self._open, self._sent = self._open, [], 0
            self._context_text = self._decode(self._context)
        return delta


class StopFilter:
    """Text in; out comes what no stop string can claim any more.

    The stop string that is complete first ends the text; of those complete at the same character, the longest.
    """

    def __init__(self, stops: Sequence[str] = ()) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        """What may be sent now. After `stopped` it is always ""."""
        if self.stopped:
            return ""
        if not self._stops:
            return text
        text = self._held + text
        found = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)[1]]
        safe = len(text) - self._claimed(text)
        self._held = text[safe:]
        return text[:safe]

    def finish(self) -> str:
        """The text that was held back, now that nothing more will come."""
        text, self._held = self._held, ""
        return text

    def _claimed(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        longest = min(len(text), max(map(len, self._stops)) - 1)
        for length in range(longest, 0, -1):
            end = text[-length:]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0


@dataclass(slots=True)
class Detokenizer:
    """The text of one sequence, as it grows. Push every generated token but the end-of-sequence token."""

    decode: Decode
    stops: Sequence[str] = ()
    _decoder: TextDecoder = field(init=False)
    _filter: StopFilter = field(init=False)
    _deltas: list[str] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self._decoder = TextDecoder(self.decode)
        self._filter = StopFilter(self.stops)

    @property
    def stopped(self) -> bool:
        """A stop string has come: the sequence is done."""
        return self._filter.stopped

    @property
    def text(self) -> str:
        """All deltas so far, joined."""
        return "".join(self._deltas)

    def push(self, token: int, *, may_stop: bool = True) -> str:
        """The delta to send; may be "". Stop strings are looked for from the first token that may stop the text."""
        text = self._decoder.push(token)
        return self._keep(self._filter.push(text) if may_stop else text)

    def finish(self) -> str:
        """The last delta. No token may be pushed after it."""
        return self._keep(self._filter.finish())

    def _keep(self, delta: str) -> str:
        if delta:
            self._deltas.append(delta)
        return delta
