"""Zeros that take no memory before they are written to."""

import numpy as np
import torch


def clear(tensor: torch.Tensor) -> None:
    """Make fresh memory zero. On a CPU the system's new pages are zero already, and reading them takes none; writing
    zeros would take all of it at once."""
    if tensor.device.type != "cpu":
        tensor.zero_()
        return
    raw = tensor.view(-1).view(torch.uint8).numpy()
    whole = raw[: raw.size // 8 * 8].view(np.int64)
    if np.bitwise_or.reduce(whole) != 0 or raw[raw.size // 8 * 8 :].any():
        tensor.zero_()


def zeros(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """As `torch.zeros`."""
    made = torch.empty(*shape, dtype=dtype, device=device)
    clear(made)
    return made
