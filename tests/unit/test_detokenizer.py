"""Streamed text is the whole text: no half characters, nothing of a stop string, however it was cut into tokens."""

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from stages.ar.detokenizer import Detokenizer, StopFilter, TextDecoder

REPLACEMENT = "\ufffd"


class Pieces:
    """A toy byte-level tokenizer: token i is the i-th piece of a text's bytes."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self.pieces = pieces

    def decode(self, ids: Sequence[int]) -> str:
        return b"".join(self.pieces[i] for i in ids).decode("utf-8", errors="replace")


def byte_fallback(ids: Sequence[int]) -> str:
    """As Llama 2's tokenizer does it: ids below 256 are bytes, a run of them that is not UTF-8 becomes one U+FFFD a byte;
    others are words, whose leading space is dropped at the start of a text."""
    words = {256: " the", 257: " cat", 258: "s"}
    out, run = [], bytearray()

    def flush() -> None:
        try:
            out.append(run.decode())
        except UnicodeDecodeError:
            out.append(REPLACEMENT * len(run))
        run.clear()

    for one in ids:
        if one < 256:
            run.append(one)
        else:
            flush()
            out.append(words[one])
    flush()
    return "".join(out).removeprefix(" ")


def cut(data: bytes, cuts: Sequence[int]) -> list[bytes]:
    edges = sorted({0, len(data), *(c % (len(data) + 1) for c in cuts)})
    return [data[a:b] for a, b in itertools.pairwise(edges)]


def first_stop(text: str, stops: Sequence[str]) -> str | None:
    """The text before the stop string that is complete first (the longest of them), by looking at every end."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return text[: end - len(max(ending, key=len))]
    return None


def run(pieces: Sequence[bytes], stops: Sequence[str] = ()) -> tuple[list[str], Detokenizer]:
    detokenizer = Detokenizer(Pieces(pieces).decode, stops)
    deltas = []
    for token in range(len(pieces)):
        deltas.append(detokenizer.push(token))
        if detokenizer.stopped:
            return deltas, detokenizer
    return [*deltas, detokenizer.finish()], detokenizer


texts = st.text(alphabet=st.sampled_from("abEND 漢字é🎨👩\u200d🚀\n"), max_size=40)
cuts = st.lists(st.integers(0, 10_000), max_size=60)
stop_strings = st.lists(st.text(alphabet="abEND漢🎨", min_size=1, max_size=4), max_size=4)


@given(texts, cuts)
def test_deltas_joined_are_the_whole_text(text: str, where: list[int]) -> None:
    deltas, detokenizer = run(cut(text.encode(), where))
    assert "".join(deltas) == detokenizer.text == text


@given(texts, cuts, stop_strings)
@example("abcd", [1, 2, 3], ["abcd", "bc"])
@example("aEN漢ENEND", [1, 2, 3, 4, 5, 6, 7, 8], ["END"])
def test_text_ends_before_the_stop_string_however_it_is_cut(text: str, where: list[int], stops: list[str]) -> None:
    deltas, detokenizer = run(cut(text.encode(), where), stops)
    expected = first_stop(text, stops)
    assert "".join(deltas) == (text if expected is None else expected)
    assert detokenizer.stopped == (expected is not None)


@given(texts, cuts, stop_strings)
def test_nothing_is_sent_before_it_is_certain(text: str, where: list[int], stops: list[str]) -> None:
    """At every moment, what has been sent is right whatever comes next: no more text could have taken it back."""
    stop_filter, sent, seen = StopFilter(stops), "", ""
    for piece in (p.decode() for p in [c.encode() for c in text]):
        sent += stop_filter.push(piece)
        seen += piece
        for stop in stops:
            for missing in range(len(stop)):
                future = seen + stop[len(stop) - missing :]
                ends = first_stop(future, stops)
                assert sent == (future if ends is None else ends)[: len(sent)]
        if stop_filter.stopped:
            return


@given(texts.filter(bool), cuts, st.integers(1, 3))
def test_a_character_that_was_never_finished_is_not_shown(text: str, where: list[int], missing: int) -> None:
    last = text[-1].encode()
    whole = text[:-1].encode() + last[: max(1, len(last) - missing)] if len(last) > 1 else text.encode()
    deltas, _ = run(cut(whole, where))
    assert "".join(deltas) == (text[:-1] if len(last) > 1 else text)
    assert REPLACEMENT not in "".join(deltas)


@given(st.binary(max_size=30), cuts)
def test_broken_bytes_give_the_tokenizers_own_text_up_to_the_open_end(data: bytes, where: list[int]) -> None:
    deltas, _ = run(cut(data, where))
    assert "".join(deltas) == data.decode("utf-8", errors="replace").rstrip(REPLACEMENT)


@given(st.lists(st.sampled_from([*"the 漢🎨é".encode(), 256, 257, 258]), max_size=30), st.data())
def test_byte_fallback_tokenizers_stream_whole_characters(ids: list[int], data: st.DataObject) -> None:
    word = st.sampled_from([256, 257, 258])
    characters = st.sampled_from(["漢", "🎨", "é", "x"]).map(lambda c: list(c.encode()))
    groups = data.draw(st.lists(characters | word.map(lambda w: [w]), max_size=15))
    flat = [one for group in groups for one in group]
    decoder = TextDecoder(byte_fallback)
    assert "".join(map(decoder.push, flat)) == byte_fallback(flat)
    TextDecoder(byte_fallback)  # and ids that make no sense never raise:
    for one in ids:
        decoder.push(one)


def test_an_emoji_over_four_tokens_comes_out_once_and_whole() -> None:
    deltas, _ = run([b"a", b"\xf0", b"\x9f", b"\x8e", b"\xa8", b"b"])
    assert deltas == ["a", "", "", "", "🎨", "b", ""]


def test_whole_text_before_a_half_character_in_the_same_token_is_not_held_back() -> None:
    deltas, _ = run([b"blue \xf0\x9f", b"\x8e\xa8"])
    assert deltas == ["blue ", "🎨", ""]


def test_stop_string_over_two_tokens_is_never_sent() -> None:
    deltas, detokenizer = run([b"then", b" E", b"ND", b" more"], ["END"])
    assert deltas == ["then", " ", ""]
    assert detokenizer.stopped
    assert detokenizer.text == "then "


def test_the_beginning_of_a_stop_string_is_sent_once_it_turns_out_to_be_none() -> None:
    deltas, detokenizer = run([b"E", b"N", b"x", b"EN"], ["END"])
    assert deltas == ["", "", "ENx", "", "EN"]
    assert not detokenizer.stopped


@pytest.mark.parametrize("pieces", [[b"abcd"], [b"a", b"b", b"c", b"d"], [b"ab", b"cd"]])
def test_the_stop_string_that_is_complete_first_wins(pieces: list[bytes]) -> None:
    assert run(pieces, ["abcd", "bc"])[1].text == "a"


def test_nothing_comes_after_the_stop() -> None:
    stop_filter = StopFilter(["."])
    assert stop_filter.push("a.b") == "a"
    assert stop_filter.push("c") == ""
    assert stop_filter.finish() == ""


def test_stop_strings_are_looked_for_from_the_first_token_that_may_stop() -> None:
    words = {1: "an", 2: " END", 3: " and", 4: " END"}
    made = Detokenizer(lambda ids: "".join(words[one] for one in ids), ("END",))
    deltas = [made.push(one, may_stop=one > 2) for one in (1, 2, 3, 4)]
    assert made.stopped
    assert "".join(deltas) == made.text == "an END and "
