"""Policies rule by rule, on scripted rounds and perplexities."""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from draftsmith.data import DraftsmithError
from draftsmith.decode import SamplingParams
from draftsmith.decode.costs import Costs
from draftsmith.decode.goodput import Goodput
from draftsmith.decode.meter import LOG_FLOOR, PerplexityMeter
from draftsmith.decode.paper import Paper, PaperSettings
from draftsmith.decode.policies import (
    Ar,
    Fixed,
    Plan,
    Policy,
    PolicyContext,
    Round,
    View,
    make_policy,
)
from draftsmith.distill.gate import Gate
from draftsmith.distill.variants import DraftShape, Variant

SHAPE = DraftShape(4, 2, (0.75, 1.0, 1.25, 1.5), 8, 24, 16)
VARIANTS = SHAPE.variants()
FULL = Variant(4)


def meter(ratio: float, positions: int = 40) -> PerplexityMeter:
    """A draft whose perplexity is `ratio` times the target's over some positions."""
    made = PerplexityMeter()
    for i in range(positions):
        made.target[i], made.draft[i] = -1.0, -1.0 - math.log(ratio)
    return made


def view(ratio: float | None = None, positions: int = 40, max_draft: int = 16) -> View:
    known = PerplexityMeter() if ratio is None else meter(ratio, positions)
    return View(0, max_draft, known, lambda: torch.zeros(2))


def paper(gate: Gate | None = None, variant: Variant = FULL, **settings: Any) -> Paper:
    return Paper(SHAPE, gate, variant, PaperSettings(**settings))


def gate(alpha: float) -> Gate:
    made = Gate(2, 3).requires_grad_(False)
    made.outer.weight.zero_()
    made.outer.bias.fill_(math.log((alpha - 0.5) / (1.5 - alpha)))
    return made


def drafted(accepted: int, of: int, confidence: float = 0.9, variant: Variant = FULL) -> Round:
    """A finished round: some of the drafted tokens accepted, the next one rejected unless there is none."""
    labels = [1.0] * accepted + [0.0] * (accepted < of)
    return Round(variant, of, accepted, accepted < of, accepted + 1, [confidence] * of, [2.0] * of, labels)


ALONE = Round(None, 0, 0, False, 1)


def judge(policy: Policy, accepted: int, rejected: int) -> None:
    """Judge tokens one a round."""
    for i in range(accepted + rejected):
        policy.plan(view())
        policy.observe(drafted(int(i < accepted), 1))


@pytest.mark.parametrize(
    ("tau", "ratio", "speculates"),
    [
        (0.7, 1.42, True),
        (0.7, 1.44, False),
        (0.6, 1.6, True),
        (0.6, 1.7, False),
        (0.8, 1.3, False),
        (0.7, 0.5, True),
    ],
)
def test_paper_speculates_from_confidence_tau_on(tau: float, ratio: float, speculates: bool) -> None:
    assert (paper(tau=tau).plan(view(ratio, positions=10)).max_tokens > 0) == speculates


def test_paper_speculates_before_any_perplexity_is_known() -> None:
    assert paper().plan(view()) == Plan(FULL, 4, 0.3)


def test_paper_probes_a_distrusted_draft_every_eight_tokens() -> None:
    policy, probes = paper(), []
    for i in range(24):
        plan = policy.plan(view(3.0))
        assert plan.max_tokens == 0
        if plan.variant is not None:
            probes.append(i)
        policy.observe(Round(plan.variant, 0, 0, False, 1))
    assert probes == [8, 16]
    assert policy.report()["paper_low_confidence"] == 24
    assert policy.plan(view(1.0)).max_tokens == 4


def test_paper_asks_the_gate_every_eight_tokens() -> None:
    policy = paper(gate(1.2))
    decisions = []
    for _ in range(9):
        assert policy.plan(view()).variant == Variant(4, 1.25)
        decisions.append(policy.counts["gate_decisions"])
        policy.observe(drafted(1, 1))  # two tokens a round
    assert decisions == [1, 1, 1, 1, 2, 2, 2, 2, 3]


