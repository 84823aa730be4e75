"""The image transformer: 64 tokens of a 64 x 64 picture that attend to themselves and to one language-model layer a block.

Deep fusion after arXiv 2505.10046 (a frozen language model's per-layer keys and values shared into the image transformer's
attention), clean-image prediction from pixels after JiT (arXiv 2511.13720). A small convolutional stem and head work on
4-pixel patches, the transformer on 8-pixel ones, with a skip connection between stem and head.

Invariant: text is read once. `read` turns a prompt's keys and values into what every step uses; `forward` never sees more.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from diffusers import ConfigMixin, ModelMixin
from diffusers.configuration_utils import register_to_config
from diffusers.models.embeddings import TimestepEmbedding, Timesteps
from torch import nn

_FINE = 4  # pixels of a side of the patches that the convolutions see
_COARSE = 8  # pixels of a side of a token's patch


class PainterTransformer2DModel(ModelMixin, ConfigMixin):  # type: ignore[misc]
    """Predicts the clean picture from a noisy one.

    `kv_layers` are the numbers of the language model's layers that the blocks read, one a block, `kv_heads` and
    `kv_head_dim` the shape of their keys, `rope_theta` the base of its rotary positions, which are taken off, and
    `prefix_tokens` how many first tokens say nothing of the prompt and are not read (those of the chat template).
    """

    config_name = "config.json"

    @register_to_config  # type: ignore[untyped-decorator]
    def __init__(
        self,
        sample_size: int = 64,
        in_channels: int = 3,
        kv_layers: Sequence[int] = (2, 5, 8, 11, 14, 17, 20, 23),
        kv_heads: int = 3,
        kv_head_dim: int = 64,
        rope_theta: float = 100000.0,
        prefix_tokens: int = 0,
        num_attention_heads: int = 3,
        attention_head_dim: int = 64,
        stem_channels: int = 64,
        mlp_ratio: float = 4.0,
    ) -> None:
        super().__init__()
        width = num_attention_heads * attention_head_dim
        side = sample_size // _COARSE
        self.stem_in = nn.Conv2d(in_channels * _FINE**2, stem_channels, 3, padding=1)
        self.stem = ConvBlock(stem_channels, width)
        self.embed = nn.Linear(4 * stem_channels, width)
        self.positions = nn.Parameter(torch.randn(side * side, width) * 0.02)
        self.time_frequencies = Timesteps(128, flip_sin_to_cos=True, downscale_freq_shift=0)
        self.time = TimestepEmbedding(128, width)
        self.modulation = nn.Linear(width, 6 * width)
        self.readers = nn.ModuleList(
            TextReader(kv_heads * kv_head_dim, num_attention_heads, attention_head_dim) for _ in kv_layers
        )
        self.blocks = nn.ModuleList(
            Block(num_attention_heads, attention_head_dim, int(mlp_ratio * width)) for _ in kv_layers
        )
        self.norm_out = nn.LayerNorm(width)
        self.unembed = nn.Linear(width, 4 * stem_channels)
        self.join = nn.Conv2d(2 * stem_channels, stem_channels, 1)
        self.head = nn.ModuleList(ConvBlock(stem_channels, width) for _ in range(2))
        self.head_norm = nn.GroupNorm(8, stem_channels)
        self.head_out = nn.Conv2d(stem_channels, in_channels * _FINE**2, 3, padding=1)
        cos, sin = rotary_2d(side, attention_head_dim)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        for linear in (self.modulation, self.head_out):
            nn.init.zeros_(linear.weight)
            nn.init.zeros_(linear.bias)

    def read(self, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """What the blocks attend to, once a prompt. `keys` (without positions) and `values`: (B, layers, kv_heads, T,
        kv_head_dim). Returns (B, T, layers, 2, heads, head_dim)."""
        texts = [
            reader(keys[:, n].transpose(1, 2).flatten(2), values[:, n].transpose(1, 2).flatten(2))
            for n, reader in enumerate(self.readers)
        ]
        return torch.stack(texts, dim=2)

    def forward(
        self,
        hidden_states: torch.Tensor,
        timestep: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        encoder_attention_mask: torch.Tensor,
    ) -> torch.Tensor:
        """The clean picture, (B, 3, S, S), values about -1 to 1.

        `hidden_states` (B, 3, S, S): the noisy one. `timestep` (B,) in 0..1: the part of it that is noise.
        `encoder_hidden_states`: what `read` gave. `encoder_attention_mask` (B, T): which of its tokens are meant.
        """
        frequencies = self.time_frequencies(timestep.float() * 1000).to(hidden_states.dtype)
        time = F.silu(self.time(frequencies))
        fine = self.stem(self.stem_in(F.pixel_unshuffle(hidden_states, _FINE)), time)
        tokens = self.embed(F.pixel_unshuffle(fine, 2).flatten(2).transpose(1, 2)) + self.positions
        ones = encoder_attention_mask.new_ones(tokens.shape[:2])
        mask = torch.cat([encoder_attention_mask, ones], dim=1).bool()[:, None, None, :]
        shared = self.modulation(time)
        for n, block in enumerate(self.blocks):
            text = encoder_hidden_states[:, :, n].permute(2, 0, 3, 1, 4)
            tokens = block(tokens, shared, text, mask, (self.cos, self.sin))
        coarse = self.unembed(self.norm_out(tokens)).transpose(1, 2)
        side = self.config.sample_size // _COARSE
        upper = F.pixel_shuffle(coarse.reshape(*coarse.shape[:2], side, side), 2)
        fine = self.join(torch.cat([fine, upper], dim=1))
        for convolution in self.head:
            fine = convolution(fine, time)
        return F.pixel_shuffle(self.head_out(F.silu(self.head_norm(fine))), _FINE)


class TextReader(nn.Module):  # type: ignore[misc]
    """One projection of a layer's [key, value] to a block's keys and values."""

    def __init__(self, size: int, heads: int, head_dim: int) -> None:
        super().__init__()
        self.shape = (2, heads, head_dim)
        self.norm_k = nn.LayerNorm(size)
        self.norm_v = nn.LayerNorm(size)
        self.project = nn.Linear(2 * size, 2 * heads * head_dim)
        self.head_dim = head_dim

    def forward(self, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """(B, T, size) twice to (B, T, 2, heads, head_dim)."""
        both = self.project(torch.cat([self.norm_k(keys), self.norm_v(values)], dim=-1))
        key, value = both.unflatten(-1, self.shape).unbind(2)
        return torch.stack([F.layer_norm(key, (self.head_dim,)).to(value.dtype), value], dim=2)


class Block(nn.Module):  # type: ignore[misc]
    """Attention of image tokens over text and image, then an MLP (squared ReLU, arXiv 2109.08668); scales, shifts and gates of the time, shared by all
    blocks, plus a table of the block's own (PixArt-alpha, arXiv 2310.00426)."""

    def __init__(self, heads: int, head_dim: int, inner: int) -> None:
        super().__init__()
        width = heads * head_dim
        self.heads = heads
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.table = nn.Parameter(torch.tensor([0.0, 0.0, 0.5, 0.0, 0.0, 0.5])[:, None].repeat(1, width))
        self.to_qkv = nn.Linear(width, 3 * width)
        self.to_out = nn.Linear(width, width)
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width)

    def forward(
        self,
        tokens: torch.Tensor,
        shared: torch.Tensor,
        text: torch.Tensor,
        mask: torch.Tensor,
        positions: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        """`tokens` (B, N, width); `text` (2, B, heads, T, head_dim); `mask` (B, 1, 1, T + N)."""
        parts = shared.unflatten(-1, self.table.shape) + self.table
        shift, scale, gate, shift_up, scale_up, gate_up = parts[:, :, None].unbind(1)
        seen = torch.addcmul(shift, self.norm(tokens), 1 + scale)
        query_key, value = self.to_qkv(seen).unflatten(-1, (3, self.heads, -1)).split((2, 1), dim=2)
        query_key = F.layer_norm(query_key, query_key.shape[-1:]).to(value.dtype)
        query, key = rotated(query_key.permute(2, 0, 3, 1, 4), positions)
        keys = torch.cat([text[0], key], dim=2)
        values = torch.cat([text[1], value[:, :, 0].transpose(1, 2)], dim=2)
        drawn = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask)
        tokens = torch.addcmul(tokens, gate, self.to_out(drawn.transpose(1, 2).flatten(2)))
        inner = F.relu(self.up(torch.addcmul(shift_up, self.norm(tokens), 1 + scale_up)), inplace=True)
        return torch.addcmul(tokens, gate_up, self.down(inner * inner))  # `square` would be a slower power


