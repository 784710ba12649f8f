"""Attention over packed blocks, computed run by run: no work is done for pairs of tokens that do not see each other.

On a CPU that is faster than one masked attention over the whole block (docs/training.md).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

Runs = list[list[tuple[int, int | None]]]  # as `data.packing.Batch.segments` gives them, block by block

NAME = "draftsmith_runs"


def product_dtype(x: torch.Tensor) -> torch.dtype:
    """The type of matrix products with `x`: autocast's where it is on, else its own."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def through_layer(layer: Callable[[torch.Tensor], Any], x_BTH: torch.Tensor, recompute: bool) -> torch.Tensor:
    """A stock layer's hidden states; with `recompute` its activations are computed anew in the backward pass."""
    out = checkpoint(layer, x_BTH, use_reentrant=False) if recompute else layer(x_BTH)
    return out[0] if isinstance(out, tuple) else out


def attend_runs(
    q_BHTD: torch.Tensor, k_BGTD: torch.Tensor, v_BGTD: torch.Tensor, runs: Runs, scaling: float,
) -> torch.Tensor:
    """Attention [B, H, T, D] in which a token sees the run that is its prompt, and its own run up to itself.

    H heads share G key-value heads in order. Under autocast, products are in its type and the softmax in float32.
    """
    device, dtype = q_BHTD.device.type, product_dtype(q_BHTD)
    exact = torch.promote_types(dtype, torch.float32)
    longest = max(n for block in runs for n, _ in block)
    future = torch.full((longest, longest), float("-inf"), dtype=exact, device=q_BHTD.device).triu(1)
    with torch.autocast(device, enabled=False):
        q_BHTD, k_BGTD, v_BGTD = (x.to(dtype) for x in (q_BHTD * scaling, k_BGTD, v_BGTD))
        return torch.stack([_attend_block(*block, future) for block in zip(q_BHTD, k_BGTD, v_BGTD, runs, strict=True)])


def _attend_block(
    q_HTD: torch.Tensor, k_GTD: torch.Tensor, v_GTD: torch.Tensor, runs: list[tuple[int, int | None]],
    future: torch.Tensor,
) -> torch.Tensor:
    (heads, _, size), groups = q_HTD.shape, len(k_GTD)
    lengths = [n for n, _ in runs]
    q, k, v = (x.split(lengths, 1) for x in (q_HTD, k_GTD, v_GTD))
    out = []
    for i, (n, prompt) in enumerate(runs):
        keys, values = k[i], v[i]
        if prompt is not None:
            keys, values = torch.cat([k[prompt], keys], 1), torch.cat([v[prompt], values], 1)
        m = keys.shape[1]
        # The heads that share keys lie beside each other: one product for all of them.
        scores = (q[i].reshape(groups, -1, size) @ keys.transpose(1, 2)).view(groups, heads // groups, n, m)
        weights = torch.softmax(scores.to(future.dtype) + F.pad(future[:n, :n], (m - n, 0)), -1)
        out.append((weights.to(values.dtype).view(groups, -1, m) @ values).view(heads, n, size))
    return torch.cat(out, 1)


def _attention(module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None,
               scaling: float, runs: Runs | None = None, **options: Any) -> tuple[torch.Tensor, None]:
    """What a stock layer calls: by runs where they are given, else the stock masked attention."""
    if runs is None:
        out, _ = sdpa_attention_forward(module, q, k, v, mask, scaling=scaling, **options)
        return out, None
    return attend_runs(q, k, v, runs, scaling).transpose(1, 2), None


AttentionInterface.register(NAME, _attention)
