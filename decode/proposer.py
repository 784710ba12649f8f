"""The elastic draft as a proposer: what it drafts, and exactly the distribution it drafted from."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from draftsmith.distill.variants import Variant

from .candidates import Draft, branch
from .meter import PerplexityMeter, log_probs_in_head
from .policies import Plan, Policy
from .processors import Processors
from .profile import Laps
from .runner import DraftModel
from .sampling import GumbelNoise, Noise, SamplingParams, process

METER_ROWS = 32  # positions of a long catch-up (a prompt) that enter the perplexity


@dataclass
class _Ahead:
    """Logits of each drafted position, and the index picked from each."""

    rows: list[torch.Tensor]
    picks: list[int]


class ElasticProposer:
    """Runs an elastic draft for one request; its cache follows the committed text."""

    def __init__(self, runner: DraftModel, prompt: list[int], capacity: int, params: SamplingParams, noise: Noise,
                 processors: Processors, laps: Laps | None = None) -> None:
        self.runner, self.params, self.noise, self.laps = runner, params, noise, laps or Laps()
        self.processors = processors
        self.cache = runner.new_cache(capacity, prompt)
        self.head_ids = self.cache.head_ids
        self.head_list: list[int] = self.head_ids.tolist()
        self.rows = {token: row for row, token in enumerate(self.head_list)}
        self.room = self.cache.capacity

    def read(self, tokens: list[int], variant: Variant, meter: PerplexityMeter | None) -> torch.Tensor:
        """Run the draft over the committed tokens it has not seen; logits [D] for the next one."""
        seen = self.cache.lengths[0]
        unseen = tokens[seen:]
        keep = min(len(unseen), METER_ROWS + 1) if meter is not None else 1
        ids = torch.tensor([unseen], device=self.head_ids.device)
        logits = self.runner.forward(ids, self.cache, variant, keep)
        self.laps.lap("draft")
        if meter is not None and keep > 1:
            first = len(tokens) - keep + 1  # absolute position that row 0 predicts
            for i, value in enumerate(self.log_probs(logits, tokens[first:])):
                meter.draft[first + i] = value
            self.laps.lap("policy")
        return logits[-1]

    def log_probs(self, logits: torch.Tensor, tokens: list[int]) -> list[float]:
        """Log-probability at temperature 1 of tokens[i] under row i; -inf where the trimmed head lacks it."""
        return log_probs_in_head(logits, self.rows, tokens)

    def propose(self, tokens: list[int], plan: Plan, policy: Policy, meter: PerplexityMeter | None,
                stop_ids: frozenset[int]) -> Draft:
        """Draft a chain of up to `plan.max_tokens` after `tokens` and its side branches, `plan.max_nodes` in all;
        the chain ends after a token in `stop_ids`."""
        assert plan.variant is not None
        draft = Draft("draft", plan.variant)
        draft.read = len(tokens) - self.cache.lengths[0]
        if plan.variant.depth > self.runner.shape.exit:
            draft.lag = self.cache.lengths[0] - self.cache.deep
        logits = self.read(tokens, plan.variant, meter)
        # Penalties need the tokens that were drafted, which drafting ahead does not wait for.
        ahead = self._look_ahead(logits, plan, tokens) if self.runner.ahead and not self.processors.stateful else None
        draft.rows.append(logits)
        draft.steps = len(ahead.rows) if ahead else 1
        while len(draft.tokens) < plan.max_tokens:
            index = len(draft.tokens)
            logits = self._processed(logits, tokens, draft.tokens)
            top = logits.topk(2).values if policy.wants_margin and len(logits) > 1 else None
            margin = float(top[0] - top[1]) if top is not None else 0.0
            if not policy.proceed(index, margin):
                self.laps.lap("policy")
                break
            self.laps.lap("policy")
            pick = ahead.picks[index] if ahead else None
            more = self._sample(draft, logits, margin, len(tokens) + index, plan.min_confidence, pick)
            if more and policy.max_width > 1:
                draft.others.append(self._others(draft, logits, policy.max_width))
            self.laps.lap("sampling")
            if not more or index + 1 == plan.max_tokens or draft.tokens[-1] in stop_ids:
                break
            if ahead is None and not policy.deepen(index):
                break
            logits = ahead.rows[index + 1] if ahead else self._step(draft.tokens[-1], plan.variant)
            draft.rows.append(logits)
            draft.steps += 0 if ahead else 1
        if draft.tokens and policy.max_width > 1:
            branch(draft, policy.widths(draft.margins), plan.max_nodes)
        return draft

    def _others(self, draft: Draft, logits: torch.Tensor, width: int) -> list[tuple[int, float]]:
        """The likeliest tokens beside the chain's last one, with their probabilities."""
        raw = torch.log_softmax(logits, -1) if self.params.greedy else draft.q_rows[-1].log()
        values, rows = raw.topk(min(width, len(raw)))
        pairs = [(self.head_list[r], q) for r, q in zip(rows.tolist(), values.exp().tolist(), strict=True)]
        return [(token, q) for token, q in pairs if q > 0 and token != draft.tokens[-1]][: width - 1]

    def _step(self, token: int, variant: Variant) -> torch.Tensor:
        ids = torch.tensor([[token]], device=self.head_ids.device)
        logits = self.runner.forward(ids, self.cache, variant)[0]
        self.laps.lap("draft")
        return logits

    def _processed(self, logits: torch.Tensor, tokens: list[int], drafted: list[int]) -> torch.Tensor:
        """What the target's logits will undergo too, so that the draft stays close to it."""
        if not self.processors.active(len(tokens) + len(drafted)):
            return logits
        return self.processors(logits, [*tokens, *drafted], self.rows)

    def _look_ahead(self, logits: torch.Tensor, plan: Plan, tokens: list[int]) -> _Ahead:
        """Draft all tokens of a plan on the device, without waiting for any of them.

        What is drafted past the place where a rule would have stopped is not proposed: the rules look at the
        same rows afterwards, in order.
        """
        assert plan.variant is not None
        rows, picks = [logits], []
        for i in range(plan.max_tokens):
            processed = self._processed(rows[-1], tokens, [0] * i)  # only their number matters here
            if self.params.greedy:
                pick = processed.argmax()
            else:
                pick = self.noise.pick(process(processed[None], self.params)[0], len(tokens) + i, self.head_ids)
            picks.append(pick)
            if i + 1 < plan.max_tokens:
                token = self.head_ids.index_select(0, pick.view(1))  # plain indexing would wait for its value
                rows.append(self.runner.forward(token.view(1, 1), self.cache, plan.variant)[0])
        ahead = _Ahead(rows, torch.stack(picks).tolist() if picks else [])  # the one wait
        self.laps.lap("draft")
        return ahead

    def _sample(self, draft: Draft, logits: torch.Tensor, margin: float, position: int, floor: float,
                pick: int | None) -> bool:
        """Sample one token into `draft`, or take the one picked ahead; False when early rejection, or a draft gone
        NaN, ends it.

        Both depend on the prefix and on q before sampling alone, or truncate the proposal.
        """
        best = float(logits.max())
        if best != best or best == float("-inf"):  # NaN, or nothing in the trimmed head is possible here
            return False
        raw = torch.log_softmax(logits, dim=-1)
        if self.params.greedy:
            row = int(logits.argmax()) if pick is None else pick
            confidence = float(raw[row].exp())
            if confidence < floor:
                draft.cut = True  # deterministic given the prefix: stops before proposing
                return False
            draft.q_at.append(1.0)
        else:
            q = process(logits[None], self.params)[0]
            if pick is not None:
                row = pick
            elif isinstance(self.noise, GumbelNoise):
                row = self.noise.draw(q, position, self.head_ids)
            else:
                row = self.noise.draw(q, position)
            confidence = float(raw[row].exp())
            draft.q_rows.append(q)
            draft.kept.append(raw.exp() >= floor if floor > 0 else None)
            if confidence < floor:
                draft.dropped = draft.cut = True
                return False
            draft.q_at.append(float(q[row]))
        draft.tokens.append(self.head_list[row])
        draft.confidences.append(confidence)
        draft.margins.append(margin)
        return True

    def q_tilde(self, draft: Draft, i: int, like: torch.Tensor) -> torch.Tensor:
        """The truncated proposal at index i over the target's vocabulary, in `like`'s precision."""
        kept = draft.kept[i]
        q = draft.q_rows[i] if kept is None else torch.where(kept, draft.q_rows[i], 0.0)
        return torch.zeros_like(like).index_copy_(0, self.head_ids, q.to(like.dtype))

    def crop(self, length: int) -> None:
        self.cache.crop(length)
