"""Linear layers for decoding: plain, in blocks, repacked once (oneDNN), or in int8. Inference only."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from .device import has_bf16_units

# Rows that the packed layout is tuned for. The time of a pass of 1 to 17 rows does not depend on it as long
# as it is not 1, which costs up to half as much again; larger passes want it large.
PACK_ROWS = 64
# oneDNN compiles a product for every number of rows and keeps what it compiled, megabytes each: of more than
# PACK_ROWS only multiples of it up to this many are asked for.
MOST_ROWS = 512


def can_pack(weight: torch.Tensor) -> bool:
    """Whether the oneDNN operators exist here and take this weight."""
    fast = weight.dtype == torch.float32 or (weight.dtype == torch.bfloat16 and has_bf16_units())
    return (
        weight.device.type == "cpu" and fast and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight") and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


def packing_pays(weight_OI: torch.Tensor) -> bool:
    """Whether a packed product is faster than a plain one over the rows of a verification pass.

    In float32 only a wide one is: a narrow one loses at 1 to 3 rows what it gains at 17. `draftsmith bench
    --linears` measures it.
    """
    return weight_OI.dtype != torch.float32 or weight_OI.shape[0] >= 2 * weight_OI.shape[1]


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


class Linear(nn.Module):
    """What every kind can do besides y = x W^T + b."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        # Without the hooks of a module, which a pass of one row would pay for a hundred times.
        y: torch.Tensor = self.forward(x)
        return y

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """residual + y, for x of two dimensions."""
        return residual + self(x)


