"""Tiny stock pipelines with random weights, written as normal folders. Same weights every time; no network.

Each `build_*` writes its pipeline to the folder it is given and returns that folder.
"""

from collections.abc import Callable
from functools import wraps
from pathlib import Path

import torch
from diffusers import (
    AutoencoderKL,
    AutoencoderKLWan,
    DanceDiffusionPipeline,
    DDIMPipeline,
    DDIMScheduler,
    DPMSolverMultistepScheduler,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
    IPNDMScheduler,
    PixArtSigmaPipeline,
    PixArtTransformer2DModel,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
    UNet1DModel,
    UNet2DModel,
    UniPCMultistepScheduler,
    WanPipeline,
    WanTransformer3DModel,
)
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    T5Config,
    T5EncoderModel,
    T5Tokenizer,
    UMT5Config,
    UMT5EncoderModel,
)

from stages.demo import tiny_painter
from stages.demo.tiny_painter import letter_tokenizer

Builder = Callable[[Path], Path]


def seeded_build(build: Callable[[Path], None]) -> Builder:
    """Build with a seed of its own, leaving the process's random state alone."""

    @wraps(build)
    def seeded(folder: Path) -> Path:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            build(folder)
        return folder

    return seeded


@seeded_build
def build_tiny_sd(folder: Path) -> None:
    """StableDiffusion (UNet, Euler), 64 x 64. Also loads as StableDiffusionImg2ImgPipeline."""
    tiny_painter.build(folder)


