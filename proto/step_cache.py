"""The `step_cache` of a diffusion stage's deploy: diffusers' own caches, by method, with the library's names and defaults.

In a step that a cache answers, parts of the denoiser are not computed but taken from the steps before: faster, and not
quite the same picture. The README's table is checked against this file by a test.
"""

from typing import Annotated

import msgspec
from msgspec import Meta

_Count = Annotated[int, Meta(ge=1)]


class _StepCache(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="method"):
    """Base of the methods."""


class FirstBlockCache(_StepCache, frozen=True, tag="first_block"):
    """A step in which the first block does about what it did is taken from the last one (ParaAttention)."""

    threshold: Annotated[float, Meta(gt=0)] = 0.05  # relative change of the first block's residual


class MagCache(_StepCache, frozen=True, tag="mag"):
    """Steps are skipped where the model's residuals are known to keep their size (arXiv 2506.09045)."""

    ratios: tuple[float, ...] = ()  # by step, measured for the model; default: those of Flux, for Flux only
    threshold: Annotated[float, Meta(gt=0)] = 0.06  # accumulated error that is allowed
    max_skip_steps: _Count = 3  # in a row
    retention_ratio: Annotated[float, Meta(ge=0, le=1)] = 0.2  # share of steps at the start that are never skipped


class TaylorSeer(_StepCache, frozen=True, tag="taylorseer"):
    """Outputs of attention are predicted from those of earlier steps by a Taylor series (arXiv 2503.06923)."""

    cache_interval: _Count = 5  # every so many steps is computed in full
    disable_cache_before_step: Annotated[int, Meta(ge=0)] = 3  # steps at the start that are computed in full
    disable_cache_after_step: _Count | None = None  # from this step on all are
    max_order: Annotated[int, Meta(ge=0, le=4)] = 1  # of the series
    factors_dtype: Annotated[str, Meta(pattern="^(bfloat16|float16|float32)$")] = "bfloat16"  # of what is kept
    use_lite_mode: bool = False  # predict the last projection only and skip all blocks: least memory
    cache_identifiers: tuple[str, ...] = ()  # regular expressions of module names to predict; default: attention
    skip_predict_identifiers: tuple[str, ...] = ()  # of modules that need not run at all in predicted steps


class FasterCache(_StepCache, frozen=True, tag="faster"):
    """Attention, and the unconditional half of guidance, are taken from earlier steps (arXiv 2410.19355)."""

    spatial_attention_block_skip_range: _Count = 2  # spatial attention is computed every so many steps
    temporal_attention_block_skip_range: _Count | None = None  # temporal attention likewise; default: always
    attention_from_timestep: float = -1  # of the timesteps in which attention may be skipped: more than this
    attention_to_timestep: float = 681  # and less than this
    unconditional_batch_skip_range: _Count = 5  # the unconditional half is computed every so many steps
    unconditional_from_timestep: float = -1
    unconditional_to_timestep: float = 641
    attention_weight: float = 0.5  # of the change between the last two outputs that is carried on
    tensor_format: Annotated[str, Meta(pattern="^(BCFHW|BFCHW|BCHW)$")] = "BCFHW"  # of the denoiser's output
    is_guidance_distilled: bool = False  # there is no unconditional half: guidance is an input, or two calls


class PyramidAttentionBroadcast(_StepCache, frozen=True, tag="pab"):
    """Outputs of attention are used for several steps (arXiv 2408.12588)."""

    spatial_attention_block_skip_range: _Count | None = 2  # each kind is computed every so many steps; null: always
    temporal_attention_block_skip_range: _Count | None = None
    cross_attention_block_skip_range: _Count | None = None
    from_timestep: float = 100  # of the timesteps in which attention may be skipped: more than this
    to_timestep: float = 800  # and less than this


StepCacheSpec = FirstBlockCache | MagCache | TaylorSeer | FasterCache | PyramidAttentionBroadcast
