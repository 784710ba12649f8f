"""Trimming the vocabulary of the draft's head."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch


def choose_vocabulary(answers_V: np.ndarray, size: int, always: Iterable[int] = (),
                      prompts_V: np.ndarray | None = None) -> torch.Tensor:
    """Ids of the head's `size` tokens, ascending int64; `always` (end-of-sequence ids) are kept.

    The most frequent tokens of the answers first; then, since answers repeat their prompts' words, the most
    frequent of the prompts; then the lowest ids, which byte-pair tokenizers give to their commonest tokens,
    so that new text finds the words that a small corpus happens to lack. Ties go to the lower id.
    """
    kept = dict.fromkeys(sorted(set(always)))
    for counts in [answers_V] + ([] if prompts_V is None else [prompts_V]):
        order = np.argsort(-counts, kind="stable")
        kept.update(dict.fromkeys(int(i) for i in order if counts[i] > 0))
    kept.update(dict.fromkeys(range(len(answers_V))))
    ids = list(kept)[: max(size, len(set(always)))]
    return torch.tensor(sorted(ids), dtype=torch.int64)


def inverse_map(head_ids_D: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Int64 [vocab_size]: the head row of each target token, or D (one past the head) for none."""
    inverse = torch.full((vocab_size,), len(head_ids_D), dtype=torch.int64)
    inverse[head_ids_D] = torch.arange(len(head_ids_D))
    return inverse
