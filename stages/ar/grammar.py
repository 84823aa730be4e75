"""Answers that must have a form: JSON of a schema, a regular expression, a grammar. The work is llguidance's.

The library is an extra (`omni-pipeline[grammar]`); without it a request that asks for a form is refused, and nothing else
changes. One `Matcher` follows one answer; making one takes milliseconds, a mask tens of microseconds.
"""

import importlib
import importlib.util
from typing import Any, Final, Protocol

import msgspec
import torch
from transformers import PreTrainedTokenizerBase

from proto.errors import InvalidRequest
from proto.params import SamplingParams

_BITS: Final = 32


class Matcher(Protocol):
    def mask(self, scores: torch.Tensor) -> None:
        """Set what may not come next to -inf: `scores` (V,), float32, in place."""
        ...

    def accept(self, token: int) -> None:
        """This token came."""
        ...


class Grammars:
    """Makes matchers for one tokenizer. `vocabulary` is the model's number of ids, `ends` end an answer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocabulary: int, ends: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._ends = ends
        self._ready: Any = None

    def matcher(self, params: SamplingParams) -> Matcher | None:
        """None if the request asks for no form. Raises `InvalidRequest` if the form is wrong or cannot be had here."""
        fields = [one for one in ("json_schema", "regex", "grammar") if _of(params, one) is not None]
        if not fields:
            return None
        field = fields[0]
        if len(fields) > 1:
            raise InvalidRequest(
                f"{field} and {fields[1]} both say what the answer looks like; set one", field=fields[1]
            )
        if importlib.util.find_spec("llguidance") is None:
            raise InvalidRequest(
                f"{field} needs the library llguidance on the stage's host: pip install 'omni-pipeline[grammar]'",
                field=field,
            )
        library = importlib.import_module("llguidance")
        if self._ready is None:
            self._ready = self._tokens(library)
        value = _of(params, field)
        if field == "json_schema":
            grammar = library.LLMatcher.grammar_from_json_schema(
                msgspec.json.encode(value or {"type": "object"}).decode()
            )
        elif field == "regex":
            grammar = library.LLMatcher.grammar_from_regex(str(value))
        else:
            grammar = library.LLMatcher.grammar_from_lark(str(value))
        inner = library.LLMatcher(self._ready, grammar)
        if inner.is_error():
            raise InvalidRequest(f"{field} cannot be followed: {inner.get_error()}", field=field)
        return _Matcher(inner, self._vocabulary, field)

    def _tokens(self, library: Any) -> Any:
        hf = importlib.import_module("llguidance.hf")
        try:
            return hf.from_tokenizer(self._tokenizer, n_vocab=self._vocabulary, eos_token=sorted(self._ends) or None)
        except (ValueError, TypeError, AttributeError) as error:
            raise InvalidRequest(f"this model's tokenizer cannot be used with a grammar: {error}") from error


class _Matcher:
    def __init__(self, inner: Any, vocabulary: int, field: str) -> None:
        self._inner = inner
        self._field = field
        self._shifts = torch.arange(_BITS, dtype=torch.int32)
        self._words = torch.zeros(1, -(-vocabulary // _BITS), dtype=torch.int32)

    def mask(self, scores: torch.Tensor) -> None:
        allowed = self._inner.compute_bitmask()
        bits = torch.frombuffer(bytearray(allowed), dtype=torch.int32)
        open_ = ((bits.unsqueeze(1) >> self._shifts) & 1).flatten()[: scores.shape[0]].bool()
        if open_.shape[0] < scores.shape[0]:
            open_ = torch.cat([open_, torch.zeros(scores.shape[0] - open_.shape[0], dtype=torch.bool)])
        scores.masked_fill_(~open_.to(scores.device), float("-inf"))

    def accept(self, token: int) -> None:
        if not self._inner.is_stopped():
            self._inner.consume_token(token)


def _of(params: SamplingParams, field: str) -> Any:
    return {"json_schema": params.json_schema, "regex": params.regex, "grammar": params.grammar}[field]
