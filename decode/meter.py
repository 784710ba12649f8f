"""Perplexity of target and draft over the text both have seen."""

from __future__ import annotations

import math

import torch

# The draft's probability of a token that its trimmed head lacks, for perplexity only: infinite
# perplexity from one rare token would hide everything else the draft does.
LOG_FLOOR = math.log(1e-3)


def log_probs_at(logits_RV: torch.Tensor, tokens: list[int]) -> list[float]:
    """Log-probability at temperature 1 of tokens[i] under row i."""
    if not tokens:
        return []
    index = torch.tensor(tokens, device=logits_RV.device)[:, None]
    rows = logits_RV[: len(tokens)]
    return (rows.gather(-1, index).squeeze(-1) - rows.logsumexp(-1)).tolist()


def log_probs_in_head(logits_RD: torch.Tensor, rows: dict[int, int], tokens: list[int]) -> list[float]:
    """The same under a trimmed head, of which `rows` gives each token's row; -inf for a token that it lacks."""
    where = [rows.get(t, -1) for t in tokens]
    known = log_probs_at(logits_RD, [max(r, 0) for r in where])
    return [value if row >= 0 else float("-inf") for value, row in zip(known, where, strict=True)]


class PerplexityMeter:
    """Log-probabilities at temperature 1 of committed tokens by absolute position."""

    def __init__(self) -> None:
        self.target: dict[int, float] = {}
        self.draft: dict[int, float] = {}

    def _mean(self, positions: list[int]) -> tuple[float, float]:
        n = len(positions)
        return (sum(self.target[i] for i in positions) / n,
                sum(max(self.draft[i], LOG_FLOOR) for i in positions) / n)

    def ratio(self, last: int | None = None) -> float | None:
        """ppl_draft / ppl_target over the positions that both judged, or the last of them; None if none."""
        both = [i for i in self.target if i in self.draft]  # in the order of the text
        if last is not None:
            if len(both) < last:
                return None
            both = both[-last:]
        if not both:
            return None
        target, draft = self._mean(both)
        return math.exp(target - draft)

    def confidence(self) -> float | None:
        """ppl_target / ppl_draft over the context seen so far, cut at 1; None before any is known."""
        ratio = self.ratio()
        return None if ratio is None else min(1.0, 1.0 / ratio)
