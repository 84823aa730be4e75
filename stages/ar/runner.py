"""Runs a stock model for one sequence at a time: the only place where the AR stage computes.

Each sequence has its own cache and its own forward, so what one gets never depends on who else runs.
"""

import inspect
from dataclasses import dataclass

import torch
from transformers import Cache, DynamicCache, PreTrainedModel

from proto.errors import StageFailed


@dataclass(frozen=True, slots=True)
class Prefilled:
    """`logits`: (1, V), for the token after the prompt. `hidden`: last layer, (1, T, D), if it was asked for."""

    cache: Cache
    logits: torch.Tensor
    hidden: torch.Tensor | None


class Runner:
    """Prefill and decode on one model. Logits have the model's dtype and device."""

    def __init__(self, model: PreTrainedModel, device: torch.device) -> None:
        self._model = model
        self._device = device
        parameters = inspect.signature(model.forward).parameters
        self._options = {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}

    def prefill(self, prompt: tuple[int, ...], *, hidden: bool = False) -> Prefilled:
        """Read a whole prompt. Raises `StageFailed` if the model does not keep its state in a key-value cache."""
        cache = DynamicCache(config=self._model.config)
        with torch.inference_mode():
            out = self._model(
                input_ids=self._ids(prompt),
                cache=cache,
                use_cache=True,
                output_hidden_states=hidden,
                **self._options,
            )
        if cache.get_seq_length() != len(prompt):
            raise StageFailed(f"{type(self._model).__name__} does not use a key-value cache; the AR engine needs one")
        return Prefilled(cache, out.logits[:, -1], out.hidden_states[-1] if hidden else None)

    def decode(self, token: int, cache: Cache) -> torch.Tensor:
        """Add one token to `cache`; the logits, (1, V), for the token after it."""
        with torch.inference_mode():
            out = self._model(input_ids=self._ids((token,)), cache=cache, use_cache=True, **self._options)
        logits: torch.Tensor = out.logits[:, -1]
        return logits

    def _ids(self, ids: tuple[int, ...]) -> torch.Tensor:
        return torch.tensor([ids], dtype=torch.int64, device=self._device)
