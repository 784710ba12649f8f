"""The draft-verify loop for one request."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from draftsmith.data import DraftsmithError

from .costs import Costs
from .device import synchronise
from .draft import DraftRunner
from .meter import PerplexityMeter, log_probs_at
from .policies import Plan, Policy, Round, View
from .processors import Processors
from .profile import Laps
from .proposer import METER_ROWS, Draft, ElasticProposer
from .runner import Runner
from .sampling import Noise, SamplingParams, process
from .verify import Verdict, block, match, token_level

FEATURE_TOKENS = 8
RULES = {"block": block, "token": token_level}


@dataclass
class Token:
    """An emitted token and where it came from: "accepted", "correction", "bonus" or "ar".

    p: the target's probability of it after all processing; q: the draft's, for accepted tokens. logprob: of the
    target's own logits, and top_logprobs (id, logprob) of the likeliest, where `SamplingParams.logprobs` asks.
    """

    id: int
    source: str
    p: float
    q: float | None = None
    variant: str | None = None
    logprob: float | None = None
    top_logprobs: list[tuple[int, float]] = field(default_factory=list)


@dataclass
class Stats:
    """Counters of one generation. `steps` are target passes after the prefill; `parts`: seconds by
    `profile.PARTS`."""

    prompt_tokens: int = 0
    drafted: int = 0
    verified: int = 0
    accepted: int = 0
    rejected: int = 0
    wasted: int = 0
    corrections: int = 0
    bonus: int = 0
    ar: int = 0
    trimmed: int = 0
    emitted: int = 0
    steps: int = 0
    ttft: float = 0.0
    seconds: float = 0.0
    target_seconds: float = 0.0
    draft_seconds: float = 0.0
    parts: dict[str, float] = field(default_factory=dict)
    accepted_by_position: list[int] = field(default_factory=lambda: [0] * 16)
    judged_by_position: list[int] = field(default_factory=lambda: [0] * 16)
    variants: dict[str, int] = field(default_factory=dict)
    policy: dict[str, float] = field(default_factory=dict)

    @property
    def acceptance_rate(self) -> float | None:
        """accepted / (accepted + rejected); None when nothing was judged."""
        judged = self.accepted + self.rejected
        return self.accepted / judged if judged else None

    @property
    def tokens_per_step(self) -> float | None:
        """Emitted tokens a target pass after the prefill; the prefill's own token is left out."""
        return (self.emitted - 1) / self.steps if self.steps else None

    def check(self) -> None:
        """The counters reconcile (DESIGN, section 7, rule 7)."""
        assert self.drafted >= self.verified >= self.accepted + self.rejected
        assert self.verified == self.accepted + self.rejected + self.wasted
        assert self.emitted == self.accepted + self.corrections + self.bonus + self.ar - self.trimmed


