"""Keys and values of a frozen language model, as the painter reads them.

`prompt_text` is the one place that says which text the language model sees; a serving stage with a chat template and no
`prompt.system` makes the same text. Cached keys carry rotary positions (RoFormer, arXiv 2104.09864); `unrotated` takes
them off, so that a word looks alike wherever it stands.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from transformers import DynamicCache, LlamaForCausalLM, PreTrainedTokenizerBase


def prompt_text(tokenizer: PreTrainedTokenizerBase, caption: str) -> str:
    """The caption as a user's only message, with the answer's opening."""
    messages = [{"role": "user", "content": caption}]
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))


def unrotated(keys: torch.Tensor, theta: float, first: int = 0) -> torch.Tensor:
    """Keys (..., T, head_dim) without the rotary positions `first`, `first` + 1, ... Computed in float32."""
    tokens, half = keys.shape[-2], keys.shape[-1] // 2
    frequencies = theta ** -(torch.arange(half, device=keys.device, dtype=torch.float32) / half)
    angles = torch.arange(first, first + tokens, device=keys.device, dtype=torch.float32)[:, None] * frequencies
    cos, sin = angles.cos(), angles.sin()
    one, two = keys.float().chunk(2, dim=-1)
    return torch.cat([one * cos + two * sin, two * cos - one * sin], dim=-1).to(keys.dtype)


@dataclass(frozen=True, slots=True)
class TextKV:
    """Keys without positions and values, each (B, layers, kv_heads, T, head_dim), and which tokens are meant, (B, T)."""

    keys: torch.Tensor
    values: torch.Tensor
    mask: torch.Tensor


class Thinker:
    """A frozen causal language model that is only read. `layers` are the numbers of the layers whose KV is wanted."""

    def __init__(self, model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, layers: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._layers = tuple(layers)
        self._model = model.eval().requires_grad_(False)
        del self._model.model.layers[max(layers) + 1 :]  # nobody reads them
        self.theta = float(model.config.rope_parameters["rope_theta"])
        first, second = (self._ids(text) for text in ("a", "7"))
        self._prefix = next(n for n, (a, b) in enumerate(zip(first, second, strict=False)) if a != b)
        self._prefix_ids = torch.tensor([first[: self._prefix]])

    @property
    def shape(self) -> dict[str, int | float]:
        """What a painter's config says of the language model that it reads."""
        config = self._model.config
        heads, size = int(config.num_key_value_heads), int(config.head_dim)
        return {"kv_heads": heads, "kv_head_dim": size, "rope_theta": self.theta, "prefix_tokens": self._prefix}

    @property
    def prefix_tokens(self) -> int:
        """How many first tokens all prompts share."""
        return self._prefix

    def tokens(self, caption: str) -> int:
        """How many tokens a caption has, without the prefix."""
        return len(self._ids(caption)) - self._prefix

    @torch.inference_mode()  # type: ignore[untyped-decorator]
    def read(self, captions: Sequence[str], length: int | None = None) -> TextKV:
        """Of all captions, without the prefix that they share, padded on the right to `length` or the longest."""
        ids = [self._ids(caption)[self._prefix :] for caption in captions]
        longest = length or max(map(len, ids))
        rows = torch.zeros(len(ids), longest, dtype=torch.int64)
        mask = torch.zeros(len(ids), longest, dtype=torch.bool)
        for n, one in enumerate(ids):
            rows[n, : len(one)] = torch.tensor(one[:longest])
            mask[n, : len(one)] = True
        cache = self._prefilled()
        cache.batch_repeat_interleave(len(ids))
        seen = torch.cat([torch.ones(len(ids), self._prefix, dtype=torch.bool), mask], dim=1)
        self._model.model(input_ids=rows, attention_mask=seen.long(), cache=cache, use_cache=True)
        keys = torch.stack([cache.layers[n].keys[:, :, self._prefix :] for n in self._layers], dim=1)
        values = torch.stack([cache.layers[n].values[:, :, self._prefix :] for n in self._layers], dim=1)
        return TextKV(unrotated(keys, self.theta, self._prefix), values.clone(), mask)

    @torch.inference_mode()  # type: ignore[untyped-decorator]
    def cached(self, caption: str) -> dict[str, torch.Tensor]:
        """One caption's KV as a serving stage caches and sends it: `k.<layer>`, rotated, and `v.<layer>`."""
        cache = DynamicCache(config=self._model.config)
        self._model.model(input_ids=torch.tensor([self._ids(caption)]), cache=cache, use_cache=True)
        keys = {f"k.{n}": cache.layers[n].keys.clone() for n in self._layers}
        return keys | {f"v.{n}": cache.layers[n].values.clone() for n in self._layers}

    def _prefilled(self) -> DynamicCache:
        cache = DynamicCache(config=self._model.config)
        self._model.model(input_ids=self._prefix_ids, cache=cache, use_cache=True)
        return cache

    def _ids(self, caption: str) -> list[int]:
        text = prompt_text(self._tokenizer, caption)
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])


def kv_tensors(tensors: Mapping[str, torch.Tensor], layers: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Tensors `k.<layer>` and `v.<layer>`, each (B, kv_heads, T, head_dim), stacked to (B, layers, kv_heads, T, head_dim)."""
    return (
        torch.stack([tensors[f"k.{layer}"] for layer in layers], dim=1),
        torch.stack([tensors[f"v.{layer}"] for layer in layers], dim=1),
    )
