"""The gate: a 2-layer MLP from target-side features to alpha, trained for throughput.

Objective (DESIGN, section 6): alpha gives soft weights over the variants, and the gate maximises
E[tokens] - lambda * E[time] with lambda the running tokens per second. Throughput is a ratio of sums;
at its optimum the same policy maximises this difference (Dinkelbach, 1967).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from draftsmith.data.traces import Traces
from torch import nn

from .variants import EXIT_ALPHA, LEAST_ALPHA, DraftShape

SOFTNESS = 1.0  # standard deviation of the soft assignment, in half-widths of a variant's interval of alpha


class Gate(nn.Module):
    """alpha = 0.5 + sigmoid(MLP((x - mean) / std)), so alpha lies in (0.5, 1.5)."""

    mean: torch.Tensor
    std: torch.Tensor

    def __init__(self, features: int, hidden: int = 64) -> None:
        super().__init__()
        self.inner = nn.Linear(features, hidden)
        self.outer = nn.Linear(hidden, 1)
        self.register_buffer("mean", torch.zeros(features))
        self.register_buffer("std", torch.ones(features))

    def forward(self, x_NF: torch.Tensor) -> torch.Tensor:
        z = self.outer(torch.nn.functional.gelu(self.inner((x_NF - self.mean) / self.std)))
        return 0.5 + torch.sigmoid(z.squeeze(-1))


def variant_edges(shape: DraftShape) -> torch.Tensor:
    """The bounds of the variants' intervals of alpha, [A + 1], in the order of `shape.variants()`."""
    return torch.tensor([LEAST_ALPHA, EXIT_ALPHA, *sorted(shape.buckets)])


def soft_weights(alpha_N: torch.Tensor, edges_A1: torch.Tensor) -> torch.Tensor:
    """Weights [N, A] of the variants around alpha; rows sum to 1 and peak at the variant that decoding runs.

    Distances are in half-widths of each interval: with plain distances a narrow interval would be trained
    for alphas at which its neighbour decodes.
    """
    centres, halves = (edges_A1[1:] + edges_A1[:-1]) / 2, ((edges_A1[1:] - edges_A1[:-1]) / 2).clamp_min(1e-6)
    return torch.softmax(-(((alpha_N[:, None] - centres) / halves) ** 2) / (2 * SOFTNESS**2), dim=-1)


def expected_tokens(acceptance_NAH: np.ndarray, k: int) -> np.ndarray:
    """Expected tokens of one round per row and variant, [N, A]: 1 + sum over i <= k of prod a_1..a_i.

    NaN (past the end of the text) counts as no acceptance.
    """
    a = np.nan_to_num(acceptance_NAH[:, :, :k], nan=0.0)
    return 1.0 + np.cumprod(a, axis=-1).sum(-1)


def round_seconds(traces: Traces, k: int) -> np.ndarray:
    """Measured seconds of one round per row and variant, [N, A], catch-up passes included.

    A switch from the early exit (variant 0) to full depth runs the deep layers over the positions that
    they have not seen; its cost is in the traces' metadata.
    """
    meta = traces.meta
    seconds = np.array(meta["step_seconds"]) * k + np.interp(k + 1, meta["verify_rows"], meta["verify_seconds"])
    table = np.tile(seconds, (len(traces), 1))
    table[traces.variant_N == 0, 1:] += meta["catch_up_seconds"]
    return table


@dataclass
class GateReport:
    """Throughputs (tokens/s, from the traces) on held-out rows; regret is 1 - gate / oracle."""

    rows: int
    gate: float
    oracle: float
    fixed: dict[str, float]
    best_fixed: str
    regret: float
    regret_best_fixed: float
    beats_fixed: bool
    calibration: list[dict[str, float]]


def throughput(tokens_NA: np.ndarray, seconds_NA: np.ndarray, choice_N: np.ndarray) -> float:
    rows = np.arange(len(choice_N))
    return float(tokens_NA[rows, choice_N].sum() / seconds_NA[rows, choice_N].sum())


def oracle_throughput(tokens_NA: np.ndarray, seconds_NA: np.ndarray) -> float:
    """The best ratio of sums when each row may choose its variant, by Dinkelbach's iteration."""
    rate = 0.0
    for _ in range(50):
        better = throughput(tokens_NA, seconds_NA, (tokens_NA - rate * seconds_NA).argmax(-1))
        if better <= rate * (1 + 1e-12):
            break
        rate = better
    return rate


@torch.no_grad()
def evaluate_gate(gate: Gate, traces: Traces, shape: DraftShape, k: int) -> GateReport:
    """Compare the gate's hard choices with the oracle and with every fixed variant."""
    variants = shape.variants()
    tokens, seconds = expected_tokens(traces.acceptance_NAH, k), round_seconds(traces, k)
    alpha = gate(torch.from_numpy(traces.features_NF)).numpy()
    choice = np.array([variants.index(shape.choose(float(a))) for a in alpha])
    fixed = {v.name: throughput(tokens, seconds, np.full(len(traces), i)) for i, v in enumerate(variants)}
    best = max(fixed, key=lambda name: fixed[name])
    gained, oracle = throughput(tokens, seconds, choice), oracle_throughput(tokens, seconds)
    # Calibrated when rows given a small alpha are those where the small variant loses little.
    largest = np.nanmean(traces.acceptance_NAH[:, -1], axis=-1)
    smallest = np.nanmean(traces.acceptance_NAH[:, 0], axis=-1)
    bins = [b for b in np.array_split(np.argsort(alpha), min(5, len(alpha))) if len(b)]
    calibration = [
        {"alpha": float(alpha[b].mean()), "acceptance_largest": float(largest[b].mean()),
         "acceptance_smallest": float(smallest[b].mean()), "rows": float(len(b))} for b in bins
    ]
    return GateReport(len(traces), gained, oracle, fixed, best, 1 - gained / oracle, 1 - fixed[best] / oracle,
                      gained > fixed[best], calibration)