class ConvBlock(nn.Module):  # type: ignore[misc]
    """Two convolutions with the time's scale and shift between them, and the input added."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.norm_1 = nn.GroupNorm(8, channels)
        self.conv_1 = nn.Conv2d(channels, channels, 3, padding=1)
        self.time = nn.Linear(width, 2 * channels)
        self.norm_2 = nn.GroupNorm(8, channels)
        self.conv_2 = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, picture: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        inner = self.conv_1(F.silu(self.norm_1(picture)))
        scale, shift = self.time(time)[:, :, None, None].chunk(2, dim=1)
        return picture + self.conv_2(F.silu(torch.addcmul(shift, self.norm_2(inner), 1 + scale)))


def rotary_2d(side: int, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines (side * side, head_dim / 2) of two-dimensional rotary positions: half of the pairs for rows, half
    for columns."""
    pairs = head_dim // 4
    frequencies = torch.pi / 2 * (1.0 / 16.0) ** (torch.arange(pairs) / pairs)
    places = torch.arange(side).float()
    rows = places.repeat_interleave(side)[:, None] * frequencies
    columns = places.repeat(side)[:, None] * frequencies
    angles = torch.cat([rows, columns], dim=-1)
    return angles.cos(), angles.sin()


def rotated(states: torch.Tensor, positions: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """`states` (..., N, head_dim) turned by their positions."""
    cos, sin = (part.to(states.dtype) for part in positions)
    first, second = states.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
