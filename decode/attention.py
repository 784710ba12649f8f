"""Where new tokens go in a static cache, what they may see, and the attention over it.

Shape letters: B requests, N new tokens, Q query heads, K key-value heads, D head size, S cached positions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

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
    """Shared by all layers of a pass. `cos` and `sin` [B or 1, 1, N, D]; `mask` bool [B or 1, 1, N, end], or
    None where every cached position may be seen; `end` is how many cached positions are read."""

    cos: torch.Tensor
    sin: torch.Tensor
    mask: torch.Tensor | None
    end: int
    start: int | None = None  # of all requests, where they agree
    slot_BN: torch.Tensor | None = None  # cache index of each new token, where requests differ
    start_B: torch.Tensor | None = None  # int32, for kernels that take lengths
    request: int | None = None
    folded: dict[int, torch.Tensor] = field(default_factory=dict)

    def view(self, store_BKSD: torch.Tensor) -> torch.Tensor:
        """The requests of this pass in one layer's keys or values."""
        return store_BKSD if self.request is None else store_BKSD[self.request : self.request + 1]

    def write(self, store_BKSD: torch.Tensor, new_BKND: torch.Tensor) -> None:
        store = self.view(store_BKSD)
        if self.slot_BN is None:
            assert self.start is not None
            store[:, :, self.start : self.start + new_BKND.shape[2]] = new_BKND
        else:
            index = self.slot_BN[:, None, :, None].expand_as(new_BKND)
            store.scatter_(2, index, new_BKND)

    def mask_for(self, groups: int) -> torch.Tensor | None:
        """The mask with query heads that share a key-value head folded into rows, [B or 1, 1, groups * N, end]."""
        if self.mask is None:
            return None
        if groups not in self.folded:
            self.folded[groups] = self.mask.repeat(1, 1, groups, 1)
        return self.folded[groups]


def chain_place(cos_SD: torch.Tensor, sin_SD: torch.Tensor, start: int, n: int, request: int | None = None,
                start_B: torch.Tensor | None = None) -> Place:
    """N tokens after the same number of positions in every request. With `start_B` the kernel takes lengths
    and no mask is made."""
    end = start + n
    mask = None
    if n > 1 and start_B is None:
        mask = torch.ones(n, end, dtype=torch.bool, device=cos_SD.device).tril(start)[None, None]
    return Place(cos_SD[start:end], sin_SD[start:end], mask, end, start, start_B=start_B, request=request)


def ragged_place(cos_SD: torch.Tensor, sin_SD: torch.Tensor, start_B: torch.Tensor, n: int, end: int,
                 tree: Tree | None = None, request: int | None = None, masked: bool = True) -> Place:
    """N tokens after start_B positions of each request, as a chain or a tree; no value of `start_B` is read
    on the host, so the same code can be captured in a graph. `end` >= max(start_B) + n."""
    device = cos_SD.device
    start_B1 = start_B.long()[:, None]
    slot_BN = start_B1 + torch.arange(n, device=device)
    columns = torch.arange(end, device=device)
    mask: torch.Tensor | None = None
    if tree is None:
        position_BN = slot_BN
        mask = (columns <= slot_BN[..., None])[:, None] if masked else None
    else:
        position_BN = start_B1 + tree.depth_BN
        committed = columns < start_B1[..., None]
        new = torch.zeros(len(start_B), n, end, dtype=torch.bool, device=device)
        new.scatter_(2, slot_BN[:, None].expand(-1, n, -1), tree.sees_BNN.expand(len(start_B), -1, -1))
        mask = (committed | new)[:, None]
    return Place(cos_SD[position_BN][:, None], sin_SD[position_BN][:, None], mask, end, slot_BN=slot_BN,
                 start_B=start_B.int(), request=request)


Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, Place], torch.Tensor]


def attend_sdpa(q_BQND: torch.Tensor, k_BKND: torch.Tensor, v_BKND: torch.Tensor, k_cache: torch.Tensor,
                v_cache: torch.Tensor, place: Place) -> torch.Tensor:
    """Write the new keys and values, then attend; returns [B, N, Q * D].

    Grouped heads are folded into rows, so keys and values are never expanded.
    """
    B, Q, N, D = q_BQND.shape
    K = k_BKND.shape[1]
    place.write(k_cache, k_BKND)
    place.write(v_cache, v_BKND)
    k, v = place.view(k_cache)[:, :, : place.end], place.view(v_cache)[:, :, : place.end]
    q = q_BQND.reshape(B, K, Q // K * N, D)
    o = F.scaled_dot_product_attention(q, k, v, attn_mask=place.mask_for(Q // K))
    return o.view(B, Q, N, D).transpose(1, 2).reshape(B, N, Q * D)


def attend_flash(q_BQND: torch.Tensor, k_BKND: torch.Tensor, v_BKND: torch.Tensor, k_cache: torch.Tensor,
                 v_cache: torch.Tensor, place: Place) -> torch.Tensor:
    """The same through `flash_attn_with_kvcache`, which writes the cache itself. Chains only."""
    flash_attn_with_kvcache: Any
    from flash_attn import flash_attn_with_kvcache

    B, Q, N, D = q_BQND.shape
    out: torch.Tensor = flash_attn_with_kvcache(
        q_BQND.transpose(1, 2), place.view(k_cache).transpose(1, 2), place.view(v_cache).transpose(1, 2),
        k_BKND.transpose(1, 2), v_BKND.transpose(1, 2), cache_seqlens=place.start_B, causal=True)
    return out.reshape(B, N, Q * D)


def attend_with(kind: str, tree: bool) -> Attend:
    """The attention of an `Engine`; trees need a mask, which FlashAttention does not take."""
    return attend_flash if kind == "flash" and not tree else attend_sdpa
