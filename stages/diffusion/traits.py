"""What the arguments of a denoiser, encoder or decoder are, where their form does not say it. Data only, no torch.

The collator reads the form first (a tensor with one entry a row, a mask, a dict); these names settle the rest.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

TIMESTEPS: Final = frozenset({"timestep", "timesteps", "t", "sigma"})
SHARED: Final = frozenset(
    {"img_ids", "txt_ids", "img_shapes", "image_rotary_emb", "rotary_embedding", "freqs_cis", "pos_embed"}
)


@dataclass(frozen=True, slots=True)
class Traits:
    """`timesteps`: one value for all rows, to be spread over them. `shared`: read once for all rows, whatever its shape,
    so only equal ones go together. `lists`: lists with one entry a row, of any shapes. `masked`: embeddings that may be
    padded, and their masks."""

    timesteps: frozenset[str] = TIMESTEPS
    shared: frozenset[str] = SHARED
    lists: frozenset[str] = frozenset()
    masked: Mapping[str, str] = field(default_factory=dict)
