"""Post-training validation: is the bundle exact, and is it faster here? Methods are interleaved by prompt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from draftsmith.data.text import Sample

from .decoder import Decoder
from .evaluation.statistics import of_ratios
from .identity import compare
from .sampling import SamplingParams
from .stats import Stats

REFERENCE = "transformers"
WARM_UP_TOKENS = 16


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
class Interval:
    """A paired geometric-mean ratio with its 95 % confidence interval."""

    mean: float
    low: float
    high: float
    n: int


@dataclass
class Result:
    rows: list[Row]
    default: str
    summary: dict[str, dict[str, Any]] = field(default_factory=dict)
    examples: list[list[tuple[str, str]]] = field(default_factory=list)  # (text, source) of each token
    machine: str = ""


def paired_ratio(numerator: Sequence[float], denominator: Sequence[float]) -> Interval:
    """Geometric mean of paired ratios with a Student t interval on their logarithms."""
    found = of_ratios(numerator, denominator)
    return Interval(found.ratio, found.low, found.high, found.n)


def rotated(names: Sequence[str], turn: int) -> list[str]:
    """The names, starting with another one each turn: who runs first must not decide who is fast."""
    at = turn % len(names)
    return [*names[at:], *names[:at]]


def run_methods(decoder: Decoder, samples: list[Sample], prompts: list[list[int]], methods: list[str], max_tokens: int,
                reference: Callable[[list[int], int], tuple[list[int], float]] | None, reference_count: int,
                progress: Callable[[list[str]], Any] = lambda names: names) -> list[Row]:
    """Every method on every prompt, greedy, the order of methods rotated from prompt to prompt.

    `reference(prompt ids, max_tokens)` returns (new ids, seconds) of an outside implementation, run on the
    first `reference_count` prompts.
    """
    params = SamplingParams(max_tokens=max_tokens)
    for method in methods:
        decoder.generate(prompts[0], SamplingParams(max_tokens=WARM_UP_TOKENS), method)
    rows: list[Row] = []
    schedule = []
    for i in range(len(samples)):
        names = methods + ([REFERENCE] if reference is not None and i < reference_count else [])
        schedule += [(i, name) for name in rotated(names, i)]
    outputs: dict[tuple[int, str], list[int]] = {}
    for i, name in progress(schedule):  # type: ignore[arg-type]
        if name == REFERENCE:
            assert reference is not None
            ids, seconds = reference(prompts[i], max_tokens)
            stats = Stats(emitted=len(ids), seconds=seconds)
        else:
            output = decoder.generate(prompts[i], params, name)
            ids, stats = output.token_ids, output.stats
        outputs[i, name] = ids
        rows.append(Row(name, samples[i].id, samples[i].kind, len(ids), stats.seconds, stats.ttft, stats.steps,
                        stats.accepted, stats.rejected, stats.drafted, stats.accepted_by_position,
                        stats.judged_by_position))
    index = {sample.id: i for i, sample in enumerate(samples)}
    for row in rows:
        i = index[row.prompt]
        found = compare(decoder.runner, prompts[i], outputs[i, row.method], outputs[i, "ar"])
        if found is not None:
            row.text_from_target = found.excused
            row.divergence = {k: min(v, 1e9) for k, v in asdict(found).items()}  # JSON has no infinity
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
