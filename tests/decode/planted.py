"""Faults planted into the production loop, one at a time, and the enumerated case that shows each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from draftsmith.decode import loop
from draftsmith.decode.candidates import Draft
from draftsmith.decode.loop import Generation
from draftsmith.decode.proposer import ElasticProposer
from draftsmith.decode.sampling import Noise
from draftsmith.decode.verify import Verdict, block_threshold, residual, survival

Patch = pytest.MonkeyPatch


def draw_from_p_after_a_drop(patch: Patch) -> None:
    def faulty(real: Any) -> Any:
        return lambda p, q_at, drafted, q_tilde, dropped, *rest: real(p, q_at, drafted, q_tilde, False, *rest)

    for rule, real in loop.RULES.items():
        patch.setitem(loop.RULES, rule, faulty(real))


def block_with_the_token_rules_residual(patch: Patch) -> None:
    real = loop.RULES["block"]

    def faulty(p: torch.Tensor, q_at: Any, drafted: Any, q_tilde: Any, dropped: bool, noise: Any, at: int) -> Verdict:
        verdict = real(p, q_at, drafted, q_tilde, dropped, noise, at)
        if verdict.source == "correction":
            i = verdict.accepted
            verdict.token = noise.draw(residual(p[i], q_tilde(i)), at + i)
        return verdict

    patch.setitem(loop.RULES, "block", faulty)


def block_that_keeps_what_each_token_test_would(patch: Patch) -> None:
    """h = pi everywhere, as if every place were a voluntary stop."""
    patch.setitem(loop.RULES, "block", lambda p, q_at, drafted, q_tilde, dropped, noise, at: next(
        Verdict(i, noise.draw(residual(p[i], q_tilde(i)) if i < len(drafted) else p[i], at + i), "bonus", False)
        for i in range(len(drafted), -1, -1)
        if noise.accept(min(1.0, float(np.prod([float(p[j, drafted[j]]) / q_at[j] for j in range(i)]))))))


def residual_without_truncation(patch: Patch) -> None:
    real = ElasticProposer.q_tilde

    def faulty(self: ElasticProposer, draft: Draft, i: int, like: torch.Tensor) -> torch.Tensor:
        draft.kept = [None] * len(draft.kept)
        return real(self, draft, i, like)

    patch.setattr(ElasticProposer, "q_tilde", faulty)


def accept_with_unprocessed_q(patch: Patch) -> None:
    real = ElasticProposer._sample

    def faulty(self: ElasticProposer, draft: Draft, logits: torch.Tensor, *rest: Any) -> bool:
        proposed = real(self, draft, logits, *rest)
        if proposed:
            draft.q_at[-1] = float(torch.softmax(logits, -1)[self.head_list.index(draft.tokens[-1])])
        return proposed

    patch.setattr(ElasticProposer, "_sample", faulty)


def bonus_from_the_draft(patch: Patch) -> None:
    real = Generation._verify

    def faulty(self: Generation, p_RV: torch.Tensor, draft: Draft, position: int) -> Verdict:
        if draft.tokens and not draft.dropped:
            target: Any = self.target
            tables, prefix = target.tables, (*self.tokens, *draft.tokens)
            q = torch.softmax(torch.from_numpy(tables.draft(prefix, draft.variant)), -1)
            p_RV = torch.cat([p_RV[:-1], q[None]])
        return real(self, p_RV, draft, position)

    patch.setattr(Generation, "_verify", faulty)


def crop_one_too_few(patch: Patch) -> None:
    def faulty(self: Generation, *_: Any) -> None:
        self.cache.crop(len(self.tokens))

    patch.setattr(Generation, "_rollback", faulty)


def stop_after_a_look_at_the_token(patch: Patch) -> None:
    """A biased stopper: a token that was sampled is thrown away as if it had never been."""
    real = ElasticProposer._sample

    def faulty(self: ElasticProposer, draft: Draft, *rest: Any) -> bool:
        if not real(self, draft, *rest):
            return False
        if draft.confidences[-1] < 0.5:
            for parts in (draft.tokens, draft.q_at, draft.confidences, draft.margins, draft.q_rows, draft.kept):
                parts.pop()  # type: ignore[attr-defined]
            return False
        return True

    patch.setattr(ElasticProposer, "_sample", faulty)


def last_before_the_first_failure(patch: Patch) -> None:
    """Block verification that stops at the first failed test from the front, instead of the largest that holds."""

    def faulty(p: torch.Tensor, q_at: Any, drafted: Any, q_tilde: Any, dropped: bool, noise: Noise, at: int) -> Verdict:
        k, pi = len(drafted), survival(p, q_at, drafted)
        for i in range(1, k + 1):
            last = i == k and not dropped
            h = pi[i] if last else block_threshold(pi[i], p[i], q_tilde(i))[0]
            if not noise.accept(h):
                rest = (pi[i - 1] * p[i - 1] - q_tilde(i - 1)).clamp_min(0)
                return Verdict(i - 1, noise.draw(rest if float(rest.sum()) > 0 else p[i - 1], at), "correction", True)
        rest = residual(p[k], q_tilde(k)) if dropped else p[k]
        return Verdict(k, noise.draw(rest, at + k), "bonus", False)

    patch.setitem(loop.RULES, "block", faulty)


def last_row_without_penalties(patch: Patch) -> None:
    real = Generation._adjust

    def faulty(self: Generation, logits_RV: torch.Tensor, draft: Draft) -> torch.Tensor:
        rows = real(self, logits_RV, draft)
        return torch.cat([rows[:-1], logits_RV[-1:]]) if len(rows) > 1 else rows

    patch.setattr(Generation, "_adjust", faulty)


def branches_tried_against_p(patch: Patch) -> None:
    """After the chain's token is rejected, branches are drawn from p and not from the residual."""

    def faulty(real: Any) -> Any:
        def rule(p: torch.Tensor, q_at: Any, drafted: Any, q_tilde: Any, dropped: bool, noise: Noise,
                 at: int) -> Verdict:
            verdict: Verdict = real(p, q_at, drafted, q_tilde, dropped, noise, at)
            if verdict.rejected:
                verdict.token = noise.draw(p[verdict.accepted], at + verdict.accepted)
            return verdict
        return rule

    for name, real in loop.RULES.items():
        patch.setitem(loop.RULES, name, faulty(real))


