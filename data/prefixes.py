"""Prompts that begin alike (one schema, one set of examples): found, so that what they share is computed once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

SHARED = 64  # tokens from which a common beginning is worth the bookkeeping


def common_prefix(a: Sequence[int] | np.ndarray, b: Sequence[int] | np.ndarray) -> int:
    """How many leading tokens two texts have in common."""
    n = min(len(a), len(b))
    differs = np.flatnonzero(np.asarray(a[:n]) != np.asarray(b[:n]))
    return int(differs[0]) if len(differs) else n


def worth_sharing(shared: int, length: int) -> bool:
    """Whether `shared` tokens of a text of `length` are worth reading once for several texts."""
    return shared >= SHARED or 2 * shared >= length > 0


def families(texts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Indices of the texts in groups that share a beginning worth sharing with their group's first text.

    In order of their tokens, so that texts which begin alike are neighbours; no family spans two beginnings.
    """
    out: list[list[int]] = []
    for i in sorted(range(len(texts)), key=lambda i: (tuple(texts[i]), i)):
        if out:
            first = texts[out[-1][0]]
            if worth_sharing(common_prefix(first, texts[i]), max(len(first), len(texts[i]))):
                out[-1].append(i)
                continue
        out.append([i])
    return out
