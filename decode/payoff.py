"""What a draft earns: predicted speed-up and break-even acceptance from what a step and a pass cost."""

from __future__ import annotations

import numpy as np
from draftsmith.distill.calibrate import break_even

LENGTHS = range(1, 9)
FLAT = np.ones(max(LENGTHS) + 1)  # a pass that costs the same for any number of rows, as where memory is the limit


def speedup(acceptance: float, k: int, step: float, verify: np.ndarray) -> float:
    """Predicted speed over plain decoding with k drafted tokens a round: (1 + a + ... + a^k) / (k c + v(k + 1) / v(1)).

    `step`: seconds of a draft step; `verify`: of a target pass of 1, 2, ... rows, in the same unit.
    """
    tokens = sum(acceptance**i for i in range(k + 1))
    return float(tokens * verify[0] / (k * step + verify[k]))


def best_length(acceptance: float, step: float, verify: np.ndarray) -> tuple[int, float]:
    """The length with the highest predicted speed-up, and that speed-up."""
    k = max(LENGTHS, key=lambda k: speedup(acceptance, k, step, verify))
    return k, speedup(acceptance, k, step, verify)


def lowest_break_even(step: float, verify: np.ndarray) -> tuple[float, int]:
    """The smallest acceptance at which some length earns what plain decoding does, and that length; 1 where none."""
    return min((break_even(step, verify, k), k) for k in LENGTHS)
