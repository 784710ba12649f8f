"""Policy `goodput`: the variant and length that maximise tokens per second at measured costs.

Per round it maximises (1 + sum_i prod_{j<=i} a_j) / (k * draft step + v(k + 1)) over variants and k, k = 0
included. Within the round it goes on drafting while the next token's expected gain, judged by a logistic
on the draft's top-2 margin, exceeds what the same time earns at the planned rate.
"""

from __future__ import annotations

import math
from typing import Any

from draftsmith.distill.variants import DraftShape, Variant

from .costs import MAX_DRAFT, PROBE_CONTEXT, Costs
from .policies import Plan, PolicyBase, Round, View

PRIOR_ACCEPTANCE = 0.6  # before calibration
LEARNING_RATE = 0.1
SHIFT_LIMIT = 3.0
PROBE_START, PROBE_MAX, PROBE_TOKENS = 8, 128, 2
MARGIN_CAP = 10.0


def sigmoid(z: float) -> float:
    return 1.0 / (1.0 + math.exp(-max(-30.0, min(30.0, z))))


def logit(p: float) -> float:
    p = min(max(p, 1e-3), 1 - 1e-3)
    return math.log(p / (1 - p))


class Goodput(PolicyBase):
    """`calibration` (from traces): {"acceptance": {variant: mean}, "margin": [intercept, slope]}.

    One number, `shift`, learns how much easier or harder this text is than the calibration text, in
    log-odds and for all variants at once: what is learned with one variant carries over to the others.
    """

    name = "goodput"
    wants_margin = True

    def __init__(self, shape: DraftShape, costs: Costs, calibration: dict[str, Any]) -> None:
        self.variants, self.costs = shape.variants(), costs
        prior = calibration.get("acceptance", {})
        self.base = {v.name: logit(prior.get(v.name, PRIOR_ACCEPTANCE)) for v in self.variants}
        self.intercept, self.slope = calibration.get("margin", [0.0, 0.5])
        self.shift = 0.0
        self.idle, self.probe_interval = 0, PROBE_START
        self.rate = 0.0
        self.reach = 1.0
        self.current: Variant | None = None
        self.probing = False
        self.idle_rounds = 0
        self.context = PROBE_CONTEXT

    def best(self, max_draft: int) -> tuple[float, Variant | None, int]:
        """(tokens per second, variant, k) of the best round; variant None when no draft pays."""
        verify = [self.costs.rows(k + 1, self.context) for k in range(max_draft + 1)]
        best: tuple[float, Variant | None, int] = (1.0 / verify[0], None, 0)
        for variant in self.variants:
            a, step = sigmoid(self.base[variant.name] + self.shift), self.costs.draft_step(variant.name, self.context)
            tokens, reach = 1.0, 1.0
            for k in range(1, max_draft + 1):
                reach *= a
                tokens += reach
                rate = tokens / (k * step + verify[k])
                if rate > best[0]:
                    best = (rate, variant, k)
        return best

    def plan(self, view: View) -> Plan:
        self.context = view.context
        if view.max_draft == 0:
            return self._alone()
        self.rate, variant, k = self.best(min(view.max_draft, MAX_DRAFT))
        self.probing = False
        if variant is None:
            # Not worth it now. Probe at growing intervals: text changes, and so do costs.
            if self.idle < self.probe_interval:
                return self._alone()
            self.idle, self.probing = 0, True
            self.probe_interval = min(PROBE_MAX, 2 * self.probe_interval)
            variant, k = self.variants[0], min(PROBE_TOKENS, view.max_draft)
        else:
            self.probe_interval, self.idle = PROBE_START, 0
        self.current, self.reach = variant, 1.0
        # The margin rule may go past the length that the average suggests, not the other way only, unless the
        # tokens past it are paid for in any case.
        return Plan(variant, min(view.max_draft, MAX_DRAFT, k if self.probing or view.ahead else 2 * k))

    def _alone(self) -> Plan:
        self.current = None
        return Plan()

    def proceed(self, index: int, margin: float) -> bool:
        if self.probing or self.current is None:
            return True
        self.reach *= sigmoid(self.intercept + self.slope * min(margin, MARGIN_CAP) + self.shift)
        slope = (self.costs.rows(index + 2, self.context) - self.costs.rows(1, self.context)) / (index + 1)
        return self.reach > self.rate * (self.costs.draft_step(self.current.name, self.context) + slope)

    def observe(self, finished: Round) -> None:
        if finished.variant is None:
            self.idle += finished.emitted
            self.idle_rounds += 1
            return
        for label, margin in zip(finished.labels, finished.margins, strict=False):
            expected = sigmoid(self.base[finished.variant.name] + self.shift)
            self.shift += LEARNING_RATE * (label - expected)
            self.shift = min(SHIFT_LIMIT, max(-SHIFT_LIMIT, self.shift))
            m = min(margin, MARGIN_CAP)
            error = label - sigmoid(self.intercept + self.slope * m + self.shift)
            self.intercept += 0.2 * LEARNING_RATE * error
            self.slope = max(0.0, self.slope + 0.2 * LEARNING_RATE * error * m / MARGIN_CAP)

    def report(self) -> dict[str, float]:
        return {"goodput_shift": self.shift, "goodput_idle_rounds": float(self.idle_rounds)}
