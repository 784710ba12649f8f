"""Measured costs: a target pass by rows, and one step of each draft variant."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from draftsmith.distill.variants import Variant

from .runner import DraftRunner, Runner, synchronise

MAX_DRAFT = 16
PROBE_ROWS = (1, 2, 3, 4, 5, 6, 8, 12, 17)
PROBE_CONTEXT = 128


@dataclass
class Costs:
    """Seconds. verify[n - 1]: a target pass of n rows; step[name]: one draft token of a variant;
    catch_up: the deep layers over 8 positions they have not seen. Entries follow the machine by moving
    averages while decoding."""

    verify: list[float]
    step: dict[str, float] = field(default_factory=dict)
    catch_up: float = 0.0

    def rows(self, n: int) -> float:
        return self.verify[min(n, len(self.verify)) - 1]

    def update_verify(self, n: int, seconds: float, weight: float = 0.1) -> None:
        if n <= len(self.verify):
            seconds = min(seconds, 2 * self.verify[n - 1])  # a hiccup of the machine is not a cost
            self.verify[n - 1] += weight * (seconds - self.verify[n - 1])

    def update_step(self, name: str, seconds: float, weight: float = 0.1) -> None:
        if name in self.step:
            self.step[name] += weight * (min(seconds, 2 * self.step[name]) - self.step[name])



def interpolate(rows: tuple[int, ...], seconds: list[float]) -> list[float]:
    """Seconds for 1 .. max(rows) rows by linear interpolation."""
    import numpy as np

    return [float(x) for x in np.interp(np.arange(1, rows[-1] + 1), rows, seconds)]


def _median(device: torch.device, repeats: int, run: Callable[..., object], *args: Any) -> float:
    run(*args)
    synchronise(device)
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run(*args)
        synchronise(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


@torch.no_grad()
def measure_costs(target: Runner, draft: DraftRunner | None, repeats: int = 3) -> Costs:
    """Time target passes and draft steps at a context of 128 positions; about two seconds for SmolLM2."""
    context = min(PROBE_CONTEXT, target.context // 2)
    cache = target.new_cache(1, context + MAX_DRAFT + 1)
    token = torch.zeros(1, 1, dtype=torch.long, device=target.device)
    target.forward(token.expand(1, context), cache, keep=1)

    def verify(n: int) -> None:
        target.forward(token.expand(1, n), cache)
        cache.crop(context)

    rows = tuple(n for n in PROBE_ROWS if context + n <= target.context)
    costs = Costs(interpolate(rows, [_median(target.device, repeats, verify, n) for n in rows]))
    if draft is None:
        return costs
    context = min(context, draft.context // 2)
    drafts = draft.new_cache(context + 2)
    full = draft.shape.variants()[-1]
    draft.forward(token.expand(1, context), drafts, full, keep=1)

    def step(variant: Variant) -> None:
        draft.forward(token, drafts, variant)
        drafts.crop(context)

    for variant in draft.shape.variants():
        drafts.deep = context
        costs.step[variant.name] = _median(target.device, 4 * repeats, step, variant)

    def deep() -> None:
        drafts.deep = max(0, context - 8)
        draft.catch_up(drafts, full, keep=1)

    costs.catch_up = _median(target.device, 2 * repeats, deep)
    return costs
