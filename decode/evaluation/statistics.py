"""Is one method faster, or better, than another? Paired tests on the same prompts, with intervals and corrections."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

CONFIDENCE, ALPHA, POWER = 0.95, 0.05, 0.8
RESAMPLES = 4000


@dataclass
class Paired:
    """One method against another over n prompts, on the logarithm of a paired ratio (or on differences).

    `ratio` is the geometric mean (the mean difference for scores) with a Student interval `low` to `high` and a
    bootstrap interval `boot_low` to `boot_high`; `t` and `wilcoxon` are two-sided p-values, `t_holm` the former after
    Holm's correction over `tests` tests; `effect` is Cohen's d of the paired values; `detectable` the smallest ratio
    (or difference) that a test of this size finds four times in five, as the only one of `tests` that differs.
    `error`: the standard error of the mean of what is tested; `logs`: that of logarithms.
    """

    n: int
    ratio: float
    low: float
    high: float
    boot_low: float
    boot_high: float
    t: float
    wilcoxon: float
    effect: float
    detectable: float
    t_holm: float = math.nan
    error: float = 0.0
    logs: bool = False
    tests: int = 1

    @property
    def significant(self) -> bool:
        p = self.t if math.isnan(self.t_holm) else self.t_holm
        return p < ALPHA


@dataclass
class Interval:
    """A paired geometric-mean ratio with its 95 % confidence interval."""

    mean: float
    low: float
    high: float
    n: int


def paired_ratio(numerator: Sequence[float], denominator: Sequence[float]) -> Interval:
    """Geometric mean of paired ratios with a Student t interval on their logarithms."""
    found = of_ratios(numerator, denominator)
    return Interval(found.ratio, found.low, found.high, found.n)


def of_ratios(numerator: Sequence[float], denominator: Sequence[float], seed: int = 0) -> Paired:
    """Paired ratios, such as tokens a second of two methods; tests are on their logarithms."""
    values = np.log(np.asarray(numerator, float) / np.asarray(denominator, float))
    found = of_differences(values, seed)
    found.logs = True
    for name in ("ratio", "low", "high", "boot_low", "boot_high", "detectable"):
        setattr(found, name, math.exp(getattr(found, name)))
    return found


def of_differences(differences: Sequence[float] | np.ndarray, seed: int = 0) -> Paired:
    """Paired differences, such as scores of two methods. Of one pair nothing can be said: intervals are infinite."""
    from scipy import stats

    values = np.asarray(differences, float)
    n, mean = len(values), float(np.mean(values)) if len(values) else math.nan
    if n < 2:
        return Paired(n, mean, -math.inf, math.inf, -math.inf, math.inf, 1.0, 1.0, 0.0, math.inf)
    spread = float(values.std(ddof=1))
    # Paired values that are all alike, as scores of lossless methods are, differ by nothing or for certain.
    if spread < 1e-12:
        p = 1.0 if abs(mean) < 1e-12 else 0.0
        return Paired(n, mean, mean, mean, mean, mean, p, p, 0.0 if p else math.copysign(math.inf, mean), 0.0)
    error, quantile = spread / math.sqrt(n), float(stats.t.ppf(0.5 + CONFIDENCE / 2, n - 1))
    drawn = values[np.random.default_rng(seed).integers(0, n, (RESAMPLES, n))].mean(1)
    boot = np.quantile(drawn, [0.5 - CONFIDENCE / 2, 0.5 + CONFIDENCE / 2])
    return Paired(n, mean, mean - quantile * error, mean + quantile * error, float(boot[0]), float(boot[1]),
                  float(stats.ttest_1samp(values, 0.0).pvalue), float(stats.wilcoxon(values).pvalue), mean / spread,
                  detectable(error, n, 1), error=error)


def detectable(error: float, n: int, tests: int) -> float:
    """The mean that a t-test at 5 % over `tests` finds four times in five, given the standard error."""
    from scipy import stats

    return error * float(stats.t.ppf(1 - ALPHA / tests / 2, n - 1) + stats.norm.ppf(POWER))


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down correction: adjusted p-values, in the given order."""
    order, adjusted, largest = np.argsort(p_values), [0.0] * len(p_values), 0.0
    for place, i in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - place) * p_values[i]))
        adjusted[i] = largest
    return adjusted


def correct(family: dict[str, Paired]) -> dict[str, Paired]:
    """Give several comparisons, such as one over all tasks, their corrected p-values."""
    for found, p in zip(family.values(), holm([found.t for found in family.values()]), strict=True):
        found.t_holm, found.tests = p, len(family)
        if found.error:
            least = detectable(found.error, found.n, len(family))
            found.detectable = math.exp(least) if found.logs else least
    return family


@dataclass
class Verdict:
    """What a comparison says in one sentence, and whether it says anything."""

    sentence: str
    differs: bool
    better: bool = False


def faster(name: str, other: str, found: Paired) -> Verdict:
    """Is `name` faster than `other`, at 95 %, after correction where there was one?"""
    interval = f"{found.ratio:.2f} x ({found.low:.2f} to {found.high:.2f}, n = {found.n})"
    if found.significant and found.ratio > 1:
        return Verdict(f"{name} is faster than {other}: {interval}", True, True)
    if found.significant:
        return Verdict(f"{name} is slower than {other}: {interval}", True)
    return Verdict(f"{name} and {other} do not differ measurably: {interval}; a ratio of {found.detectable:.2f} would "
                   "have been found four times in five", False)
