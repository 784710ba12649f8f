"""Replaying passes of few rows as CUDA graphs.

A graph is bound to the memory it was captured over, so cache storage outlives requests: a new request takes
over the storage of a finished one, and its graphs. Shapes are bucketed by rows and by how many cached
positions are read.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

import torch

ROW_BUCKETS = (1, 2, 3, 5, 9, 17)
CONTEXT_BUCKET = 256

Tensors = tuple[torch.Tensor, ...]


def bucket_rows(n: int) -> int | None:
    """The smallest bucket for n rows; None where a graph would not pay."""
    return next((b for b in ROW_BUCKETS if b >= n), None)


def bucket_context(end: int, capacity: int) -> int:
    return min(capacity, -(-end // CONTEXT_BUCKET) * CONTEXT_BUCKET)


def storage_size(capacity: int) -> int:
    """Positions to allocate, so that rows that only fill a bucket have somewhere to go."""
    return -(-(capacity + ROW_BUCKETS[-1]) // CONTEXT_BUCKET) * CONTEXT_BUCKET


@dataclass
class Pass:
    """A captured pass: `ids_BN` and `start_B` are written before `replay`, `outputs` read after it."""

    ids_BN: torch.Tensor
    start_B: torch.Tensor
    replay: Callable[[], None]
    outputs: Tensors

    def __call__(self, ids_BN: torch.Tensor, starts: list[int]) -> Tensors:
        self.ids_BN[:, : ids_BN.shape[1]].copy_(ids_BN)
        self.start_B.copy_(torch.tensor(starts), non_blocking=True)
        self.replay()
        return self.outputs


def capture(function: Callable[[], Tensors]) -> tuple[Callable[[], None], Tensors]:
    """Record a function of static tensors in a CUDA graph: (replay, its outputs)."""
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(2):  # libraries choose and allocate on the first runs
            function()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = function()
    return graph.replay, outputs


@dataclass(eq=False)
class Storage:
    """Tensors of a cache for `batch` requests of `size` positions, and the passes captured over them."""

    tensors: Tensors
    batch: int
    size: int
    passes: dict[Hashable, Pass] = field(default_factory=dict)

    def run(self, key: Hashable, function: Callable[[torch.Tensor, torch.Tensor], Tensors], ids_BN: torch.Tensor,
            starts: list[int], rows: int) -> Tensors:
        """Replay the pass of this key, captured on first use from `function(ids_BN, start_B)`.

        The outputs are overwritten by the next replay.
        """
        if key not in self.passes:
            device = ids_BN.device
            static_ids = torch.zeros(len(ids_BN), rows, dtype=torch.long, device=device)
            static_ids[:, : ids_BN.shape[1]] = ids_BN
            # Captured at the real place: warming up writes what the pass itself will write.
            static_start = torch.tensor(starts, device=device)
            with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
                replay, outputs = capture(lambda: function(static_ids, static_start))
            self.passes[key] = Pass(static_ids, static_start, replay, outputs)
        return self.passes[key](ids_BN, starts)


class Pool:
    """Storage handed from finished requests to new ones. Little of it is kept: a new request takes any that is
    large enough and not much larger."""

    KEEP, SLACK = 4, 2

    def __init__(self) -> None:
        self.free: list[Storage] = []

    def take(self, batch: int, size: int, make: Callable[[], Tensors]) -> Storage:
        """Storage for `batch` requests of `size` positions; `make` allocates it where none is free."""
        fitting = [s for s in self.free if s.batch == batch and size <= s.size <= self.SLACK * size]
        if not fitting:
            return Storage(make(), batch, size)
        found = min(fitting, key=lambda s: s.size)
        self.free.remove(found)
        return found

    def give(self, storage: Storage) -> None:
        self.free = [*self.free, storage][-self.KEEP :]
