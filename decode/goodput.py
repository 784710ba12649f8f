"""Policy `goodput`: the proposer, variant, length and tree that maximise tokens per second at measured costs.

Per round it maximises (1 + sum_i prod_{j<=i} a_j) / (k * draft step + v(k + 1)) over variants, the lookup and k,
k = 0 included. A gate, where there is one that beat every fixed variant, proposes the variant; whether and how far
that one drafts, and whether the lookup does instead, is still decided by measured cost. Within the round it takes
another draft step while the token it promises is worth more than the step and a row of the pass earn elsewhere; a
token whose step is taken need only be worth its row, judged by a logistic on the draft's top-2 margin. The drafted
chain gets those side branches whose gain exceeds what a row more in the pass costs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from draftsmith.data import DraftsmithError
from draftsmith.distill.gate import Gate
from draftsmith.distill.variants import DraftShape, Variant

from .costs import MAX_DRAFT, PROBE_CONTEXT, Costs
from .policies import Plan, PolicyBase, Round, View, refuse_unknown

PRIOR_ACCEPTANCE = 0.6  # before calibration
LEARNING_RATE = 0.1
# Texts differ from the calibration text, and temperatures from its own, by about one unit of log-odds; within a text
# acceptance wanders by this much a token. In trials on traces of text-to-SQL the best of the pairs tried, both where
# the calibration was right and where it promised twice too much.
TEXT_VARIANCE, DRIFT = 1.0, 0.005
SHIFT_LIMIT = 3.0
GATE_INTERVAL = 8  # emitted tokens between two questions to the gate
PROBE_START, PROBE_MAX, PROBE_TOKENS = 8, 128, 2
PROBE_SHARE = 0.02  # of the rest of the answer's time: what a probe may spend on reading text
MARGIN_CAP = 10.0
# How often, after a rejection, the target's token is the draft's second and its third choice, at first.
RUNNERS_UP = (0.35, 0.15)
LOOKUP_PRIOR = {2: 0.4, 3: 0.6, 4: 0.75}  # acceptance by matched tokens, at first


def sigmoid(z: float) -> float:
    return 1.0 / (1.0 + math.exp(-max(-30.0, min(30.0, z))))


def logit(p: float) -> float:
    p = min(max(p, 1e-3), 1 - 1e-3)
    return math.log(p / (1 - p))


@dataclass
class GoodputSettings:
    """Which of its means the policy uses; 1 is yes, 0 no. Without `stop` it always drafts at least one token."""

    lookup: int = 1
    branches: int = 1
    margin: int = 1
    learn: int = 1
    stop: int = 1

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> GoodputSettings:
        refuse_unknown("goodput", cls, value)
        for key, setting in value.items():
            if setting not in (0, 1):
                raise DraftsmithError(f"setting '{key}' of policy goodput is 1 or 0, not {setting:g}")
        return cls(**{key: int(setting) for key, setting in value.items()})


class Goodput(PolicyBase):
    """`calibration` (from traces): {"acceptance": {variant: mean}, "margin": [intercept, slope]}.

    One number, `shift`, learns how much easier or harder this text is than the calibration text, in
    log-odds and for all variants at once: what is learned with one variant carries over to the others. It follows
    the judged tokens by an extended Kalman filter: at first each of them counts for much, later for less.
    """

    name = "goodput"
    learns = ("intercept", "slope", "shift", "variance", "runners_up", "matched", "idle", "probe_interval",
              "idle_rounds", "proposed", "since_gate")

    def __init__(self, shape: DraftShape | None, costs: Costs, calibration: dict[str, Any],
                 gate: Gate | None = None, settings: GoodputSettings | None = None) -> None:
        self.shape, self.gate, self.costs = shape, gate, costs
        self.s = settings or GoodputSettings()
        self.wants_lookup, self.wants_margin = bool(self.s.lookup), bool(self.s.margin)
        self.max_width = 1 + len(RUNNERS_UP) * self.s.branches
        self.variants = shape.variants() if shape else []
        self.proposed: Variant | None = None  # by the gate
        self.since_gate = GATE_INTERVAL
        prior = calibration.get("acceptance", {})
        self.base = {v.name: logit(prior.get(v.name, PRIOR_ACCEPTANCE)) for v in self.variants}
        self.intercept, self.slope = calibration.get("margin", [0.0, 0.5])
        self.shift, self.variance = 0.0, TEXT_VARIANCE
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
        alone = (1.0 / verify[0], Plan())
        best = alone if self.s.stop or not view.max_draft else (0.0, Plan())

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
        if self.s.stop and best[1].variant is not None and not self._repays_reading(*best, 1.0 / verify[0], view):
            best = alone
        if matched:
            consider(self.matched[matched - min(LOOKUP_PRIOR)], 0.0, min(rest, view.max_depth), Plan(lookup=True))
        return best

    def _repays_reading(self, rate: float, plan: Plan, alone: float, view: View) -> bool:
        """Whether what is left of the answer makes up for the text that the draft has to read first."""
        depth, layers = (plan.variant.depth, self.shape.layers) if plan.variant and self.shape else (0, 1)
        read = self.costs.read * depth / layers * view.unread
        return view.remaining / rate + read <= view.remaining / alone

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
            dear = self.costs.read * view.unread * self.rate > PROBE_SHARE * view.remaining
            if self.idle < self.probe_interval or view.max_draft == 0 or dear:
                return self._alone()
            self.idle, self.probing = 0, True
            self.probe_interval = min(PROBE_MAX, 2 * self.probe_interval)
            plan = Plan(self.variants[0], min(PROBE_TOKENS, view.max_draft))
        else:
            self.probe_interval, self.idle = PROBE_START, 0
            # The margin rule may go past the length that the average suggests, not the other way only, unless the
            # tokens past it are paid for in any case.
            longer = 2 if self.s.margin and not view.ahead else 1
            plan.max_tokens = min(view.max_draft, MAX_DRAFT, plan.max_tokens * longer)
        self.current, self.reach = plan.variant, 1.0
        return plan

    def _alone(self) -> Plan:
        self.current = None
        return Plan()

    def proceed(self, index: int, margin: float) -> bool:
        if self.probing or self.current is None or not self.s.margin:
            return True
        self.reach *= self._likely(margin)
        return self.reach > self.rate * self._row(index + 1) or (index == 0 and not self.s.stop)

    def deepen(self, index: int) -> bool:
        if self.probing or self.current is None or not self.s.margin:
            return True
        name = self.current.name
        step = self.costs.draft_step(name, self.context)
        return self.reach * sigmoid(self.base[name] + self.shift) > self.rate * (step + self._row(index + 2))

    def _likely(self, margin: float) -> float:
        """Acceptance of a token drafted with this margin; without the margin rule, of any."""
        if not self.s.margin and self.current is not None:
            return sigmoid(self.base[self.current.name] + self.shift)
        return sigmoid(self.intercept + self.slope * min(margin, MARGIN_CAP) + self.shift)

    def _row(self, nodes: int) -> float:
        """Seconds that each of so many nodes adds to a pass."""
        more = self.costs.rows(nodes + 1, self.context, self.batch) - self.costs.rows(1, self.context, self.batch)
        return more / nodes

    def widths(self, margins: list[float]) -> list[int]:
        """A branch pays where the chain is likely to get and then to fail, and the target's token to be the next in
        the draft's order."""
        if self.probing or not self.branches or not self.s.branches:
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
        if not self.s.learn:
            finished = replace(finished, labels=[], others=[])
        if finished.variant is None:
            self.idle += finished.emitted
            self.idle_rounds += int(not finished.matched)
            for label in finished.labels:
                n = finished.matched - min(LOOKUP_PRIOR)
                self.matched[n] += LEARNING_RATE * (label - self.matched[n])
            return
        for label, margin in zip(finished.labels, finished.margins, strict=False):
            expected = sigmoid(self.base[finished.variant.name] + self.shift)
            self.variance += DRIFT
            self.variance /= 1.0 + self.variance * expected * (1.0 - expected)
            self.shift += self.variance * (label - expected)
            self.shift = min(SHIFT_LIMIT, max(-SHIFT_LIMIT, self.shift))
            if not self.s.margin:
                continue
            m = min(margin, MARGIN_CAP)
            error = label - self._likely(margin)
            self.intercept += 0.2 * LEARNING_RATE * error
            self.slope = max(0.0, self.slope + 0.2 * LEARNING_RATE * error * m / MARGIN_CAP)
        for i, hit in enumerate(finished.others[: len(self.runners_up)]):
            self.runners_up[i] += LEARNING_RATE * (hit - self.runners_up[i])

    def report(self) -> dict[str, float]:
        return {"goodput_shift": self.shift, "goodput_idle_rounds": float(self.idle_rounds)}
