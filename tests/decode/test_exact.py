"""Every outcome of the production loop, enumerated in float64: the text has the target's distribution."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from draftsmith.decode.policies import Plan, Policy, View
from draftsmith.decode.verify import block, token_level
from enumeration import CASES, EXACT, Case, Tables, enumerate_texts, every_branch, reference_texts, total_variation

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


@pytest.mark.parametrize(("rule", "expected"), [(token_level, 10 / 9), (block, 11 / 9)])
def test_tokens_accepted_of_two(rule: Any, expected: float) -> None:
    """The example of the paper on block verification: p = (1/3, 2/3) and q = (2/3, 1/3) everywhere."""
    p, q = torch.tensor([1 / 3, 2 / 3], dtype=torch.float64), torch.tensor([2 / 3, 1 / 3], dtype=torch.float64)
    total = 0.0
    for noise in every_branch():
        drafted = [noise.draw(q, 0), noise.draw(q, 1)]
        verdict = rule(p.expand(3, 2), [float(q[t]) for t in drafted], drafted, lambda i: q, False, noise, 0)
        total += noise.weight * verdict.accepted
    assert total == pytest.approx(expected, abs=EXACT)


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
                                  "goodput, trimmed head", "mtv(2,2)"])
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
