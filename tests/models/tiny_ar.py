"""Tiny causal language models with a real tokenizer, made on the spot: ordinary checkpoint folders of a few hundred KB.

`build_tiny_llama` has random weights: its words are noise, its numbers are those of any Llama.
`build_scripted_llama` says one given text whatever it is asked, in float32 and bfloat16 alike.
"""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CONTEXT = 512
VOCABULARY = 384
END_OF_TEXT, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SCRIPT = ("The", " boat", "🎨", " of", "漢字", ",", " then", "E", "ND", " and", " it", ".")
"""Pieces of one or more tokens: an emoji of four bytes, two CJK characters, and END over two tokens."""

_CORPUS = (
    "A small red boat lies on the blue water of a quiet lake. The sun goes down behind the hills and the sky turns",
    "orange. What is the capital of France? The capital of France is Paris. List three fruits: apple, pear and plum.",
    "Describe what to draw: a cat that sits on a chair, and then the end of it. system user assistant",
    "2ND 3ND FUND BOND KIND SEND",  # so that END is two tokens, E and ND
)


def build_tiny_tokenizer(*, chat_template: bool = True) -> PreTrainedTokenizerFast:
    """Byte-level BPE: every text can be encoded, and what it was not trained on falls into single bytes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END_OF_TEXT, START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, pad_token=END_OF_TEXT, clean_up_tokenization_spaces=False
    )
    fast.add_special_tokens({"additional_special_tokens": [START]})
    if chat_template:
        fast.chat_template = CHAT_TEMPLATE
    return fast


def build_tiny_llama(folder: Path, *, chat_template: bool = True, never_ends: bool = False) -> Path:
    """Random weights, the same at every call. `never_ends` leaves it without an end-of-sequence token."""
    tokenizer = build_tiny_tokenizer(chat_template=chat_template)
    with torch.random.fork_rng():
        torch.manual_seed(20)
        model = LlamaForCausalLM(_config(hidden=64, intermediate=128, layers=3, init=0.15))
    if never_ends:
        tokenizer.eos_token = None
    return _save(folder, model, tokenizer)


def build_scripted_llama(folder: Path, script: Sequence[str] = SCRIPT) -> Path:
    """Says `script` and ends, whatever the prompt (as long as its last token is not in the script: a chat template's is not).

    Attention and feed-forward add nothing, states are one-hot, and the head maps each token to the next one. So no token
    may come twice; a script in which one does is a ValueError.
    """
    tokenizer = build_tiny_tokenizer()
    ids = script_ids(script)
    if len(set(ids)) != len(ids):
        raise ValueError(f"a token comes twice in {tokenizer.convert_ids_to_tokens(ids)}")
    size = len(tokenizer)
    model = LlamaForCausalLM(_config(hidden=size, intermediate=8, layers=1, init=0.02))
    follows = torch.full((size,), ids[0])
    for before, after in pairwise([*ids, tokenizer.eos_token_id]):
        follows[before] = after
    with torch.no_grad():
        layer = model.model.layers[0]
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(size))
        model.lm_head.weight.zero_()
        model.lm_head.weight[follows, torch.arange(size)] = 4.0
    return _save(folder, model, tokenizer)


def script_ids(script: Sequence[str] = SCRIPT) -> list[int]:
    """The tokens that the scripted model says before its end-of-sequence token: each piece encoded by itself."""
    tokenizer = build_tiny_tokenizer()
    return [one for piece in script for one in tokenizer.encode(piece, add_special_tokens=False)]


def _config(*, hidden: int, intermediate: int, layers: int, init: float) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=CONTEXT,
        initializer_range=init,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )


def _save(folder: Path, model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