class PlainLinear(Linear):
    """y = x W^T + b; slices of its outputs and inputs cost what they are."""

    def __init__(self, weight_OI: torch.Tensor, bias_O: torch.Tensor | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight_OI.shape
        self.weight, self.bias = weight_OI.detach(), None if bias_O is None else bias_O.detach()
        self.weight_IO = self.weight.T

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        y = torch.addmm(residual, x, self.weight_IO)
        return y if self.bias is None else y.add_(self.bias)

    def outputs(self, x: torch.Tensor, start: int, end: int) -> torch.Tensor:
        """Outputs start to end only."""
        return F.linear(x, self.weight[start:end], None if self.bias is None else self.bias[start:end])

    def inputs(self, x: torch.Tensor, width: int) -> torch.Tensor:
        """The product with the first `width` inputs, which are all that x has."""
        return F.linear(x, self.weight[:, :width], self.bias)


class BlockedLinear(PlainLinear):
    """The same, computed for 4 to 15 rows as a batch of narrow products over blocks of outputs.

    MKL's AVX-512 product takes up to twice as long for so few rows as reading the weight does; a batch of
    narrow ones hardly longer. The weight stays as it is, so an embedding can share it.
    """

    BLOCK, FEW, MANY = 96, 3, 16

    def __init__(self, weight_OI: torch.Tensor, bias_O: torch.Tensor | None = None) -> None:
        super().__init__(weight_OI, bias_O)
        count = self.out_features // self.BLOCK
        self.split = count * self.BLOCK
        self.blocks_CIO = self.weight[: self.split].view(count, self.BLOCK, self.in_features).transpose(1, 2)

    def _few(self, rows: int) -> bool:
        return self.FEW < rows < self.MANY and self.split > self.BLOCK

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self._few(x.numel() // self.in_features):
            return F.linear(x, self.weight, self.bias)
        rows = x.reshape(-1, self.in_features)
        y = torch.bmm(rows.expand(len(self.blocks_CIO), -1, -1), self.blocks_CIO).transpose(0, 1).flatten(1)
        if self.split < self.out_features:
            y = torch.cat([y, F.linear(rows, self.weight[self.split :])], 1)
        y = y if self.bias is None else y + self.bias
        return y.view(*x.shape[:-1], self.out_features)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return residual + self(x) if self._few(len(x)) else super().add_to(residual, x)


class PackedLinear(Linear):
    """y = x W^T + b with W held packed; the plain weight is not kept."""

    def __init__(self, weight_OI: torch.Tensor, bias_O: torch.Tensor | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight_OI.shape
        self.bias = None if bias_O is None else bias_O.detach()
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight_OI.detach(), PACK_ROWS)
        self.product = torch.ops.mkldnn._linear_pointwise.default  # looked up once: half of a small call's overhead

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.numel() > PACK_ROWS * self.in_features:
            return self._many(x.reshape(-1, self.in_features)).view(*x.shape[:-1], self.out_features)
        y: torch.Tensor = self.product(x, self.packed, self.bias, "none", [], "")
        return y

    def _many(self, rows_RI: torch.Tensor) -> torch.Tensor:
        parts = []
        for part_RI in rows_RI.split(MOST_ROWS):
            n = len(part_RI)
            padded = F.pad(part_RI, (0, 0, 0, -n % PACK_ROWS)) if n > PACK_ROWS else part_RI
            parts.append(self.product(padded, self.packed, self.bias, "none", [], "")[:n])
        return parts[0] if len(parts) == 1 else torch.cat(parts)


class Int8Linear(Linear):
    """y = x W^T + b with W in int8; every row of x is quantised by its own largest value.

    Integer sums are exact, so a row's result is the same whatever pass it is in: a target may use this.
    PyTorch's quantised product is the fastest, but takes one range for all rows. So the rows are scaled to
    [-1, 1] first and one more row pins the range to just that. Where it is missing, `int8_rows`.
    """

    def __init__(self, weight_OI: torch.Tensor, bias_O: torch.Tensor | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight_OI.shape
        self.bias = None if bias_O is None else bias_O.detach()
        weight, self.scale = quantise(weight_OI.detach())
        self.packed = prepack(weight, self.scale)
        self.weight: torch.Tensor | None = weight
        if self.packed is not None:
            self.weight, self.product = None, torch.ops.quantized.linear_dynamic.default
        self.guard = torch.zeros(1, self.in_features)
        self.guard[0, 0], self.guard[0, -1] = 1.0, -1.0
        # Without VNNI the products of two 8-bit numbers are added in 16 bits, which 7-bit activations fit.
        self.reduce_range = not torch.cpu._is_vnni_supported()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, self.in_features)
        if self.weight is not None:
            y = int8_rows(rows, self.weight, self.scale)
        else:
            size = rows.abs().amax(1, keepdim=True).clamp_min(1e-12)
            guarded = torch.cat([rows / size, self.guard])
            y = self.product(guarded, self.packed, self.reduce_range)[:-1] * size
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


class Int8DraftLinear(Linear):
    """y = x W^T + b with W in int8 and x in bfloat16: the fastest single row, for drafts only.

    One row takes weights alone in int8, more rows quantise x too, so a row's result depends a little on the
    pass it is in.
    """

    FEW_ROWS = 2
    ALIGN = 32  # the product of few rows reads inputs in whole vectors, and past them if they do not fill one

    def __init__(self, weight_OI: torch.Tensor, bias_O: torch.Tensor | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight_OI.shape
        self.bias = None if bias_O is None else bias_O.detach()
        weight, self.scale = quantise(weight_OI.detach().float())
        self.pad = -self.in_features % self.ALIGN
        self.weight = F.pad(weight, (0, self.pad)).contiguous()
        self.half_scale = self.scale.to(torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, self.in_features)
        rows = F.pad(rows, (0, self.pad)) if self.pad else rows.contiguous()
        if len(rows) <= self.FEW_ROWS:
            y = torch._weight_int8pack_mm(rows, self.weight, self.half_scale)
        else:
            y = int8_rows(rows.float(), self.weight, self.scale).to(x.dtype)
        y = y if self.bias is None else y + self.bias
        return y.view(*x.shape[:-1], self.out_features)


def make_linear(weight_OI: torch.Tensor, bias_O: torch.Tensor | None, kind: str) -> Linear:
    """A linear layer of the kind an `Engine` asks for, or the fastest that this weight and machine can have."""
    if kind == "int8" and can_quantise(weight_OI):
        return Int8Linear(weight_OI, bias_O)
    if kind == "int8_draft":
        return Int8DraftLinear(weight_OI, bias_O)
    if kind == "packed" and can_pack(weight_OI) and packing_pays(weight_OI):
        return PackedLinear(weight_OI, bias_O)
    if kind == "blocked":
        return BlockedLinear(weight_OI, bias_O)
    return PlainLinear(weight_OI, bias_O)


def swap_linears(module: nn.Module, kind: str) -> int:
    """Replace the linear layers below any Hugging Face model by `make_linear`'s; returns how many changed.

    Packed, a layer that shares its weight (with a tied embedding) costs its size once more. GPT-2's transposed
    `Conv1D` is a linear layer too.
    """
    from transformers.pytorch_utils import Conv1D

    swapped = 0
    child: Any
    for name, child in list(module.named_children()):
        if type(child) is nn.Linear or type(child) is Conv1D:
            weight = child.weight.T if isinstance(child, Conv1D) else child.weight
            setattr(module, name, make_linear(weight.contiguous(), child.bias, kind))
            swapped += 1
        else:
            swapped += swap_linears(child, kind)
    return swapped
