"""Policy `paper`: the source paper's controller (DESIGN, section 7)."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Any

from draftsmith.data import DraftsmithError
from draftsmith.distill.gate import Gate
from draftsmith.distill.variants import DraftShape, Variant

from .costs import MAX_DRAFT
from .policies import Plan, PolicyBase, Round, View, refuse_unknown


@dataclass
class PaperSettings:
    """Thresholds of policy `paper` (DESIGN, section 7); counts are in tokens."""

    tau: float = 0.7
    gate_interval: int = 8
    gate_acceptance: float = 0.85
    upgrade_ratio: float = 1.2
    failure_ratio: float = 1.35
    ppl_window: int = 32
    min_confidence: float = 0.3
    window_start: int = 4
    window_grow: int = 2
    window_shrink: int = 1
    confident: float = 0.5
    stop_acceptance: float = 0.7
    stop_window: int = 32
    pause: int = 32
    pause_max: int = 256
    probe_interval: int = 8

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> PaperSettings:
        refuse_unknown("paper", cls, value)
        found: dict[str, Any] = {}
        for key, setting in value.items():
            whole = isinstance(getattr(cls, key), int)
            if not isinstance(setting, (int, float)) or math.isnan(setting) or (whole and setting != setting // 1):
                raise DraftsmithError(f"setting '{key}' of policy paper is a {'whole ' * whole}number, not {setting}")
            found[key] = int(setting) if whole else float(setting)
        return cls(**found)


class Paper(PolicyBase):
    """The source paper's controller: perplexity analyser, gate, upgrades, dynamic window, termination.

    With no gate (one that did not beat the best fixed variant is not used) `variant` is the fixed one.
    """

    name = "paper"
    wants_perplexity = True
    learns = ("variant", "window", "judged", "paused", "pause", "since_gate", "since_probe", "was_low", "counts")

    def __init__(self, shape: DraftShape, gate: Gate | None, variant: Variant, settings: PaperSettings) -> None:
        self.shape, self.gate, self.s = shape, gate, settings
        self.variants = shape.variants()
        self.base = self.variant = variant
        self.window = settings.window_start
        self.judged: deque[bool] = deque(maxlen=settings.stop_window)
        self.paused, self.pause = 0, settings.pause
        self.since_gate, self.since_probe = settings.gate_interval, 0
        self.was_low = False
        self.counts = {"gate_decisions": 0, "upgrades": 0, "failures": 0, "terminations": 0, "low_confidence": 0}

    def acceptance(self, last: int | None = None) -> float | None:
        recent = list(self.judged)[-last:] if last else list(self.judged)
        return sum(recent) / len(recent) if recent else None

    def plan(self, view: View) -> Plan:
        if self.paused > 0 or view.max_draft == 0:
            return Plan()
        if not self._confident(view):
            return self._probe()
        if self._failing(view):
            self.counts["failures"] += 1
            self._start_pause(self.s.pause)
            return Plan()
        self._choose_variant(view)
        return Plan(self.variant, min(self.window, view.max_draft, MAX_DRAFT), self.s.min_confidence)

    def _confident(self, view: View) -> bool:
        confidence = view.meter.confidence()
        return confidence is None or confidence >= self.s.tau

    def _probe(self) -> Plan:
        """The target decodes alone; every so often the draft reads along to be judged again."""
        self.counts["low_confidence"] += 1
        if self.since_probe >= self.s.probe_interval:
            self.since_probe = 0
            return Plan(self.variant, 0)
        return Plan()

    def _choose_variant(self, view: View) -> None:
        recent = self.acceptance(self.s.gate_interval)
        low = recent is not None and recent < self.s.gate_acceptance
        # "Falls below": re-evaluated when it crosses the line, not at every round beneath it.
        if self.since_gate >= self.s.gate_interval or (low and not self.was_low):
            self.since_gate = 0
            self.variant = self.base
            if self.gate is not None:
                self.counts["gate_decisions"] += 1
                self.variant = self.shape.choose(float(self.gate(view.features()[None])))
            ratio = view.meter.ratio(self.s.ppl_window)
            at = self.variants.index(self.variant)
            if ratio is not None and ratio > self.s.upgrade_ratio and at + 1 < len(self.variants):
                self.counts["upgrades"] += 1
                self.variant = self.variants[at + 1]
        self.was_low = low

    def _failing(self, view: View) -> bool:
        """The failure mode; after a pause the draft is given some tokens before it is judged again."""
        ratio = view.meter.ratio(self.s.ppl_window)
        return ratio is not None and ratio > self.s.failure_ratio and len(self.judged) >= self.s.gate_interval

    def _start_pause(self, tokens: int) -> None:
        self.paused = tokens
        self.judged.clear()

    def observe(self, finished: Round) -> None:
        s = self.s
        self.since_gate += finished.emitted
        self.since_probe += finished.emitted
        if self.paused > 0:
            self.paused = max(0, self.paused - finished.emitted)
            return
        if finished.variant is None or (finished.drafted == 0 and not finished.cut):
            return
        self.judged.extend([True] * finished.accepted + [False] * int(finished.rejected))
        confident = all(c >= s.confident for c in finished.confidences)
        full = finished.accepted == finished.drafted and not finished.cut
        self.window += s.window_grow if full and confident else -s.window_shrink
        self.window = min(MAX_DRAFT, max(1, self.window))
        acceptance = self.acceptance()
        if len(self.judged) < s.stop_window or acceptance is None:
            return
        if acceptance < s.stop_acceptance:
            self.counts["terminations"] += 1
            self._start_pause(self.pause)
            self.pause = min(s.pause_max, 2 * self.pause)
        else:
            self.pause = s.pause

    def report(self) -> dict[str, float]:
        return {f"paper_{key}": float(value) for key, value in self.counts.items()}