@pytest.mark.parametrize(("alpha", "name"), [(0.6, "2L"), (0.71, "4L@0.75"), (0.9, "4L@1"), (1.45, "4L")])
def test_paper_runs_the_variant_that_the_gate_chose(alpha: float, name: str) -> None:
    variant = paper(gate(alpha)).plan(view()).variant
    assert variant is not None
    assert variant.name == name


def test_paper_asks_the_gate_once_when_acceptance_falls_below_its_line() -> None:
    policy = paper(gate(1.0))
    decisions = []
    # Judged so far: 7 of 7 (no fall), 7 of 8 = 0.875 (no fall), then 6 of the last 8 = 0.75 and on.
    for finished in [drafted(7, 7), drafted(0, 1), drafted(0, 1), drafted(0, 1), drafted(0, 1)]:
        policy.plan(view())
        decisions.append(policy.counts["gate_decisions"])
        policy.observe(finished)
        policy.since_gate = 0  # take the interval rule out of play
    policy.plan(view())
    decisions.append(policy.counts["gate_decisions"])
    assert decisions == [1, 1, 1, 2, 2, 2]


@pytest.mark.parametrize(
    ("ratio", "positions", "expected"),
    [
        (1.19, 40, "4L@1"),
        (1.21, 40, "4L@1.25"),
        (1.21, 31, "4L@1"),
    ],
)
def test_paper_moves_one_variant_up_at_the_upgrade_ratio(ratio: float, positions: int, expected: str) -> None:
    policy = paper(variant=Variant(4, 1.0))
    variant = policy.plan(view(ratio, positions)).variant
    assert variant is not None
    assert variant.name == expected
    assert policy.report()["paper_upgrades"] == (expected != "4L@1")


def test_paper_has_nothing_above_the_largest_variant() -> None:
    policy = paper()
    assert policy.plan(view(1.25)).variant == FULL
    assert policy.report()["paper_upgrades"] == 0


def test_paper_judges_the_last_32_tokens_only() -> None:
    """A long bad beginning followed by 32 good tokens is no failure and no upgrade."""
    known = meter(1.4, 10)
    for i in range(10, 42):
        known.target[i] = known.draft[i] = -1.0
    policy = paper(variant=VARIANTS[1])
    judge(policy, 8, 0)
    assert policy.plan(View(0, 16, known, lambda: torch.zeros(2))).variant == VARIANTS[1]


@pytest.mark.parametrize(("ratio", "fails"), [(1.34, False), (1.36, True)])
def test_paper_counts_the_failure_mode_and_pauses(ratio: float, fails: bool) -> None:
    policy = paper()
    judge(policy, 8, 0)
    alone = 0
    while policy.plan(view(ratio)).variant is None and alone < 100:
        policy.observe(ALONE)
        alone += 1
    assert alone == (32 if fails else 0)
    assert policy.report()["paper_failures"] == fails


def test_paper_window_grows_by_two_and_shrinks_by_one() -> None:
    policy, seen = paper(stop_acceptance=0.0), []
    rounds = [drafted(4, 4), drafted(6, 6), drafted(8, 8, 0.4), drafted(2, 7), drafted(0, 6)]
    for finished in rounds:
        seen.append(policy.plan(view()).max_tokens)
        policy.observe(finished)
    assert [*seen, policy.plan(view()).max_tokens] == [4, 6, 8, 7, 6, 5]


@pytest.mark.parametrize(("accepted", "of", "end"), [(1, 1, 16), (0, 1, 1)])
def test_paper_window_stays_from_1_to_16(accepted: int, of: int, end: int) -> None:
    policy = paper(stop_acceptance=0.0)
    for _ in range(20):
        policy.plan(view())
        policy.observe(drafted(accepted, of))
    assert policy.plan(view()).max_tokens == end


def test_paper_drafts_no_more_than_there_is_room_for() -> None:
    assert paper().plan(view(max_draft=2)).max_tokens == 2
    assert paper().plan(view(max_draft=0)) == Plan()


def pause_length(policy: Paper) -> int:
    tokens = 0
    while policy.plan(view()).variant is None:
        policy.observe(ALONE)
        tokens += 1
    return tokens


