"""A tiny model of each family that the AR stage is tried on: the family's own config class, few and narrow layers."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GenerationConfig,
    Glm4Config,
    GPT2Config,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from tests.models.tiny_ar import VOCABULARY, build_tiny_tokenizer

CONTEXT: Final = 128
_NO_IDS: Final = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
_SIZES: Final = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.15,
    **_NO_IDS,
}

FAMILIES: Final[Mapping[str, Callable[[], PreTrainedConfig]]] = {
    "llama": lambda: LlamaConfig(**_SIZES),
    "qwen2": lambda: Qwen2Config(**_SIZES),
    "qwen3": lambda: Qwen3Config(**_SIZES, head_dim=16),
    "gemma2": lambda: Gemma2Config(**_SIZES, head_dim=16, sliding_window=8, query_pre_attn_scalar=16),
    "mistral": lambda: MistralConfig(**_SIZES, sliding_window=8),
    "phi3": lambda: Phi3Config(**_SIZES),
    "qwen3-moe": lambda: Qwen3MoeConfig(
        **_SIZES, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32
    ),
    "mixtral": lambda: MixtralConfig(**_SIZES, num_local_experts=4),
    "gpt2": lambda: GPT2Config(
        vocab_size=VOCABULARY, n_positions=CONTEXT, n_embd=64, n_layer=3, n_head=4, initializer_range=0.15, **_NO_IDS
    ),
    "glm4": lambda: Glm4Config(**_SIZES, head_dim=16),
    "gpt-oss": lambda: GptOssConfig(
        **_SIZES, head_dim=16, num_local_experts=4, num_experts_per_tok=2, sliding_window=8
    ),
}


def build_family(folder: Path, family: str) -> Path:
    """A checkpoint folder with random weights, the same at every call. Its answers never end by themselves."""
    with torch.random.fork_rng():
        torch.manual_seed(20)
        model = AutoModelForCausalLM.from_config(FAMILIES[family]())
    tokenizer = build_tiny_tokenizer()
    tokenizer.eos_token = None
    model.generation_config = GenerationConfig(pad_token_id=0)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
