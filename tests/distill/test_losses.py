"""Distillation losses against float64 references, on dense and on sparse targets."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from draftsmith.data.teacher_cache import teacher_rows
from draftsmith.distill.losses import forward_kl_dense, forward_kl_sparse

R, V = 6, 30
Sparse = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Loss = Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]


def draw(seed: int = 0, scale: float = 3.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Raw logits of a draft and of a teacher, float64 [R, V]."""
    generator = torch.Generator().manual_seed(seed)
    a, b = torch.randn(2, R, V, generator=generator, dtype=torch.float64) * scale
    return a, b


def top_k(teacher_RV: torch.Tensor, k: int, temperature: float) -> Sparse:
    """Exact sparse targets in float64 (the cache's own rows are float32)."""
    logp = torch.log_softmax(teacher_RV / temperature, -1)
    order = logp.argsort(-1, descending=True)
    top, rest = order[:, :k], order[:, k:]
    return top, logp.gather(-1, top), logp.gather(-1, rest).exp().sum(-1)


def softmax_by_hand(logits: list[float], temperature: float) -> list[float]:
    weights = [math.exp(x / temperature) for x in logits]
    return [w / math.fsum(weights) for w in weights]


def kl_by_hand(logits_RV: torch.Tensor, teacher_RV: torch.Tensor, temperature: float) -> torch.Tensor:
    """Term by term in Python floats."""
    out = []
    for draft, teacher in zip(logits_RV.tolist(), teacher_RV.tolist(), strict=True):
        p, q = softmax_by_hand(teacher, temperature), softmax_by_hand(draft, temperature)
        out.append(math.fsum(a * math.log(a / b) for a, b in zip(p, q, strict=True)))
    return torch.tensor(out, dtype=torch.float64)


def lumped_by_hand(logits_RV: torch.Tensor, teacher_RV: torch.Tensor, k: int, temperature: float) -> torch.Tensor:
    """KL over the k likeliest tokens of the teacher and one event for all others."""
    out = []
    for draft, teacher in zip(logits_RV.tolist(), teacher_RV.tolist(), strict=True):
        p, q = softmax_by_hand(teacher, temperature), softmax_by_hand(draft, temperature)
        order = sorted(range(len(p)), key=lambda i: -p[i])
        tail = math.fsum(p[i] for i in order[k:]), math.fsum(q[i] for i in order[k:])
        events = [*((p[i], q[i]) for i in order[:k]), tail]
        out.append(math.fsum(a * math.log(a / b) for a, b in events))
    return torch.tensor(out, dtype=torch.float64)


def dense(logits: torch.Tensor, teacher: torch.Tensor, temperature: float) -> torch.Tensor:
    return forward_kl_dense(logits, torch.log_softmax(teacher / temperature, -1), temperature)


def sparse(logits: torch.Tensor, teacher: torch.Tensor, temperature: float) -> torch.Tensor:
    return forward_kl_sparse(logits, *top_k(teacher, 5, temperature), temperature)


def check(loss: Loss, reference: Loss) -> None:
    for seed, temperature in ((0, 0.5), (1, 1.0), (2, 2.0)):
        logits, teacher = draw(seed)
        torch.testing.assert_close(
            loss(logits, teacher, temperature), reference(logits, teacher, temperature), rtol=1e-11, atol=1e-12
        )


def sparse_reference(logits: torch.Tensor, teacher: torch.Tensor, temperature: float) -> torch.Tensor:
    return lumped_by_hand(logits, teacher, 5, temperature)


CASES: list[tuple[Loss, Loss]] = [(dense, kl_by_hand), (sparse, sparse_reference)]


@pytest.mark.parametrize(("loss", "reference"), CASES, ids=["dense", "sparse"])
def test_value_against_float64(loss: Loss, reference: Loss) -> None:
    check(loss, reference)


@pytest.mark.parametrize(("loss", "reference"), CASES, ids=["dense", "sparse"])
@pytest.mark.parametrize("fault", ["draft not divided by T", "teacher not divided by T", "targets shifted by one"])
def test_the_reference_catches_planted_faults(loss: Loss, reference: Loss, fault: str) -> None:
    faults: dict[str, Loss] = {
        "draft not divided by T": lambda logits, teacher, t: loss(logits * t, teacher, t),
        "teacher not divided by T": lambda logits, teacher, t: loss(logits, teacher * t, t),
        "targets shifted by one": lambda logits, teacher, t: loss(logits, teacher.roll(1, 0), t),
    }
    with pytest.raises(AssertionError):
        check(faults[fault], reference)


def test_a_draft_equal_to_its_teacher_has_no_loss_and_no_gradient() -> None:
    """True for both losses only when both sides stand at the same temperature and position."""
    _, teacher = draw()
    for loss in (dense, sparse):
        logits = teacher.clone().requires_grad_()
        value = loss(logits, teacher, 0.5)
        assert value.abs().max() < 1e-12
        assert torch.autograd.grad(value.sum(), logits)[0].abs().max() < 1e-12


def test_no_temperature_factor_is_applied() -> None:
    """Scaling both logits and T leaves the loss as it is; a hidden T^2 would not."""
    logits, teacher = draw()
    for loss in (dense, sparse):
        torch.testing.assert_close(loss(logits * 2, teacher * 2, 2.0), loss(logits, teacher, 1.0))


