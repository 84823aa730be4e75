"""Tokens picked in C, for all rows of a step in one call; the rules are those of `stages.ar.sampler`."""

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch

from stages.ar.native import library as c
from stages.ar.sampling import SamplingRule

FINE: Final = 0
NO_NUMBERS: Final = 2
"""States of a row; any other one asks for more than C has, so that PyTorch must draw."""

_RULE: Final = np.dtype(
    [("uniform", "f8"), ("top_p", "f8"), ("min_p", "f8"), ("temperature", "f4"), ("top_k", "i4")], align=True
)


def usable(scores: torch.Tensor) -> bool:
    """Whether these scores can be given to `pick`: the library is loaded, and reads their dtype where they are."""
    plain = scores.dtype in (torch.float32, torch.bfloat16) and scores.device.type == "cpu" and scores.stride(1) == 1
    return plain and scores.shape[1] >= 4096 and c.loaded() is not None


def pick(
    scores: torch.Tensor, rules: Sequence[SamplingRule], uniform: Sequence[float], few: int
) -> tuple[list[int], list[int]]:
    """A token and a state for each row of `scores` (S, V); `uniform` in [0, 1) decides a draw. `few`: how many of the
    likeliest are looked at for `top_p` without `top_k`."""
    rows, vocabulary = scores.shape
    given = np.array(
        [
            (u, one.top_p, one.min_p, one.temperature, min(one.top_k, vocabulary))
            for u, one in zip(uniform, rules, strict=True)
        ],
        dtype=_RULE,
    )
    tokens, states = np.zeros(rows, np.int64), np.zeros(rows, np.int32)
    failed = c.library().omni_draw(
        scores.data_ptr(),
        scores.dtype == torch.bfloat16,
        rows,
        vocabulary,
        scores.stride(0),
        given.ctypes.data,
        few,
        tokens.ctypes.data,
        states.ctypes.data,
        torch.get_num_threads(),
    )
    if failed:
        raise MemoryError(f"no memory to pick {rows} tokens")
    return tokens.tolist(), states.tolist()
