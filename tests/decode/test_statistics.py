"""Statistics against scipy and by simulation: what is there is found, what is not is not."""

from __future__ import annotations

import math

import numpy as np
import pytest
from draftsmith.decode.evaluation.statistics import Paired, correct, faster, holm, of_differences, of_ratios
from scipy import stats


def rates(n: int, ratio: float, seed: int, noise: float = 0.05) -> tuple[np.ndarray, np.ndarray]:
    """Paired speeds of prompts that differ far more than the methods do."""
    random = np.random.default_rng(seed)
    base = np.exp(random.normal(3, 0.5, n))
    return base * ratio * np.exp(random.normal(0, noise, n)), base * np.exp(random.normal(0, noise, n))


def test_a_paired_ratio_is_that_of_logarithms_and_its_tests_are_scipys() -> None:
    a, b = rates(40, 1.2, 0)
    found, logs = of_ratios(a, b), np.log(a / b)
    assert found.ratio == pytest.approx(math.exp(logs.mean()))
    low, high = stats.t.interval(0.95, len(logs) - 1, logs.mean(), stats.sem(logs))
    assert (found.low, found.high) == pytest.approx((math.exp(low), math.exp(high)))
    assert found.t == pytest.approx(stats.ttest_rel(np.log(a), np.log(b)).pvalue)
    assert found.wilcoxon == pytest.approx(stats.wilcoxon(logs).pvalue)
    assert found.effect == pytest.approx(logs.mean() / logs.std(ddof=1))
    assert found.boot_low == pytest.approx(found.low, rel=0.02)
    assert found.boot_high == pytest.approx(found.high, rel=0.02)


def test_holm_against_the_definition() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, 0.9]) == pytest.approx([1.0, 1.0])
    assert holm([0.02]) == [0.02]


def test_the_same_method_twice_is_rarely_flagged_and_after_correction_more_rarely() -> None:
    trials = [correct({str(t): of_ratios(*rates(30, 1.0, 100 * s + t)) for t in range(6)}) for s in range(60)]
    raw = np.mean([f.t < 0.05 for found in trials for f in found.values()])
    assert 0.02 < raw < 0.09
    assert np.mean([any(f.significant for f in found.values()) for found in trials]) < 0.12


@pytest.mark.parametrize("ratio", [0.95, 1.05])
def test_a_planted_difference_is_found(ratio: float) -> None:
    found = of_ratios(*rates(60, ratio, 3))
    verdict = faster("new", "old", found)
    assert verdict.differs
    assert verdict.better == (ratio > 1)
    assert ("faster" if ratio > 1 else "slower") in verdict.sentence


def test_what_a_test_is_said_to_find_it_finds_four_times_in_five() -> None:
    detectable = of_ratios(*rates(30, 1.0, 5)).detectable
    hits = np.mean([of_ratios(*rates(30, detectable, 1000 + s)).significant for s in range(200)])
    assert 0.6 < hits < 0.95


def test_no_difference_is_said_with_what_would_have_been_found() -> None:
    verdict = faster("a", "b", of_ratios(*rates(20, 1.0, 1)))
    assert not verdict.differs
    assert "do not differ measurably" in verdict.sentence


def test_values_that_are_all_alike_need_no_test() -> None:
    same = of_differences([0.0] * 10)
    assert (same.t, same.significant, same.ratio) == (1.0, False, 0.0)
    certain = of_differences([-0.5] * 10)
    assert (certain.t, certain.significant) == (0.0, True)


def test_one_pair_says_nothing() -> None:
    found = of_ratios([2.0], [1.0])
    assert isinstance(found, Paired)
    assert not found.significant
    assert (found.low, found.high) == (0.0, math.inf)
