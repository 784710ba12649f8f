"""Policies decide how each round speculates; `goodput` has its own file.

A policy sees finished rounds, the committed prefix and, through `proceed`, the draft's distribution
*before* a token is sampled from it, never a sampled token that is then discarded: a decision could not
bias the output if it wanted to (DESIGN, section 7, rule 1).
"""

from __future__ import annotations

import copy
import math
import re
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Protocol

import torch
from draftsmith.data import DraftsmithError
from draftsmith.data.io import nearest
from draftsmith.distill.gate import Gate
from draftsmith.distill.variants import DraftShape, Variant

from .costs import MAX_DRAFT, PROBE_CONTEXT, Costs
from .meter import PerplexityMeter

MAX_WIDTH, LONGEST_NAME = 8, 300
KNOWN = ("ar", "fixed(4)", "mtv(2,2,1,1)", "lookup(4)", "hybrid(4)", "paper", "goodput")


@dataclass
class Plan:
    """One round: a chain of up to `max_tokens` from `variant`, or from the lookup; neither: the target decodes
    alone. The loop sets `max_nodes`, of the whole tree.

    `min_confidence`: early rejection. `max_tokens` 0 with a variant is a probe: the draft reads what it
    has missed, so that its perplexity is known, and proposes nothing.
    """

    variant: Variant | None = None
    max_tokens: int = 0
    min_confidence: float = 0.0
    lookup: bool = False
    max_nodes: int = MAX_DRAFT


@dataclass
class Round:
    """A finished round as policies see it. Counts are of the chain, and of a lookup's; `emitted` is of all.

    `labels`: min(1, p/q) of each judged token, in order. `matched`: tokens that a lookup's match had in common.
    `others`: after a rejection, whether the target's token was each of the draft's likeliest others. `read`:
    committed tokens that the draft read first.
    """

    variant: Variant | None
    drafted: int
    accepted: int
    rejected: bool
    emitted: int
    confidences: list[float] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)
    labels: list[float] = field(default_factory=list)
    target_seconds: float = 0.0
    draft_seconds: float = 0.0
    cut: bool = False  # early rejection ended the draft
    matched: int = 0
    others: list[bool] = field(default_factory=list)
    read: int = 0

    @property
    def judged(self) -> int:
        return self.accepted + int(self.rejected)


@dataclass
class View:
    """What a policy may look at when it plans: counts, perplexities, the gate's features and the length of the
    text so far (prompt included).

    `max_draft`: tokens in a row that the draft may propose; `max_depth`: that anything may. `match`: what
    `PromptLookup.match` found. `batch`: requests in the pass. `cheap_trees`: a pass over a tree costs what one over
    a chain does. `unread`: tokens of the text that the draft has not read; `remaining`: that may still be emitted.
    """

    emitted: int
    max_draft: int
    meter: PerplexityMeter
    features: Callable[[], torch.Tensor]
    context: int = PROBE_CONTEXT
    ahead: bool = False  # a plan is drafted whole before `proceed` is asked
    match: tuple[int, int] = (0, 0)
    max_depth: int = MAX_DRAFT
    batch: int = 1
    cheap_trees: bool = True
    unread: int = 0
    remaining: int = 1


class Policy(Protocol):
    """Plans rounds. Everything a policy learns is in `state()`, which JSON can hold and `restore` takes back."""

    name: str
    wants_perplexity: bool
    wants_margin: bool
    wants_draft: bool
    wants_lookup: bool
    max_width: int  # candidates at one place; more than 1 makes trees

    def plan(self, view: View) -> Plan: ...

    def proceed(self, index: int, margin: float) -> bool:
        """Whether to sample drafted token `index`, given the top-2 margin of the draft's logits."""
        ...

    def deepen(self, index: int) -> bool:
        """Whether to compute what follows drafted token `index`. Not asked where a plan is drafted ahead."""
        ...

    def widths(self, margins: list[float]) -> list[int]:
        """How many candidates to propose at each index of the drafted chain, itself included, given the margins."""
        ...

    def observe(self, finished: Round) -> None: ...

    def state(self) -> dict[str, Any]: ...

    def restore(self, state: dict[str, Any]) -> None: ...

    def report(self) -> dict[str, float]:
        """Counters of its own for the generation's statistics."""
        ...


