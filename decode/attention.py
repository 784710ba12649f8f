"""Where new tokens go in a static cache, what they may see, and the attention over it.

Shape letters: B requests, N new tokens, Q query heads, K key-value heads, D head size, S cached positions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional as F


@dataclass
class Tree:
    """New tokens that are not a chain: `depth_BN` counts from the first new position; `sees_BNN[b, i, j]`
    says that token i descends from token j, or is it."""

    depth_BN: torch.Tensor
    sees_BNN: torch.Tensor

    @classmethod
    def of(cls, parents: list[int], device: torch.device | None = None) -> Tree:
        """One request's tree: parents[i] < i is the index of token i's parent, -1 for a root."""
        n = len(parents)
        depth, sees = [0] * n, torch.eye(n, dtype=torch.bool)
        for i, parent in enumerate(parents):
            if parent >= 0:
                depth[i] = depth[parent] + 1
                sees[i] |= sees[parent]
        return cls(torch.tensor([depth], device=device), sees[None].to(device))


@dataclass
class Place:
    """Shared by all layers of a pass. `cos` and `sin` [(B,) N, 1, D]; `mask` bool [B or 1, 1, N, end], or None
    where every cached position may be seen; `end` is how many cached positions are read."""

    cos: torch.Tensor
    sin: torch.Tensor
    mask: torch.Tensor | None
    end: int
    start: int | None = None  # of all requests, where they agree
    slot_BN: torch.Tensor | None = None  # cache index of each new token, where requests differ,
    request_B1: torch.Tensor | None = None  # and the request that it goes to
    start_B: torch.Tensor | None = None  # int32, for kernels that take lengths
    slots: range | None = None  # of a larger cache, that the requests lie in
    window: int | None = None  # positions that a token sees, itself included; None: all before it
    # Made by `bind`: keys and values by layer, and where new ones go.
    keys: Sequence[torch.Tensor] = ()
    values: Sequence[torch.Tensor] = ()
    targets: Sequence[torch.Tensor] = ()
    bias: torch.Tensor | None = None

    def bind(self, kv_L2BKSD: torch.Tensor, groups: int, n: int, whole: bool = False) -> Place:
        """Cut the cache for this pass: all layers at once, since a cut costs as much as small arithmetic.

        `whole` keeps every cached position in `keys` and `values`, for kernels that take lengths.
        """
        slots = self.slots
        region = kv_L2BKSD if slots is None else kv_L2BKSD[:, :, slots.start : slots.stop]
        read = region if whole else region[..., : self.end, :]
        views = read.flatten(0, 1).unbind(0)
        self.keys, self.values = views[0::2], views[1::2]
        if self.start is not None:
            region = region[..., self.start : self.start + n, :]
        self.targets = region.unbind(0)
        if self.mask is not None and not whole:
            # Query heads that share a key-value head are rows of one product, so the mask repeats by row.
            mask = self.mask.repeat_interleave(groups, 2) if groups > 1 else self.mask
            bias = torch.zeros(mask.shape, dtype=kv_L2BKSD.dtype, device=mask.device)
            self.bias = bias.masked_fill_(~mask, -torch.inf)
        return self

    def write(self, layer: int, new_BN2KD: torch.Tensor) -> None:
        """Put the keys and values of the new tokens into the cache."""
        if self.slot_BN is None:
            self.targets[layer].copy_(new_BN2KD.permute(2, 0, 3, 1, 4))
        else:
            self.targets[layer][:, self.request_B1, :, self.slot_BN] = new_BN2KD


def chain_place(cos_SD: torch.Tensor, sin_SD: torch.Tensor, start: int, n: int, slots: range | None = None,
                start_B: torch.Tensor | None = None, window: int | None = None) -> Place:
    """N tokens after the same number of positions in every request. With `start_B` the kernel takes lengths
    and no mask is made."""
    end = start + n
    mask = None
    if start_B is None and (n > 1 or (window is not None and end > window)):
        mask = torch.ones(n, end, dtype=torch.bool, device=cos_SD.device).tril(start)
        mask = (mask if window is None else mask.triu(start - window + 1))[None, None]
    return Place(cos_SD[start:end, None], sin_SD[start:end, None], mask, end, start, start_B=start_B, slots=slots,
                 window=window)


def ragged_place(cos_SD: torch.Tensor, sin_SD: torch.Tensor, start_B: torch.Tensor, n: int, end: int,
                 tree: Tree | None = None, slots: range | None = None, masked: bool = True,
                 window: int | None = None) -> Place:
    """N tokens after start_B positions of each request, as a chain or a tree; no value of `start_B` is read
    on the host, so the same code can be captured in a graph. `end` >= max(start_B) + n."""
    device = cos_SD.device
    start_B1 = start_B.long()[:, None]
    slot_BN = start_B1 + torch.arange(n, device=device)
    columns = torch.arange(end, device=device)
    mask: torch.Tensor | None = None
    if tree is None:
        position_BN = slot_BN
        if masked:
            seen = columns <= slot_BN[..., None]
            mask = (seen if window is None else seen & (columns > slot_BN[..., None] - window))[:, None]
    else:
        position_BN = start_B1 + tree.depth_BN
        committed, sees_BNN = columns < start_B1[..., None], tree.sees_BNN
        if window is not None:
            committed = committed & (columns > position_BN[..., None] - window)
            sees_BNN = sees_BNN & (tree.depth_BN[:, :, None] - tree.depth_BN[:, None] < window)
        new = torch.zeros(len(start_B), n, end, dtype=torch.bool, device=device)
        new.scatter_(2, slot_BN[:, None].expand(-1, n, -1), sees_BNN.expand(len(start_B), -1, -1))
        mask = (committed | new)[:, None]
    return Place(cos_SD[position_BN][:, :, None], sin_SD[position_BN][:, :, None], mask, end, slot_BN=slot_BN,
                 request_B1=torch.arange(len(start_B), device=device)[:, None], start_B=start_B.int(), slots=slots,
                 window=window)


# (heads [B, N, Q + 2K, D] with queries, keys and values, number of key-value heads, layer, place) -> [B * N, Q * D]
Attend = Callable[[torch.Tensor, int, int, Place], torch.Tensor]


def attend_sdpa(heads_BNHD: torch.Tensor, kv_heads: int, layer: int, place: Place) -> torch.Tensor:
    """Write the new keys and values, then attend.

    Grouped heads are folded into rows, so keys and values are never expanded.
    """
    B, N, H, D = heads_BNHD.shape
    K, Q = kv_heads, H - 2 * kv_heads
    place.write(layer, heads_BNHD[:, :, Q:].view(B, N, 2, K, D))
    q = heads_BNHD[:, :, :Q].view(B, N, K, Q // K, D)
    if N == 1:
        o = F.scaled_dot_product_attention(q[:, 0], place.keys[layer], place.values[layer], attn_mask=place.bias)
        return o.reshape(B, Q * D)
    q = q.transpose(1, 2).reshape(B, K, -1, D)
    o = F.scaled_dot_product_attention(q, place.keys[layer], place.values[layer], attn_mask=place.bias)
    return o.view(B, K, N, -1, D).transpose(1, 2).reshape(B * N, Q * D)


def attend_flash(heads_BNHD: torch.Tensor, kv_heads: int, layer: int, place: Place) -> torch.Tensor:
    """The same through `flash_attn_with_kvcache`, which writes the cache itself. Chains only."""
    from flash_attn import flash_attn_with_kvcache

    B, N, H, _ = heads_BNHD.shape
    K, Q = kv_heads, H - 2 * kv_heads
    out: torch.Tensor = flash_attn_with_kvcache(
        heads_BNHD[:, :, :Q], place.keys[layer].transpose(1, 2), place.values[layer].transpose(1, 2),
        heads_BNHD[:, :, Q : Q + K], heads_BNHD[:, :, Q + K :], cache_seqlens=place.start_B, causal=True,
        window_size=(-1, -1) if place.window is None else (place.window - 1, 0))
    return out.reshape(B * N, -1)


def attend_with(kind: str, tree: bool) -> Attend:
    """The attention of an `Engine`; trees need a mask, which FlashAttention does not take."""
    return attend_flash if kind == "flash" and not tree else attend_sdpa
