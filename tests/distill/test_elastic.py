"""The elastic draft: which sub-network a width or an alpha means, and that each computes what it should."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from conftest import END, make_draft, make_target_model
from draftsmith.data import DraftsmithError
from draftsmith.distill.elastic import ElasticDraft
from draftsmith.distill.init import build_draft, neuron_importance
from draftsmith.distill.variants import DraftShape, Variant
from draftsmith.distill.vocab import choose_vocabulary, inverse_map
from torch import nn

LAYERS = [0, 1, 3, 4]
BUCKETS = (0.75, 1.0, 1.25, 1.5)
SHAPE = DraftShape(4, 2, BUCKETS, 64, 96, 121)
CALIBRATION = [torch.arange(32, 126)[None]]


def inputs(length: int = 20) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    ids = torch.randint(0, 120, (2, length), generator=torch.Generator().manual_seed(0))
    return ids, torch.arange(length).expand(2, -1), torch.ones(2, 1, length, length, dtype=torch.bool).tril()


@torch.no_grad()
def run(draft: ElasticDraft, width: int | torch.Tensor | None = None) -> dict[int, torch.Tensor]:
    ids, position, mask = inputs()
    widths = torch.full(ids.shape, width) if isinstance(width, int) else width
    return draft.exits(ids, position, mask, widths)


@pytest.fixture(scope="module")
def model() -> Any:
    return make_target_model()


@pytest.fixture
def draft(target: Any) -> ElasticDraft:
    return make_draft(target, LAYERS)


# --- variants


def test_variants_go_from_the_cheapest_to_the_largest_and_are_found_by_name() -> None:
    names = ["2L", "4L@0.75", "4L@1", "4L@1.25", "4L"]
    assert [v.name for v in SHAPE.variants()] == names
    assert [SHAPE.find(n) for n in names] == SHAPE.variants()
    with pytest.raises(ValueError, match=r"no variant '3L'; there are 2L, 4L@0\.75, 4L@1, 4L@1\.25, 4L$"):
        SHAPE.find("3L")
    assert DraftShape.from_json(SHAPE.to_json()) == SHAPE


@pytest.mark.parametrize(
    ("alpha", "intermediate", "width"),
    [
        (1.5, 96, 96),
        (1.25, 96, 80),
        (1.0, 96, 64),
        (0.75, 96, 48),
        (1.0, 100, 67),
        (0.7, 1000, 467),
        (0.75, 1536, 768),
        (0.9, 10, 6),
        (1.2, 10, 8),
    ],
)
def test_width_is_the_share_of_neurons_rounded_up(alpha: float, intermediate: int, width: int) -> None:
    shape = DraftShape(4, 2, BUCKETS, 64, intermediate, 121)
    assert shape.width(Variant(4, alpha)) == width
    assert shape.width(Variant(2)) == intermediate, "the early exit runs at full width"


@pytest.mark.parametrize(
    ("alpha", "name"),
    [
        (0.5, "2L"),
        (0.6999, "2L"),
        (0.7, "4L@0.75"),
        (0.75, "4L@0.75"),
        (0.7501, "4L@1"),
        (1.0, "4L@1"),
        (1.0001, "4L@1.25"),
        (1.25, "4L@1.25"),
        (1.26, "4L"),
        (1.5, "4L"),
    ],
)
def test_alpha_is_rounded_up_to_a_bucket_and_below_0_7_selects_the_exit(alpha: float, name: str) -> None:
    assert SHAPE.choose(alpha).name == name
    unsorted = DraftShape(4, 2, BUCKETS[::-1], 64, 96, 121)
    assert unsorted.choose(alpha).name == name


# --- initialisation


def family_model(family: str) -> Any:
    return make_target_model(family=family, head_dim=16, pad_token_id=None, tie_word_embeddings=False)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_at_full_width_the_draft_computes_the_targets_layers(family: str) -> None:
    """Sorting the neurons changes nothing: both exits equal the stock model cut to the same layers."""
    model = family_model(family)
    draft = build_draft(model, LAYERS, 2, BUCKETS, torch.arange(120), CALIBRATION)
    found, (ids, _, _) = run(draft), inputs()
    for depth in (2, 4):
        stock = copy.deepcopy(model.model)
        stock.layers = nn.ModuleList(stock.layers[i] for i in LAYERS[:depth])
        with torch.no_grad():
            expected = stock(input_ids=ids, use_cache=False).last_hidden_state
        torch.testing.assert_close(found[depth], expected, rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(run(draft, SHAPE.intermediate)[4], found[4])


def activations(mlp: Any, x: torch.Tensor) -> torch.Tensor:
    return nn.functional.silu(x @ mlp.gate_proj.weight.T) * (x @ mlp.up_proj.weight.T)


def test_neurons_are_sorted_by_measured_importance(model: Any, draft: ElasticDraft) -> None:
    """Recomputed in float64 from what enters each block of the target on the calibration text."""
    seen: dict[int, torch.Tensor] = {}
    hooks = [
        model.model.layers[i].mlp.register_forward_pre_hook(
            lambda _module, args, i=i: seen.update({i: args[0][0].double()})
        )
        for i in LAYERS
    ]
    with torch.no_grad():
        model.model(input_ids=CALIBRATION[0], use_cache=False)
    for hook in hooks:
        hook.remove()
    measured = neuron_importance(model, LAYERS, CALIBRATION)
    for layer, source, scores in zip(draft.layers, LAYERS, measured, strict=True):
        mlp = copy.deepcopy(layer.mlp).double()
        importance = activations(mlp, seen[source]).abs().mean(0) * mlp.down_proj.weight.norm(dim=0)
        assert (importance.diff() <= 1e-5 * importance[0]).all(), "not descending"
        ranked = scores.sort(descending=True).values.double()
        torch.testing.assert_close(importance.detach(), ranked, rtol=1e-4, atol=1e-6)
        assert importance[0] > 1.5 * importance[-1], "nothing to sort"


def test_a_prefix_of_sorted_neurons_loses_less_than_the_last_ones_would(draft: ElasticDraft) -> None:
    full = run(draft)[4]
    reversed_draft = copy.deepcopy(draft)
    for layer in reversed_draft.layers:
        for name in ("gate_proj", "up_proj"):
            getattr(layer.mlp, name).weight.data = getattr(layer.mlp, name).weight.data.flip(0)
        layer.mlp.down_proj.weight.data = layer.mlp.down_proj.weight.data.flip(1)
    torch.testing.assert_close(run(reversed_draft)[4], full, rtol=1e-4, atol=1e-5)
    assert (run(draft, 48)[4] - full).norm() < (run(reversed_draft, 48)[4] - full).norm()


def test_the_target_is_left_as_it_was(model: Any) -> None:
    target = copy.deepcopy(model)
    build_draft(target, LAYERS, 2, BUCKETS, torch.arange(50), CALIBRATION)
    for name, value in target.state_dict().items():
        assert torch.equal(value, model.state_dict()[name]), name
    assert not any(module._forward_pre_hooks for module in target.modules())


def test_embedding_and_head_are_the_targets_and_frozen(model: Any, draft: ElasticDraft) -> None:
    ids = torch.tensor([*range(120), END])
    assert torch.equal(draft.head_ids, ids)
    assert torch.equal(draft.embed, model.get_input_embeddings().weight)
    assert torch.equal(draft.head.weight, model.get_output_embeddings().weight[ids])
    assert {"embed", "head.weight"}.isdisjoint(dict(draft.named_parameters())), "what is not trained is no parameter"
    sample, position, mask = inputs()
    hidden = draft.exits(sample, position, mask)
    torch.stack([draft.logits(h).square().mean() for h in hidden.values()]).sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in draft.norms.parameters())
    assert "embed" not in draft.portable_state()


@pytest.mark.parametrize("narrow", [False, True])
def test_layers_computed_twice_give_the_gradients_of_layers_kept(draft: ElasticDraft, narrow: bool) -> None:
    """At widths too: the second pass must not forget them."""
    sample, position, mask = inputs()
    widths = torch.randint(48, 97, sample.shape, generator=torch.Generator().manual_seed(3)) if narrow else None

    def gradients(recompute: bool) -> list[torch.Tensor]:
        draft.recompute = recompute
        draft.zero_grad()
        torch.stack([h.square().sum() for h in draft.exits(sample, position, mask, widths).values()]).sum().backward()
        return [p.grad.clone() for p in draft.parameters() if p.grad is not None]

    kept, twice = gradients(False), gradients(True)
    assert len(kept) == len(list(draft.parameters()))
    for a, b in zip(kept, twice, strict=True):
        torch.testing.assert_close(a, b)


# --- widths


@pytest.mark.parametrize("width", [48, 64, 80])
def test_a_width_mask_equals_slicing_the_weights(width: int, draft: ElasticDraft) -> None:
    sliced = copy.deepcopy(draft)
    for layer in sliced.layers:
        for name in ("gate_proj", "up_proj"):
            getattr(layer.mlp, name).weight.data = getattr(layer.mlp, name).weight.data[:width]
        layer.mlp.down_proj.weight.data = layer.mlp.down_proj.weight.data[:, :width]
    found, expected = run(draft, width), run(sliced)
    for depth in (2, 4):
        torch.testing.assert_close(found[depth], expected[depth], rtol=1e-5, atol=1e-5)
        assert (found[depth] - run(draft)[depth]).abs().max() > 1e-2, "the width changes nothing"


class SlicedByToken(nn.Module):
    """Reference feed-forward block: each token through its own slice of the weights."""

    def __init__(self, mlp: Any, width_BT: torch.Tensor) -> None:
        super().__init__()
        self.inner, self.width_BT = mlp, width_BT

    def forward(self, x_BTH: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x_BTH)
        for b, t in np.ndindex(*self.width_BT.shape):
            w = int(self.width_BT[b, t])
            out[b, t] = activations(self.inner, x_BTH[b, t])[:w] @ self.inner.down_proj.weight[:, :w].T
        return out


def test_each_token_runs_at_the_width_of_its_span(draft: ElasticDraft) -> None:
    widths = torch.tensor([48, 96, 64])[torch.arange(20) // 8].expand(2, -1).clone()
    widths[1] = widths[1].flip(0)
    found = run(draft, widths)
    reference = copy.deepcopy(draft)
    for layer in reference.layers:
        layer.mlp = SlicedByToken(layer.mlp, widths)
    expected = run(reference)
    for depth in (2, 4):
        torch.testing.assert_close(found[depth], expected[depth], rtol=1e-5, atol=1e-5)
    # Before the first change of width nothing else can have been seen; after it the two differ.
    torch.testing.assert_close(found[4][0, :8], run(draft, 48)[4][0, :8])
    assert (found[4][0, 8:] - run(draft, 48)[4][0, 8:]).abs().max() > 1e-2


def test_a_width_does_not_outlive_its_pass_even_when_that_fails(draft: ElasticDraft) -> None:
    full = run(draft)[4]
    with pytest.raises(RuntimeError):
        run(draft, torch.zeros(3, 7, dtype=torch.long))
    torch.testing.assert_close(run(draft)[4], full, rtol=0, atol=0)


# --- shapes that cannot be


@pytest.mark.parametrize(("layers", "exit_depth"), [(LAYERS, 4), (LAYERS, 5), (LAYERS, 0), (LAYERS, -1), ([0, 1], 2)])
def test_an_impossible_exit_is_refused(layers: list[int], exit_depth: int, model: Any) -> None:
    with pytest.raises(DraftsmithError, match=f"{len(layers)} layers cannot have an exit after {exit_depth}"):
        build_draft(model, layers, exit_depth, BUCKETS, torch.arange(50), CALIBRATION)


@pytest.mark.parametrize("bad", [5, 28, -1])
def test_a_layer_that_the_target_does_not_have_is_named(bad: int, model: Any) -> None:
    with pytest.raises(DraftsmithError, match=rf"layer {bad}, but the target has layers 0 to 4"):
        build_draft(model, [0, 1, bad, 4], 2, BUCKETS, torch.arange(50), CALIBRATION)


def test_a_target_without_gated_blocks_gets_a_llama_shaped_draft() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    gpt2 = GPT2LMHeadModel(
        GPT2Config(vocab_size=150, n_embd=32, n_layer=2, n_head=4, n_positions=128, bos_token_id=0, eos_token_id=1)
    ).eval()
    draft = build_draft(gpt2, LAYERS, 2, BUCKETS, torch.arange(120), CALIBRATION)
    assert draft.config.model_type == "llama"
    assert (draft.config.hidden_size, draft.config.num_attention_heads, draft.config.num_hidden_layers) == (32, 4, 4)
    assert draft.config.max_position_embeddings == 128
    assert torch.equal(draft.embed, gpt2.get_input_embeddings().weight)
    exits = run(draft)
    assert exits[4].shape == (2, 20, 32)
    assert draft.logits(exits[4]).shape == (2, 20, 120)
    assert torch.isfinite(exits[2]).all()
    assert (run(draft, 64)[4] - exits[4]).abs().max() > 1e-6


# --- the head's vocabulary

COUNTS = np.array([0, 5, 9, 5, 0, 1, 5, 0])


@pytest.mark.parametrize(
    ("size", "always", "expected"),
    [
        (1, [], [2]),
        (2, [], [1, 2]),  # of the three tokens seen five times, the lowest id
        (3, [], [1, 2, 3]),
        (5, [], [1, 2, 3, 5, 6]),
        (3, [7], [1, 2, 7]),
        (3, [2, 7, 7], [1, 2, 7]),
        (1, [4, 7], [4, 7]),  # what must be kept is kept, even beyond the size
    ],
)
def test_the_most_frequent_tokens_are_chosen_ties_by_lower_id(
    size: int, always: list[int], expected: list[int]
) -> None:
    ids = choose_vocabulary(COUNTS, size, always)
    assert ids.dtype == torch.int64
    assert ids.tolist() == expected


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (5, [1, 2, 3, 5, 6]),
        (6, [1, 2, 3, 5, 6, 7]),  # then the prompts' most frequent
        (7, [0, 1, 2, 3, 5, 6, 7]),
        (8, list(range(8))),
        (99, list(range(8))),
    ],
)
def test_tokens_of_prompts_come_after_those_of_answers(size: int, expected: list[int]) -> None:
    prompts = np.array([1, 50, 50, 50, 0, 50, 50, 3])
    assert choose_vocabulary(COUNTS, size, (), prompts).tolist() == expected


def test_fewer_distinct_tokens_than_asked_are_filled_up_by_the_lowest_ids() -> None:
    assert choose_vocabulary(COUNTS, 7, [7]).tolist() == [0, 1, 2, 3, 5, 6, 7]
    assert choose_vocabulary(np.zeros(8, int), 3, [6]).tolist() == [0, 1, 6]
    assert choose_vocabulary(COUNTS, 100, [7]).tolist() == list(range(8))


def test_the_inverse_map_sends_tokens_to_their_rows_and_the_others_past_the_head() -> None:
    ids = torch.tensor([1, 4, 6])
    assert inverse_map(ids, 8).tolist() == [3, 0, 3, 3, 1, 3, 2, 3]
    assert torch.equal(inverse_map(ids, 8)[ids], torch.arange(3))