def branches_scored_with_soft_q(patch: Patch) -> None:
    """A branch is kept with min(1, p / q) as if it had been sampled, not taken for certain."""

    def faulty(self: Generation, p: torch.Tensor, draft: Draft, position: int) -> Verdict:
        proposer: Any = self.proposer
        verdict = self.rule(p, draft.q_at, draft.tokens, lambda i: proposer.q_tilde(draft, i, p[i]), draft.dropped,
                            self.noise, position)
        n = verdict.accepted
        for token, node in draft.children().get(n - 1, {}).items():
            if verdict.rejected and node >= len(draft.tokens) and self.noise.accept(
                    min(1.0, float(p[n, token]) / dict(draft.others[n])[token])):
                verdict.side, verdict.token = [node], self.noise.draw(p[node + 1], position + n + 1)
                break
        return verdict

    patch.setattr(Generation, "_verify", faulty)


def kept_branch_read_at_the_wrong_row(patch: Patch) -> None:
    """The token after a branch comes from the row of the chain's token beside it."""
    real = Generation._draw

    def faulty(self: Generation, p_RV: torch.Tensor, position: int) -> Callable[[int, int], int]:
        draw = real(self, p_RV, position)
        return lambda node, depth: draw(depth - 1, depth)

    patch.setattr(Generation, "_draw", faulty)


def branch_left_where_it_was_in_the_cache(patch: Patch) -> None:
    """The accepted path's keys and values are not moved up."""
    real = Generation._rollback

    def faulty(self: Generation, position: int, verdict: Verdict) -> None:
        real(self, position, Verdict(len(verdict.path), verdict.token, "", False))

    patch.setattr(Generation, "_rollback", faulty)


@dataclass
class Mutant:
    """A fault, and a case of `enumeration.CASES` that shows it, under these rules."""

    fault: Callable[[Patch], None]
    case: str
    rules: tuple[str, ...] = ("block", "token")

    @property
    def name(self) -> str:
        return self.fault.__name__


MUTANTS = [
    Mutant(stop_after_a_look_at_the_token, "fixed(2)"),
    Mutant(draw_from_p_after_a_drop, "paper, early rejection"),
    Mutant(residual_without_truncation, "paper, early rejection"),
    Mutant(block_with_the_token_rules_residual, "fixed(3), top_k", ("block",)),
    Mutant(block_that_keeps_what_each_token_test_would, "fixed(3), top_k", ("block",)),
    Mutant(last_before_the_first_failure, "fixed(3), top_k", ("block",)),
    Mutant(accept_with_unprocessed_q, "fixed(3), top_k"),
    Mutant(crop_one_too_few, "fixed(1)"),
    Mutant(bonus_from_the_draft, "fixed(2)"),
    Mutant(last_row_without_penalties, "fixed(2), penalties"),
    Mutant(last_row_without_penalties, "mtv(2,2), penalties"),
    Mutant(branches_tried_against_p, "mtv(2,2)"),
    Mutant(branches_scored_with_soft_q, "mtv(2,2)"),
    Mutant(kept_branch_read_at_the_wrong_row, "mtv(2,2)"),
    Mutant(branch_left_where_it_was_in_the_cache, "mtv(2,2)"),
]
