"""What a pass costs in multiplications, and how many of them this machine can do."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from draftsmith.decode.attention import Tree
from draftsmith.decode.device import training_dtype
from draftsmith.decode.flops import layer_weights_of
from draftsmith.decode.runner import Runner


@dataclass
class Shape:
    """Of a stack: weights of its layers, of its embedding and head, hidden size and layers."""

    layers: float
    ends: float
    hidden: int
    depth: int

    def flops(self, tokens: float, rows: float, trained: bool, ends_trained: bool = True) -> float:
        """Of a pass over `tokens`, of which `rows` reach the head, attention left out. A backward pass is twice a
        forward one: by the weights and by what went in; of a frozen head it is the latter alone."""
        back, ends_back = (2, 1 + ends_trained) if trained else (0, 0)
        return 2 * (self.layers * tokens * (1 + back) + self.ends * rows * (1 + ends_back))


def shape_of(config: Any, layers: int | None = None, head: int | None = None) -> Shape:
    """Of a configuration of the Llama kind; others are counted as if they were. `head`: rows of a trimmed one."""
    hidden, depth = config.hidden_size, layers or config.num_hidden_layers
    return Shape(layer_weights_of(config) * depth, (head or config.vocab_size) * hidden, hidden, depth)


class Paced:
    """A runner that counts what it computes: positions, padding included, and rows of the head."""

    def __init__(self, runner: Runner) -> None:
        self.runner, self.tokens, self.rows, self.started = runner, 0, 0, time.perf_counter()

    def forward(self, ids_BN: torch.Tensor, cache: Any, keep: int | None = None, slots: range | None = None,
                tree: Tree | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        self.tokens += ids_BN.numel()
        self.rows += len(ids_BN) * (ids_BN.shape[1] if keep is None else keep)
        return self.runner.forward(ids_BN, cache, keep, slots, tree)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.runner, name)

    def report(self, config: Any) -> str:
        """The pace since it was made, in words; times a product."""
        seconds = time.perf_counter() - self.started
        share = shape_of(config).flops(self.tokens, self.rows, trained=False) / seconds / product_speed(self.device)
        return (f"{self.tokens:,} positions computed in {seconds:,.0f} s: {self.tokens / seconds:,.0f} a second, "
                f"{share:.0%} of what one large product reaches here")


def product_speed(device: torch.device) -> float:
    """FLOP/s of one large product here, in the type that training uses unless told otherwise."""
    dtype = training_dtype("auto", device)
    size = 2048 if device.type == "cpu" else 4096
    own = torch.Generator(device)  # the global one belongs to whoever is training
    a, b = (torch.randn(size, size, dtype=dtype, device=device, generator=own) for _ in range(2))
    best = float("inf")
    for _ in range(4):
        started = time.perf_counter()
        float((a @ b)[0, 0])
        best = min(best, time.perf_counter() - started)
    return 2 * size**3 / best