class PolicyBase:
    name = "base"
    wants_perplexity = False
    wants_margin = False
    wants_draft = True
    wants_lookup = False
    max_width = 1
    learns: tuple[str, ...] = ()  # attributes that change from round to round

    def proceed(self, index: int, margin: float) -> bool:
        return True

    def deepen(self, index: int) -> bool:
        return True

    def widths(self, margins: list[float]) -> list[int]:
        return []

    def observe(self, finished: Round) -> None:
        return None

    def state(self) -> dict[str, Any]:
        found: dict[str, Any] = {"policy": self.name}
        for name in self.learns:
            value = getattr(self, name)
            found[name] = {"variant": asdict(value)} if isinstance(value, Variant) else (
                list(value) if isinstance(value, deque) else copy.deepcopy(value))
        return found

    def restore(self, state: dict[str, Any]) -> None:
        """Raises `DraftsmithError` for the state of another policy."""
        if state.get("policy") != self.name or set(state) != {"policy", *self.learns}:
            raise DraftsmithError(f"this is not a state of policy '{self.name}': {sorted(state)}")
        for name in self.learns:
            value, old = copy.deepcopy(state[name]), getattr(self, name)
            if isinstance(value, dict) and set(value) == {"variant"}:
                value = Variant(**value["variant"])
            setattr(self, name, deque(value, old.maxlen) if isinstance(old, deque) else value)

    def report(self) -> dict[str, float]:
        return {}


class Ar(PolicyBase):
    """Plain autoregressive decoding."""

    name = "ar"
    wants_draft = False

    def plan(self, view: View) -> Plan:
        return Plan()


def named(kind: str, k: int) -> str:
    """The name of a policy of k drafted tokens. Raises `DraftsmithError` where a pass cannot take so many."""
    if not 1 <= k <= MAX_DRAFT:
        raise DraftsmithError(f"{kind}(k) needs k from 1 to {MAX_DRAFT}, not {k}")
    return f"{kind}({k})"


class Fixed(PolicyBase):
    """The same variant and number of tokens every round (DSD)."""

    kind = "fixed"

    def __init__(self, k: int, variant: Variant) -> None:
        self.k, self.variant, self.name = k, variant, named(self.kind, k)

    def plan(self, view: View) -> Plan:
        return Plan(self.variant, min(self.k, view.max_draft)) if view.max_draft else Plan()


class Mtv(Fixed):
    """A tree of the same shape every round: `shape[i]` candidates at index i, the first of them the chain's."""

    def __init__(self, shape: list[int], variant: Variant) -> None:
        if not 1 <= len(shape) <= MAX_DRAFT or not all(1 <= width <= MAX_WIDTH for width in shape):
            raise DraftsmithError(f"mtv(shape) needs 1 to {MAX_DRAFT} numbers of candidates from 1 to {MAX_WIDTH}, "
                                  f"not {shape}")
        super().__init__(len(shape), variant)
        self.shape, self.max_width = shape, max(shape)
        self.name = f"mtv({','.join(map(str, shape))})"

    def widths(self, margins: list[float]) -> list[int]:
        return self.shape


class LookupOnly(PolicyBase):
    """What followed the same tokens before, up to k of it; where nothing did, the target alone."""

    wants_draft, wants_lookup = False, True

    def __init__(self, k: int) -> None:
        self.k, self.name = k, named("lookup", k)

    def plan(self, view: View) -> Plan:
        k = min(self.k, view.max_depth, view.match[1])
        return Plan(max_tokens=k, lookup=True) if k else Plan()


class Hybrid(Fixed):
    """The lookup where a long match has something to offer, else the draft."""

    kind, wants_lookup = "hybrid", True
    LEAST = 3  # matched tokens

    def plan(self, view: View) -> Plan:
        matched, rest = view.match
        k = min(self.k, view.max_depth, rest)
        return Plan(max_tokens=k, lookup=True) if k and matched >= self.LEAST else super().plan(view)


@dataclass
class PolicyContext:
    """What policies are made of: the draft's shape, the gate, costs, and the bundle's settings."""

    shape: DraftShape | None
    gate: Gate | None
    costs: Costs | None
    default: str
    variant: Variant | None
    paper: dict[str, Any]
    goodput: dict[str, Any]


