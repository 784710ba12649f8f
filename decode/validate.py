"""Post-training validation: is the bundle exact, and is it faster here? Methods are interleaved by prompt."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from draftsmith.data.text import Sample

from .decoder import Decoder
from .evaluation.interleave import interleave
from .evaluation.methods import Method, ours
from .evaluation.statistics import paired_ratio
from .identity import compare
from .sampling import SamplingParams
from .stats import Stats

REFERENCE = "transformers"


@dataclass
class Row:
    """One method on one prompt. `text_from_target`: equal to AR's ids, or apart within rounding."""

    method: str
    prompt: str
    kind: str
    tokens: int
    seconds: float
    ttft: float
    steps: int
    accepted: int
    rejected: int
    drafted: int
    accepted_by_position: list[int]
    judged_by_position: list[int]
    text_from_target: bool = True
    divergence: dict[str, float] | None = None


@dataclass
class Result:
    rows: list[Row]
    default: str
    summary: dict[str, dict[str, Any]] = field(default_factory=dict)
    examples: list[list[tuple[str, str]]] = field(default_factory=list)  # (text, source) of each token
    machine: str = ""


def run_methods(decoder: Decoder, samples: list[Sample], prompts: list[list[int]], methods: list[str], max_tokens: int,
                reference: Method | None, reference_count: int,
                progress: Callable[[Any], Any] = lambda prompts: prompts) -> list[Row]:
    """Every method on every prompt, greedy; `reference`, an outside implementation, on the first `reference_count`."""
    named = {method: ours(decoder, method) for method in methods}
    if reference is not None:
        named[REFERENCE] = reference
    answers = interleave(named, prompts, SamplingParams(max_tokens=max_tokens), progress, {REFERENCE: reference_count})
    rows = []
    for i, (sample, prompt, plain) in enumerate(zip(samples, prompts, answers["ar"], strict=True)):
        for method in (name for name in named if i < len(answers[name])):
            answer = answers[method][i]
            stats = answer.stats or Stats()
            row = Row(method, sample.id, sample.kind, len(answer.ids), answer.seconds, answer.ttft, stats.steps,
                      stats.accepted, stats.rejected, stats.drafted, stats.accepted_by_position,
                      stats.judged_by_position)
            if (found := compare(decoder.runner, prompt, answer.ids, plain.ids)) is not None:
                row.text_from_target = found.excused
                row.divergence = {k: min(v, 1e9) for k, v in asdict(found).items()}  # JSON has no infinity
            rows.append(row)
    return rows


def summarise(rows: list[Row], methods: list[str]) -> dict[str, dict[str, Any]]:
    """Figures of each method: tokens/s, speed-up over AR (paired), acceptance, tokens per step, identity."""
    by = {(r.method, r.prompt): r for r in rows}
    out: dict[str, dict[str, Any]] = {}
    for method in methods:
        mine = [r for r in rows if r.method == method]
        if not mine:
            continue
        rate = [r.tokens / r.seconds for r in mine]
        ar = [by["ar", r.prompt].tokens / by["ar", r.prompt].seconds for r in mine]
        judged, steps = sum(r.accepted + r.rejected for r in mine), sum(r.steps for r in mine)
        out[method] = {
            "prompts": len(mine),
            "tokens_per_second": sum(r.tokens for r in mine) / sum(r.seconds for r in mine),
            "speedup": asdict(paired_ratio(rate, ar)),
            "ttft": float(np.median([r.ttft for r in mine])),
            "acceptance": sum(r.accepted for r in mine) / judged if judged else None,
            "tokens_per_step": sum(r.tokens - 1 for r in mine) / steps if steps else None,
            "identical": sum(r.text_from_target for r in mine),
            "rounding_mismatches": sum(r.divergence is not None and r.text_from_target for r in mine),
            "by_position": _by_position(mine),
        }
    return out


def _by_position(rows: list[Row]) -> list[float]:
    """Acceptance of the i-th drafted token among those judged, while there are at least 5 of them."""
    accepted = np.sum([r.accepted_by_position for r in rows], axis=0)
    judged = np.sum([r.judged_by_position for r in rows], axis=0)
    return [float(a / j) for a, j in zip(accepted, judged, strict=True) if j >= 5]


def check(summary: dict[str, Any], thresholds: dict[str, float], method: str) -> list[str]:
    """A plain sentence for each threshold that `method` misses."""
    figures, misses = summary[method], []
    acceptance, per_step = figures["acceptance"], figures["tokens_per_step"]
    if acceptance is None or acceptance < thresholds["acceptance"]:
        shown = "no drafted token was judged" if acceptance is None else f"it is {acceptance:.3f}"
        misses.append(f"acceptance must be at least {thresholds['acceptance']:g}: {shown}.")
    if per_step is None or per_step < thresholds["tokens_per_step"]:
        shown = "no step was taken" if per_step is None else f"there are {per_step:.2f}"
        misses.append(f"tokens per step must be at least {thresholds['tokens_per_step']:g}: {shown}.")
    if figures["speedup"]["low"] < thresholds["speedup"]:
        misses.append(f"the lower end of the speed-up's interval must be at least {thresholds['speedup']:g}: it is "
                      f"{figures['speedup']['low']:.2f}.")
    for name, other in summary.items():
        if name != REFERENCE and other["identical"] < thresholds["identical"] * other["prompts"]:
            misses.append(f"texts of '{name}' must be the target's own: {other['identical']} of {other['prompts']} "
                          "are.")
    return misses