class Generation:
    """One request: `prefill()` emits the first token, each `round()` at least one more."""

    def __init__(self, prompt: list[int], params: SamplingParams, policy: Policy, target: Runner,
                 draft: DraftRunner | None, noise: Noise, eos_ids: frozenset[int], costs: Costs | None = None,
                 rule: str = "block") -> None:
        """`rule`: "block" or "token", how sampled chains are verified; both leave the target's distribution."""
        if not prompt:
            raise DraftsmithError("the prompt is empty: there is no token to continue from")
        if len(prompt) + 1 > target.context:
            raise DraftsmithError(f"the prompt has {len(prompt)} tokens, but the target's context is "
                                  f"{target.context}; shorten it")
        self.params, self.policy, self.target, self.noise, self.costs = params, policy, target, noise, costs
        self.rule = RULES[rule]
        self.tokens, self.prompt_length = list(prompt), len(prompt)
        if bad := [i for i in params.stop_token_ids if not 0 <= i < target.vocab_size]:
            raise DraftsmithError(f"stop token id {bad[0]} is outside the target's vocabulary of {target.vocab_size}")
        self.max_tokens = min(params.max_tokens, target.context - len(prompt))
        self.stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else eos_ids)
        if bad := [i for i in params.logit_bias if not 0 <= i < target.vocab_size]:
            raise DraftsmithError(f"logit_bias names token id {bad[0]}, outside the target's vocabulary of "
                                  f"{target.vocab_size}")
        self.dead_end: int | None = None  # drafted tokens after which the processors leave nothing possible
        self.processors = Processors(params, prompt, self.stop_ids, target.vocab_size)
        capacity = len(prompt) + self.max_tokens
        self.cache = target.new_cache(1, capacity)
        self.laps = Laps()
        self.proposer: ElasticProposer | None = None
        if draft is not None and policy.name != "ar" and len(prompt) < draft.context:
            self.proposer = ElasticProposer(draft, self.tokens, capacity, params, noise, self.processors, self.laps)
        self.meter = PerplexityMeter()
        self.stats = Stats(prompt_tokens=len(prompt), parts=self.laps.seconds)
        self.last_hidden: torch.Tensor | None = None
        self.on_round: Callable[[Generation, Round], None] | None = None

    @property
    def emitted(self) -> int:
        return len(self.tokens) - self.prompt_length

    @torch.no_grad()
    def prefill(self) -> list[Token]:
        keep = min(len(self.tokens), METER_ROWS + 1) if self._metered else 1
        self.laps.start()
        hidden, logits = self.target.forward(self._ids(self.tokens), self.cache, keep)
        synchronise(self.target.device)
        self.stats.target_seconds += self.laps.lap("target")
        first = len(self.tokens) - keep + 1
        if self._metered:
            for i, value in enumerate(log_probs_at(logits[0], self.tokens[first:])):
                self.meter.target[first + i] = value
        p_RV = self._process(logits[0, -1:], [])
        self._refuse_dead_end(0)
        token = self._target_tokens(p_RV, len(self.tokens))[0]
        self.laps.lap("sampling")
        self.stats.ar += 1
        emitted = self._commit(Draft(), Verdict(0, token, "ar", False), p_RV, logits[0, -1:], hidden[0, -1:])
        self.laps.lap("verification")
        return emitted

    @torch.no_grad()
    def round(self) -> list[Token]:
        """One draft-verify cycle: propose, one target pass over the drafted tokens, keep what is the target's."""
        laps, position = self.laps, len(self.tokens)
        laps.start()
        plan = self._plan()
        laps.lap("policy")

        started = time.perf_counter()
        draft = self._propose(plan)
        draft_seconds = time.perf_counter() - started
        hidden, logits = self.target.forward(self._ids([self.tokens[-1], *draft.tokens]), self.cache)
        synchronise(self.target.device)
        target_seconds = laps.lap("target")

        p_RV = self._process(logits[0], draft.tokens)
        laps.lap("sampling")
        verdict = self._verify(p_RV, draft, position)
        self._refuse_dead_end(verdict.accepted)
        emitted = self._commit(draft, verdict, p_RV, logits[0], hidden[0])
        self._rollback()
        laps.lap("verification")

        finished = self._round(draft, verdict, p_RV, draft_seconds, target_seconds)
        self.policy.observe(finished)
        if self.on_round is not None:
            self.on_round(self, finished)
        laps.lap("policy")
        return emitted

    def _plan(self) -> Plan:
        # The last token of the budget comes from the target anyway: drafting for it would be waste.
        room = self.max_tokens - self.emitted - 1
        if self.proposer is not None:
            room = min(room, self.proposer.room - len(self.tokens) - 1)
        return self.policy.plan(View(self.emitted, max(0, min(16, room)), self.meter, self.features, len(self.tokens),
                                     self.proposer is not None and self.proposer.runner.ahead))

    def _propose(self, plan: Plan) -> Draft:
        if self.proposer is None or plan.variant is None or len(self.tokens) > self.proposer.room:
            return Draft()
        meter = self.meter if self._metered else None
        return self.proposer.propose(self.tokens, plan, self.policy, meter, self.stop_ids)

    def _verify(self, p_RV: torch.Tensor, draft: Draft, position: int) -> Verdict:
        if self.params.greedy or self.noise.coupled:
            verdict = match(self._target_tokens(p_RV, position), draft.tokens)
            if draft.dropped and verdict.source == "bonus":
                verdict.source = "correction"  # of the dropped token, as in the uncoupled rule
        else:
            proposer = self.proposer
            verdict = self.rule(
                p_RV, draft.q_at, draft.tokens, lambda i: proposer.q_tilde(draft, i, p_RV[i]),  # type: ignore[union-attr]
                draft.dropped, self.noise, position)
        if not draft.tokens and not draft.dropped:
            verdict.source = "ar"
        return verdict

    def _target_tokens(self, p_RV: torch.Tensor, position: int) -> list[int]:
        if self.params.greedy:
            return p_RV.argmax(-1).tolist()
        return [self.noise.draw(p, position + i) for i, p in enumerate(p_RV)]

    def _process(self, logits_RV: torch.Tensor, drafted: list[int]) -> torch.Tensor:
        """What is sampled from, for the rows after the text and after each drafted token."""
        position = len(self.tokens)
        if not bool(torch.isfinite(logits_RV.sum())):
            raise DraftsmithError(f"the target's logits are not finite at position {position} "
                                  f"({self.emitted} tokens emitted): the weights or the precision are at fault")
        if any(self.processors.active(position + i) for i in range(len(logits_RV))):
            logits_RV = self._adjust(logits_RV, drafted)
        if self.params.greedy:
            return logits_RV  # argmax is all that is asked of it
        return process(logits_RV, self.params)

    def _adjust(self, logits_RV: torch.Tensor, drafted: list[int]) -> torch.Tensor:
        """Penalties, bans and the caller's processors, row by row."""
        rows, position = list(logits_RV), len(self.tokens)
        text = [*self.tokens, *drafted]
        self.dead_end = None
        for i, row in enumerate(rows):
            adjusted = self.processors(row, text[: position + i])
            if float(adjusted.max()) == float("-inf"):
                self.dead_end = i  # an error only if the text gets there
                break
            rows[i] = adjusted
            # No processor should see a text that cannot be, or that has ended.
            if i < len(drafted) and (drafted[i] in self.stop_ids or float(adjusted[drafted[i]]) == float("-inf")):
                break
        return torch.stack(rows)

    def _refuse_dead_end(self, accepted: int) -> None:
        if self.dead_end is not None and accepted >= self.dead_end:
            raise DraftsmithError(f"logits_processors leave no token possible at position "
                                  f"{len(self.tokens) + self.dead_end}")
        self.dead_end = None

    def _commit(self, draft: Draft, verdict: Verdict, p_RV: torch.Tensor, logits_RV: torch.Tensor,
                hidden_RH: torch.Tensor) -> list[Token]:
        """Append the accepted tokens and the target's own; count them; remember what features need."""
        n, position = verdict.accepted, len(self.tokens)
        new = [*draft.tokens[:n], verdict.token]
        p_at = [1.0] * len(new) if self.params.greedy else [float(p_RV[i, t]) for i, t in enumerate(new)]
        name = draft.variant.name if draft.variant else None
        emitted = [Token(t, "accepted", p_at[i], draft.q_at[i], name) for i, t in enumerate(draft.tokens[:n])]
        emitted.append(Token(verdict.token, verdict.source, p_at[n]))
        if self.params.logprobs is not None:
            self._report(emitted, logits_RV)
        if self._metered:
            for i, value in enumerate(log_probs_at(logits_RV, new)):
                self.meter.target[position + i] = value
            if self.proposer is not None and draft.rows:
                judged = torch.stack(draft.rows[: n + 1])
                for i, value in enumerate(self.proposer.log_probs(judged, new[: len(judged)])):
                    self.meter.draft[position + i] = value
        self.tokens += new
        self.last_hidden = hidden_RH[n]
        return emitted

    def _report(self, emitted: list[Token], logits_RV: torch.Tensor) -> None:
        """Give tokens their log-probabilities and the likeliest alternatives."""
        assert self.params.logprobs is not None
        logp_RV = torch.log_softmax(logits_RV[: len(emitted)], -1)
        values, ids = logp_RV.topk(min(self.params.logprobs, logp_RV.shape[-1]), -1)
        for i, token in enumerate(emitted):
            token.logprob = float(logp_RV[i, token.id])
            token.top_logprobs = list(zip(ids[i].tolist(), values[i].tolist(), strict=True))

    def _rollback(self) -> None:
        """Both caches forget everything but the committed text; its last token is not yet in them."""
        self.cache.crop(len(self.tokens) - 1)
        if self.proposer is not None:
            self.proposer.crop(len(self.tokens) - 1)

    def _round(self, draft: Draft, verdict: Verdict, p_RV: torch.Tensor, draft_seconds: float,
               target_seconds: float) -> Round:
        s, k = self.stats, len(draft.tokens)
        s.steps += 1
        s.drafted += k + int(draft.dropped)
        s.verified += k
        s.accepted += verdict.accepted
        s.rejected += int(verdict.rejected)
        s.wasted += k - verdict.accepted - int(verdict.rejected)
        s.corrections += int(verdict.source == "correction")
        s.bonus += int(verdict.source == "bonus")
        s.ar += int(verdict.source == "ar")
        s.target_seconds += target_seconds
        s.draft_seconds += draft_seconds
        judged = verdict.accepted + int(verdict.rejected)
        for i in range(judged):
            s.judged_by_position[i] += 1
            s.accepted_by_position[i] += int(i < verdict.accepted)
        if draft.variant is not None:
            s.variants[draft.variant.name] = s.variants.get(draft.variant.name, 0) + 1
        if self.costs is not None:
            context = len(self.tokens) - verdict.accepted - 1
            self.costs.update_verify(k + 1, target_seconds, context)
            # Rounds that first read a prompt or caught up are not what a step costs.
            if draft.variant is not None and k > 1 and draft.read <= 2:
                self.costs.update_step(draft.variant.name, draft_seconds / draft.steps, context)
        labels = [float(i < verdict.accepted) for i in range(judged)]
        if not self.params.greedy and not self.noise.coupled:
            labels = [min(1.0, float(p_RV[i, draft.tokens[i]]) / draft.q_at[i]) for i in range(judged)]
        return Round(draft.variant, k, verdict.accepted, verdict.rejected, verdict.accepted + 1, draft.confidences,
                     draft.margins, labels, target_seconds, draft_seconds, draft.cut)

    def features(self) -> torch.Tensor:
        """The gate's input: mean target embedding of the last 8 tokens, then the last hidden state."""
        assert self.last_hidden is not None
        return gate_features(self.target, self.tokens, self.last_hidden)

    @property
    def _metered(self) -> bool:
        return self.policy.wants_perplexity and self.proposer is not None

    def _ids(self, tokens: list[int]) -> torch.Tensor:
        return torch.tensor([tokens], device=self.target.device)


def gate_features(target: Any, tokens: list[int], hidden_H: torch.Tensor) -> torch.Tensor:
    """Float32 [2H] on the CPU."""
    recent = torch.tensor(tokens[-FEATURE_TOKENS:], device=target.device)
    return torch.cat([target.embed(recent).float().mean(0), hidden_H.float()]).cpu()