def refuse_unknown(policy: str, settings: type, value: dict[str, Any]) -> None:
    """Raise `DraftsmithError` for a setting that the dataclass of a policy does not have."""
    known = {f.name for f in fields(settings)}
    for key in value:
        if key not in known:
            raise DraftsmithError(f"unknown setting '{key}' of policy {policy}{nearest(key, known)}")


def _settings(name: str, text: str) -> dict[str, float]:
    """key=number pairs, split at commas."""
    found = {}
    for pair in filter(None, (part.strip() for part in text.split(","))):
        key, equals, value = (part.strip() for part in pair.partition("="))
        if key in found:
            raise DraftsmithError(f"policy '{name}': '{key}' is given twice")
        try:
            found[key] = float(value) if equals else math.nan
        except ValueError:
            found[key] = math.nan
        if math.isnan(found[key]):
            raise DraftsmithError(f"policy '{name}': '{pair}' is not setting=number")
    return found


def make_policy(name: str | None, context: PolicyContext) -> Policy:
    """A policy by name, None for the default: `ar`, `fixed(k)` or `fixed(k,variant)`, `mtv(w1,w2,...)`, `lookup(k)`,
    `hybrid(k)`, `paper`, `goodput`; the last two with settings too, `paper(tau=0.6)`, `goodput(lookup=0)`, as in
    `PaperSettings` and `GoodputSettings`; `gate=0` leaves the gate out."""
    from .goodput import Goodput, GoodputSettings
    from .paper import Paper, PaperSettings

    name = context.default if name is None else name
    if len(name) > LONGEST_NAME:
        raise DraftsmithError(f"a policy's name of {len(name)} characters; {LONGEST_NAME} are enough")
    if set_apart := re.fullmatch(r"(paper|goodput)\((.*)\)", name):
        settings = _settings(name, set_apart[2])
        with_gate = settings.pop("gate", 1)
        if with_gate not in (0, 1):
            raise DraftsmithError(f"policy '{name}': gate is 1 or 0, not {with_gate:g}")
        gate = context.gate if with_gate else None
        policy = make_policy(set_apart[1], replace(context, gate=gate))
        if isinstance(policy, Paper):
            policy = Paper(policy.shape, gate, policy.base,
                           PaperSettings.from_json({**context.paper, **settings}))
        elif isinstance(policy, Goodput):
            policy = Goodput(context.shape, policy.costs, context.goodput, gate, GoodputSettings.from_json(settings))
        return policy
    if name == "ar":
        return Ar()
    if found := re.fullmatch(r"lookup\(\s*(\d+)\s*\)", name):
        return LookupOnly(int(found[1]))
    if name == "goodput" and context.costs is not None:  # without a draft it weighs the lookup alone
        return Goodput(context.shape, context.costs, context.goodput, context.gate)
    fixed = re.fullmatch(r"fixed\(\s*(\d+)\s*(?:,\s*([^)]+?)\s*)?\)", name)
    tree = re.fullmatch(r"mtv\(\s*(\d+(?:\s*,\s*\d+)*)\s*\)", name)
    hybrid = re.fullmatch(r"hybrid\(\s*(\d+)\s*\)", name)
    if not (fixed or tree or hybrid or name in ("paper", "goodput")):
        raise DraftsmithError(f"unknown policy '{name}'{nearest(name, KNOWN)}")
    if context.shape is None or context.variant is None:
        raise DraftsmithError(f"policy '{name}' needs a draft, and none was loaded; ar and lookup(k) do not")
    if name == "goodput":
        raise DraftsmithError("policy 'goodput' needs measured costs, and this decoder has none")
    if tree:
        return Mtv([int(width) for width in tree[1].split(",")], context.variant)
    if hybrid:
        return Hybrid(int(hybrid[1]), context.variant)
    if fixed:
        try:
            variant = context.shape.find(fixed[2]) if fixed[2] else context.variant
        except ValueError as error:
            raise DraftsmithError(f"policy '{name}': {error}") from error
        return Fixed(int(fixed[1]), variant)
    return Paper(context.shape, context.gate, context.variant, PaperSettings.from_json(context.paper))
