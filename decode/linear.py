"""Linear layers with weights repacked once for the CPU (oneDNN), and a plain fallback."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

# Rows that the packed layout is tuned for. Verification passes have 2 to 17 rows; packing for 8 costs a
# little at one row and keeps four-row passes from costing three times a one-row pass.
PACK_ROWS = 8


def has_bf16_units() -> bool:
    """Whether this CPU multiplies bfloat16 matrices in hardware (AMX): several times float32 there, and
    slower than float32 everywhere else."""
    supported = getattr(torch.cpu, "_is_amx_tile_supported", None)
    return bool(supported is not None and supported())


def training_dtype(precision: str, device: torch.device | str) -> torch.dtype:
    """The dtype that a recipe's `precision` means here: "auto" is bfloat16 where the device has units for it."""
    fast = torch.device(device).type == "cuda" or has_bf16_units()
    return torch.bfloat16 if precision == "bf16" or (precision == "auto" and fast) else torch.float32


def can_pack(weight: torch.Tensor) -> bool:
    """Whether the oneDNN operators exist here and take this weight."""
    fast = weight.dtype == torch.float32 or (weight.dtype == torch.bfloat16 and has_bf16_units())
    return (
        weight.device.type == "cpu" and fast and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight") and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


class PackedLinear(nn.Module):
    """y = x W^T + b with W held packed; the plain weight is not kept. Inference only."""

    def __init__(self, weight_OI: torch.Tensor, bias_O: torch.Tensor | None = None) -> None:
        super().__init__()
        self.in_features, self.out_features = weight_OI.shape[1], weight_OI.shape[0]
        self.bias = bias_O.detach() if bias_O is not None else None
        self.packed = can_pack(weight_OI)
        weight = weight_OI.detach()
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight, PACK_ROWS) if self.packed else weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.packed:
            return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return F.linear(x, self.weight, self.bias)


def pack_linears(module: nn.Module) -> int:
    """Replace every `nn.Linear` below `module` that can be packed; returns how many were.

    Layers whose weight is shared with a module that is not a linear layer (a tied embedding) keep the
    plain weight there; the packed copy costs its size once more.
    """
    swapped = 0
    for name, child in list(module.named_children()):
        if type(child) is nn.Linear and can_pack(child.weight):
            setattr(module, name, PackedLinear(child.weight, child.bias))
            swapped += 1
        else:
            swapped += pack_linears(child)
    return swapped
