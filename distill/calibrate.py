"""Thresholds of policy `paper` fitted to traces: where speculating begins to pay on this machine and this text."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from draftsmith.data.traces import Traces

from .gate import expected_tokens


@dataclass
class Calibration:
    """`tau` and `stop_acceptance` as in policy `paper`; seconds a token in the traces with the fitted tau, always
    speculating, and never."""

    tau: float
    stop_acceptance: float
    seconds: float
    seconds_always: float
    seconds_never: float


def tau_costs(confidence_N: np.ndarray, speculating_N: np.ndarray, alone: float) -> tuple[list[float], list[float]]:
    """Thresholds on the analyser's confidence, rising, and the mean seconds a token of each.

    A decision with a confidence of tau or more, or of none yet (NaN), costs `speculating` seconds a token, else
    `alone`.
    """
    confidence = np.where(np.isnan(confidence_N), np.inf, confidence_N)
    known = np.unique(confidence[np.isfinite(confidence)])
    # Between the confidences that were seen; above the highest the target decodes alone wherever it is known.
    candidates = [0.0, *((known[1:] + known[:-1]) / 2).tolist(), *(known[-1:] + 1e-6).tolist()]
    return candidates, [float(np.where(confidence >= tau, speculating_N, alone).mean()) for tau in candidates]


def fit_tau(confidence_N: np.ndarray, speculating_N: np.ndarray, alone: float) -> tuple[float, float]:
    """The threshold with the least mean seconds a token, and that mean; of those that do equally well the lowest."""
    candidates, means = tau_costs(confidence_N, speculating_N, alone)
    best = int(np.argmin(means))
    return candidates[best], means[best]


def break_even(step: float, verify: np.ndarray, k: int) -> float:
    """The acceptance at which k drafted tokens a round earn what plain decoding does: the a with
    1 + a + ... + a^k = (k step + v(k + 1)) / v(1); 1 where even full acceptance earns less.

    `verify`: seconds of a target pass of 1, 2, ... rows.
    """
    price = (k * step + verify[k]) / verify[0]
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(middle**i for i in range(k + 1)) < price else (low, middle)
    return high


def round_costs(traces: Traces, variant: str, k: int) -> tuple[float, np.ndarray]:
    """Seconds of a draft step of a variant, and of target passes of 1 to k + 1 rows."""
    meta = traces.meta
    verify = np.interp(np.arange(1, k + 2), meta["verify_rows"], meta["verify_seconds"])
    return float(meta["step_seconds"][meta["variants"].index(variant)]), verify


def decisions(traces: Traces, variant: str, k: int) -> tuple[np.ndarray, np.ndarray, float]:
    """Of the decisions in prompts that a variant decoded: the confidence, and the seconds a token of k drafted tokens
    a round; and the seconds of a token without any."""
    number, (step, verify) = traces.meta["variants"].index(variant), round_costs(traces, variant, k)
    # Decisions of prompts that this variant decoded: the confidence is of the draft that was running. In few prompts
    # there may be none; then the confidences of the others stand in.
    mine = traces.variant_N == number
    if not mine.any():
        mine = np.ones_like(mine)
    speculating = (k * step + verify[k]) / expected_tokens(traces.acceptance_NAH[mine], k)[:, number]
    return traces.confidence_N[mine], speculating, float(verify[0])


def calibrate(traces: Traces, variant: str, k: int) -> Calibration:
    """Fit the thresholds for one variant that drafts k tokens a round."""
    confidence, speculating, alone = decisions(traces, variant, k)
    tau, mean = fit_tau(confidence, speculating, alone)
    return Calibration(tau, break_even(*round_costs(traces, variant, k), k), mean, float(speculating.mean()), alone)
