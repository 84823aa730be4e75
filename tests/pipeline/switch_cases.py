"""Pipelines for the tests of switches: tiny ones made deep enough, and what is asked of them."""

import json
from collections.abc import Mapping
from pathlib import Path

import diffusers
from diffusers import AutoencoderKLCogVideoX, CogVideoXDDIMScheduler, CogVideoXPipeline, CogVideoXTransformer3DModel
from transformers import T5Config, T5EncoderModel

from proto.params import Json
from tests.models.tiny_diffusion import seeded_build, t5_config, t5_tokenizer
from tests.pipeline.batching_cases import CASES, Family


def deeper(name: str, **config: Json) -> Family:
    """The family with another transformer: of the same class, with `config` changed, and random weights again."""
    family = CASES[name]

    @seeded_build
    def build(folder: Path) -> None:
        family.build(folder)
        index = json.loads((folder / "model_index.json").read_text())
        cls = getattr(diffusers, index["transformer"][1])
        old = cls.load_config(folder, subfolder="transformer")
        cls.from_config({**old, **config}).save_pretrained(folder / "transformer")

    return Family(build, base=family.base, sizes=family.sizes, negative=family.negative, output=family.output)


@seeded_build
def build_tiny_cogvideox(folder: Path) -> None:
    """CogVideoX: video, both halves of guidance in one call; sizes in multiples of 16."""
    CogVideoXPipeline(
        transformer=CogVideoXTransformer3DModel(
            num_attention_heads=2,
            attention_head_dim=16,
            in_channels=4,
            out_channels=4,
            time_embed_dim=2,
            text_embed_dim=32,
            num_layers=3,
            sample_width=4,
            sample_height=4,
            sample_frames=9,
            patch_size=2,
            temporal_compression_ratio=4,
            max_text_seq_length=16,
        ),
        scheduler=CogVideoXDDIMScheduler(),
        vae=AutoencoderKLCogVideoX(
            down_block_types=("CogVideoXDownBlock3D",) * 4,
            up_block_types=("CogVideoXUpBlock3D",) * 4,
            block_out_channels=(8, 8, 8, 8),
            latent_channels=4,
            layers_per_block=1,
            norm_num_groups=2,
            temporal_compression_ratio=4,
        ),
        text_encoder=T5EncoderModel(t5_config(T5Config)),
        tokenizer=t5_tokenizer(),
    ).save_pretrained(folder)


DEEP: Mapping[str, Family] = {
    "flux": deeper("flux", num_layers=2, num_single_layers=2),
    "qwen_image": deeper("qwen_image", num_layers=4),
    "wan": deeper("wan", num_layers=4),
    "cogvideox": Family(
        build_tiny_cogvideox,
        base={"extra": {"num_frames": 9, "max_sequence_length": 16}},
        sizes=((32, 32), (16, 32)),
        guidance=(6.0, 3.0, 5.0),
        several=False,
        output="video",
    ),
}
