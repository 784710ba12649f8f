"""Every outcome of the production loop, enumerated in float64: the text has the target's distribution."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from draftsmith.decode import loop
from draftsmith.decode.costs import Costs
from draftsmith.decode.goodput import Goodput
from draftsmith.decode.loop import Generation
from draftsmith.decode.policies import Fixed, Paper, PaperSettings, Plan, Policy, View
from draftsmith.decode.proposer import Draft, ElasticProposer
from draftsmith.decode.sampling import Noise, SamplingParams
from draftsmith.decode.verify import Verdict, residual
from draftsmith.distill.variants import DraftShape, Variant

SHAPE = DraftShape(layers=4, exit=2, buckets=(1.0, 1.5), hidden=1, intermediate=6, head=3)
PROMPT = [0, 1, 1]
EXACT, CAUGHT = 1e-12, 1e-3


def scripted_logits(key: tuple[int, ...], vocab: int) -> np.ndarray:
    """Float64 logits that any change of the prefix changes."""
    return 1.5 * np.random.default_rng(key).standard_normal(vocab)


class Tables:
    """Target and draft logits of every prefix; the draft is a distorted target, each variant its own way."""

    def __init__(self, vocab: int) -> None:
        self.vocab = vocab
        self.known: dict[tuple[Any, ...], np.ndarray] = {}

    def target(self, prefix: tuple[int, ...]) -> np.ndarray:
        if prefix not in self.known:
            self.known[prefix] = scripted_logits((0, *prefix), self.vocab)
        return self.known[prefix]

    def draft(self, prefix: tuple[int, ...], variant: Variant) -> np.ndarray:
        key = (variant.name, *prefix)
        if key not in self.known:
            own = scripted_logits((variant.depth, int(10 * variant.alpha), *prefix), self.vocab)
            self.known[key] = 0.6 * self.target(prefix) + 0.6 * own
        return self.known[key]


class PrefixCache:
    """Holds the tokens themselves, so that a wrong rollback changes the logits."""

    def __init__(self, capacity: int) -> None:
        self.tokens: list[int] = []
        self.capacity = capacity
        self.head_ids = torch.empty(0)

    @property
    def lengths(self) -> list[int]:
        return [len(self.tokens)]

    def crop(self, length: int, request: int = 0) -> None:
        del self.tokens[length:]

    def extend(self, ids: torch.Tensor) -> list[tuple[int, ...]]:
        """Append tokens; the prefix that ends with each of them."""
        prefixes = []
        for token in ids[0].tolist():
            self.tokens.append(token)
            prefixes.append(tuple(self.tokens))
        return prefixes


class ScriptedTarget:
    context, max_batch, device = 64, 1, torch.device("cpu")

    def __init__(self, tables: Tables) -> None:
        self.tables, self.vocab_size = tables, tables.vocab

    def new_cache(self, batch: int, capacity: int) -> PrefixCache:
        return PrefixCache(capacity)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(ids), 1)

    def forward(
        self, ids: torch.Tensor, cache: PrefixCache, keep: int | None = None, slots: range | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows = np.stack([self.tables.target(p) for p in cache.extend(ids)[-(keep or 10**6) :]])
        return torch.zeros(1, len(rows), 1), torch.from_numpy(rows)[None]


class ScriptedDraft:
    context = 64

    def __init__(self, tables: Tables, head: Sequence[int], ahead: bool) -> None:
        self.tables, self.shape, self.head_ids, self.ahead = tables, SHAPE, torch.tensor(head), ahead

    def new_cache(self, capacity: int, prompt: list[int] | None = None) -> PrefixCache:
        cache = PrefixCache(capacity)
        cache.head_ids = self.head_ids
        return cache

    def forward(self, ids: torch.Tensor, cache: PrefixCache, variant: Variant, keep: int | None = None) -> torch.Tensor:
        rows = np.stack([self.tables.draft(p, variant) for p in cache.extend(ids)[-(keep or 10**6) :]])
        return torch.from_numpy(rows)[:, self.head_ids]


class Branches(Noise):
    """Follows a script of decisions, then takes the first branch; remembers how wide each fork was."""

    def __init__(self, script: list[int]) -> None:
        self.script = script
        self.taken: list[int] = []
        self.widths: list[int] = []
        self.weight = 1.0

    def fork(self, weights: Sequence[float]) -> int:
        possible = [i for i, w in enumerate(weights) if w > 0]
        pick = self.script[len(self.taken)] if len(self.taken) < len(self.script) else 0
        self.taken.append(pick)
        self.widths.append(len(possible))
        self.weight *= weights[possible[pick]]
        return possible[pick]

    def accept(self, probability: float) -> bool:
        return self.fork([probability, 1.0 - probability]) == 0

    def draw(self, probs_V: torch.Tensor, position: int) -> int:
        return self.fork((probs_V / probs_V.sum()).tolist())

    def pick(self, probs_D: torch.Tensor, position: int, ids_D: torch.Tensor) -> torch.Tensor:
        return torch.tensor(self.draw(probs_D, position))


def every_branch() -> Iterator[Branches]:
    """Noise for each outcome in turn: to be used up before the next is asked for."""
    script: list[int] = []
    while True:
        noise = Branches(script)
        yield noise
        taken, widths = noise.taken, noise.widths
        while taken and taken[-1] + 1 == widths[-1]:
            taken.pop()
            widths.pop()
        if not taken:
            return
        script = [*taken[:-1], taken[-1] + 1]


@dataclass
class Case:
    policy: Callable[[], Policy]
    params: dict[str, Any] = field(default_factory=dict)
    vocab: int = 3
    head: tuple[int, ...] | None = None
    length: int = 4
    eos: frozenset[int] = frozenset()
    must: tuple[str, ...] = ("accepted", "rejected", "bonus")  # events that have to occur in some branch

    def sampling(self) -> SamplingParams:
        return SamplingParams(**{"temperature": 1.0, "max_tokens": self.length, **self.params})

    def generation(self, tables: Tables, noise: Branches, ahead: bool, rule: str) -> Generation:
        target: Any = ScriptedTarget(tables)
        draft: Any = ScriptedDraft(tables, self.head or tuple(range(self.vocab)), ahead)
        return Generation(list(PROMPT), self.sampling(), self.policy(), target, draft, noise, self.eos, rule=rule)


def paper(**settings: Any) -> Callable[[], Policy]:
    chosen = PaperSettings(**{"tau": 0.0, "window_start": 2, **settings})
    return lambda: Paper(SHAPE, None, Variant(2), chosen)


def goodput() -> Callable[[], Policy]:
    steps = {v.name: 0.05 * (1 + i) for i, v in enumerate(SHAPE.variants())}
    costs = Costs([1.0 + 0.05 * i for i in range(17)], steps)
    return lambda: Goodput(SHAPE, costs, {"acceptance": {}, "margin": [-0.5, 1.0]})


def fixed(k: int) -> Callable[[], Policy]:
    return lambda: Fixed(k, Variant(4))


def no_token_twice(answer: list[int], logits: torch.Tensor) -> torch.Tensor:
    """A grammar: a token may not follow itself, and must be even after an odd one."""
    if answer:
        assert all(a != b and not (a % 2 and b % 2) for a, b in zip(answer, answer[1:], strict=False)), answer
        logits[answer[-1]] = float("-inf")
        if answer[-1] % 2:
            logits[1::2] = float("-inf")
    return logits


CASES = {
    "fixed(1)": Case(fixed(1)),
    "fixed(2)": Case(fixed(2)),
    "fixed(3), top_k": Case(fixed(3), {"top_k": 2}, vocab=4, length=5),
    "fixed(2), trimmed head": Case(fixed(2), vocab=4, head=(0, 2)),
    "fixed(2), temperature": Case(fixed(2), {"temperature": 0.6}),
    "fixed(2), top_p": Case(fixed(2), {"top_p": 0.75, "temperature": 1.4}, vocab=5),
    "fixed(2), end banned at first": Case(fixed(2), {"min_tokens": 2}, eos=frozenset({2})),
    "fixed(2), min_p": Case(fixed(2), {"min_p": 0.3, "temperature": 1.5}),
    "fixed(2), penalties": Case(
        fixed(2), {"repetition_penalty": 1.7, "presence_penalty": 0.6, "frequency_penalty": 0.9}, vocab=3, head=(0, 2)
    ),
    "fixed(2), bias": Case(fixed(2), {"logit_bias": {0: -100.0, 2: 1.5}}, length=3),
    "fixed(2), grammar": Case(fixed(2), {"logits_processors": [no_token_twice]}, vocab=4, head=(0, 2, 3)),
    "paper, penalties": Case(paper(), {"frequency_penalty": 1.2}, must=("accepted", "rejected", "dropped"), length=3),
    "fixed(2), end": Case(fixed(2), eos=frozenset({2})),
    "paper, early rejection": Case(paper(), must=("accepted", "rejected", "dropped")),
    "paper, early rejection, top_p": Case(
        paper(min_confidence=0.4), {"top_p": 0.8}, vocab=4, must=("accepted", "rejected", "dropped")
    ),
    "paper, every switch": Case(
        paper(
            tau=0.8,
            stop_window=2,
            pause=1,
            gate_interval=1,
            ppl_window=3,
            upgrade_ratio=0.8,
            failure_ratio=1.05,
            probe_interval=1,
        ),
        length=6,
        vocab=2,
        head=(0, 1),
        must=("accepted", "rejected", "ar"),
    ),
    "goodput": Case(goodput()),
    "goodput, trimmed head": Case(goodput(), {"temperature": 0.8}, vocab=4, head=(1, 3)),
}


def enumerate_texts(
    case: Case, tables: Tables, ahead: bool = False, rule: str = "block"
) -> tuple[dict[tuple[int, ...], float], Counter[str]]:
    """Probability of each text, and how often each kind of event occurred over all branches. `ahead`: plans are
    drafted whole before any rule looks at them, as on a GPU."""
    texts: dict[tuple[int, ...], float] = defaultdict(float)
    events: Counter[str] = Counter()
    for noise in every_branch():
        generation = case.generation(tables, noise, ahead, rule)
        emitted = [t.id for t in generation.prefill()]
        while len(emitted) < case.length and not case.eos & set(emitted):
            emitted += [t.id for t in generation.round()]
        assert len(emitted) <= case.length
        end = next((i + 1 for i, token in enumerate(emitted) if token in case.eos), len(emitted))
        texts[tuple(emitted[:end])] += noise.weight
        s = generation.stats
        events.update(
            accepted=s.accepted, rejected=s.rejected, bonus=s.bonus, ar=s.ar - 1, dropped=s.drafted - s.verified
        )
    return texts, events


def reference_row(
    logits: np.ndarray, params: SamplingParams, banned: frozenset[int], answer: tuple[int, ...]
) -> np.ndarray:
    """All processing in plain numpy, written apart from the code under test."""
    logits = logits.copy()
    for token in range(len(logits)):
        logits[token] += params.logit_bias.get(token, 0.0)
        if token in PROMPT or token in answer:
            r = params.repetition_penalty
            logits[token] = logits[token] / r if logits[token] > 0 else logits[token] * r
        if token in answer:
            logits[token] -= params.presence_penalty + params.frequency_penalty * answer.count(token)
    for processor in params.logits_processors:
        logits = processor(list(answer), torch.from_numpy(logits)).numpy()
    logits = logits / params.temperature
    logits[list(banned)] = -np.inf
    if params.min_p:
        logits[np.exp(logits - logits.max()) < params.min_p] = -np.inf
    if params.top_k:
        logits[np.argsort(-logits)[params.top_k :]] = -np.inf
    probs = np.exp(logits - logits.max())
    probs /= probs.sum()
    order = np.argsort(-probs)
    reached = int(np.searchsorted(np.cumsum(probs[order]), params.top_p)) + 1
    probs[order[reached:]] = 0.0
    return probs / probs.sum()


def reference_texts(case: Case, tables: Tables) -> dict[tuple[int, ...], float]:
    """The target alone: probability of each text by the chain rule."""
    params = case.sampling()
    done: dict[tuple[int, ...], float] = {}
    open_texts: dict[tuple[int, ...], float] = {(): 1.0}
    for i in range(case.length):
        banned = case.eos if i < params.min_tokens else frozenset()
        longer: dict[tuple[int, ...], float] = {}
        for text, weight in open_texts.items():
            row = reference_row(tables.target(tuple(PROMPT) + text), params, banned, text)
            for token in np.nonzero(row)[0].tolist():
                (done if token in case.eos else longer)[text + (token,)] = weight * row[token]
        open_texts = longer
    return {**done, **open_texts}


def total_variation(a: dict[tuple[int, ...], float], b: dict[tuple[int, ...], float]) -> float:
    return 0.5 * sum(abs(a.get(t, 0.0) - b.get(t, 0.0)) for t in a.keys() | b.keys())


def distance(case: Case, rule: str) -> float:
    tables = Tables(case.vocab)
    return total_variation(enumerate_texts(case, tables, rule=rule)[0], reference_texts(case, tables))


rules = pytest.mark.parametrize("rule", ["block", "token"])


@rules
@pytest.mark.parametrize("name", CASES)
def test_text_has_the_targets_distribution(name: str, rule: str) -> None:
    case = CASES[name]
    tables = Tables(case.vocab)
    texts, events = enumerate_texts(case, tables, rule=rule)
    assert total_variation(texts, reference_texts(case, tables)) < EXACT
    # The proof covers what it claims only if these branches were reached.
    assert not [event for event in case.must if not events[event]], events


@pytest.mark.parametrize("name", ["fixed(1)", "fixed(2)", "fixed(3), top_k", "fixed(2), trimmed head"])
def test_block_verification_accepts_at_least_as_much(name: str) -> None:
    """Expected accepted tokens in the first round after the same prefix, over all branches."""
    case = CASES[name]
    tables = Tables(case.vocab)
    accepted = {rule: expected_accepted(case, tables, rule) for rule in ("block", "token")}
    assert accepted["block"] >= accepted["token"] - EXACT
    if name != "fixed(1)":
        assert accepted["block"] > accepted["token"] + 1e-6, "a longer chain gains"


def expected_accepted(case: Case, tables: Tables, rule: str) -> float:
    total = 0.0
    for noise in every_branch():
        generation = case.generation(tables, noise, False, rule)
        generation.prefill()
        generation.round()
        total += noise.weight * generation.stats.accepted
    return total


@pytest.mark.parametrize("name", ["fixed(2)", "fixed(2), end banned at first", "paper, early rejection",
                                  "goodput, trimmed head"])
def test_drafting_ahead_leaves_the_distribution_as_it_is(name: str) -> None:
    """Tokens that were drafted past a stop are thrown away unseen."""
    case = CASES[name]
    tables = Tables(case.vocab)
    texts, _ = enumerate_texts(case, tables, ahead=True)
    assert total_variation(texts, reference_texts(case, tables)) < EXACT


def test_variants_and_pauses_occur_in_the_switching_case() -> None:
    case = CASES["paper, every switch"]
    counts: Counter[str] = Counter()

    def counted() -> Policy:
        policy: Any = case.policy()
        plan = policy.plan

        def planned(view: View) -> Plan:
            chosen = plan(view)
            counts.update(key for key, value in policy.counts.items() if value)
            return chosen

        policy.plan = planned
        return policy

    enumerate_texts(Case(counted, case.params, case.vocab, case.head, case.length), Tables(case.vocab))
    assert {"upgrades", "failures", "terminations", "low_confidence"} <= counts.keys()


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
    def faulty(self: Generation) -> None:
        self.cache.crop(len(self.tokens))

    patch.setattr(Generation, "_rollback", faulty)


@pytest.mark.parametrize(
    ("fault", "name"),
    [
        (draw_from_p_after_a_drop, "paper, early rejection"),
        (residual_without_truncation, "paper, early rejection"),
        (accept_with_unprocessed_q, "fixed(3), top_k"),
        (bonus_from_the_draft, "fixed(2)"),
        (crop_one_too_few, "fixed(1)"),
    ],
)
@rules
def test_planted_fault_is_caught(fault: Callable[[Patch], None], name: str, rule: str, monkeypatch: Patch) -> None:
    fault(monkeypatch)
    assert distance(CASES[name], rule) > CAUGHT


@pytest.mark.parametrize("fault", [block_with_the_token_rules_residual, block_that_keeps_what_each_token_test_would])
def test_a_wrong_block_rule_is_caught(fault: Callable[[Patch], None], monkeypatch: Patch) -> None:
    fault(monkeypatch)
    assert distance(CASES["fixed(3), top_k"], "block") > CAUGHT
