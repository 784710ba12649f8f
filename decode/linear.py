"""Linear layers for decoding: plain, repacked once for the CPU (oneDNN), or in int8. Inference only."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from .device import has_bf16_units

# Rows that the packed layout is tuned for. Verification passes have 2 to 17 rows; packing for 8 costs a
# little at one row and keeps four-row passes from costing three times a one-row pass.
PACK_ROWS = 8


def can_pack(weight: torch.Tensor) -> bool:
    """Whether the oneDNN operators exist here and take this weight."""
    fast = weight.dtype == torch.float32 or (weight.dtype == torch.bfloat16 and has_bf16_units())
    return (
        weight.device.type == "cpu" and fast and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight") and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


def packing_pays(weight_OI: torch.Tensor) -> bool:
    """Whether a packed product is faster over the rows of a verification pass: only a wide one is.

    `draftsmith bench --linears` measures it: narrow products lose at 1 to 3 rows what they gain at 17.
    """
    return weight_OI.shape[0] >= 2 * weight_OI.shape[1]


def can_quantise(weight: torch.Tensor) -> bool:
    """Whether int8 products run here: on a CPU, for weights given in float32."""
    return weight.device.type == "cpu" and weight.dtype == torch.float32 and hasattr(torch, "_int_mm")


def quantise(weight_OI: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Symmetric int8 with one scale an output: (int8 [O, I], float32 [O])."""
    scale_O = weight_OI.abs().amax(1).clamp_min(1e-12) / 127
    return (weight_OI / scale_O[:, None]).round().to(torch.int8).contiguous(), scale_O


def int8_rows(rows_RI: torch.Tensor, weight_OI: torch.Tensor, scale_O: torch.Tensor) -> torch.Tensor:
    """rows x weight^T in exact integer arithmetic, every row quantised by its own largest value; float32 [R, O]."""
    step_R1 = rows_RI.abs().amax(1, keepdim=True).clamp_min(1e-12) / 127
    return torch._int_mm((rows_RI / step_R1).round().to(torch.int8), weight_OI.T) * step_R1 * scale_O


class PlainLinear(nn.Module):
    """y = x W^T + b."""

    def __init__(self, weight_OI: torch.Tensor, bias_O: torch.Tensor | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight_OI.shape
        self.weight, self.bias = weight_OI.detach(), None if bias_O is None else bias_O.detach()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)


class PackedLinear(nn.Module):
    """y = x W^T + b with W held packed; the plain weight is not kept."""

    def __init__(self, weight_OI: torch.Tensor, bias_O: torch.Tensor | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight_OI.shape
        self.bias = None if bias_O is None else bias_O.detach()
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight_OI.detach(), PACK_ROWS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")


class Int8Linear(nn.Module):
    """y = x W^T + b with W in int8; every row of x is quantised by its own largest value.

    Integer sums are exact, so a row's result is the same whatever pass it is in: a target may use this.
    PyTorch's quantised product is the fastest, but takes one range for all rows. So the rows are scaled to
    [-1, 1] first and one more row pins the range to just that. Where it is missing, `int8_rows`.
    """

    def __init__(self, weight_OI: torch.Tensor, bias_O: torch.Tensor | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight_OI.shape
        self.bias = None if bias_O is None else bias_O.detach()
        self.weight, self.scale = quantise(weight_OI.detach())
        self.packed = prepack(self.weight, self.scale)
        if self.packed is not None:
            self.weight = None
        self.guard = torch.zeros(1, self.in_features)
        self.guard[0, 0], self.guard[0, -1] = 1.0, -1.0
        # Without VNNI the products of two 8-bit numbers are added in 16 bits, which 7-bit activations fit.
        self.reduce_range = not torch.cpu._is_vnni_supported()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, self.in_features)
        if self.packed is None:
            y = int8_rows(rows, self.weight, self.scale)
        else:
            size = rows.abs().amax(1, keepdim=True).clamp_min(1e-12)
            guarded = torch.cat([rows / size, self.guard])
            y = torch.ops.quantized.linear_dynamic(guarded, self.packed, self.reduce_range)[:-1] * size
        y = y if self.bias is None else y + self.bias
        return y.view(*x.shape[:-1], self.out_features)


def prepack(weight_OI: torch.Tensor, scale_O: torch.Tensor) -> Any:
    """Int8 weights packed for the FBGEMM product; None where this build has none."""
    if torch.backends.quantized.engine not in ("x86", "fbgemm") or not hasattr(torch.ops.quantized, "linear_dynamic"):
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # creating quantised tensors is to be removed one day
        zero = torch.zeros(len(scale_O), dtype=torch.long)
        made = torch._make_per_channel_quantized_tensor(weight_OI, scale_O.double(), zero, 0)
    return torch.ops.quantized.linear_prepack(made, None)


class Int8DraftLinear(nn.Module):
    """y = x W^T + b with W in int8 and x in bfloat16: the fastest single row, for drafts only.

    One row takes weights alone in int8, more rows quantise x too, so a row's result depends a little on the
    pass it is in.
    """

    FEW_ROWS = 2

    def __init__(self, weight_OI: torch.Tensor, bias_O: torch.Tensor | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight_OI.shape
        self.bias = None if bias_O is None else bias_O.detach()
        self.weight, self.scale = quantise(weight_OI.detach().float())
        self.half_scale = self.scale.to(torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, self.in_features)
        if len(rows) <= self.FEW_ROWS:
            y = torch._weight_int8pack_mm(rows, self.weight, self.half_scale)
        else:
            y = int8_rows(rows.float(), self.weight, self.scale).to(x.dtype)
        y = y if self.bias is None else y + self.bias
        return y.view(*x.shape[:-1], self.out_features)


def make_linear(weight_OI: torch.Tensor, bias_O: torch.Tensor | None, kind: str) -> nn.Module:
    """A linear layer of the kind an `Engine` asks for, or the nearest that this weight and machine can have."""
    if kind == "int8" and can_quantise(weight_OI):
        return Int8Linear(weight_OI, bias_O)
    if kind == "int8_draft":
        return Int8DraftLinear(weight_OI, bias_O)
    if kind == "packed" and can_pack(weight_OI) and packing_pays(weight_OI):
        return PackedLinear(weight_OI, bias_O)
    return PlainLinear(weight_OI, bias_O)


def swap_linears(module: nn.Module, kind: str) -> int:
    """Replace the linear layers below any Hugging Face model by `make_linear`'s; returns how many changed.

    A layer whose weight is shared (a tied embedding) keeps the plain weight there, and its packed copy costs
    the size once more. GPT-2's transposed `Conv1D` is a linear layer too.
    """
    from transformers.pytorch_utils import Conv1D

    swapped = 0
    for name, child in list(module.named_children()):
        if type(child) is nn.Linear or type(child) is Conv1D:
            weight = child.weight.T if isinstance(child, Conv1D) else child.weight
            made = make_linear(weight.contiguous() if weight.stride(-1) != 1 else weight, child.bias, kind)
            if not isinstance(made, PlainLinear):
                setattr(module, name, made)
                swapped += 1
        else:
            swapped += swap_linears(child, kind)
    return swapped
