"""Enumerates every outcome of the production loop over scripted models in float64."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from draftsmith.decode.attention import Tree
from draftsmith.decode.costs import Costs
from draftsmith.decode.goodput import Goodput
from draftsmith.decode.loop import Generation
from draftsmith.decode.paper import Paper, PaperSettings
from draftsmith.decode.policies import Fixed, Hybrid, LookupOnly, Mtv, Plan, Policy, View
from draftsmith.decode.sampling import Noise, SamplingParams
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

    @property
    def deep(self) -> int:
        return len(self.tokens)

    def crop(self, length: int, request: int = 0) -> None:
        del self.tokens[length:]

    def compact(self, length: int, keep: list[int], request: int = 0) -> None:
        self.tokens[length:] = [self.tokens[i] for i in keep]

    def extend(self, ids: torch.Tensor, tree: Tree | None = None) -> list[tuple[int, ...]]:
        """Append tokens; the prefix that ends with each of them: all before it, or in a tree what it sees."""
        start, new = len(self.tokens), ids[0].tolist()
        self.tokens += new
        sees = torch.ones(len(new), len(new)).tril().bool() if tree is None else tree.sees_BNN[0]
        return [(*self.tokens[:start], *(t for t, seen in zip(new, row, strict=True) if seen)) for row in sees.tolist()]


class ScriptedTarget:
    context, max_batch, trees, cheap_trees, device = 64, 1, True, True, torch.device("cpu")

    def __init__(self, tables: Tables) -> None:
        self.tables, self.vocab_size = tables, tables.vocab

    def new_cache(self, batch: int, capacity: int) -> PrefixCache:
        return PrefixCache(capacity)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(ids), 1)

    def forward(
        self, ids: torch.Tensor, cache: PrefixCache, keep: int | None = None, slots: range | None = None,
        tree: Tree | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows = np.stack([self.tables.target(p) for p in cache.extend(ids, tree)[-(keep or 10**6) :]])
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


def goodput(row: float = 0.05) -> Callable[[], Policy]:
    steps = {v.name: 0.05 * (1 + i) for i, v in enumerate(SHAPE.variants())}
    costs = Costs([1.0 + row * i for i in range(17)], steps)
    return lambda: Goodput(SHAPE, costs, {"acceptance": {}, "margin": [-0.5, 1.0]})


def fixed(k: int) -> Callable[[], Policy]:
    return lambda: Fixed(k, Variant(4))


def mtv(*shape: int) -> Callable[[], Policy]:
    return lambda: Mtv(list(shape), Variant(4))


class CutTree(Mtv):
    """A tree on a chain that early rejection may end."""

    def plan(self, view: View) -> Plan:
        return replace(super().plan(view), min_confidence=0.4)


class PatientTree(Mtv):
    """A tree on a chain that ends of its own accord where the draft hesitates."""

    wants_margin = True

    def proceed(self, index: int, margin: float) -> bool:
        return index == 0 or margin > 0.5


def no_token_twice(answer: list[int], logits: torch.Tensor) -> torch.Tensor:
    """A grammar: a token may not follow itself, and must be even after an odd one."""
    if answer:
        assert all(a != b and not (a % 2 and b % 2) for a, b in zip(answer, answer[1:], strict=False)), answer
        logits[answer[-1]] = float("-inf")
        if answer[-1] % 2:
            logits[1::2] = float("-inf")
    return logits


TREE = ("accepted", "side", "rejected")


class Longest(Hybrid):
    LEAST = 2  # texts here are too short for longer matches


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
    "mtv(2)": Case(mtv(2), must=("accepted", "side", "bonus")),
    "mtv(2,2)": Case(mtv(2, 2), must=TREE),
    "mtv(3,1,2), top_k": Case(mtv(3, 1, 2), {"top_k": 3}, vocab=4, must=TREE),
    "mtv(3,3), all there is": Case(mtv(3, 3), must=("accepted", "side", "bonus")),
    "mtv(2,2), trimmed head": Case(mtv(2, 2), vocab=4, head=(0, 2, 3), must=TREE),
    "mtv(2,2), temperature, top_p": Case(mtv(2, 2), {"top_p": 0.8, "temperature": 1.3}, vocab=4, must=TREE),
    "mtv(2,2), end": Case(mtv(2, 2), eos=frozenset({2}), must=TREE),
    "mtv(2,2), end banned at first": Case(mtv(2, 2), {"min_tokens": 3}, eos=frozenset({1}), vocab=4, must=TREE),
    "mtv(2,2), penalties": Case(
        mtv(2, 2), {"repetition_penalty": 1.7, "presence_penalty": 0.6, "frequency_penalty": 0.9}, vocab=4, must=TREE),
    "mtv(2,2), grammar": Case(mtv(2, 2), {"logits_processors": [no_token_twice]}, vocab=5, must=TREE),
    "tree, early rejection": Case(lambda: CutTree([2, 2], Variant(4)), vocab=4, must=(*TREE, "dropped")),
    "tree, voluntary stop": Case(lambda: PatientTree([2, 2], Variant(4)), vocab=4, must=TREE),
    "lookup(3)": Case(lambda: LookupOnly(3), length=5, must=("side", "rejected", "bonus", "ar")),
    "lookup(2), penalties, top_k": Case(lambda: LookupOnly(2), {"frequency_penalty": 0.7, "top_k": 2}, length=5,
                                        must=("side", "rejected", "bonus", "ar")),
    "lookup(3), end": Case(lambda: LookupOnly(3), length=5, eos=frozenset({1}), vocab=4, must=("rejected", "ar")),
    "hybrid(2)": Case(lambda: Longest(2, Variant(4)), length=5, must=(*TREE, "bonus")),
    "goodput, tree": Case(goodput(row=0.001), vocab=4, must=TREE),
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
            tokens = generation.round()
            emitted += [t.id for t in tokens]
            # Chain tokens are proposed with less than certainty.
            events["side"] += sum(t.source == "accepted" and t.q == 1.0 for t in tokens)
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
    """Total variation between the loop's texts and the target's own."""
    tables = Tables(case.vocab)
    return total_variation(enumerate_texts(case, tables, rule=rule)[0], reference_texts(case, tables))
