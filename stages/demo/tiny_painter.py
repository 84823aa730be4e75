"""A painter made on the spot: a StableDiffusion pipeline of real diffusers classes, a few hundred thousand random weights.

Its pictures are noise, but noise of its prompt: another prompt, seed or guidance gives another picture. For trying a deploy
whose stages speak in text before there are checkpoints. No network, same weights always.
"""

from pathlib import Path

import torch
from diffusers import AutoencoderKL, EulerDiscreteScheduler, StableDiffusionPipeline, UNet2DConditionModel
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

_SEED = 20260
_WIDTH = 32  # of the text encoder, and of what the UNet attends to
_CONTEXT = 77  # tokens of a prompt, as CLIP has them


def build(folder: Path) -> None:
    """Write the pipeline to `folder`, which is made. It draws 64 x 64 pixels."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_SEED)
        pipe = StableDiffusionPipeline(
            vae=_vae(),
            text_encoder=_text_encoder(tokenizer := letter_tokenizer()),
            tokenizer=tokenizer,
            unet=_unet(),
            scheduler=EulerDiscreteScheduler(
                beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", steps_offset=1
            ),
            safety_checker=None,
            feature_extractor=None,
            requires_safety_checker=False,
        )
    pipe.save_pretrained(folder)


def letter_tokenizer() -> CLIPTokenizer:
    """CLIP's tokenizer with a vocabulary of single bytes, inside words and at their ends: nothing is ever unknown."""
    # the 256 byte symbols of byte-level BPE: printable Latin-1 stands for itself, the rest for code points from 256 on
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    letters = [chr(byte) for byte in printable] + [chr(256 + n) for n in range(256 - len(printable))]
    words = [*letters, *(f"{letter}</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    vocabulary = {word: index for index, word in enumerate(words)}
    return CLIPTokenizer(vocab=vocabulary, merges=[], model_max_length=_CONTEXT)


def _text_encoder(tokenizer: CLIPTokenizer) -> CLIPTextModel:
    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=_WIDTH,
        intermediate_size=2 * _WIDTH,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=_CONTEXT,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        initializer_factor=20.0,  # the usual scale would make all prompts nearly alike
    )
    return CLIPTextModel(config).eval()


def _unet() -> UNet2DConditionModel:
    return UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(32, 64),
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=_WIDTH,
        attention_head_dim=4,
        norm_num_groups=8,
    ).eval()


def _vae() -> AutoencoderKL:
    return AutoencoderKL(
        block_out_channels=(16, 16, 32, 32),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        latent_channels=4,
        norm_num_groups=8,
        sample_size=64,
    ).eval()
