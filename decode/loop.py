"""The draft-verify loop for one request."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from draftsmith.data import DraftsmithError

from .attention import Tree
from .candidates import Draft
from .costs import MAX_DRAFT, Costs
from .device import synchronise
from .lookup import PromptLookup
from .meter import PerplexityMeter, log_probs_at
from .policies import Plan, Policy, Round, View
from .processors import Processors
from .profile import Laps
from .proposer import METER_ROWS, ElasticProposer
from .runner import DraftModel, Runner
from .sampling import Noise, SamplingParams, process
from .stats import Stats, Token
from .verify import Verdict, along, block, match, token_level

FEATURE_TOKENS = 8
RULES = {"block": block, "token": token_level}


class TargetFailure(DraftsmithError):
    """The target's weights or precision are at fault, not what was asked."""


def check_request(prompt: Sequence[int], params: SamplingParams, target: Runner) -> None:
    """Raise `DraftsmithError` for a prompt that does not fit the target, or for options that name tokens it does not
    have."""
    if not prompt:
        raise DraftsmithError("the prompt is empty: there is no token to continue from")
    if len(prompt) + 1 > target.context:
        raise DraftsmithError(f"the prompt has {len(prompt)} tokens, but the target's context is {target.context}; "
                              "shorten it")
    outside = f"outside the target's vocabulary of {target.vocab_size}"
    if bad := [i for i in params.stop_token_ids if not 0 <= i < target.vocab_size]:
        raise DraftsmithError(f"stop token id {bad[0]} is {outside}")
    if bad := [i for i in params.logit_bias if not 0 <= i < target.vocab_size]:
        raise DraftsmithError(f"logit_bias names token id {bad[0]}, {outside}")


