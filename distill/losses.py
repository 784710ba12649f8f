"""Distillation losses on rows of logits, against dense or sparse teacher targets.

Every loss returns one value a row; the caller normalises by the global count of rows. Both sides are at
the same temperature: the caller passes the draft's raw logits and T, and teacher log-probabilities that
were taken at T. No T^2 factor is applied here.

A sparse target names the teacher's k likeliest tokens and lumps all others into one event, the tail. Any
divergence over these k + 1 events bounds the dense one from below, and the acceptance, sum min(p, q), bounds the
dense one from above (both by the data-processing inequality); at k = V they are the dense values.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from .attention import product_dtype

TINY = 1e-30  # probabilities below count as this where a logarithm is taken of them


@dataclass
class Events:
    """p and q over the same events, [R, E]: log-probabilities, of the draft's those that are differentiated.

    `logq` is -inf where the draft cannot go: a token outside its trimmed head, a tail that is empty. `tail`: whether
    the last event is all other tokens together.
    """

    logp: torch.Tensor
    logq: torch.Tensor
    tail: bool = False

    @property
    def p(self) -> torch.Tensor:
        return self.logp.exp()

    @property
    def q(self) -> torch.Tensor:
        return self.logq.exp()

    def acceptance(self) -> torch.Tensor:
        """Expected acceptance of a token drafted from q, sum min(p, q), per row."""
        return torch.minimum(self.p, self.q).sum(-1)


def dense_events(logits_RV: torch.Tensor, teacher_logp_RV: torch.Tensor, temperature: float) -> Events:
    """Every token its own event."""
    return Events(teacher_logp_RV, F.log_softmax(logits_RV / temperature, dim=-1))


def sparse_events(
    logits_RV: torch.Tensor, top_ids_RK: torch.Tensor, top_logp_RK: torch.Tensor, tail_R: torch.Tensor,
    temperature: float,
) -> Events:
    """The teacher's top-k and the rest, k + 1 events.

    `top_ids_RK` index the draft's head (0..V-1); the id V marks a teacher token that the trimmed head
    does not have. No draft can propose it.
    """
    tail = torch.where(tail_R > 0, tail_R.clamp_min(TINY), 0.0).log()
    logq: torch.Tensor = _EventLogQ.apply(logits_RV, top_ids_RK, temperature)
    return Events(torch.cat([top_logp_RK, tail[:, None]], -1).to(logq.dtype), logq, tail=True)


class _EventLogQ(torch.autograd.Function):
    """log q of the tokens `top_ids` and of all others together [R, K + 1], in few passes over the logits.

    With z = logits / T: log q_i = z_i - log Z for the k tokens, log sum_rest e^z - log Z for the rest, so that
    for upstream gradients g with sum G, d/dz = g - G q on the k, g_rest e^z / sum_rest e^z - G q on the rest.
    """

    @staticmethod
    def forward(ctx: Any, logits_RV: torch.Tensor, top_ids_RK: torch.Tensor, temperature: float) -> torch.Tensor:
        rows, size = logits_RV.shape
        # One extra column at -inf stands for every token outside the head.
        z = logits_RV.new_full((rows, size + 1), float("-inf"))
        torch.mul(logits_RV, 1 / temperature, out=z[:, :size])
        top_z = z.gather(-1, top_ids_RK)
        # The mass outside the teacher's top-k is summed directly, from its own largest: 1 - sum(q) would lose its
        # digits.
        rest = z.scatter_(-1, top_ids_RK, float("-inf"))
        largest = rest.amax(-1)
        largest = torch.where(torch.isfinite(largest), largest, 0.0)
        total = rest.sub_(largest[:, None]).exp_().sum(-1)
        log_rest = largest + total.log()
        log_z = torch.logaddexp(top_z.logsumexp(-1), log_rest)
        logq = torch.cat([top_z, log_rest[:, None]], -1) - log_z[:, None]
        ctx.temperature = temperature
        ctx.save_for_backward(rest, total, (largest - log_z).exp(), top_ids_RK, logq)
        return logq

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rest, total, scale, top_ids, logq = ctx.saved_tensors
        g = torch.where(torch.isfinite(logq), upstream[0], 0.0) / ctx.temperature
        sums = g.sum(-1)
        of_rest = torch.where(total > 0, g[:, -1] / total, 0.0) - sums * scale
        grad = rest * of_rest[:, None]
        grad.scatter_(-1, top_ids, g[:, :-1] - sums[:, None] * logq[:, :-1].exp())
        return grad[:, :-1], None, None


def _weighted_log_ratio(weight: torch.Tensor, log_a: torch.Tensor, log_b: torch.Tensor) -> torch.Tensor:
    """sum weight * (log_a - log_b) over events where the weight is above 0 and both logarithms are finite."""
    where = (weight > 0) & torch.isfinite(log_a) & torch.isfinite(log_b)
    # Masked before the product, so that the unused branch has no NaN gradient.
    difference = torch.where(where, log_a, 0.0) - torch.where(where, log_b, 0.0)
    return (torch.where(where, weight, 0.0) * difference).sum(-1)


def forward_kl(e: Events) -> torch.Tensor:
    """KL(p || q). Tokens that the draft cannot propose are left out: their mass must not pull q towards others, and
    rows whose mass is mostly outside weigh less."""
    return _weighted_log_ratio(e.p, e.logp, e.logq)


def reverse_kl(e: Events) -> torch.Tensor:
    """KL(q || p); where the teacher rules a token out, p counts as 1e-30."""
    return _weighted_log_ratio(e.q, e.logq, e.logp.clamp_min(math.log(TINY)))


def jensen_shannon(e: Events, beta: float) -> torch.Tensor:
    """JSD(beta) = beta KL(p || m) + (1 - beta) KL(q || m) with m = beta p + (1 - beta) q (Agarwal et al. 2024,
    GKD, equation 1)."""
    a, b = e.logp + math.log(beta), e.logq + math.log1p(-beta)
    possible = torch.isfinite(a) | torch.isfinite(b)  # the gradient at two infinities is not a number
    log_m = torch.logaddexp(torch.where(possible, a, 0.0), torch.where(possible, b, 0.0))
    return beta * _weighted_log_ratio(e.p, e.logp, log_m) + (1 - beta) * _weighted_log_ratio(e.q, e.logq, log_m)


def total_variation(e: Events) -> torch.Tensor:
    """1 - sum min(p, q): the share of drafted tokens that is rejected."""
    return 1 - e.acceptance()


def lk(e: Events) -> torch.Tensor:
    """-log sum min(p, q): the likelihood of acceptance."""
    return -e.acceptance().clamp_min(TINY).log()


def hybrid(e: Events, eta: float) -> torch.Tensor:
    """lambda KL + (1 - lambda) TV with lambda = exp(-eta acceptance), the acceptance detached: KL, whose gradient
    does not vanish, where the draft is far off, the rejection rate itself where it is close."""
    weight = torch.exp(-eta * e.acceptance().detach())
    return weight * forward_kl(e) + (1 - weight) * total_variation(e)


def hard(e: Events) -> torch.Tensor:
    """Cross-entropy of the teacher's likeliest token, which is the next token of greedy text; none where the draft
    cannot propose it."""
    tokens = e.logp[:, :-1] if e.tail else e.logp
    best = e.logq.gather(-1, tokens.argmax(-1, keepdim=True)).squeeze(-1)
    possible = torch.isfinite(best)
    return -torch.where(possible, torch.where(possible, best, 0.0), 0.0)


JSD_BETA, HYBRID_ETA = 0.5, 3.0

LOSSES: dict[str, Callable[[Events], torch.Tensor]] = {
    "kl": forward_kl,
    "reverse_kl": reverse_kl,
    "jsd": lambda e: jensen_shannon(e, JSD_BETA),
    "tv": total_variation,
    "lk": lk,
    "hybrid": lambda e: hybrid(e, HYBRID_ETA),
    "hard": hard,
}


def mixture(weights: dict[str, float], e: Events) -> torch.Tensor:
    """The weighted sum of named losses per row."""
    return torch.stack([weight * LOSSES[name](e) for name, weight in weights.items()]).sum(0)


def row_weights(acceptance_R: torch.Tensor, follows_R: torch.Tensor, reach: int, focus: float) -> torch.Tensor:
    """What each row's loss weighs, [R], detached.

    `reach` k > 1: the chance that a draft of up to k tokens gets to the row, over the k places where it may have
    begun: the mean of prod a_j over the 0, 1, ..., k - 1 rows before it. Expected tokens a step, 1 + a_1 + a_1 a_2 +
    ..., grow with a row's acceptance by as much as drafts reach it. `focus` g: times (1 - a)^g, more for rows where
    the draft is still wrong (Lin et al. 2017 for labels). `follows_R`: whether a row is of the token after that of
    the row before it, in one answer.
    """
    acceptance = acceptance_R.detach()
    weights = arriving = torch.ones_like(acceptance)
    for _ in range(reach - 1):
        before = torch.cat([torch.zeros_like(arriving[:1]), (arriving * acceptance)[:-1]])
        arriving = torch.where(follows_R, before, 0.0)
        weights = weights + arriving
    return weights / reach * (1 - acceptance).clamp_min(0) ** focus if focus else weights / reach


# What a block of rows costs: (loss [R], figures [R] that are logged), from logits [R, V] and teacher tensors [R, ...].
RowLoss = Callable[..., tuple[torch.Tensor, torch.Tensor]]

# Of the logits that exist at once: what a processor's cache holds; on a GPU, where launches cost more than memory, and
# with a trained head, to whose gradient every chunk adds, more.
CHUNK_BYTES, LARGE_CHUNK_BYTES = 2**22, 2**28


class _HeadedLoss(torch.autograd.Function):
    """Losses of chunks of rows, each with its gradients at once, so that no two chunks' logits exist together."""

    @staticmethod
    def forward(ctx: Any, hidden_RH: torch.Tensor, head_VH: torch.Tensor, loss: RowLoss, dtype: torch.dtype,
                *teacher: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        exact = torch.promote_types(dtype, torch.float32)
        small = hidden_RH.device.type == "cpu" and not ctx.needs_input_grad[1]
        rows = max(1, (CHUNK_BYTES if small else LARGE_CHUNK_BYTES) // (len(head_VH) * exact.itemsize))
        wanted = any(ctx.needs_input_grad[:2])
        grads, losses, figures = torch.zeros_like(hidden_RH), [], []
        of_head = torch.zeros_like(head_VH) if ctx.needs_input_grad[1] else None
        head = head_VH.to(dtype)
        for at in range(0, len(hidden_RH), rows):
            here = slice(at, at + rows)
            hidden = hidden_RH[here].to(dtype)
            with torch.set_grad_enabled(wanted):
                logits = (hidden @ head.T).to(exact).detach().requires_grad_(wanted)
                value, figure = loss(logits, *(t[here] for t in teacher))
                grad = torch.autograd.grad(value.sum(), logits)[0].to(dtype) if wanted else None
            if grad is not None:
                grads[here] = (grad @ head).to(grads.dtype)
                if of_head is not None:
                    of_head += (grad.T @ hidden).to(of_head.dtype)
            losses.append(value.detach())
            figures.append(figure.detach())
        ctx.save_for_backward(grads, of_head)
        none = hidden_RH.new_zeros(0, dtype=exact)
        out = torch.cat([none, *losses]), torch.cat([none, *figures])
        ctx.mark_non_differentiable(out[1])
        return out

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grads, of_head = ctx.saved_tensors
        weights, rest = upstream[0], [None] * (len(ctx.needs_input_grad) - 2)
        if of_head is not None and len(weights):
            if not bool((weights == weights[0]).all()):
                raise ValueError("rows of a trained head must weigh the same: its gradient is already summed")
            of_head = of_head * weights[0].to(of_head.dtype)
        return grads * weights[:, None].to(grads.dtype), of_head, *rest


def headed_loss(loss: RowLoss, hidden_RH: torch.Tensor, head_VH: torch.Tensor,
                *teacher: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`loss(hidden @ head.T, *teacher)` row by row, without the R x V logits in memory.

    Where the head is trained too, whatever is made of the rows must weigh them alike (a sum, times a factor). Under
    autocast the products are in its type; the loss is computed in float32 at least.
    """
    dtype = product_dtype(hidden_RH)
    with torch.autocast(hidden_RH.device.type, enabled=False):
        rows, figures = _HeadedLoss.apply(hidden_RH, head_VH, loss, dtype, *teacher)
    return rows, figures


class LossHead(nn.Module):
    """A head [V, H] with the loss on its logits: a module of its own, so that ZeRO 3 gathers its weight for it."""

    def __init__(self, weight_VH: torch.Tensor, trained: bool) -> None:
        super().__init__()
        if trained:
            self.weight = nn.Parameter(weight_VH.clone())
        else:  # a buffer is whole on every rank however the parameters are spread over them
            self.register_buffer("weight", weight_VH.clone())

    def forward(self, loss: RowLoss, hidden_RH: torch.Tensor,
                *teacher: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return headed_loss(loss, hidden_RH, self.weight, *teacher)
