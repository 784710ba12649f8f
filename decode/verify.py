"""Verification: which drafted tokens are kept, and what is drawn after them. Pure functions of p, q, the drafted
tokens and the noise's uniforms.

The token-level rule is speculative sampling (Leviathan et al. 2023; Chen et al. 2023): accept x ~ q with
probability min(1, p(x) / q(x)), else draw from norm((p - q)+). Early rejection is a truncated proposal:
with q~(x) = q(x) * 1[x is kept], a rejected *or dropped* token is replaced by a draw from
norm((p - q~)+). Drawing from p after a drop would be biased.

Block verification (Sun et al. 2024) judges a chain as a whole and accepts at least as many tokens, from the
same distribution.

Trees need no rule of their own here. Where the chain's rule stops, its residual r is what the next token has to be
drawn from; recursive residuals (Miao et al. 2024) then try the one-hot branches b in turn, keeping b with
probability r(b) and else taking b out of r. That is one draw from r, kept if it is any of them: `along`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from .candidates import Draft
from .sampling import Noise


@dataclass
class Verdict:
    """`accepted` tokens of the chain are kept, then the nodes `side`, then `token` is emitted: a correction or a
    bonus.

    `rejected` says that the next token of the chain failed its test; false after a bonus and after a drop.
    """

    accepted: int
    token: int
    source: str
    rejected: bool
    side: list[int] = field(default_factory=list)

    @property
    def path(self) -> list[int]:
        """All nodes that are kept."""
        return [*range(self.accepted), *self.side]


def residual(p_V: torch.Tensor, q_V: torch.Tensor) -> torch.Tensor:
    """norm((p - q~)+), the distribution after a rejection or a drop; p itself if nothing is left.

    Nothing is left only when q~ covers p, where a rejection has probability zero up to rounding.
    """
    rest = (p_V - q_V).clamp_min(0)
    total = rest.sum()
    return rest / total if float(total) > 0 else p_V


def along(draft: Draft, verdict: Verdict, draw: Callable[[int, int], int]) -> Verdict:
    """Go on from a chain's verdict through one-hot nodes: as long as the token drawn is one of them, keep it and
    draw the next.

    draw(node, depth): a token from the target's distribution after `node`, which is `depth` tokens into the tree.
    """
    children = draft.children()
    node = verdict.accepted - 1
    while (child := children.get(node, {}).get(verdict.token)) is not None:
        verdict.side.append(child)
        node = child
        verdict.token = draw(node, len(verdict.path))
        verdict.source = "correction" if node in children else "bonus"
    if not verdict.side and verdict.source == "bonus" and node in children:
        verdict.source = "correction"  # none of the branches after the last token
    return verdict


def match(draft: Draft, draw: Callable[[int, int], int]) -> Verdict:
    """Greedy and coupled rule: keep the nodes that the target's own choices lead through. `draw` as for `along`."""
    accepted, chain = 0, draft.tokens
    token = draw(-1, 0)
    while accepted < len(chain) and chain[accepted] == token:
        accepted += 1
        token = draw(accepted - 1, accepted)
    rejected = accepted < len(chain)
    # After a token that early rejection dropped, as in the uncoupled rules, comes its correction.
    source = "correction" if rejected or draft.dropped else "bonus"
    return along(draft, Verdict(accepted, token, source, rejected), draw)


def survival(p_RV: torch.Tensor, q_at: list[float], drafted: list[int]) -> list[float]:
    """Block verification's pi: pi_0 = 1, pi_{i+1} = min(1, pi_i p / q) at the drafted token; [k + 1]."""
    pi = [1.0]
    for i, (token, q) in enumerate(zip(drafted, q_at, strict=True)):
        pi.append(min(1.0, pi[-1] * float(p_RV[i, token]) / q))
    return pi


def block_threshold(pi: float, p_V: torch.Tensor, q_V: torch.Tensor) -> tuple[float, torch.Tensor]:
    """Where a chain goes on after i tokens: (h, residual). S = sum of (pi p - q~)+, h = S / (S + 1 - pi); the next
    token is drawn from the residual, unnormalised here."""
    rest = (pi * p_V - q_V).clamp_min(0)
    total = float(rest.sum())
    return (total / (total + 1.0 - pi) if total > 0 else 0.0), rest


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

    i tokens are kept with probability h_i, the largest such i counting: h = pi (`survival`) where the draft ended of
    its own accord, and elsewhere, a dropped token included, the `block_threshold`.
    """
    k, pi = len(drafted), survival(p_RV, q_at, drafted)
    if not dropped and noise.accept(pi[k]):
        return Verdict(k, noise.draw(p_RV[k], position + k), "bonus", False)
    for i in range(k if dropped else k - 1, 0, -1):
        h, rest = block_threshold(pi[i], p_RV[i], q_tilde(i))
        if h > 0 and noise.accept(h):
            return Verdict(i, noise.draw(rest / rest.sum(), position + i), "correction", i < k)
    return Verdict(0, noise.draw(residual(p_RV[0], q_tilde(0)), position), "correction", k > 0)
