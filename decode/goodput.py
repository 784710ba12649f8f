"""Policy `goodput`: the proposer, variant, length and tree that maximise tokens per second at measured costs.

Per round it maximises (1 + sum_i prod_{j<=i} a_j) / (k * draft step + v(k + 1)) over variants, the lookup and k,
k = 0 included. A gate, where there is one that beat every fixed variant, proposes the variant; whether and how far
that one drafts, and whether the lookup does instead, is still decided by measured cost. Within the round it goes on
drafting while the next token's expected gain, judged by a logistic on the draft's top-2 margin, exceeds what the
same time earns at the planned rate; and the drafted chain gets those side branches whose gain exceeds what a row
more in the pass costs.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from draftsmith.distill.gate import Gate
from draftsmith.distill.variants import DraftShape, Variant

from .costs import MAX_DRAFT, PROBE_CONTEXT, Costs
from .policies import Plan, PolicyBase, Round, View

PRIOR_ACCEPTANCE = 0.6  # before calibration
LEARNING_RATE = 0.1
SHIFT_LIMIT = 3.0
GATE_INTERVAL = 8  # emitted tokens between two questions to the gate
PROBE_START, PROBE_MAX, PROBE_TOKENS = 8, 128, 2
MARGIN_CAP = 10.0
# How often, after a rejection, the target's token is the draft's second and its third choice, at first.
RUNNERS_UP = (0.35, 0.15)
LOOKUP_PRIOR = {2: 0.4, 3: 0.6, 4: 0.75}  # acceptance by matched tokens, at first


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
    wants_lookup = True
    max_width = 1 + len(RUNNERS_UP)
    learns = ("intercept", "slope", "shift", "runners_up", "matched", "idle", "probe_interval", "idle_rounds",
              "proposed", "since_gate")

    def __init__(self, shape: DraftShape | None, costs: Costs, calibration: dict[str, Any],
                 gate: Gate | None = None) -> None:
        self.shape, self.gate, self.costs = shape, gate, costs
        self.variants = shape.variants() if shape else []
        self.proposed: Variant | None = None  # by the gate
        self.since_gate = GATE_INTERVAL
        prior = calibration.get("acceptance", {})
        self.base = {v.name: logit(prior.get(v.name, PRIOR_ACCEPTANCE)) for v in self.variants}
        self.intercept, self.slope = calibration.get("margin", [0.0, 0.5])
        self.shift = 0.0
        self.runners_up = list(RUNNERS_UP)
        self.matched = [LOOKUP_PRIOR[n] for n in sorted(LOOKUP_PRIOR)]
        self.idle, self.probe_interval = 0, PROBE_START
        self.rate = 0.0
        self.reach = 1.0
        self.current: Variant | None = None
        self.probing = False
        self.idle_rounds = 0
        self.context, self.batch, self.branches = PROBE_CONTEXT, 1, True

    def best(self, view: View) -> tuple[float, Plan]:
        """(tokens per second, plan) of the best round."""
        verify = [self.costs.rows(k + 1, view.context, view.batch) for k in range(view.max_depth + 1)]
        best = (1.0 / verify[0], Plan())

        def consider(a: float, step: float, longest: int, plan: Plan) -> None:
            nonlocal best
            tokens, reach = 1.0, 1.0
            for k in range(1, longest + 1):
                reach *= a
                tokens += reach
                rate = tokens / (k * step + verify[k])
                if rate > best[0]:
                    best = (rate, replace(plan, max_tokens=k))

        for variant in [self.proposed] if self.proposed else self.variants:
            consider(sigmoid(self.base[variant.name] + self.shift), self.costs.draft_step(variant.name, view.context),
                     view.max_draft, Plan(variant))
        matched, rest = view.match
        if matched:
            consider(self.matched[matched - min(LOOKUP_PRIOR)], 0.0, min(rest, view.max_depth), Plan(lookup=True))
        return best

    def plan(self, view: View) -> Plan:
        self.context, self.batch, self.branches = view.context, view.batch, view.cheap_trees
        if view.max_depth == 0:
            return self._alone()
        if self.gate is not None and self.shape is not None and self.since_gate >= GATE_INTERVAL:
            self.proposed, self.since_gate = self.shape.choose(float(self.gate(view.features()[None]))), 0
        self.rate, plan = self.best(view)
        self.probing = False
        if plan.lookup:
            self.current = None
            return plan
        if plan.variant is None:
            # Not worth it now. Probe at growing intervals: text changes, and so do costs.
            if self.idle < self.probe_interval or view.max_draft == 0:
                return self._alone()
            self.idle, self.probing = 0, True
            self.probe_interval = min(PROBE_MAX, 2 * self.probe_interval)
            plan = Plan(self.variants[0], min(PROBE_TOKENS, view.max_draft))
        else:
            self.probe_interval, self.idle = PROBE_START, 0
            # The margin rule may go past the length that the average suggests, not the other way only, unless the
            # tokens past it are paid for in any case.
            plan.max_tokens = min(view.max_draft, MAX_DRAFT, plan.max_tokens * (1 if view.ahead else 2))
        self.current, self.reach = plan.variant, 1.0
        return plan

    def _alone(self) -> Plan:
        self.current = None
        return Plan()

    def proceed(self, index: int, margin: float) -> bool:
        if self.probing or self.current is None:
            return True
        self.reach *= self._likely(margin)
        return self.reach > self.rate * (self.costs.draft_step(self.current.name, self.context)
                                         + self._row(index + 1))

    def _likely(self, margin: float) -> float:
        """Acceptance of a token drafted with this margin."""
        return sigmoid(self.intercept + self.slope * min(margin, MARGIN_CAP) + self.shift)

    def _row(self, nodes: int) -> float:
        """Seconds that each of so many nodes adds to a pass."""
        more = self.costs.rows(nodes + 1, self.context, self.batch) - self.costs.rows(1, self.context, self.batch)
        return more / nodes

    def widths(self, margins: list[float]) -> list[int]:
        """A branch pays where the chain is likely to get and then to fail, and the target's token to be the next in
        the draft's order."""
        if self.probing or not self.branches:
            return []
        widths, reach, nodes = [1] * len(margins), 1.0, len(margins)
        for i, margin in enumerate(margins):
            likely = self._likely(margin)
            for share in self.runners_up:
                if reach * (1.0 - likely) * share <= self.rate * self._row(nodes + 1) or nodes >= MAX_DRAFT:
                    break
                widths[i] += 1
                nodes += 1
            reach *= likely
        return widths

    def observe(self, finished: Round) -> None:
        self.since_gate += finished.emitted
        if finished.variant is None:
            self.idle += finished.emitted
            self.idle_rounds += int(not finished.matched)
            for label in finished.labels:
                n = finished.matched - min(LOOKUP_PRIOR)
                self.matched[n] += LEARNING_RATE * (label - self.matched[n])
            return
        for label, margin in zip(finished.labels, finished.margins, strict=False):
            expected = sigmoid(self.base[finished.variant.name] + self.shift)
            self.shift += LEARNING_RATE * (label - expected)
            self.shift = min(SHIFT_LIMIT, max(-SHIFT_LIMIT, self.shift))
            m = min(margin, MARGIN_CAP)
            error = label - self._likely(margin)
            self.intercept += 0.2 * LEARNING_RATE * error
            self.slope = max(0.0, self.slope + 0.2 * LEARNING_RATE * error * m / MARGIN_CAP)
        for i, hit in enumerate(finished.others[: len(self.runners_up)]):
            self.runners_up[i] += LEARNING_RATE * (hit - self.runners_up[i])

    def report(self) -> dict[str, float]:
        return {"goodput_shift": self.shift, "goodput_idle_rounds": float(self.idle_rounds)}
