"""Is it the target's own text? Comparing token ids, and judging mismatches by the margin rule.

Passes of different numbers of rows round differently. A mismatch is excused only when the target's top-2
margin at that position is at most 4 times the largest logit difference between a 1-row and a 16-row pass
over the same prefix (DESIGN, section 7, rule 6).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from .runner import Runner

FACTOR = 4.0
ROWS = 16


@dataclass
class Divergence:
    """The first position (in emitted tokens) where two texts differ. `margin`: how far the worse of the two
    tokens lies below the target's best, infinite where one text simply ends. `excused`: within rounding."""

    position: int
    margin: float
    rounding: float

    @property
    def excused(self) -> bool:
        return self.margin <= FACTOR * self.rounding


@torch.no_grad()
def last_logits(runner: Runner, prefix: Sequence[int], rows: int) -> torch.Tensor:
    """The target's logits after `prefix`, its last `rows` tokens run as one pass."""
    ids = torch.tensor([list(prefix)], device=runner.device)
    rows = min(rows, len(prefix))
    cache = runner.new_cache(1, len(prefix))
    if rows < len(prefix):
        runner.forward(ids[:, :-rows], cache, 1)
    return runner.forward(ids[:, -rows:], cache, 1)[1][0, -1].double()


def compare(runner: Runner, prompt: Sequence[int], ours: Sequence[int], reference: Sequence[int],
            score: Callable[[torch.Tensor, int], torch.Tensor] | None = None) -> Divergence | None:
    """None when the texts are equal; otherwise where they part, measured on the runner.

    `score(logits, position)`: what the text takes the largest of, if it is not the logits: under Gumbel coupling,
    log-probabilities with the position's noise.
    """
    if list(ours) == list(reference):
        return None
    at = next((i for i, (a, b) in enumerate(zip(ours, reference, strict=False)) if a != b),
              min(len(ours), len(reference)))
    prefix = [*prompt, *reference[:at]]
    one, many = last_logits(runner, prefix, 1), last_logits(runner, prefix, ROWS)
    if score is not None:
        one, many = score(one, len(prefix)), score(many, len(prefix))
    rounding = float((one - many).abs().max())
    if at == min(len(ours), len(reference)):
        return Divergence(at, math.inf, rounding)
    # The best token against the worse of the two: at a near-tie any third token is still a fault.
    return Divergence(at, float(one.max() - torch.minimum(one[ours[at]], one[reference[at]])), rounding)