@seeded_build
def build_tiny_sd3(folder: Path) -> None:
    """StableDiffusion3: transformer, flow matching, three text encoders, 32 x 32, sizes in multiples of 4."""
    StableDiffusion3Pipeline(
        transformer=SD3Transformer2DModel(
            sample_size=16,
            patch_size=2,
            in_channels=4,
            out_channels=4,
            num_layers=1,
            attention_head_dim=8,
            num_attention_heads=4,
            caption_projection_dim=32,
            joint_attention_dim=64,
            pooled_projection_dim=64,
            pos_embed_max_size=32,
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=image_vae(4),
        text_encoder=CLIPTextModelWithProjection(clip_config()),
        tokenizer=letter_tokenizer(),
        text_encoder_2=CLIPTextModelWithProjection(clip_config()),
        tokenizer_2=letter_tokenizer(),
        text_encoder_3=T5EncoderModel(t5_config(T5Config, width=64)),
        tokenizer_3=t5_tokenizer(),
    ).save_pretrained(folder)


@seeded_build
def build_tiny_flux(folder: Path) -> None:
    """Flux: packed latents, guidance as an input; sizes in multiples of 4."""
    FluxPipeline(
        transformer=FluxTransformer2DModel(
            patch_size=1,
            in_channels=16,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=32,
            pooled_projection_dim=32,
            axes_dims_rope=(4, 4, 8),
            guidance_embeds=True,
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=image_vae(4),
        text_encoder=CLIPTextModel(clip_config()),
        tokenizer=letter_tokenizer(),
        text_encoder_2=T5EncoderModel(t5_config(T5Config)),
        tokenizer_2=t5_tokenizer(),
    ).save_pretrained(folder)


@seeded_build
def build_tiny_pixart(folder: Path) -> None:
    """PixArt-Sigma: no step callback; takes `prompt_embeds` (tokens, 32) from another stage."""
    PixArtSigmaPipeline(
        transformer=PixArtTransformer2DModel(
            sample_size=8,
            num_layers=1,
            patch_size=2,
            attention_head_dim=8,
            num_attention_heads=4,
            caption_channels=32,
            cross_attention_dim=32,
            in_channels=4,
            out_channels=8,
            use_additional_conditions=False,
        ),
        scheduler=DPMSolverMultistepScheduler(),
        vae=image_vae(4),
        text_encoder=T5EncoderModel(t5_config(T5Config)),
        tokenizer=t5_tokenizer(),
    ).save_pretrained(folder)


@seeded_build
def build_tiny_wan(folder: Path) -> None:
    """Wan: video, UniPC, sizes in multiples of 16."""
    WanPipeline(
        transformer=WanTransformer3DModel(
            patch_size=(1, 2, 2),
            num_attention_heads=2,
            attention_head_dim=12,
            in_channels=16,
            out_channels=16,
            text_dim=32,
            freq_dim=32,
            ffn_dim=32,
            num_layers=1,
            cross_attn_norm=True,
            qk_norm="rms_norm_across_heads",
            rope_max_seq_len=32,
        ),
        scheduler=UniPCMultistepScheduler(flow_shift=3.0, prediction_type="flow_prediction", use_flow_sigmas=True),
        vae=AutoencoderKLWan(
            base_dim=3, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1, temperal_downsample=[False, True, True]
        ),
        text_encoder=UMT5EncoderModel(t5_config(UMT5Config)),
        tokenizer=t5_tokenizer(),
    ).save_pretrained(folder)


@seeded_build
def build_tiny_ddim(folder: Path) -> None:
    """Unconditional DDIM: neither a prompt nor a step callback nor a size."""
    DDIMPipeline(
        unet=UNet2DModel(
            sample_size=16,
            block_out_channels=(16, 32),
            layers_per_block=1,
            down_block_types=("DownBlock2D", "AttnDownBlock2D"),
            up_block_types=("AttnUpBlock2D", "UpBlock2D"),
            norm_num_groups=8,
        ),
        scheduler=DDIMScheduler(),
    ).save_pretrained(folder)


@seeded_build
def build_tiny_dance(folder: Path) -> None:
    """DanceDiffusion: unconditional stereo sound at 16 kHz, 1024 samples; its call has no output type."""
    DanceDiffusionPipeline(
        unet=UNet1DModel(
            block_out_channels=(32, 64),
            extra_in_channels=64,  # the Fourier features of the time
            sample_size=1024,
            sample_rate=16000,
            in_channels=2,
            out_channels=2,
            flip_sin_to_cos=True,
            use_timestep_embedding=False,
            time_embedding_type="fourier",
            mid_block_type="UNetMidBlock1D",
            down_block_types=("DownBlock1DNoSkip", "AttnDownBlock1D"),
            up_block_types=("AttnUpBlock1D", "UpBlock1DNoSkip"),
        ),
        scheduler=IPNDMScheduler(),
    ).save_pretrained(folder)


def t5_tokenizer() -> T5Tokenizer:
    """T5's tokenizer with a vocabulary of single printable characters."""
    letters = [(chr(code), -2.0) for code in range(ord("!"), ord("~") + 1)]
    return T5Tokenizer(
        vocab=[("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0), *letters], extra_ids=0, model_max_length=77
    )


def t5_config(config: type[T5Config] | type[UMT5Config], width: int = 32) -> T5Config | UMT5Config:
    return config(
        vocab_size=len(t5_tokenizer()),
        d_model=width,
        d_kv=8,
        d_ff=37,
        num_layers=2,
        num_heads=4,
        relative_attention_num_buckets=8,
    )


def clip_config() -> CLIPTextConfig:
    tokenizer = letter_tokenizer()
    return CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        projection_dim=32,
        intermediate_size=37,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=77,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def image_vae(latent_channels: int, mean: list[float] | None = None, std: list[float] | None = None) -> AutoencoderKL:
    """Two pixels a latent. `mean` and `std` for pipelines that scale each channel."""
    return AutoencoderKL(
        block_out_channels=(8, 8),
        down_block_types=("DownEncoderBlock2D", "DownEncoderBlock2D"),
        up_block_types=("UpDecoderBlock2D", "UpDecoderBlock2D"),
        latent_channels=latent_channels,
        norm_num_groups=4,
        use_quant_conv=False,
        use_post_quant_conv=False,
        shift_factor=0.06,
        scaling_factor=1.5,
        latents_mean=mean,
        latents_std=std,
    )