def test_paper_pauses_double_to_256_while_it_stays_bad_and_start_again_when_good() -> None:
    policy, pauses = paper(), []
    for _ in range(5):
        judge(policy, 22, 10)  # 0.69
        pauses.append(pause_length(policy))
    judge(policy, 32, 0)
    assert pause_length(policy) == 0
    judge(policy, 0, 10)  # 22 good and 10 bad among the last 32
    assert [*pauses, pause_length(policy)] == [32, 64, 128, 256, 256, 32]
    assert policy.report()["paper_terminations"] == 6


@pytest.mark.parametrize(("accepted", "rejected"), [(23, 9), (0, 31)])
def test_paper_does_not_stop_at_70_percent_or_before_32_judged(accepted: int, rejected: int) -> None:
    policy = paper()
    judge(policy, accepted, rejected)
    assert pause_length(policy) == 0


def test_paper_setting_with_a_typo_is_named() -> None:
    with pytest.raises(DraftsmithError, match="'min_confidense'.*did you mean 'min_confidence'"):
        PaperSettings.from_json({"min_confidense": 0.2})


@pytest.mark.parametrize(("variant", "floor"), [("2L", 0.0), ("4L", 0.3)])
def test_draft_perplexity_counts_the_tokens_that_it_got_wrong(decoder: Any, variant: str, floor: float) -> None:
    """Over accepted tokens alone every draft would look good: the failure mode could never be seen."""
    off = {"tau": 0.0, "failure_ratio": 1e9, "upgrade_ratio": 1e9, "stop_acceptance": 0.0, "min_confidence": floor}
    decoder.context.paper, decoder.context.gate = off, None
    decoder.context.variant = decoder.bundle.shape.find(variant)
    prompt = decoder.prompt_ids("SELECT a, b FROM")
    generation = decoder.start(prompt, SamplingParams(max_tokens=40, ignore_eos=True), "paper")
    generation.prefill()
    while generation.emitted < 32:
        generation.round()
    assert generation.stats.accepted < 20
    text = generation.tokens
    draft = decoder.draft
    cache = draft.new_cache(64, prompt)
    logits = draft.forward(torch.tensor([text[:-1]]), cache, decoder.context.variant)
    rows = {token: row for row, token in enumerate(cache.head_ids.tolist())}
    exact = [
        float(torch.log_softmax(logits[i - 1], -1)[rows[text[i]]]) if text[i] in rows else LOG_FLOOR
        for i in range(1, len(text))
    ]
    # The last token was just committed: the draft may read it in the next round.
    metered = {i: max(value, LOG_FLOOR) for i, value in generation.meter.draft.items()}
    assert set(metered) >= set(range(1, len(text) - 1))
    assert all(abs(value - max(exact[i - 1], LOG_FLOOR)) < 1e-3 for i, value in metered.items())


def costs(steps: dict[str, float] | None = None, row: float = 0.02) -> Costs:
    return Costs([1.0 + row * i for i in range(17)], steps or {v.name: 0.1 * (i + 1) for i, v in enumerate(VARIANTS)})


def goodput(table: Costs | None = None, **calibration: Any) -> Goodput:
    return Goodput(SHAPE, table or costs(), calibration)


def drive(policy: Goodput, tokens: int, accept: Callable[[int], bool]) -> list[Plan]:
    """Rounds until so many tokens are emitted; `accept` tells whether the draft is right at a position."""
    plans, at = [], 0
    while at < tokens:
        plan = policy.plan(view())
        plans.append(plan)
        good = 0
        while good < plan.max_tokens and accept(at + good):
            good += 1
        policy.observe(ALONE if plan.variant is None else drafted(good, plan.max_tokens, variant=plan.variant))
        at += good + 1
    return plans


