"""Linear layers with a second copy of their weights, laid out as a CPU's matrix kernels read them.

A stock layer lays its weight out anew at each call with several rows. Measured with SmolLM2-135M in float32 on one core
with AVX-512, CPU time of a decoding step: 85 ms instead of 126 with 8 answers under way, 100 instead of 119 with 16; with
one it would be 64 instead of 56, so single rows take the stock way. Sums are in another order than in stock layers and
results differ in their last bits, and the copy takes memory: a deploy must ask for it (`engine.pack_weights`).
"""

from typing import Final

import torch
from torch import nn
from torch.nn import functional as F

ROWS: Final = 16
"""The layout is chosen for so many rows; others work as well."""


class PackedLinear(nn.Module):  # type: ignore[misc]  # torch has no types here
    """In place of an `nn.Linear` on a CPU, for inference. Has the same parameters under the same names."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        with torch.no_grad():
            self._packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), ROWS)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """(..., in) to (..., out), in the weight's dtype."""
        if rows.numel() == self.in_features:
            return F.linear(rows, self.weight, self.bias)
        packed: torch.Tensor = torch.ops.mkldnn._linear_pointwise(rows, self._packed, self.bias, "none", [], "")
        return packed


def pack(model: nn.Module) -> None:
    """Replace the linear layers of a model on a CPU. Raises what PyTorch raises where it was built without oneDNN."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, PackedLinear(child))
