"""Verification: which drafted tokens are kept, and what is drawn after them. Pure functions.

The token-level rule is speculative sampling (Leviathan et al. 2023; Chen et al. 2023): accept x ~ q with
probability min(1, p(x) / q(x)), else draw from norm((p - q)+). Early rejection is a truncated proposal:
with q~(x) = q(x) * 1[x is kept], a rejected *or dropped* token is replaced by a draw from
norm((p - q~)+). Drawing from p after a drop would be biased.

Block verification (Sun et al. 2024) judges a chain as a whole and accepts at least as many tokens, from the
same distribution.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from .sampling import Noise


@dataclass
class Verdict:
    """`accepted` drafted tokens are kept, then `token` is emitted: a correction or a bonus.

    `rejected` says that a drafted token failed its test; false after a bonus and after a drop.
    """

    accepted: int
    token: int
    source: str
    rejected: bool


def residual(p_V: torch.Tensor, q_V: torch.Tensor) -> torch.Tensor:
    """norm((p - q~)+), the distribution after a rejection or a drop; p itself if nothing is left.

    Nothing is left only when q~ covers p, where a rejection has probability zero up to rounding.
    """
    rest = (p_V - q_V).clamp_min(0)
    total = rest.sum()
    return rest / total if float(total) > 0 else p_V


def match(target_tokens: list[int], drafted: list[int]) -> Verdict:
    """Greedy and coupled rule: keep the drafted tokens that equal the target's own choices.

    `target_tokens` has one more entry than `drafted`.
    """
    accepted = 0
    while accepted < len(drafted) and drafted[accepted] == target_tokens[accepted]:
        accepted += 1
    rejected = accepted < len(drafted)
    return Verdict(accepted, target_tokens[accepted], "correction" if rejected else "bonus", rejected)


def token_level(
    p_RV: torch.Tensor, q_at: list[float], drafted: list[int], q_tilde: Callable[[int], torch.Tensor],
    dropped: bool, noise: Noise, position: int,
) -> Verdict:
    """The token-level rule over one chain.

    p_RV: target rows, one more than drafted tokens. q_at[i]: probability with which drafted[i] was
    proposed. q_tilde(i): the truncated proposal over V at index i, asked for only where needed.
    dropped: one more token was sampled after the chain and not proposed (early rejection). position:
    absolute position of the first drafted token.
    """
    for i, (token, q) in enumerate(zip(drafted, q_at, strict=True)):
        if not noise.accept(min(1.0, float(p_RV[i, token]) / q)):
            replacement = noise.draw(residual(p_RV[i], q_tilde(i)), position + i)
            return Verdict(i, replacement, "correction", True)
    k = len(drafted)
    if dropped:
        return Verdict(k, noise.draw(residual(p_RV[k], q_tilde(k)), position + k), "correction", False)
    return Verdict(k, noise.draw(p_RV[k], position + k), "bonus", False)


def block(
    p_RV: torch.Tensor, q_at: list[float], drafted: list[int], q_tilde: Callable[[int], torch.Tensor],
    dropped: bool, noise: Noise, position: int,
) -> Verdict:
    """Block verification of one chain; arguments as for `token_level`.

    pi_0 = 1 and pi_{i+1} = min(1, pi_i p / q) at the drafted token. i tokens are kept with probability h_i, the
    largest such i counting: h = pi where the draft ended of its own accord, and elsewhere, a dropped token
    included, h = S / (S + 1 - pi) with S the sum of (pi p - q~)+, from which the next token is then drawn.
    """
    k, pi = len(drafted), [1.0]
    for i, (token, q) in enumerate(zip(drafted, q_at, strict=True)):
        pi.append(min(1.0, pi[-1] * float(p_RV[i, token]) / q))
    if not dropped and noise.accept(pi[k]):
        return Verdict(k, noise.draw(p_RV[k], position + k), "bonus", False)
    for i in range(k if dropped else k - 1, 0, -1):
        rest = (pi[i] * p_RV[i] - q_tilde(i)).clamp_min(0)
        total = float(rest.sum())
        if total > 0 and noise.accept(total / (total + 1.0 - pi[i])):
            return Verdict(i, noise.draw(rest / total, position + i), "correction", i < k)
    return Verdict(0, noise.draw(residual(p_RV[0], q_tilde(0)), position), "correction", k > 0)
