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
    """Indices of the texts in groups with a beginning worth sharing in common.

    In order of their tokens, so that texts which begin alike are neighbours. Where some share much more than the
    rest (schemas after one system prompt), they are a family of their own.
    """
    out: list[list[int]] = []
    shared = 0  # by the last family, of two or more
    order = sorted(range(len(texts)), key=lambda i: (np.asarray(texts[i], ">u4").tobytes(), i))
    for before, i in zip([None, *order], order, strict=False):
        common = 0 if before is None else common_prefix(texts[before], texts[i])
        if before is None or not worth_sharing(common, max(len(texts[before]), len(texts[i]))):
            out.append([i])
        elif len(out[-1]) == 1:
            out[-1].append(i)
            shared = common
        elif common > 2 * shared:
            out.append([out[-1].pop(), i])
            shared = common
        elif 2 * common >= shared:
            out[-1].append(i)
            shared = min(shared, common)
        else:
            out.append([i])
    return out
