"""Trimming the vocabulary of the draft's head."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch


def choose_vocabulary(counts_V: np.ndarray, size: int, always: Iterable[int] = ()) -> torch.Tensor:
    """Ids of the `size` most frequent tokens, ascending; `always` (end-of-sequence ids) are kept.

    Ties go to the lower id. Tokens that never occur are left out, so a corpus with fewer distinct
    tokens than `size` gives a smaller head. Returns int64 [at most max(size, len(always))].
    """
    always = sorted(set(always))
    order = np.argsort(-counts_V, kind="stable")
    frequent = [int(i) for i in order if counts_V[i] > 0 and int(i) not in always]
    return torch.tensor(sorted(always + frequent[: max(0, size - len(always))]), dtype=torch.int64)


def inverse_map(head_ids_D: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Int64 [vocab_size]: the head row of each target token, or D (one past the head) for none."""
    inverse = torch.full((vocab_size,), len(head_ids_D), dtype=torch.int64)
    inverse[head_ids_D] = torch.arange(len(head_ids_D))
    return inverse
