"""Distillation losses against float64 references, on dense and on sparse targets."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from draftsmith.data.teacher_cache import teacher_rows
from draftsmith.distill import losses
from draftsmith.distill.losses import LOSSES, dense_events, headed_loss, mixture, sparse_events

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


Pairs = list[tuple[float, float]]  # (p, q) of every event of a row, the lumped tail last


def kl_of(pairs: Pairs) -> float:
    return math.fsum(p * math.log(p / q) for p, q in pairs)


def jsd_of(pairs: Pairs) -> float:
    middle = [(p + q) / 2 for p, q in pairs]
    return 0.5 * math.fsum(x * math.log(x / m) for pair, m in zip(pairs, middle, strict=True) for x in pair)


def accepted(pairs: Pairs) -> float:
    return math.fsum(min(p, q) for p, q in pairs)


def hybrid_of(pairs: Pairs) -> float:
    weight = math.exp(-3.0 * accepted(pairs))
    return weight * kl_of(pairs) + (1 - weight) * (1 - accepted(pairs))


# Each loss once more, in Python floats.
BY_HAND: dict[str, Callable[[Pairs], float]] = {
    "kl": kl_of,
    "reverse_kl": lambda pairs: kl_of([(q, p) for p, q in pairs]),
    "jsd": jsd_of,
    "tv": lambda pairs: 0.5 * math.fsum(abs(p - q) for p, q in pairs),
    "lk": lambda pairs: -math.log(accepted(pairs)),
    "hybrid": hybrid_of,
    "hard": lambda pairs: -math.log(pairs[0][1]),  # the likeliest token comes first
}


def by_hand(name: str, k: int) -> Loss:
    """The loss over the k likeliest tokens of the teacher and, where k is less than all, one event for the rest."""

    def reference(logits_RV: torch.Tensor, teacher_RV: torch.Tensor, temperature: float) -> torch.Tensor:
        out = []
        for draft, teacher in zip(logits_RV.tolist(), teacher_RV.tolist(), strict=True):
            p, q = softmax_by_hand(teacher, temperature), softmax_by_hand(draft, temperature)
            order = sorted(range(len(p)), key=lambda i: -p[i])
            events = [(p[i], q[i]) for i in order[:k]]
            if k < len(p):
                events.append((math.fsum(p[i] for i in order[k:]), math.fsum(q[i] for i in order[k:])))
            out.append(BY_HAND[name](events))
        return torch.tensor(out, dtype=torch.float64)

    return reference


def dense_loss(name: str) -> Loss:
    return lambda logits, teacher, t: LOSSES[name](dense_events(logits, torch.log_softmax(teacher / t, -1), t))


def sparse_loss(name: str, k: int = 5) -> Loss:
    return lambda logits, teacher, t: LOSSES[name](sparse_events(logits, *top_k(teacher, k, t), t))


def forward_kl_sparse(logits: torch.Tensor, ids: torch.Tensor, logp: torch.Tensor, tail: torch.Tensor,
                      temperature: float) -> torch.Tensor:
    return losses.forward_kl(sparse_events(logits, ids, logp, tail, temperature))


dense, sparse = dense_loss("kl"), sparse_loss("kl")


def check(loss: Loss, reference: Loss) -> None:
    for seed, temperature in ((0, 0.5), (1, 1.0), (2, 2.0)):
        logits, teacher = draw(seed)
        torch.testing.assert_close(
            loss(logits, teacher, temperature), reference(logits, teacher, temperature), rtol=1e-11, atol=1e-12
        )


FAULTS = ("draft not divided by T", "teacher not divided by T", "targets shifted by one")
CASES = [(kind(name), by_hand(name, k)) for name in LOSSES for kind, k in ((dense_loss, V), (sparse_loss, 5))]
IDS = [f"{name}-{kind}" for name in LOSSES for kind in ("dense", "sparse")]
# The likeliest token is the same at every temperature of the teacher.
TOLD = [(*case, fault) for case, name in zip(CASES, IDS, strict=True) for fault in FAULTS
        if not (name.startswith("hard") and fault.startswith("teacher"))]


@pytest.mark.parametrize(("loss", "reference"), CASES, ids=IDS)
def test_value_against_float64(loss: Loss, reference: Loss) -> None:
    check(loss, reference)


@pytest.mark.parametrize(("loss", "reference", "fault"), TOLD)
def test_the_reference_catches_planted_faults(loss: Loss, reference: Loss, fault: str) -> None:
    faults: dict[str, Loss] = {
        "draft not divided by T": lambda logits, teacher, t: loss(logits * t, teacher, t),
        "teacher not divided by T": lambda logits, teacher, t: loss(logits, teacher * t, t),
        "targets shifted by one": lambda logits, teacher, t: loss(logits, teacher.roll(1, 0), t),
    }
    with pytest.raises(AssertionError):
        check(faults[fault], reference)


# The others have a kink there, or the text's own entropy.
@pytest.mark.parametrize("name", ["kl", "reverse_kl", "jsd"])
def test_a_draft_equal_to_its_teacher_has_no_loss_and_no_gradient(name: str) -> None:
    """True only when both sides stand at the same temperature and position."""
    _, teacher = draw()
    for loss in (dense_loss(name), sparse_loss(name)):
        logits = teacher.clone().requires_grad_()
        value = loss(logits, teacher, 0.5)
        assert value.abs().max() < 1e-12
        assert torch.autograd.grad(value.sum(), logits)[0].abs().max() < 1e-12


@pytest.mark.parametrize("name", LOSSES)
def test_no_temperature_factor_is_applied(name: str) -> None:
    """Scaling both logits and T leaves the loss as it is; a hidden T^2 would not."""
    logits, teacher = draw()
    for loss in (dense_loss(name), sparse_loss(name)):
        torch.testing.assert_close(loss(logits * 2, teacher * 2, 2.0), loss(logits, teacher, 1.0))


@pytest.mark.parametrize("name", LOSSES)
def test_sparse_is_dense_when_k_is_the_whole_vocabulary(name: str) -> None:
    logits, teacher = draw()
    a, b = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    full, whole = sparse_loss(name, V)(a, teacher, 0.5), dense_loss(name)(b, teacher, 0.5)
    torch.testing.assert_close(full, whole, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(torch.autograd.grad(full.sum(), a)[0], torch.autograd.grad(whole.sum(), b)[0])


# `hard` is no divergence, and `hybrid` weighs its two by what they are.
@pytest.mark.parametrize("name", [n for n in LOSSES if n not in {"hard", "hybrid"}])
@pytest.mark.parametrize("seed", range(5))
def test_the_lumped_tail_bounds_dense_from_below_and_tightens_with_k(seed: int, name: str) -> None:
    """Divergences from below; so the acceptance, of which `tv` and `lk` fall, from above."""
    logits, teacher = draw(seed)
    values = [sparse_loss(name, k)(logits, teacher, 0.5) for k in (1, 4, 12, V)]
    for fewer, more in zip(values[:-1], values[1:], strict=True):
        assert (fewer <= more + 1e-12).all()
    assert (values[0] < values[-1] - 1e-6).any(), "the bound is never strict: nothing was lumped"
    assert (values[0] >= -1e-12).all()


def test_rows_of_the_cache_in_float32_are_close_to_float64() -> None:
    logits, teacher = draw()
    ids, logp, tail = teacher_rows(teacher.float(), 5, 0.5)
    found = forward_kl_sparse(logits.float(), ids.long(), logp, tail, 0.5)
    torch.testing.assert_close(found.double(), by_hand("kl", 5)(logits, teacher, 0.5), rtol=1e-4, atol=1e-5)


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


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("case", HARD)
def test_values_and_gradients_are_finite(case: str, dtype: torch.dtype, name: str) -> None:
    ids, logp, tail = hard_targets(case)
    logits = draw(1, scale=20.0)[0].to(dtype).requires_grad_()
    value = LOSSES[name](sparse_events(logits, ids, logp.to(dtype), tail.to(dtype), 0.5))
    assert torch.isfinite(value).all()
    assert torch.isfinite(torch.autograd.grad(value.sum(), logits)[0]).all()


# The hybrid's weight is detached: finite differences would see it move.
@pytest.mark.parametrize("name", [n for n in LOSSES if n not in {"hybrid"}])
@pytest.mark.parametrize("case", ["plain", "k = V", "no tail", "all outside"])
def test_gradients_of_sparse_losses_against_finite_differences(case: str, name: str) -> None:
    targets = hard_targets(case)
    logits = draw(1)[0].requires_grad_()
    assert torch.autograd.gradcheck(lambda x: LOSSES[name](sparse_events(x, *targets, 0.5)), (logits,))


@pytest.mark.parametrize("name", [n for n in LOSSES if n not in {"hybrid"}])
def test_gradients_of_dense_losses_against_finite_differences(name: str) -> None:
    logits, teacher = draw(1)
    assert torch.autograd.gradcheck(lambda x: dense_loss(name)(x, teacher, 0.5), (logits.requires_grad_(),))


def test_the_hybrid_moves_as_its_parts_at_the_weight_of_its_acceptance() -> None:
    logits, teacher = draw(1)
    logits.requires_grad_()

    def gradient(loss: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(loss.sum(), logits, retain_graph=True)[0]

    weight = torch.exp(-3.0 * (1 - sparse_loss("tv")(logits, teacher, 0.5).detach()))[:, None]
    parts = [gradient(sparse_loss(name)(logits, teacher, 0.5)) for name in ("kl", "tv")]
    torch.testing.assert_close(gradient(sparse_loss("hybrid")(logits, teacher, 0.5)),
                               weight * parts[0] + (1 - weight) * parts[1])


def test_the_hard_target_is_a_token_however_likely_all_others_are_together() -> None:
    logits, teacher = draw(scale=0.1)  # nearly flat: the tail holds most of the mass
    events = sparse_events(logits, *top_k(teacher, 3, 0.5), 0.5)
    assert (events.p[:, -1] > 0.5).all()
    expected = -torch.log_softmax(logits / 0.5, -1).gather(-1, teacher.argmax(-1, keepdim=True)).squeeze(-1)
    torch.testing.assert_close(LOSSES["hard"](events), expected)


def test_a_mixture_is_the_weighted_sum_of_its_losses() -> None:
    logits, teacher = draw()
    events = sparse_events(logits, *top_k(teacher, 5, 0.5), 0.5)
    expected = 0.7 * LOSSES["kl"](events) + 2.0 * LOSSES["tv"](events)
    torch.testing.assert_close(mixture({"kl": 0.7, "tv": 2.0}, events), expected)


@pytest.mark.parametrize("rows_at_once", [1, 4, 100])
def test_a_loss_in_chunks_is_the_loss_on_all_logits(rows_at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values, and gradients where rows weigh differently."""
    monkeypatch.setattr(losses, "CHUNK_BYTES", rows_at_once * V * 8)
    _, teacher = draw()
    targets = top_k(teacher, 5, 0.5)
    generator = torch.Generator().manual_seed(5)
    head, hidden = (torch.randn(n, 7, generator=generator, dtype=torch.float64) for n in (V, R))
    weights = torch.rand(R, generator=generator, dtype=torch.float64)

    def kl(logits: torch.Tensor, *targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        events = sparse_events(logits, *targets, 0.5)
        return losses.forward_kl(events), events.acceptance()

    a, b = hidden.clone().requires_grad_(), hidden.clone().requires_grad_()
    (value, figure), (expected, acceptance) = headed_loss(kl, a, head, *targets), kl(b @ head.T, *targets)
    torch.testing.assert_close((value, figure), (expected, acceptance))
    (value * weights).sum().backward()
    (expected * weights).sum().backward()
    torch.testing.assert_close(a.grad, b.grad)
    empty, _ = headed_loss(kl, hidden[:0].requires_grad_(), head, *(t[:0] for t in targets))
    empty.sum().backward()
    assert len(empty) == 0


def test_a_teacher_that_rules_tokens_out_is_no_problem_for_the_dense_loss() -> None:
    logits, teacher = draw()
    teacher[:, ::2] = -torch.inf
    draft = logits.clone().requires_grad_()
    value = dense(draft, teacher, 0.5)
    p = torch.softmax(teacher / 0.5, -1)
    expected = (p * (p.clamp_min(1e-300).log() - torch.log_softmax(logits / 0.5, -1))).sum(-1)
    torch.testing.assert_close(value, expected)
    assert torch.isfinite(torch.autograd.grad(value.sum(), draft)[0]).all()


def test_rows_weigh_by_how_often_drafts_reach_them_and_how_wrong_the_draft_is() -> None:
    """Against the definition: the mean over the k places where a draft may have begun of the product of acceptances
    on the way; times (1 - a)^g."""
    acceptance, k = [0.9, 0.5, 0.2, 1.0, 0.7, 0.6], 3
    follows = [False, True, True, True, False, True]
    expected = []
    for t in range(len(acceptance)):
        total = 0.0
        for begun in range(t, t - k, -1):
            if begun < 0 or not all(follows[begun + 1 : t + 1]):
                break
            total += math.prod(acceptance[begun:t])
        expected.append(total / k)
    a = torch.tensor(acceptance, dtype=torch.float64)
    found = losses.row_weights(a, torch.tensor(follows), k, 0.0)
    assert found.tolist() == pytest.approx(expected)
    focused = losses.row_weights(a, torch.tensor(follows), k, 2.0)
    assert focused.tolist() == pytest.approx([w * (1 - x) ** 2 for w, x in zip(expected, acceptance, strict=True)])
    assert losses.row_weights(a, torch.tensor(follows), 1, 0.0).tolist() == [1.0] * 6
