"""Measured costs: a target pass by rows, context and batch, and one step of each draft variant."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from draftsmith.data import DraftsmithError
from draftsmith.distill.variants import Variant

from .device import device_name, synchronise
from .runner import DraftModel, Runner, fill

MAX_DRAFT = 16
PROBE_ROWS = (1, 2, 3, 5, 9, 17)
PROBE_CONTEXT = 128
FAR_CONTEXT = 1024
PROBE_BATCH = 4
REPEATS = 2  # timed runs of a pass; the fastest counts, since other work only ever adds


@dataclass
class Costs:
    """Seconds. verify[n - 1]: a target pass of n rows at a context of 128; context[n - 1]: what each further
    position adds to it; batch[n - 1]: what each further request with n rows adds. step[name]: one draft token
    of a variant; step_context[name]: what each further position adds; catch_up: the deep layers over 8
    positions they have not seen; read: all layers, a position of a text. verify and step follow the machine by
    moving averages while decoding."""

    verify: list[float]
    step: dict[str, float] = field(default_factory=dict)
    catch_up: float = 0.0
    context: list[float] = field(default_factory=list)
    batch: list[float] = field(default_factory=list)
    step_context: dict[str, float] = field(default_factory=dict)
    read: float = 0.0

    def rows(self, n: int, context: int = PROBE_CONTEXT, batch: int = 1) -> float:
        """v(n, context, batch): seconds of a target pass of n rows in each of `batch` requests."""
        i = min(n, len(self.verify)) - 1
        more = self.batch[i] * (batch - 1) if self.batch else 0.0
        # The positions of every request are read.
        far = self.context[i] * batch * (context - PROBE_CONTEXT) if self.context else 0.0
        return self.verify[i] + more + far

    def draft_step(self, name: str, context: int = PROBE_CONTEXT) -> float:
        """Seconds of one draft token at a context."""
        return self.step[name] + self.step_context.get(name, 0.0) * (context - PROBE_CONTEXT)

    def update_verify(self, n: int, seconds: float, context: int = PROBE_CONTEXT, weight: float = 0.1) -> None:
        if n <= len(self.verify):
            seconds = min(seconds, 2 * self.rows(n, context))  # a hiccup of the machine is not a cost
            self.verify[n - 1] = max(1e-9, self.verify[n - 1] + weight * (seconds - self.rows(n, context)))

    def update_step(self, name: str, seconds: float, context: int = PROBE_CONTEXT, weight: float = 0.1) -> None:
        if name in self.step:
            expected = self.draft_step(name, context)
            self.step[name] = max(1e-9, self.step[name] + weight * (min(seconds, 2 * expected) - expected))

    def scaled(self, target: float, draft: float) -> Costs:
        """The same table on a machine that is by these factors slower today."""
        return Costs([x * target for x in self.verify], {k: x * draft for k, x in self.step.items()},
                     self.catch_up * draft, [x * target for x in self.context], [x * target for x in self.batch],
                     {k: x * draft for k, x in self.step_context.items()}, self.read * draft)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Costs:
        """Raises `DraftsmithError` for a table that is not one."""
        try:
            costs = cls(**value)
            fine = len(costs.verify) > 0 and all(x > 0 for x in [*costs.verify, *costs.step.values()])
        except (TypeError, AttributeError) as error:
            raise DraftsmithError(f"not a cost table: {error}") from error
        if not fine:
            raise DraftsmithError("not a cost table: its times are not above zero")
        return costs


def cost_key(target: Runner, draft: DraftModel | None) -> str:
    """Under which a bundle keeps a table: the device and how the weights are held."""
    return f"{device_name()}; target {target.precision}" + (f"; draft {draft.precision}" if draft else "")


def interpolate(rows: tuple[int, ...], seconds: list[float]) -> list[float]:
    """Seconds for 1 .. max(rows) rows by linear interpolation."""
    return [float(x) for x in np.interp(np.arange(1, rows[-1] + 1), rows, seconds)]


def _fastest(device: torch.device, repeats: int, run: Callable[[], object]) -> float:
    run()
    synchronise(device)
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        synchronise(device)
        times.append(time.perf_counter() - start)
    return min(times)


class Prober:
    """Times passes over caches whose content does not matter."""

    def __init__(self, target: Runner, draft: DraftModel | None, repeats: int = REPEATS) -> None:
        self.target, self.draft, self.repeats = target, draft, repeats
        limit = target.context if draft is None else min(target.context, draft.context)
        self.near = min(PROBE_CONTEXT, limit // 2)
        self.far = min(FAR_CONTEXT, limit - MAX_DRAFT - 1)

    def target_pass(self, n: int, context: int, batch: int = 1) -> float:
        cache = self.target.new_cache(batch, context + n)
        ids = torch.zeros(batch, n, dtype=torch.long, device=self.target.device)
        fill(self.target, cache, batch, context)

        def run() -> None:
            self.target.forward(ids, cache)
            for request in range(batch):
                cache.crop(context, request)

        return _fastest(self.target.device, self.repeats, run)

    def draft_step(self, variant: Variant, context: int) -> float:
        assert self.draft is not None
        cache, draft = self.draft.new_cache(context + 2), self.draft
        draft.declare(cache, context)
        ids = torch.zeros(1, 1, dtype=torch.long, device=self.target.device)

        def run() -> None:
            draft.forward(ids, cache, variant)
            cache.crop(context)
            cache.deep = context

        return _fastest(self.target.device, 4 * self.repeats, run)

    def read(self) -> float:
        """Seconds of a position of a text that the draft reads."""
        assert self.draft is not None
        draft, full = self.draft, self.draft.shape.variants()[-1]
        cache, ids = draft.new_cache(self.near + 2), torch.zeros(1, self.near, dtype=torch.long)
        ids = ids.to(self.target.device)

        def run() -> None:
            cache.crop(0)
            draft.forward(ids, cache, full, keep=1)

        return _fastest(self.target.device, self.repeats, run) / self.near

    def catch_up(self) -> float:
        assert self.draft is not None
        draft, full = self.draft, self.draft.shape.variants()[-1]
        cache = draft.new_cache(self.near + 2)
        cache.lengths[0] = self.near

        def run() -> None:
            cache.deep = max(0, self.near - 8)
            draft.catch_up(cache, full, keep=1)

        return _fastest(self.target.device, 2 * self.repeats, run)


@torch.no_grad()
def measure_costs(target: Runner, draft: DraftModel | None, repeats: int = REPEATS) -> Costs:
    """Time target passes and draft steps; a second or two for SmolLM2."""
    probe = Prober(target, draft, repeats)
    rows = tuple(n for n in PROBE_ROWS if probe.near + n <= target.context)
    costs = Costs(interpolate(rows, [probe.target_pass(n, probe.near) for n in rows]))
    ends = (rows[0], rows[-1])
    if target.max_batch is None and probe.far > probe.near:
        more = [max(0.0, probe.target_pass(n, probe.far) - costs.rows(n)) / (probe.far - probe.near) for n in ends]
        costs.context = interpolate(ends, more)
    if target.max_batch is None:
        near = (1, min(5, rows[-1]))
        more = [max(0.0, probe.target_pass(n, probe.near, PROBE_BATCH) - costs.rows(n)) / (PROBE_BATCH - 1)
                for n in near]
        slope = (more[1] - more[0]) / max(1, near[1] - near[0])
        costs.batch = [max(0.0, more[0] + slope * i) for i in range(rows[-1])]
    if draft is not None:
        costs.step = {v.name: probe.draft_step(v, probe.near) for v in draft.shape.variants()}
        for variant in draft.shape.variants() if probe.far > probe.near else []:
            far = max(0.0, probe.draft_step(variant, probe.far) - costs.step[variant.name])
            costs.step_context[variant.name] = far / (probe.far - probe.near)
        costs.catch_up, costs.read = probe.catch_up(), probe.read()
    return costs


@torch.no_grad()
def refresh_costs(stored: Costs, target: Runner, draft: DraftModel | None) -> Costs:
    """A stored table brought to today's speed by timing one pass and one step."""
    probe = Prober(target, draft)
    now = probe.target_pass(1, probe.near) / stored.rows(1, probe.near)
    if draft is None:
        return stored.scaled(now, 1.0)
    full = draft.shape.variants()[-1]
    table = stored.scaled(now, probe.draft_step(full, probe.near) / stored.step[full.name])
    table.read = table.read or probe.read()  # a table of an earlier release has none
    return table
