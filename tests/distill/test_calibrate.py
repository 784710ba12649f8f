"""Thresholds fitted to traces: where speculating pays, found again where it was planted."""

from __future__ import annotations

import numpy as np
import pytest
from draftsmith.data.traces import HORIZON, Traces
from draftsmith.distill.calibrate import break_even, calibrate, fit_tau

VERIFY = np.array([8.0, 8.5, 9.0, 9.5, 10.0])


@pytest.mark.parametrize("planted", [0.2, 0.55, 0.9])
def test_tau_is_found_where_speculating_begins_to_pay(planted: float) -> None:
    confidence = np.random.default_rng(0).random(400)
    speculating = np.where(confidence >= planted, 4.0, 12.0)
    tau, mean = fit_tau(confidence, speculating, 8.0)
    below, above = confidence[confidence < planted].max(), confidence[confidence >= planted].min()
    assert below < tau <= above
    assert mean == pytest.approx(np.where(confidence >= planted, 4.0, 8.0).mean())


def test_tau_is_the_least_where_speculating_always_pays_and_the_highest_where_it_never_does() -> None:
    confidence = np.linspace(0.1, 0.9, 9)
    assert fit_tau(confidence, np.full(9, 4.0), 8.0) == (0.0, 4.0)
    tau, mean = fit_tau(confidence, np.full(9, 12.0), 8.0)
    assert (tau > 0.9, mean) == (True, 8.0)


def test_a_decision_without_a_confidence_speculates_whatever_tau_is() -> None:
    """As the policy does; so its cost must not move the threshold."""
    confidence, speculating = np.array([np.nan, np.nan, 0.2, 0.8]), np.array([50.0, 60.0, 12.0, 4.0])
    tau, mean = fit_tau(confidence, speculating, 8.0)
    assert 0.2 < tau <= 0.8
    assert mean == (50 + 60 + 8 + 4) / 4
    assert fit_tau(confidence[:2], speculating[:2], 8.0)[0] == 0.0


@pytest.mark.parametrize(("step", "k"), [(0.5, 1), (0.5, 4), (1.0, 2)])
def test_at_the_break_even_acceptance_a_round_earns_what_plain_decoding_does(step: float, k: int) -> None:
    a = break_even(step, VERIFY, k)
    assert 0 < a < 1
    assert sum(a**i for i in range(k + 1)) / (k * step + VERIFY[k]) == pytest.approx(1 / VERIFY[0])


def test_a_draft_that_costs_too_much_never_breaks_even() -> None:
    assert break_even(100.0, VERIFY, 4) == pytest.approx(1.0)


def test_thresholds_come_from_the_variant_that_runs() -> None:
    """The small variant pays from a confidence of 0.5 on, the large one everywhere."""
    n = 200
    confidence = np.random.default_rng(1).random(n).astype(np.float32)
    acceptance = np.ones((n, 2, HORIZON), np.float32)
    acceptance[confidence < 0.5, 0] = 0.0
    meta = {"variants": ["2L", "4L"], "step_seconds": [0.5, 0.6], "verify_rows": [1, 5], "verify_seconds": [8.0, 10.0],
            "catch_up_seconds": 0.0}
    # Half of the prompts were decoded by each; the confidence is that of the draft which ran.
    traces = Traces(["p"] * n, np.arange(n), np.zeros((n, 2), np.float32), acceptance, np.arange(n) % 2,
                    np.full(n, 4), np.full(n, 4), confidence, meta)
    small, large = calibrate(traces, "2L", 4), calibrate(traces, "4L", 4)
    assert 0.45 < small.tau < 0.55
    assert large.tau == 0.0
    assert small.seconds < min(small.seconds_always, small.seconds_never)
    assert large.seconds == large.seconds_always == pytest.approx((4 * 0.6 + 10.0) / 5)
    assert small.stop_acceptance < large.stop_acceptance < 1


def test_where_the_variant_decoded_no_prompt_the_others_confidences_stand_in() -> None:
    """In few traces the fastest variant may have decoded none, or only answers of one token."""
    n = 40
    acceptance = np.zeros((n, 2, HORIZON), np.float32)
    acceptance[:, 0] = 0.9
    meta = {"variants": ["2L", "4L"], "step_seconds": [0.5, 0.6], "verify_rows": [1, 5], "verify_seconds": [8.0, 10.0],
            "catch_up_seconds": 0.0}
    traces = Traces(["p"] * n, np.arange(n), np.zeros((n, 2), np.float32), acceptance, np.ones(n, int), np.full(n, 4),
                    np.full(n, 4), np.linspace(0, 1, n, dtype=np.float32), meta)
    fitted = calibrate(traces, "2L", 4)
    assert fitted.tau == 0.0  # of the acceptance of 2L: that of 4L, nothing, would never speculate
    assert calibrate(traces, "4L", 4).tau > 1.0
