"""A painter of a few thousand random weights, which reads two layers of the tiny Llama: an ordinary pipeline folder."""

from pathlib import Path

import torch
from diffusers import FlowMatchEulerDiscreteScheduler

from stages.diffusion.painter.model import PainterTransformer2DModel
from stages.diffusion.painter.pipeline import PainterPipeline

LAYERS = (0, 1)
SIDE = 16


def build_tiny_kv_painter(folder: Path, *, kv_heads: int = 2, kv_head_dim: int = 16, theta: float = 10000.0) -> Path:
    """Draws 16 x 16 pixels; another prompt gives another picture. The same weights at every call."""
    with torch.random.fork_rng():
        torch.manual_seed(11)
        model = PainterTransformer2DModel(
            sample_size=SIDE,
            kv_layers=LAYERS,
            kv_heads=kv_heads,
            kv_head_dim=kv_head_dim,
            rope_theta=theta,
            prefix_tokens=2,
            num_attention_heads=2,
            attention_head_dim=16,
            stem_channels=16,
        )
        torch.nn.init.normal_(model.head_out.weight, std=0.2)
        torch.nn.init.normal_(model.modulation.weight, std=0.2)
    PainterPipeline(model.eval(), FlowMatchEulerDiscreteScheduler()).save_pretrained(folder)
    return folder
