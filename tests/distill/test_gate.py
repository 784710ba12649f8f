"""The gate: alpha and its soft weights, tokens and seconds of a round, and that training finds what is there."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from draftsmith.data.traces import HORIZON, Traces
from draftsmith.distill.gate import (
    Gate,
    evaluate_gate,
    expected_tokens,
    oracle_throughput,
    round_seconds,
    soft_weights,
    throughput,
    variant_edges,
)
from draftsmith.distill.variants import DraftShape
from draftsmith.train.gate import GateModule, split_rows

SHAPE = DraftShape(4, 2, (0.75, 1.0, 1.25, 1.5), 64, 96, 120)
THREE = DraftShape(4, 2, (1.0, 1.5), 64, 96, 120)
K = 4


def make_traces(
    features: np.ndarray, acceptance_NA: np.ndarray, shape: DraftShape, seed: int = 0, **meta: Any
) -> Traces:
    """Rows whose variants are accepted with `acceptance_NA` at each position; four rows a prompt."""
    n, variants = acceptance_NA.shape
    costs = {
        "variants": [v.name for v in shape.variants()],
        "step_seconds": np.linspace(1.0, 2.0, variants).tolist(),
        "verify_rows": [1, 2, 4, 8],
        "verify_seconds": [8.0, 9.0, 10.0, 12.0],
        "catch_up_seconds": 0.5,
        **meta,
    }
    return Traces(
        [f"p{i // 4}" for i in range(n)],
        np.arange(n),
        features.astype(np.float32),
        np.repeat(acceptance_NA[:, :, None], HORIZON, 2).astype(np.float32),
        np.random.default_rng(seed).integers(0, variants, (n,)),
        np.full(n, K),
        np.zeros(n, int),
        np.full(n, np.nan, np.float32),
        costs,
    )


def centres(shape: DraftShape) -> list[float]:
    edges = variant_edges(shape)
    return ((edges[1:] + edges[:-1]) / 2).tolist()


def test_alpha_lies_strictly_between_a_half_and_one_and_a_half() -> None:
    torch.manual_seed(0)
    gate = Gate(6, 8)
    alpha = gate(torch.randn(500, 6) * 3)
    assert alpha.shape == (500,)
    assert ((alpha > 0.5) & (alpha < 1.5)).all()
    assert alpha.std() > 0.01
    gate.mean += 5.0
    assert torch.allclose(
        gate(torch.zeros(1, 6) + 5.0), 0.5 + torch.sigmoid(gate.outer(torch.nn.functional.gelu(gate.inner.bias)))
    )


@pytest.mark.parametrize("buckets", [(0.75, 1.0, 1.25, 1.5), (1.0, 1.5), (1.5,), (1.5, 0.9)])
def test_soft_weights_sum_to_one_and_peak_at_the_variant_that_alpha_selects(buckets: tuple[float, ...]) -> None:
    """Where the peak is elsewhere, training rewards one variant and decoding runs another."""
    shape = DraftShape(4, 2, buckets, 64, 96, 120)
    alpha = torch.linspace(0.501, 1.499, 400)
    weights = soft_weights(alpha, variant_edges(shape))
    assert weights.shape == (400, len(shape.variants()))
    torch.testing.assert_close(weights.sum(-1), torch.ones(400))
    assert (weights >= 0).all()
    names = [v.name for v in shape.variants()]
    wrong = [
        (round(float(a), 3), shape.choose(float(a)).name, names[int(w.argmax())])
        for a, w in zip(alpha, weights, strict=True)
        if shape.choose(float(a)).name != names[int(w.argmax())]
    ]
    assert not wrong, f"(alpha, selected, peak): {wrong}"


def test_every_variant_can_be_reached_by_alpha() -> None:
    assert [SHAPE.choose(c) for c in centres(SHAPE)] == SHAPE.variants()


def test_soft_weights_carry_a_gradient_to_alpha() -> None:
    alpha = torch.tensor([0.6, 0.9, 1.3], requires_grad=True)
    gradient = torch.autograd.grad(soft_weights(alpha, variant_edges(SHAPE))[:, 0].sum(), alpha)[0]
    assert (gradient[:2] < 0).all(), "a larger alpha must mean less of the smallest variant"


def test_expected_tokens_of_a_round_by_hand() -> None:
    a = np.full((1, 2, HORIZON), np.nan)
    a[0, 0, :3] = 0.5, 0.8, 1.0
    a[0, 1, :] = 1.0
    assert expected_tokens(a, 2) == pytest.approx(np.array([[1 + 0.5 + 0.4, 3.0]]))
    # The fourth position of the first variant lies past the end of the text: nothing to accept there.
    assert expected_tokens(a, 4) == pytest.approx(np.array([[1 + 0.5 + 0.4 + 0.4, 5.0]]))


def test_seconds_of_a_round_by_hand_with_the_catch_up_of_a_depth_switch() -> None:
    traces = make_traces(np.zeros((3, 1)), np.zeros((3, 3)), THREE)
    traces.variant_N = np.array([2, 0, 1])
    # 2 steps of 1.0, 1.5 or 2.0 s, and a pass of 3 rows: halfway between 9 and 10 s.
    plain = [2.0 + 9.5, 3.0 + 9.5, 4.0 + 9.5]
    assert round_seconds(traces, 2) == pytest.approx(
        np.array([plain, [plain[0], plain[1] + 0.5, plain[2] + 0.5], plain])
    )


@pytest.mark.parametrize("seed", range(6))
def test_the_oracle_is_the_best_of_all_choices(seed: int) -> None:
    rng = np.random.default_rng(seed)
    tokens, seconds = 1 + 4 * rng.random((6, 3)), 0.2 + rng.random((6, 3)) * rng.choice([0.2, 5.0])
    every = [throughput(tokens, seconds, np.array(c)) for c in itertools.product(range(3), repeat=6)]
    assert oracle_throughput(tokens, seconds) == pytest.approx(max(every), rel=1e-12)


def test_throughput_is_a_ratio_of_sums() -> None:
    tokens, seconds = np.array([[4.0, 1.0], [1.0, 2.0]]), np.array([[1.0, 1.0], [9.0, 1.0]])
    assert throughput(tokens, seconds, np.array([0, 0])) == pytest.approx(5.0 / 10.0)
    assert throughput(tokens, seconds, np.array([0, 1])) == pytest.approx(6.0 / 2.0)


def train(traces: Traces, shape: DraftShape, steps: int = 300) -> Gate:
    """As the job does, with plain Adam."""
    torch.manual_seed(0)
    gate = Gate(traces.features_NF.shape[1], 16)
    gate.mean.copy_(torch.from_numpy(traces.features_NF.mean(0)))
    gate.std.copy_(torch.from_numpy(traces.features_NF.std(0)))
    module = GateModule(gate, traces, shape, K)
    optimizer = torch.optim.Adam(gate.parameters(), lr=0.01)
    rng = np.random.default_rng(0)
    for _ in range(steps):
        rows = torch.from_numpy(rng.integers(0, len(traces), 128))
        loss, _ = module(rows)
        optimizer.zero_grad()
        (loss / len(rows)).backward()
        optimizer.step()
    return gate


def planted(shape: DraftShape) -> Traces:
    """On easy text all variants are accepted and the smallest is best; on hard text only the largest is."""
    rng = np.random.default_rng(1)
    features = rng.normal(size=(600, 5))
    hard = features[:, 2] > 0
    acceptance = np.where(hard[:, None], np.linspace(0.1, 0.9, len(shape.variants())), 0.9)
    return make_traces(features, acceptance, shape)


@pytest.mark.parametrize("shape", [THREE, SHAPE], ids=["three variants", "five variants"])
def test_a_gate_whose_features_decide_beats_the_best_fixed_variant(shape: DraftShape) -> None:
    traces = planted(shape)
    train_rows, held_rows = split_rows(traces, 0.3, 0)
    held = traces.take(held_rows)
    report = evaluate_gate(train(traces.take(train_rows), shape), held, shape, K)
    assert report.beats_fixed
    assert report.regret_best_fixed > 0.1, "nothing was planted"
    assert report.regret < 0.3 * report.regret_best_fixed, "far from the oracle"
    first, last = report.calibration[0], report.calibration[-1]
    assert first["acceptance_smallest"] > 0.8 > 0.2 > last["acceptance_smallest"]


@pytest.mark.parametrize("seed", range(3))
def test_a_gate_on_noise_does_not_claim_to_beat_the_best_fixed_variant(seed: int) -> None:
    """Acceptance varies from row to row, but no feature knows it."""
    rng = np.random.default_rng(seed)
    acceptance = np.clip(np.array([0.55, 0.6, 0.7]) + 0.1 * rng.normal(size=(400, 3)), 0, 1)
    traces = make_traces(rng.normal(size=(400, 5)), acceptance, THREE, seed, step_seconds=[1.5] * 3, catch_up_seconds=0)
    train_rows, held_rows = split_rows(traces, 0.3, seed)
    report = evaluate_gate(train(traces.take(train_rows), THREE), traces.take(held_rows), THREE, K)
    assert report.best_fixed == "4L"
    assert not report.beats_fixed
    assert report.regret >= report.regret_best_fixed


@pytest.mark.parametrize("seed", range(4))
def test_the_report_agrees_with_its_own_numbers(seed: int) -> None:
    torch.manual_seed(seed)
    traces = planted(SHAPE)
    report = evaluate_gate(Gate(5, 8), traces, SHAPE, K)
    tokens, seconds = expected_tokens(traces.acceptance_NAH, K), round_seconds(traces, K)
    assert report.rows == len(traces) == sum(b["rows"] for b in report.calibration)
    assert report.oracle >= max(report.gate, *report.fixed.values())
    assert report.fixed == {
        v.name: pytest.approx(tokens[:, i].sum() / seconds[:, i].sum()) for i, v in enumerate(SHAPE.variants())
    }
    assert report.fixed[report.best_fixed] == max(report.fixed.values())
    assert report.beats_fixed == (report.gate > report.fixed[report.best_fixed])
    assert report.regret == pytest.approx(1 - report.gate / report.oracle)
    assert report.regret_best_fixed == pytest.approx(1 - report.fixed[report.best_fixed] / report.oracle)
    assert [b["alpha"] for b in report.calibration] == sorted(b["alpha"] for b in report.calibration)


def test_a_constant_gate_is_worth_exactly_its_fixed_variant() -> None:
    traces = planted(SHAPE)
    for centre, variant in zip(centres(SHAPE), SHAPE.variants(), strict=True):
        gate = Gate(5, 8)
        torch.nn.init.zeros_(gate.outer.weight)
        torch.nn.init.constant_(gate.outer.bias, float(np.log((centre - 0.5) / (1.5 - centre))))
        report = evaluate_gate(gate, traces, SHAPE, K)
        assert report.gate == pytest.approx(report.fixed[variant.name])
        assert not report.beats_fixed


def test_no_prompt_is_on_both_sides_of_the_split() -> None:
    traces = planted(SHAPE)
    train_rows, held_rows = split_rows(traces, 0.25, 3)
    assert (train_rows ^ held_rows).all()
    sides = [{p for p, r in zip(traces.prompt_N, rows, strict=True) if r} for rows in (train_rows, held_rows)]
    assert not sides[0] & sides[1]
    assert len(sides[1]) == round(0.25 * len(set(traces.prompt_N)))