def test_sparse_is_dense_when_k_is_the_whole_vocabulary() -> None:
    logits, teacher = draw()
    a, b = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    full, whole = forward_kl_sparse(a, *top_k(teacher, V, 0.5), 0.5), dense(b, teacher, 0.5)
    torch.testing.assert_close(full, whole, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(torch.autograd.grad(full.sum(), a)[0], torch.autograd.grad(whole.sum(), b)[0])


@pytest.mark.parametrize("seed", range(5))
def test_the_lumped_tail_bounds_dense_from_below_and_tightens_with_k(seed: int) -> None:
    logits, teacher = draw(seed)
    values = [forward_kl_sparse(logits, *top_k(teacher, k, 0.5), 0.5) for k in (1, 4, 12, V)]
    for fewer, more in zip(values[:-1], values[1:], strict=True):
        assert (fewer <= more + 1e-12).all()
    assert (values[0] < values[-1] - 1e-6).any(), "the bound is never strict: nothing was lumped"
    assert (values[0] >= -1e-12).all()


def test_rows_of_the_cache_in_float32_are_close_to_float64() -> None:
    logits, teacher = draw()
    ids, logp, tail = teacher_rows(teacher.float(), 5, 0.5)
    found = forward_kl_sparse(logits.float(), ids.long(), logp, tail, 0.5)
    torch.testing.assert_close(found.double(), lumped_by_hand(logits, teacher, 5, 0.5), rtol=1e-4, atol=1e-5)


def test_teacher_tokens_outside_the_head_are_left_out() -> None:
    """The gradient is that of p restricted to the head: (sum of p) q - p, tail included in the sum."""
    logits, teacher = draw()
    ids, logp, tail = top_k(teacher, 5, 0.5)
    outside = torch.zeros_like(ids, dtype=torch.bool)
    outside[0, 0] = outside[1, 1:] = outside[2, [0, 2, 4]] = True
    draft = logits.clone().requires_grad_()
    value = forward_kl_sparse(draft, torch.where(outside, V, ids), logp, tail, 0.5)
    gradient = torch.autograd.grad(value.sum(), draft)[0]

    q = torch.softmax(logits / 0.5, -1)
    p = torch.zeros_like(q).scatter(-1, ids, torch.where(outside, 0.0, logp.exp()))
    inside = torch.zeros_like(q, dtype=torch.bool).scatter(-1, ids, ~outside)
    rest = torch.where(inside, 0.0, q)  # the tail is shared out as the draft's own mass outside the top-k
    p = p + tail[:, None] * rest / rest.sum(-1, keepdim=True)
    torch.testing.assert_close(gradient, (p.sum(-1, keepdim=True) * q - p) / 0.5)
    assert p[1].sum() < p[3].sum(), "rows whose mass is mostly outside weigh less"


def hard_targets(name: str) -> Sparse:
    _, teacher = draw()
    ids, logp, tail = top_k(teacher, V if name in ("k = V", "zero probability") else 5, 0.5)
    if name == "no tail":
        logp, tail = torch.log_softmax(logp, -1), torch.zeros_like(tail)
    if name == "all outside":
        ids = torch.full_like(ids, V)
    if name == "all outside, no tail":
        ids, tail = torch.full_like(ids, V), torch.zeros_like(tail)
    if name == "tail below float32":
        tail = torch.full_like(tail, 1e-42)
    if name == "zero probability":  # a target that masks tokens: their logits are -inf
        logp[:, -3:] = -torch.inf
    if name == "rounded tail at k = V":
        ids, logp, _ = top_k(teacher, V, 0.5)
        tail = torch.full_like(tail, 1e-9)
    return ids, logp, tail


HARD = [
    "plain",
    "k = V",
    "no tail",
    "all outside",
    "all outside, no tail",
    "tail below float32",
    "zero probability",
    "rounded tail at k = V",
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("case", HARD)
def test_values_and_gradients_are_finite(case: str, dtype: torch.dtype) -> None:
    ids, logp, tail = hard_targets(case)
    logits = draw(1, scale=20.0)[0].to(dtype).requires_grad_()
    value = forward_kl_sparse(logits, ids, logp.to(dtype), tail.to(dtype), 0.5)
    assert torch.isfinite(value).all()
    assert torch.isfinite(torch.autograd.grad(value.sum(), logits)[0]).all()


@pytest.mark.parametrize("case", ["plain", "k = V", "no tail", "all outside"])
def test_gradients_of_the_sparse_loss_against_finite_differences(case: str) -> None:
    targets = hard_targets(case)
    logits = draw(1)[0].requires_grad_()
    assert torch.autograd.gradcheck(lambda x: forward_kl_sparse(x, *targets, 0.5), (logits,))


def test_gradients_of_the_dense_loss_against_finite_differences() -> None:
    logits, teacher = draw(1)
    assert torch.autograd.gradcheck(lambda x: dense(x, teacher, 0.5), (logits.requires_grad_(),))


def test_a_teacher_that_rules_tokens_out_is_no_problem_for_the_dense_loss() -> None:
    logits, teacher = draw()
    teacher[:, ::2] = -torch.inf
    draft = logits.clone().requires_grad_()
    value = dense(draft, teacher, 0.5)
    p = torch.softmax(teacher / 0.5, -1)
    expected = (p * (p.clamp_min(1e-300).log() - torch.log_softmax(logits / 0.5, -1))).sum(-1)
    torch.testing.assert_close(value, expected)
    assert torch.isfinite(torch.autograd.grad(value.sum(), draft)[0]).all()