@pytest.mark.parametrize("acceptance", [0.2, 0.5, 0.8, 0.95])
@pytest.mark.parametrize("row", [0.01, 0.3])
def test_goodput_finds_the_best_rate(acceptance: float, row: float) -> None:
    """Against the definition: (1 + sum of products) / (draft cost + v)."""
    prior = {v.name: acceptance ** (1 + 0.3 * (4 - i)) for i, v in enumerate(VARIANTS)}
    policy = goodput(costs(row=row), acceptance=prior)
    rates = {(None, 0): 1.0}
    for i, v in enumerate(VARIANTS):
        for k in range(1, 17):
            tokens = sum(prior[v.name] ** n for n in range(k + 1))
            rates[v.name, k] = tokens / (0.1 * (i + 1) * k + 1.0 + row * k)
    rate, plan = policy.best(view())
    assert (plan.variant.name if plan.variant else None, plan.max_tokens) == max(rates, key=lambda key: rates[key])
    assert rate == pytest.approx(max(rates.values()))


def test_goodput_leaves_the_target_alone_when_drafts_never_pay() -> None:
    """Only probes remain, ever farther apart."""
    plans = drive(goodput(costs({v.name: 5.0 for v in VARIANTS})), 600, lambda at: False)
    probes = [i for i, plan in enumerate(plans) if plan.variant is not None]
    gaps = [b - a for a, b in zip(probes[:-1], probes[1:], strict=True)]
    assert probes[0] == 8
    assert gaps == sorted(gaps)
    assert gaps[-1] >= 100
    assert all(plans[i].max_tokens <= 2 for i in probes)


def test_goodput_recovers_by_probing() -> None:
    policy = goodput()
    drive(policy, 300, lambda at: False)
    assert policy.best(view())[1] == Plan()
    drive(policy, 1200, lambda at: True)
    assert policy.plan(view()).max_tokens > 2


def test_goodput_takes_the_cheaper_of_equally_accepted_variants() -> None:
    prior = {v.name: 0.7 for v in VARIANTS}
    steps = {v.name: 0.2 for v in VARIANTS} | {"4L@1": 0.1}
    variant = goodput(costs(steps), acceptance=prior).plan(view()).variant
    assert variant == Variant(4, 1.0)


def test_goodput_pays_for_a_variant_that_is_accepted_much_more() -> None:
    prior = {v.name: 0.2 for v in VARIANTS} | {"4L": 0.9}
    assert goodput(acceptance=prior).plan(view()).variant == FULL


@pytest.mark.parametrize(("alpha", "name"), [(0.6, "2L"), (1.0, "4L@1"), (1.4, "4L")])
def test_the_gate_proposes_and_measured_cost_disposes(alpha: float, name: str) -> None:
    """The variant is the gate's; whether it drafts at all, and whether the lookup does, is the cost's to say."""
    equal = {"acceptance": {v.name: 0.8 for v in VARIANTS}, "margin": [-2.0, 1.0]}
    policy = Goodput(SHAPE, costs(), equal, gate(alpha))
    variant = policy.plan(view()).variant
    assert variant is not None
    assert variant.name == name
    dear = Goodput(SHAPE, costs({v.name: 5.0 for v in VARIANTS}), equal, gate(alpha))
    assert dear.plan(view()) == Plan()
    hopeless = Goodput(SHAPE, costs(), {"acceptance": {v.name: 0.05 for v in VARIANTS}}, gate(alpha))
    assert hopeless.plan(replace(view(), match=(4, 8))).lookup


def test_goodput_asks_the_gate_every_eight_tokens() -> None:
    asked = []
    policy = Goodput(SHAPE, costs(), {"acceptance": {v.name: 0.8 for v in VARIANTS}}, gate(1.4))
    for _ in range(5):
        policy.plan(replace(view(), features=lambda: asked.append(1) or torch.zeros(2)))
        policy.observe(drafted(3, 3))  # four tokens a round
    assert len(asked) == 3


def test_goodput_learns_the_length_from_acceptance() -> None:
    good, bad = goodput(), goodput()
    before = good.best(view())[1].max_tokens
    drive(good, 60, lambda at: True)
    drive(bad, 60, lambda at: at % 2 == 0)
    assert good.best(view())[1].max_tokens > before > bad.best(view())[1].max_tokens


def test_goodput_ends_a_draft_at_a_small_margin() -> None:
    policy = goodput(costs(row=0.2), acceptance={v.name: 0.8 for v in VARIANTS}, margin=[-2.0, 1.0])
    policy.plan(view())
    assert [policy.proceed(0, 8.0), policy.proceed(1, 8.0), policy.proceed(2, 0.0)] == [True, True, False]
    policy.plan(view())
    assert policy.proceed(0, 8.0)  # what was learned of the last draft does not linger