class Generation:
    """One request: `prefill()` emits the first token, each `round()` at least one more.

    A round is `propose`, one pass of the target over `pass_ids`, and `finish`; requests of a batch share the pass.
    """

    def __init__(self, prompt: list[int], params: SamplingParams, policy: Policy, target: Runner,
                 draft: DraftModel | None, noise: Noise, eos_ids: frozenset[int], costs: Costs | None = None,
                 rule: str = "block", cache: Any = None, slot: int = 0) -> None:
        """`rule`: "block" or "token", how sampled chains are verified; both leave the target's distribution.
        `cache`: one of several requests, of which this one has `slot`."""
        check_request(prompt, params, target)
        self.params, self.policy, self.target, self.noise, self.costs = params, policy, target, noise, costs
        self.rule = RULES[rule]
        self.tokens, self.prompt_length = list(prompt), len(prompt)
        self.max_tokens = min(params.max_tokens, target.context - len(prompt))
        self.stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else eos_ids)
        self.dead_ends: dict[int, int] = {}  # rows where the processors leave nothing possible, and their positions
        self.draft_seconds = 0.0
        self.processors = Processors(params, prompt, self.stop_ids, target.vocab_size)
        capacity = len(prompt) + self.max_tokens
        # A tree has more nodes than the text can grow by.
        self.cache = cache or target.new_cache(1, capacity + MAX_DRAFT)
        self.slot, self.shared = slot, cache is not None
        self.laps = Laps()
        self.proposer: ElasticProposer | None = None
        if draft is not None and policy.wants_draft and len(prompt) < draft.context:
            self.proposer = ElasticProposer(draft, self.tokens, capacity, params, noise, self.processors, self.laps)
        self.lookup = PromptLookup() if policy.wants_lookup else None
        self.meter = PerplexityMeter()
        self.stats = Stats(prompt_tokens=len(prompt), parts=self.laps.seconds)
        self.last_hidden: torch.Tensor | None = None
        self.last_round: Round | None = None  # None until the first is finished

    @property
    def emitted(self) -> int:
        return len(self.tokens) - self.prompt_length

    @property
    def prompt_rows(self) -> int:
        """Rows of the end of the prompt that `begin` needs."""
        return min(self.prompt_length, METER_ROWS + 1) if self._metered else 1

    @torch.no_grad()
    def read(self, known: int, count: int) -> None:
        """Read a piece of the prompt, of which the cache holds `known` positions; `prefill` reads the last one."""
        self.laps.start()
        self.target.forward(self._ids(self.tokens[known : known + count]), self.cache, 1, self._place)
        synchronise(self.target.device)
        self.stats.target_seconds += self.laps.lap("target")

    @torch.no_grad()
    def prefill(self, share: Callable[[torch.Tensor, torch.Tensor], None] | None = None,
                known: int = 0) -> list[Token]:
        """Read the prompt; the first token. `share` is given the target's rows, for `begin` of another request with
        the same prompt. `known`: positions that the cache holds already, all but `prompt_rows` at most."""
        self.laps.start()
        hidden, logits = self.target.forward(self._ids(self.tokens[known:]), self.cache, self.prompt_rows, self._place)
        if share is not None:
            share(hidden[0], logits[0])
        return self.begin(hidden[0], logits[0])

    @torch.no_grad()
    def begin(self, hidden_RH: torch.Tensor, logits_RV: torch.Tensor) -> list[Token]:
        """The first token, given the target's rows of the end of the prompt."""
        synchronise(self.target.device)
        self.stats.target_seconds += self.laps.lap("target")
        first = len(self.tokens) - len(logits_RV) + 1
        if self._metered:
            for i, value in enumerate(log_probs_at(logits_RV, self.tokens[first:])):
                self.meter.target[first + i] = value
        p_RV = self._process(logits_RV[-1:], Draft())
        self._refuse_dead_end([0])
        token = self._draw(p_RV, len(self.tokens))(-1, 0)
        self.laps.lap("sampling")
        self.stats.ar += 1
        emitted = self._commit(Draft(), Verdict(0, token, "ar", False), p_RV, logits_RV[-1:], hidden_RH[-1:])
        self.laps.lap("verification")
        return emitted

    @torch.no_grad()
    def round(self) -> list[Token]:
        """One draft-verify cycle: propose, one target pass over the drafted tokens, keep what is the target's."""
        draft = self.propose()
        tree = None if draft.is_chain else Tree.of(self.pass_parents(draft), self.target.device)
        hidden, logits = self.target.forward(self._ids(self.pass_ids(draft)), self.cache, tree=tree)
        return self.finish(draft, hidden[0], logits[0])

    @torch.no_grad()
    def propose(self, batch: int = 1, room: int = MAX_DRAFT) -> Draft:
        """What this round's pass will verify: at most `room` nodes; `batch` requests share the pass."""
        self.laps.start()
        plan = self._plan(batch, room)
        self.laps.lap("policy")
        started = time.perf_counter()
        draft = self._draft(plan)
        self.draft_seconds = time.perf_counter() - started
        return draft

    def pass_ids(self, draft: Draft) -> list[int]:
        return [self.tokens[-1], *draft.nodes]

    @staticmethod
    def pass_parents(draft: Draft) -> list[int]:
        """Parents of the rows of the pass, of which the first is the text's last token."""
        return [-1, *(parent + 1 for parent in draft.parents)]

    @torch.no_grad()
    def finish(self, draft: Draft, hidden_RH: torch.Tensor, logits_RV: torch.Tensor, batch: int = 1,
               seconds: float | None = None) -> list[Token]:
        """Verify what was proposed, given the target's rows of the pass, which took `seconds` (None: all the time
        since `propose`)."""
        laps, position = self.laps, len(self.tokens)
        if seconds is None:
            synchronise(self.target.device)
            target_seconds = laps.lap("target")
        else:
            target_seconds = seconds
            laps.add("target", seconds)

        p_RV = self._process(logits_RV, draft)
        laps.lap("sampling")
        verdict = self._verify(p_RV, draft, position)
        rows = [0, *(node + 1 for node in verdict.path)]
        self._refuse_dead_end(rows)
        if verdict.side:  # the path's rows only; a chain's are the first
            p_RV, logits_RV, hidden_RH = p_RV[rows], logits_RV[rows], hidden_RH[rows]
        emitted = self._commit(draft, verdict, p_RV, logits_RV, hidden_RH)
        self._rollback(position, verdict)
        laps.lap("verification")

        self.last_round = finished = self._round(draft, verdict, p_RV, target_seconds, batch)
        self.policy.observe(finished)
        laps.lap("policy")
        return emitted

    def _plan(self, batch: int, room: int) -> Plan:
        # The last token of the budget comes from the target anyway: drafting for it would be waste.
        nodes = max(0, min(MAX_DRAFT, room, self.cache.capacity - len(self.tokens)))
        depth = max(0, min(nodes, self.max_tokens - self.emitted - 1))
        chain = 0
        if self.proposer is not None:
            chain = max(0, min(depth, self.proposer.room - len(self.tokens) - 1))
        plan = self.policy.plan(View(
            self.emitted, chain, self.meter, self.features, len(self.tokens),
            self.proposer is not None and self.proposer.runner.ahead,
            self.lookup.match(self.tokens) if self.lookup else (0, 0), depth, batch, self.target.cheap_trees,
            len(self.tokens) - self.proposer.cache.lengths[0] if self.proposer is not None else 0,
            self.max_tokens - self.emitted))
        plan.max_nodes = nodes if self.target.trees else 0
        return plan

    def _draft(self, plan: Plan) -> Draft:
        if plan.lookup and self.lookup is not None:
            draft = self.lookup.propose(self.tokens, plan.max_tokens, self.stop_ids)
            self.laps.lap("draft")
            return draft
        if self.proposer is None or plan.variant is None or len(self.tokens) > self.proposer.room:
            return Draft()
        meter = self.meter if self._metered else None
        return self.proposer.propose(self.tokens, plan, self.policy, meter, self.stop_ids)

    def _verify(self, p_RV: torch.Tensor, draft: Draft, position: int) -> Verdict:
        draw = self._draw(p_RV, position)
        if self.params.greedy or self.noise.coupled:
            verdict = match(draft, draw)
        else:
            proposer = self.proposer
            verdict = along(draft, self.rule(
                p_RV, draft.q_at, draft.tokens, lambda i: proposer.q_tilde(draft, i, p_RV[i]),  # type: ignore[union-attr]
                draft.dropped, self.noise, position), draw)
        if not draft.nodes and not draft.dropped:
            verdict.source = "ar"
        return verdict

    def _draw(self, p_RV: torch.Tensor, position: int) -> Callable[[int, int], int]:
        """draw(node, depth): the target's token after a node."""
        if self.params.greedy:
            best = p_RV.argmax(-1).tolist()
            return lambda node, depth: best[node + 1]
        return lambda node, depth: self.noise.draw(p_RV[node + 1], position + depth)

    def _process(self, logits_RV: torch.Tensor, draft: Draft) -> torch.Tensor:
        """What is sampled from, for the rows after the text and after each node."""
        position = len(self.tokens)
        if not bool(torch.isfinite(logits_RV.sum())):
            raise TargetFailure(f"the target's logits are not finite at position {position} "
                                f"({self.emitted} tokens emitted): the weights or the precision are at fault")
        if any(self.processors.active(position + i) for i in range(len(logits_RV))):
            logits_RV = self._adjust(logits_RV, draft)
        if self.params.greedy:
            return logits_RV  # argmax is all that is asked of it
        return process(logits_RV, self.params)

    def _adjust(self, logits_RV: torch.Tensor, draft: Draft) -> torch.Tensor:
        """Penalties, bans and the caller's processors, row by row."""
        rows, texts = list(logits_RV), [list(self.tokens)]
        self.dead_ends = {}
        unseen: set[int] = set()  # rows that no text reaches, or only one that has ended: no processor should see them
        for row, (parent, token) in enumerate(zip(self.pass_parents(draft), self.pass_ids(draft), strict=True)):
            if row:
                texts.append([*texts[parent], token])
                if parent in unseen or token in self.stop_ids or float(rows[parent][token]) == float("-inf"):
                    unseen.add(row)
                    continue
            adjusted = self.processors(rows[row], texts[row])
            if float(adjusted.max()) == float("-inf"):
                self.dead_ends[row] = len(texts[row])  # an error only if the text gets there
                unseen.add(row)
            else:
                rows[row] = adjusted
        return torch.stack(rows)

    def _refuse_dead_end(self, path_rows: list[int]) -> None:
        if found := [self.dead_ends[row] for row in path_rows if row in self.dead_ends]:
            raise DraftsmithError(f"logits_processors leave no token possible at position {found[0]}")
        self.dead_ends = {}

    def _commit(self, draft: Draft, verdict: Verdict, p_RV: torch.Tensor, logits_RV: torch.Tensor,
                hidden_RH: torch.Tensor) -> list[Token]:
        """Append the accepted tokens and the target's own; remember what features need. Rows are of the path."""
        position, nodes = len(self.tokens), draft.nodes
        new = [*(nodes[node] for node in verdict.path), verdict.token]
        p_at = [1.0] * len(new) if self.params.greedy else [float(p_RV[i, t]) for i, t in enumerate(new)]
        emitted = [Token(nodes[node], "accepted", p_at[i], draft.q_at[node] if node < len(draft.tokens) else 1.0,
                         draft.name) for i, node in enumerate(verdict.path)]
        emitted.append(Token(verdict.token, verdict.source, p_at[-1]))
        kept = verdict.accepted if draft.tokens else len(verdict.path)
        emitted[kept].replaced = draft.thrown_away(kept)
        if self.params.logprobs is not None:
            self._report(emitted, logits_RV)
        if self._metered:
            for i, value in enumerate(log_probs_at(logits_RV, new)):
                self.meter.target[position + i] = value
            if self.proposer is not None and draft.rows:
                judged = torch.stack(draft.rows[: verdict.accepted + 1])
                for i, value in enumerate(self.proposer.log_probs(judged, new[: len(judged)])):
                    self.meter.draft[position + i] = value
        self.tokens += new
        self.last_hidden = hidden_RH[len(new) - 1]
        return emitted

    def _report(self, emitted: list[Token], logits_RV: torch.Tensor) -> None:
        """Give tokens their log-probabilities and the likeliest alternatives."""
        assert self.params.logprobs is not None
        logp_RV = torch.log_softmax(logits_RV[: len(emitted)], -1)
        values, ids = logp_RV.topk(min(self.params.logprobs, logp_RV.shape[-1]), -1)
        for i, token in enumerate(emitted):
            token.logprob = float(logp_RV[i, token.id])
            token.top_logprobs = list(zip(ids[i].tolist(), values[i].tolist(), strict=True))

    def _rollback(self, position: int, verdict: Verdict) -> None:
        """Both caches forget everything but the committed text; its last token is not yet in them."""
        self.cache.compact(position, [position + node for node in verdict.path], self.slot)
        if self.proposer is not None:
            self.proposer.crop(min(len(self.tokens) - 1, position + verdict.accepted))

    def _count(self, draft: Draft, verdict: Verdict) -> None:
        s, verified, path = self.stats, len(draft.nodes), verdict.path
        # Candidates at one place are judged together: one of them was kept, or none.
        rejected = int((path[-1] if path else -1) in draft.parents)
        s.steps += 1
        s.drafted += verified + int(draft.dropped)
        s.verified += verified
        s.accepted += len(path)
        s.rejected += rejected
        s.wasted += verified - len(path) - rejected
        s.corrections += int(verdict.source == "correction")
        s.bonus += int(verdict.source == "bonus")
        s.ar += int(verdict.source == "ar")
        for i in range(len(path) + rejected):
            s.judged_by_position[i] += 1
            s.accepted_by_position[i] += int(i < len(path))
        if draft.name:
            s.variants[draft.name] = s.variants.get(draft.name, 0) + 1
        if draft.variant is not None:  # what was read, and a row for each step after
            rows = draft.read + max(0, draft.steps - 1)
            s.draft_rows[draft.variant.name] = s.draft_rows.get(draft.variant.name, 0) + rows
            s.draft_heads[draft.variant.name] = s.draft_heads.get(draft.variant.name, 0) + draft.steps
            s.draft_lag += draft.lag

    def _round(self, draft: Draft, verdict: Verdict, p_RV: torch.Tensor, target_seconds: float, batch: int) -> Round:
        """Count a finished round, and tell the policy of it."""
        self._count(draft, verdict)
        self.stats.target_seconds += target_seconds
        self.stats.draft_seconds += self.draft_seconds
        emitted = len(verdict.path) + 1
        if self.costs is not None:
            context = len(self.tokens) - emitted
            if batch == 1 and (draft.is_chain or self.target.cheap_trees):
                self.costs.update_verify(len(draft.nodes) + 1, target_seconds, context)
            # Rounds that first read a prompt or caught up are not what a step costs.
            if draft.variant is not None and draft.steps and draft.read <= 2:
                self.costs.update_step(draft.variant.name, self.draft_seconds / draft.steps, context)
        if draft.source == "lookup":  # one path of side nodes, judged as a chain would be
            kept, rejected, labels = len(verdict.path), verdict.source == "correction", []
            return Round(None, len(draft.nodes), kept, rejected, emitted, labels=[1.0] * kept + [0.0] * rejected,
                         target_seconds=target_seconds, draft_seconds=self.draft_seconds, matched=draft.matched)
        n = verdict.accepted
        judged = n + int(verdict.rejected)
        labels = [float(i < n) for i in range(judged)]
        if not self.params.greedy and not self.noise.coupled:
            labels = [min(1.0, float(p_RV[i, draft.tokens[i]]) / draft.q_at[i]) for i in range(judged)]
        others = []
        if verdict.rejected and n < len(draft.others):
            instead = self.tokens[len(self.tokens) - emitted + n]
            others = [token == instead for token, _ in draft.others[n]]
        return Round(draft.variant, len(draft.tokens), n, verdict.rejected, emitted, draft.confidences, draft.margins,
                     labels, target_seconds, self.draft_seconds, draft.cut, others=others,
                     read=draft.read)

    def close(self) -> None:
        """Let go of everything large: nothing more will be asked of it."""
        for name in ("cache", "proposer", "lookup", "noise", "processors", "meter", "last_hidden"):
            setattr(self, name, None)

    def features(self) -> torch.Tensor:
        """The gate's input: mean target embedding of the last 8 tokens, then the last hidden state."""
        assert self.last_hidden is not None
        return gate_features(self.target, self.tokens, self.last_hidden)

    @property
    def _metered(self) -> bool:
        return self.policy.wants_perplexity and self.proposer is not None

    @property
    def _place(self) -> range | None:
        """Of this request in a cache of several."""
        return range(self.slot, self.slot + 1) if self.shared else None

    def _ids(self, tokens: list[int]) -> torch.Tensor:
        return torch.tensor([tokens], device=self.target.device)


def gate_features(target: Any, tokens: list[int], hidden_H: torch.Tensor) -> torch.Tensor:
    """Float32 [2H] on the CPU."""
    recent = torch.tensor(tokens[-FEATURE_TOKENS:], device=target.device)
    return torch.cat([target.embed(recent).float().mean(0), hidden_H.float()]).cpu()
