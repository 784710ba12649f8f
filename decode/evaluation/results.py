"""The figures of a comparison, from its records."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .protocol import PLAIN
from .statistics import Paired, correct, of_differences, of_ratios

FAILING = 1.35  # the draft's perplexity over the target's, from which on a sample counts as the failure mode
REFERENCES = (PLAIN, "dsd", "mtv")
FEW = 5  # judged tokens at a place in the draft, below which nothing is said of it

Row = dict[str, Any]


class Results:
    """Rows with what was judged of them, by task and method."""

    def __init__(self, records: Sequence[Row], methods: Sequence[str] | None = None) -> None:
        """`records` of a journal. `methods`: which are wanted (default: all that ran). Prompts that not all of them
        have answered are left out: pairs must be whole."""
        judged: dict[tuple[str, str], Row] = {}
        for record in records:
            if record.get("what") == "judged":  # methods that were added later have a record of their own
                of = judged.setdefault((record["task"], record["item"]), {**record, "score": {}, "apart": {},
                                                                          "divergence": {}})
                for what in ("score", "apart", "divergence"):
                    of[what].update(record[what])
        rows = [r for r in records if r.get("what") == "row" and r["method"] in judged.get(
            (r["task"], r["item"]), {"score": ()})["score"]]
        self.tuned = [r for r in records if r.get("what") == "tuned"]
        # The order in which methods first ran is rotated; plain decoding is named first.
        names = dict.fromkeys(methods or (r["method"] for r in rows))
        self.methods = [*(n for n in (PLAIN, "dsd", "mtv", "paper", "goodput") if n in names),
                        *(n for n in names if n not in (PLAIN, "dsd", "mtv", "paper", "goodput"))]
        by = {(r["task"], r["item"], r["method"]): r for r in rows}
        whole = [(task, item) for task, item in dict.fromkeys((r["task"], r["item"]) for r in rows)
                 if all((task, item, name) in by for name in self.methods)]
        self.tasks = list(dict.fromkeys(task for task, _ in whole))
        self.judged = [judged[pair] for pair in whole]
        self.rows: list[Row] = []
        for task, item in whole:
            for name in self.methods:
                row, of = by[task, item, name], judged[task, item]
                self.rows.append({**row, **{what: of[what].get(name) for what in ("score", "apart", "divergence")},
                                  "perplexity_ratio": of.get("perplexity_ratio")})
        self.by = {(r["task"], r["item"], r["method"]): r for r in self.rows}

    @property
    def split(self) -> float:
        """The share of prompts whose methods did not all run in one session: their machine may have changed."""
        sessions: dict[tuple[str, str], set[int]] = {}
        for row in self.rows:
            sessions.setdefault((row["task"], row["item"]), set()).add(row["session"])
        return float(np.mean([len(s) > 1 for s in sessions.values()])) if sessions else 0.0

    def of(self, task: str | None, method: str) -> list[Row]:
        """A method's rows, of one task or of all (None), in the order of the prompts."""
        return [r for r in self.rows if r["method"] == method and task in (None, r["task"])]

    def tuned_name(self, task: str, method: str) -> str:
        """A method with what it was tuned to."""
        chosen = next((r["chosen"] for r in self.tuned if (r["task"], r["method"]) == (task, method)), None)
        return f"{method} ({chosen})" if chosen else method

    def pairs(self, task: str | None, method: str, other: str, value: Callable[[Row], float | None]
              ) -> tuple[list[float], list[float]]:
        """A value of two methods on the same prompts, where both have one."""
        mine, theirs = [], []
        for row in self.of(task, method):
            against = self.by.get((row["task"], row["item"], other))
            a, b = value(row), None if against is None else value(against)
            if a is not None and b is not None:
                mine.append(a)
                theirs.append(b)
        return mine, theirs

    def speed(self, task: str | None, method: str, other: str = PLAIN) -> Paired | None:
        """Tokens a second of a method over another's."""
        pairs = self.pairs(task, method, other, rate)
        return of_ratios(*pairs) if pairs[0] else None

    def speed_by_task(self, method: str, other: str) -> dict[str, Paired]:
        """The same for every task, corrected over them."""
        return correct({task: found for task in self.tasks if (found := self.speed(task, method, other)) is not None})

    def quality(self, task: str, method: str, other: str = PLAIN) -> Paired | None:
        """The difference in score."""
        mine, theirs = self.pairs(task, method, other, lambda r: r["score"])
        return of_differences(np.array(mine) - np.array(theirs)) if mine else None

    def summary(self, task: str | None, method: str) -> dict[str, Any]:
        """Figures of one method on one task, or on all."""
        rows = self.of(task, method)
        tokens, seconds = sum(r["tokens"] for r in rows), sum(r["seconds"] for r in rows)
        scores = [r["score"] for r in rows if r["score"] is not None]
        out: dict[str, Any] = {
            "prompts": len(rows), "tokens": tokens, "tokens_per_second": tokens / seconds if seconds else None,
            "seconds": float(np.median([r["seconds"] for r in rows])) if rows else None,
            "ttft": float(np.median([r["ttft"] for r in rows])) if rows else None,
            # Scores of different tasks are different things.
            "score": float(np.mean(scores)) if scores and task is not None else None,
            "same_text": sum(r["divergence"] is None for r in rows), "apart": sum(bool(r["apart"]) for r in rows),
            "joules_per_token": _ratio(sum(r["joules"] or 0 for r in rows), tokens) if all(
                r["joules"] is not None for r in rows) else None,
        }
        if not rows or "steps" not in rows[0]:
            return out
        judged, flops = sum(r["accepted"] + r["rejected"] for r in rows), sum(
            r["target_flops"] + r["draft_flops"] for r in rows)
        return {
            **out, "acceptance": _ratio(sum(r["accepted"] for r in rows), judged),
            "tokens_per_step": _ratio(sum(r["tokens"] - r["turns"] for r in rows), sum(r["steps"] for r in rows)),
            "gflop_per_token": _ratio(flops / 1e9, tokens), "by_position": self.by_position(task, method),
            "parts": self.parts(task, method),
            "terminated": float(np.mean([r["policy_counts"].get("paper_terminations", 0) > 0 for r in rows])),
            "upgrade_extra_ms": self.upgrade_cost(task, method),
        }

    def compute(self, task: str | None, method: str, other: str = "dsd") -> float | None:
        """FLOPs a token, target and draft, relative to another method's."""
        mine, theirs = (self.summary(task, m).get("gflop_per_token") for m in (method, other))
        return None if mine is None or not theirs else mine / theirs

    def by_position(self, task: str | None, method: str) -> list[float]:
        """Acceptance of the i-th drafted token among those judged."""
        rows = [r for r in self.of(task, method) if "accepted_by_position" in r]
        if not rows:
            return []
        kept, all_ = (np.sum([r[f"{what}_by_position"] for r in rows], axis=0) for what in ("accepted", "judged"))
        return [float(a / j) for a, j in zip(kept, all_, strict=True) if j >= FEW]

    def parts(self, task: str | None, method: str) -> dict[str, float]:
        """Shares of the time."""
        rows = [r for r in self.of(task, method) if "parts" in r]
        seconds = sum(r["seconds"] for r in rows)
        if not seconds:
            return {}
        found = {part: sum(r["parts"][part] for r in rows) / seconds for part in rows[0]["parts"]}
        return {**found, "other": max(0.0, 1.0 - sum(found.values()))}

    def failing(self, task: str | None = None) -> float | None:
        """The share of prompts in the failure mode."""
        ratios = [r["perplexity_ratio"] for r in self.judged
                  if task in (None, r["task"]) and r.get("perplexity_ratio") is not None]
        return float(np.mean([x > FAILING for x in ratios])) if ratios else None

    def upgrade_cost(self, task: str | None, method: str) -> float | None:
        """Milliseconds that drafting takes longer in a round that moved to a larger variant, at the median, than in
        other rounds of as many tokens; None without such rounds."""
        usual: dict[tuple[int, int], list[float]] = {}
        moved = []
        for row in self.of(task, method):
            before, turn = -1, 0
            for _, drafted, _, variant, _, ms, read, now in row.get("rounds", ()):
                before, turn = (before, turn) if now == turn else (-1, now)
                if variant > before >= 0:
                    moved.append(((variant, drafted), ms))
                elif variant >= 0 and read <= 2:  # others read a prompt, or what a pause has left unread
                    usual.setdefault((variant, drafted), []).append(ms)
                before = variant if variant >= 0 else before
        extra = [ms - float(np.median(usual[key])) for key, ms in moved if key in usual]
        return float(np.median(extra)) if extra else None


def rate(row: Row) -> float | None:
    return row["tokens"] / row["seconds"] if row["tokens"] and row["seconds"] > 0 else None


def _ratio(a: float, b: float) -> float | None:
    return a / b if b else None


def predicted_speedup(acceptance: float, k: int, step: float, verify: float) -> float:
    """Of a chain of k: (1 + a + ... + a^k) / (k step + verify), both in passes of one row (Leviathan et al. 2023,
    theorem 3.8, with a pass of k + 1 rows at its own cost)."""
    return sum(acceptance**i for i in range(k + 1)) / (k * step + verify)


def finite(value: Any) -> Any:
    """JSON has no infinity: it becomes None."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {k: finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(v) for v in value]
    return value