def test_goodput_verifies_a_token_that_is_paid_for_and_takes_no_step_that_will_not_pay() -> None:
    """A doubtful token costs one more row, what follows it a step and a row."""
    policy = goodput(acceptance={v.name: 0.8 for v in VARIANTS}, margin=[-2.0, 1.0])
    policy.plan(view())
    assert (policy.proceed(0, 8.0), policy.deepen(0)) == (True, True)
    assert (policy.proceed(1, 0.0), policy.deepen(1)) == (True, False)


def test_goodput_learns_a_text_that_is_unlike_the_calibration_within_a_few_rounds() -> None:
    """And is not thrown by one surprise in a text that it knows."""
    policy = goodput(acceptance={v.name: 0.8 for v in VARIANTS})
    first = policy.best(view())[1].max_tokens
    for _ in range(4):
        policy.observe(drafted(0, 4))
    assert policy.best(view())[1].max_tokens < first
    assert policy.shift < -1.0
    for _ in range(50):
        policy.observe(drafted(3, 4))
    known = policy.shift
    policy.observe(drafted(0, 4))
    assert known - policy.shift < 0.3


@pytest.mark.parametrize(("unread", "remaining", "drafts"), [(1, 20, True), (1000, 20, False), (1000, 1000, True)])
def test_goodput_reads_a_long_prompt_only_for_an_answer_that_repays_it(unread: int, remaining: int, drafts: bool
                                                                       ) -> None:
    policy = goodput(replace(costs(), read=0.05), acceptance={v.name: 0.8 for v in VARIANTS})
    here = replace(view(), unread=unread, remaining=remaining)
    assert (policy.plan(here).variant is not None) == drafts
    policy.observe(replace(ALONE, emitted=200))
    assert (policy.plan(here).variant is not None) == drafts  # not for a probe either
    policy.costs.read = 0.0
    assert policy.plan(here).variant is not None


def test_goodput_drafts_no_more_than_there_is_room_for() -> None:
    assert goodput().plan(view(max_draft=1)).max_tokens == 1
    assert goodput().plan(view(max_draft=0)) == Plan()


def context(**changes: Any) -> PolicyContext:
    base: dict[str, Any] = {
        "shape": SHAPE,
        "gate": None,
        "costs": costs(),
        "default": "fixed(3)",
        "variant": FULL,
        "paper": {},
        "goodput": {},
    }
    return PolicyContext(**{**base, **changes})


def test_make_policy_knows_every_name() -> None:
    assert isinstance(make_policy("ar", context()), Ar)
    assert isinstance(make_policy("paper", context()), Paper)
    assert isinstance(make_policy("goodput", context()), Goodput)
    default, named = make_policy(None, context()), make_policy("fixed(5, 2L)", context())
    assert isinstance(default, Fixed)
    assert isinstance(named, Fixed)
    assert (default.k, default.variant, named.k, named.variant) == (3, FULL, 5, Variant(2))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("papper", "unknown policy 'papper'; did you mean 'paper'"),
        ("fixd(4)", r"did you mean 'fixed\(4\)'"),
        ("fixed", r"did you mean 'fixed\(4\)'"),
        ("good_put", "did you mean 'goodput'"),
        ("fixed(0)", "k from 1 to 16, not 0"),
        ("fixed(17)", "k from 1 to 16, not 17"),
        ("fixed(3,9L)", "no variant '9L'; there are 2L, 4L@0.75"),
        ("zzz", "known: ar, "),
        ("mtv(2,9)", r"candidates from 1 to 8, not \[2, 9\]"),
        ("mtv(2,0)", r"candidates from 1 to 8, not \[2, 0\]"),
        ("mtv(2", r"did you mean 'mtv\("),
        ("mtv(" + "1," * 16 + "1)", "1 to 16 numbers of candidates"),
        ("lookup(0)", "k from 1 to 16, not 0"),
        ("lookup", r"did you mean 'lookup\(4\)'"),
        ("hybrid(20)", "k from 1 to 16, not 20"),
    ],
)
def test_make_policy_says_what_was_meant(name: str, message: str) -> None:
    with pytest.raises(DraftsmithError, match=message):
        make_policy(name, context())


