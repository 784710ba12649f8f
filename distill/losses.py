"""Distillation losses on rows of logits, against dense or sparse teacher targets.

Every loss returns one value a row; the caller normalises by the global count of rows. Both sides are at
the same temperature: the caller passes the draft's raw logits and T, and teacher log-probabilities that
were taken at T. No T^2 factor is applied here.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F


def forward_kl_dense(logits_RV: torch.Tensor, teacher_logp_RV: torch.Tensor, temperature: float) -> torch.Tensor:
    """KL(p || q) per row, q = softmax(logits / T). Teacher entries of -inf count as p = 0."""
    logq = F.log_softmax(logits_RV / temperature, dim=-1)
    p = teacher_logp_RV.exp()
    return torch.where(p > 0, p * (teacher_logp_RV - logq), 0.0).sum(-1)


def forward_kl_sparse(
    logits_RV: torch.Tensor, top_ids_RK: torch.Tensor, top_logp_RK: torch.Tensor, tail_R: torch.Tensor,
    temperature: float,
) -> torch.Tensor:
    """KL(p || q) per row with everything outside the teacher's top-k lumped into one tail event.

    By the log-sum inequality this bounds the dense value from below; at k = V it is the dense value.
    `top_ids_RK` index the draft's head (0..V-1); the id V marks a teacher token that the trimmed head
    does not have. Such a token is left out: no draft can propose it, so its mass must not pull q
    towards others; the gradient is that of p restricted to the head, and rows whose mass is mostly
    outside weigh less.
    """
    # One extra column at -inf stands for every token outside the head.
    scaled = F.pad(logits_RV / temperature, (0, 1), value=float("-inf"))
    log_z = scaled.logsumexp(-1, keepdim=True)
    inside = top_ids_RK < logits_RV.shape[-1]
    logq = torch.where(inside, scaled.gather(-1, top_ids_RK), 0.0) - log_z
    p = torch.where(inside, top_logp_RK.exp(), 0.0)
    head = torch.where(inside & (p > 0), p * (top_logp_RK - logq), 0.0).sum(-1)
    # log of q's mass outside the teacher's top-k, summed directly: 1 - sum(q) would lose its digits.
    rest = scaled.scatter(-1, top_ids_RK, float("-inf"))
    has_rest = torch.isfinite(rest).any(-1) & (tail_R > 0)
    rest = torch.where(has_rest[:, None], rest, 0.0)  # keeps the unused branch free of NaN gradients
    log_tail_q = rest.logsumexp(-1) - log_z.squeeze(-1)
    tail = torch.where(has_rest, tail_R * (tail_R.clamp_min(1e-30).log() - log_tail_q), 0.0)
    return head + tail