def test_settings_stand_in_a_policys_name() -> None:
    given = context(gate=gate(1.4), paper={"stop_acceptance": 0.4})
    policy = make_policy("paper(tau=0.6, upgrade_ratio=inf, gate=0)", given)
    assert isinstance(policy, Paper)
    assert (policy.s.tau, policy.s.upgrade_ratio, policy.s.stop_acceptance) == (0.6, math.inf, 0.4)
    assert policy.gate is None
    assert isinstance(make_policy("paper()", given), Paper)
    whole = make_policy("goodput", given)
    assert isinstance(whole, Goodput)
    assert whole.gate is not None


@pytest.mark.parametrize(("name", "message"), [
    ("paper(tua=0.6)", "unknown setting 'tua' of policy paper; did you mean 'tau'"),
    ("goodput(lokup=0)", "unknown setting 'lokup' of policy goodput; did you mean 'lookup'"),
    ("goodput(lookup=2)", "setting 'lookup' of policy goodput is 1 or 0, not 2"),
    ("goodput(gate=2)", "gate is 1 or 0, not 2"),
    ("paper(tau)", "'tau' is not setting=number"),
    ("paper(tau=high)", "'tau=high' is not setting=number"),
    ("paper(tau=1,tau=2)", "'tau' is given twice"),
    ("paper(window_start=2.5)", "setting 'window_start' of policy paper is a whole number, not 2.5"),
    ("paper(stop_window=inf)", "setting 'stop_window' of policy paper is a whole number, not inf"),
    ("papper(tau=1)", "unknown policy 'papper(tau=1)'"),
])  # fmt: skip
def test_a_wrong_setting_is_named(name: str, message: str) -> None:
    with pytest.raises(DraftsmithError, match=re.escape(message)):
        make_policy(name, context())


def made(name: str, **calibration: Any) -> Goodput:
    policy = make_policy(name, context(goodput=calibration, costs=costs(row=0.02)))
    assert isinstance(policy, Goodput)
    return policy


def test_each_of_goodputs_means_can_be_left_out() -> None:
    good = {"acceptance": {v.name: 0.8 for v in VARIANTS}, "margin": [-2.0, 1.0]}
    bad = {"acceptance": {v.name: 0.01 for v in VARIANTS}}
    match = replace(view(), match=(4, 16))
    assert made("goodput", **bad).plan(match).lookup
    assert not made("goodput(lookup=0)", **bad).wants_lookup
    assert made("goodput", **bad).plan(view()) == Plan()
    stubborn = made("goodput(stop=0)", **bad)
    assert stubborn.plan(view()).max_tokens >= 1
    assert stubborn.proceed(0, 0.0)
    for name, stops in (("goodput", True), ("goodput(margin=0)", False)):
        policy = made(name, **good)
        policy.plan(view())
        assert policy.wants_margin == stops
        assert (policy.proceed(0, 0.0) and policy.deepen(0)) != stops
    branching, plain = made("goodput", **good), made("goodput(branches=0)", **good)
    for policy in (branching, plain):
        policy.plan(view())
        policy.runners_up = [0.9, 0.05]
    assert max(branching.widths([0.5, 0.5])) > 1
    assert plain.widths([0.5, 0.5]) == []
    deaf = made("goodput(learn=0)", **good)
    deaf.observe(drafted(0, 4))
    assert deaf.shift == 0.0


def test_without_a_draft_only_ar_and_the_lookup_are_possible() -> None:
    nothing = context(shape=None, variant=None, default="ar")
    assert isinstance(make_policy(None, nothing), Ar)
    assert make_policy("lookup(3)", nothing).name == "lookup(3)"
    with pytest.raises(DraftsmithError, match="policy 'paper' needs a draft"):
        make_policy("paper", nothing)


def test_a_lookup_plans_what_its_match_offers() -> None:
    policy = make_policy("lookup(4)", context())
    assert policy.plan(replace(view(), match=(3, 9))) == Plan(max_tokens=4, lookup=True)
    assert policy.plan(replace(view(), match=(2, 1))) == Plan(max_tokens=1, lookup=True)
    assert policy.plan(replace(view(), match=(3, 9), max_depth=2)) == Plan(max_tokens=2, lookup=True)
    assert policy.plan(view()) == Plan()


def test_a_hybrid_drafts_where_there_is_no_long_match() -> None:
    policy = make_policy("hybrid(4)", context())
    assert policy.plan(replace(view(), match=(3, 9))) == Plan(max_tokens=4, lookup=True)
    assert policy.plan(replace(view(), match=(2, 9))) == policy.plan(view()) == Plan(FULL, 4)


def test_goodput_takes_the_lookup_while_it_is_right() -> None:
    policy = goodput(acceptance={v.name: 0.5 for v in VARIANTS})
    offer = replace(view(), match=(4, 16))
    assert policy.plan(offer).lookup
    for _ in range(20):
        policy.observe(Round(None, 4, 0, True, 1, labels=[0.0], matched=4))
    assert not policy.plan(offer).lookup
    assert policy.plan(replace(view(), match=(3, 16))).lookup  # judged by how long the match is
    for _ in range(40):
        policy.observe(Round(None, 4, 4, False, 5, labels=[1.0] * 4, matched=4))
    assert policy.plan(offer).max_tokens > 8


def test_goodput_branches_where_the_draft_hesitates_and_its_second_choice_is_right() -> None:
    policy = goodput(costs(row=0.02), acceptance={v.name: 0.7 for v in VARIANTS}, margin=[-1.0, 1.0])
    policy.plan(view())
    assert policy.widths([0.1, 8.0, 8.0]) == [3, 1, 1]
    assert policy.widths([8.0, 8.0, 0.1])[2] > 1
    for _ in range(30):
        policy.observe(Round(FULL, 1, 0, True, 1, [0.5], [1.0], [0.0], others=[True, False]))
    policy.plan(view())
    assert policy.widths([0.1, 8.0]) == [2, 1]
    for _ in range(60):
        policy.observe(Round(FULL, 1, 0, True, 1, [0.5], [1.0], [0.0], others=[False, False]))
    policy.plan(view())
    assert policy.widths([0.1, 8.0]) == [1, 1]


def test_goodput_does_not_branch_where_a_row_costs_much() -> None:
    policy = goodput(costs(row=0.4), acceptance={v.name: 0.9 for v in VARIANTS})
    policy.plan(view())
    assert policy.widths([0.1, 0.1]) == [1, 1]


@pytest.mark.parametrize("name", ["ar", "fixed(3)", "mtv(2,1)", "lookup(2)", "hybrid(2)", "paper", "goodput"])
def test_a_policy_goes_on_from_its_state(name: str) -> None:
    """Through JSON, at every round of a varied history."""
    generator = random.Random(5)
    first = make_policy(name, context())
    for _ in range(120):
        seen = replace(view(generator.choice([0.9, 1.1, 1.3, 1.5])), match=(generator.choice([0, 2, 4]), 5))
        second = make_policy(name, context())
        second.restore(json.loads(json.dumps(first.state())))
        plan = first.plan(seen)
        assert second.plan(seen) == plan
        margins = [generator.random() * 5 for _ in range(plan.max_tokens)]
        assert [first.proceed(i, m) for i, m in enumerate(margins)] == [
            second.proceed(i, m) for i, m in enumerate(margins)]
        assert first.widths(margins) == second.widths(margins)
        good = generator.randint(0, plan.max_tokens)
        if plan.lookup:
            done = Round(None, plan.max_tokens, good, good < plan.max_tokens, good + 1, labels=[1.0] * good, matched=4)
        else:
            done = drafted(good, plan.max_tokens, variant=plan.variant) if plan.variant else ALONE
        first.observe(done)
        second.observe(done)
        assert first.state() == second.state()


def test_a_state_of_another_policy_is_refused() -> None:
    with pytest.raises(DraftsmithError, match="not a state of policy 'goodput'"):
        make_policy("goodput", context()).restore(make_policy("paper", context()).state())
