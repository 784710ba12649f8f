"""Runners compute exactly the model: against Hugging Face, over chunks, rollbacks, batches and variants."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from conftest import END, make_draft, make_target_model, make_tokenizer
from draftsmith.data import DraftsmithError
from draftsmith.decode import draft as draft_module
from draftsmith.decode import runner as runner_module
from draftsmith.decode.attention import Tree
from draftsmith.decode.draft import DraftRunner
from draftsmith.decode.runner import LeanRunner, ModuleRunner, load_runner
from draftsmith.decode.target import Target, load_target
from draftsmith.distill.elastic import ElasticDraft
from draftsmith.distill.init import build_draft
from draftsmith.distill.variants import FULL_ALPHA, Variant
from torch import nn

BASE = {
    "vocab_size": 259,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
LEAN: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("Llama", {"tie_word_embeddings": True}),
    "Llama, biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "Llama, scaled positions": (
        "Llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 1e4,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "Mistral, window": ("Mistral", {"sliding_window": 300, "head_dim": 16}),
    "Qwen2": ("Qwen2", {}),
    "Qwen3": ("Qwen3", {"head_dim": 12}),
}
MODULE: dict[str, Any] = {
    "GPT2": lambda: transformers.GPT2Config(vocab_size=259, n_embd=32, n_layer=2, n_head=2, n_positions=64),
    "GPTNeoX": lambda: transformers.GPTNeoXConfig(
        vocab_size=259,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=64,
    ),
    "Gemma2": lambda: transformers.Gemma2Config(
        vocab_size=259,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        intermediate_size=64,
        max_position_embeddings=64,
        sliding_window=8,
        initializer_range=0.2,
    ),
    "Bloom": lambda: transformers.BloomConfig(vocab_size=259, hidden_size=32, n_layer=2, n_head=2),
}
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-10}


class ExactNorm(nn.Module):
    """RMSNorm in the input's own precision; the stock one always rounds to float32 on the way."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(weight, requires_grad=False), eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * (x / (x.pow(2).mean(-1, keepdim=True) + self.eps).sqrt())


def exact_norms(module: nn.Module) -> None:
    child: Any
    for name, child in module.named_children():
        if type(child).__name__.endswith("RMSNorm"):
            setattr(module, name, ExactNorm(child.weight.data, child.variance_epsilon))
        else:
            exact_norms(child)


CHUNK = 100


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that short prompts take several prefill passes."""
    monkeypatch.setattr(runner_module, "PREFILL_CHUNK", CHUNK)
    monkeypatch.setattr(draft_module, "PREFILL_CHUNK", CHUNK)


def lean_model(name: str, dtype: torch.dtype) -> Any:
    """A random model whose biases and norm weights are random too (they start as zeros and ones)."""
    family, changes = LEAN[name]
    torch.manual_seed(3)
    config = getattr(transformers, f"{family}Config")(**{**BASE, **changes})
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval().requires_grad_(False).to(dtype)
    for tensor in model.parameters():
        if tensor.dim() == 1:
            tensor += 0.3 * torch.randn_like(tensor)
    if dtype == torch.float64:
        exact_norms(model)
    return model


def random_ids(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (1, count), generator=torch.Generator().manual_seed(seed))


def close(ours: torch.Tensor, theirs: torch.Tensor, tolerance: float) -> None:
    assert ours.shape == theirs.shape
    assert float((ours - theirs).abs().max()) < tolerance


lean_families = pytest.mark.parametrize("family", LEAN)
precisions = pytest.mark.parametrize("dtype", TOLERANCE, ids=["float32", "float64"])


@precisions
@lean_families
def test_lean_runner_equals_the_stock_model(family: str, dtype: torch.dtype) -> None:
    """A prefill of more than one chunk, then 1 row, then 3 rows, with a rollback between."""
    model = lean_model(family, dtype)
    runner, tolerance = load_runner(Target(family, model, None)), TOLERANCE[dtype]
    assert isinstance(runner, LeanRunner)
    ids, other = random_ids(298), random_ids(298, seed=1)
    stock = model(input_ids=ids).logits
    cache = runner.new_cache(1, 400)
    hidden, logits = runner.forward(ids[:, :290], cache)
    close(logits, stock[:, :290], tolerance)
    close(hidden, model.model(input_ids=ids[:, :290]).last_hidden_state, tolerance)
    close(runner.forward(ids[:, 290:291], cache)[1], stock[:, 290:291], tolerance)
    runner.forward(other[:, :5], cache)  # rejected
    cache.crop(291)
    close(runner.forward(ids[:, 291:294], cache)[1], stock[:, 291:294], tolerance)
    cache.crop(10)
    close(runner.forward(ids[:, 10:], cache, keep=4)[1], stock[:, -4:], tolerance)
    assert cache.lengths == [298]


@lean_families
def test_lean_runner_runs_requests_of_different_lengths_together(family: str) -> None:
    model = lean_model(family, torch.float64)
    runner = load_runner(Target(family, model, None))
    texts = [random_ids(9, 1), random_ids(20, 2), random_ids(14, 3)]
    starts = [6, 17, 11]
    cache = runner.new_cache(3, 24)
    for slot, (ids, start) in enumerate(zip(texts, starts, strict=True)):
        runner.forward(ids[:, :start], cache, slots=range(slot, slot + 1))
    cache.crop(4, 1)
    runner.forward(texts[1][:, 4:17], cache, slots=range(1, 2))
    together = torch.cat([t[:, s : s + 3] for t, s in zip(texts, starts, strict=True)])
    _, logits = runner.forward(together, cache)
    assert cache.lengths == [9, 20, 14]
    for slot, ids in enumerate(texts):
        close(logits[slot], model(input_ids=ids).logits[0, -3:], 1e-10)


def test_lean_runner_copies_a_prompt_to_another_slot() -> None:
    model = lean_model("Llama", torch.float64)
    runner: Any = load_runner(Target("llama", model, None))
    ids, cache = random_ids(12), runner.new_cache(2, 16)
    runner.forward(ids[:, :10], cache, slots=range(1, 2))
    cache.copy_prefix(1, 0, 8)
    close(runner.forward(ids[:, 8:], cache, slots=range(0, 1))[1], model(input_ids=ids).logits[:, 8:], 1e-10)


def test_a_text_many_times_as_long_as_the_sliding_window() -> None:
    """Chunks, single rows, rollbacks, requests of different lengths and trees, all past a window of 7."""
    torch.manual_seed(4)
    model = transformers.MistralForCausalLM(transformers.MistralConfig(**BASE, sliding_window=7)).double().eval()
    exact_norms(model.requires_grad_(False))
    runner: Any = load_runner(Target("mistral", model, None))
    assert isinstance(runner, LeanRunner)
    ids, other = random_ids(40), random_ids(40, seed=1)
    stock = model(input_ids=ids).logits
    unlimited = copy.deepcopy(model)
    unlimited.config.sliding_window = None
    assert float((unlimited(input_ids=ids).logits - stock)[:, 20:].abs().min()) > 1e-6, "the window matters"
    cache = runner.new_cache(2, 44)
    first, second = range(0, 1), range(1, 2)
    close(runner.forward(ids[:, :20], cache, slots=first)[1], stock[:, :20], 1e-10)
    runner.forward(other[:, :9], cache, slots=first)  # rejected
    cache.crop(20)
    close(runner.forward(ids[:, 20:21], cache, slots=first)[1], stock[:, 20:21], 1e-10)
    runner.forward(ids[:, :30], cache, slots=second)
    _, logits = runner.forward(torch.cat([ids[:, 21:24], ids[:, 30:33]]), cache)
    close(logits, torch.cat([stock[:, 21:24], stock[:, 30:33]]), 1e-10)
    # A tree of two chains of 9, longer than the window, and the second of them kept.
    parents = [-1, *range(8), -1, *range(9, 17)]
    nodes = torch.cat([other[:, 24:33], ids[:, 24:33]], 1)
    _, logits = runner.forward(nodes, cache, slots=first, tree=Tree.of(parents))
    close(logits[:, 9:], stock[:, 24:33], 1e-10)
    cache.compact(24, list(range(33, 42)))
    close(runner.forward(ids[:, 33:35], cache, slots=first)[1], stock[:, 33:35], 1e-10)


def module_model(family: str) -> Any:
    torch.manual_seed(4)
    return transformers.AutoModelForCausalLM.from_config(MODULE[family]()).eval().requires_grad_(False)


@pytest.mark.parametrize("family", MODULE)
def test_module_runner_equals_the_stock_model(family: str) -> None:
    """Text three times as long as Gemma's window, with rollbacks across it."""
    model = module_model(family)
    ids, other = random_ids(30), random_ids(30, seed=1)
    stock = model(input_ids=ids).logits
    runner = load_runner(Target(family, copy.deepcopy(model), None))
    assert isinstance(runner, ModuleRunner)
    cache = runner.new_cache(1, 40)
    close(runner.forward(ids[:, :20], cache)[1], stock[:, :20], 1e-4)
    close(runner.forward(ids[:, 20:21], cache)[1], stock[:, 20:21], 1e-4)
    runner.forward(other[:, :6], cache)  # rejected
    cache.crop(21)
    hidden, logits = runner.forward(ids[:, 21:24], cache)
    close(logits, stock[:, 21:24], 1e-4)
    cache.crop(5)
    hidden, logits = runner.forward(ids[:, 5:], cache, keep=4)
    close(logits, stock[:, -4:], 1e-4)
    close(hidden, model(input_ids=ids, output_hidden_states=True).hidden_states[-1][:, -4:], 1e-4)


def save(model: Any, folder: Path) -> str:
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("family", MODULE)
def test_any_stock_attention_model_loads_as_a_target(family: str, tmp_path: Path) -> None:
    model = module_model(family)
    runner = load_runner(load_target(save(model, tmp_path)))
    ids = random_ids(20)
    close(runner.forward(ids, runner.new_cache(1, 24))[1], model(input_ids=ids).logits, 1e-4)


def test_a_recurrent_model_is_refused_with_the_reason(tmp_path: Path) -> None:
    config = transformers.MambaConfig(vocab_size=259, hidden_size=16, num_hidden_layers=1, state_size=4)
    with pytest.raises(DraftsmithError, match="recurrent state"):
        load_target(save(transformers.MambaForCausalLM(config), tmp_path))


@pytest.mark.parametrize("name", ["/no/such/folder", "./nowhere"])
def test_a_target_that_is_not_there_is_named(name: str) -> None:
    with pytest.raises(DraftsmithError, match=f"'{name}'"):
        load_target(name)


# The elastic draft


@pytest.fixture(scope="module")
def draft() -> ElasticDraft:
    """Layers of a random target, exits with different norms."""
    model = make_target_model(seed=6, num_hidden_layers=4)
    made = build_draft(model, [0, 1, 2, 3], 2, (0.75, 1.0, 1.5), torch.arange(0, 200, 2), [random_ids(64)])
    torch.manual_seed(7)
    for norm in made.norms.values():
        norm.weight.data += 0.3 * torch.randn_like(norm.weight)
    return made


def draft_runner(draft: ElasticDraft, dtype: torch.dtype = torch.float32) -> DraftRunner:
    return DraftRunner(draft.config, draft.shape, draft.portable_state(), draft.embed.detach().to(dtype))


def trained_logits(draft: ElasticDraft, ids: torch.Tensor, variants: list[Variant]) -> torch.Tensor:
    """Logits [T, D] of the training module with the variant of each token; all of one depth."""
    count = ids.shape[1]
    widths = torch.tensor([[draft.shape.width(v) for v in variants]])
    mask = torch.ones(count, count, dtype=torch.bool).tril()[None, None]
    hidden = draft.exits(ids, torch.arange(count)[None], mask, widths)[variants[0].depth]
    return draft.logits(hidden[0]).detach()


DRAFT_VARIANTS = [Variant(2), Variant(4, 0.75), Variant(4, 1.0), Variant(4, 1.5)]


@pytest.mark.parametrize("variant", DRAFT_VARIANTS, ids=lambda v: v.name)
def test_draft_runner_equals_the_trained_module(draft: ElasticDraft, variant: Variant) -> None:
    runner, ids = draft_runner(draft), random_ids(40)
    expected = trained_logits(draft, ids, [variant] * 40)
    cache = runner.new_cache(64)
    close(runner.forward(ids[:, :30], cache, variant), expected[:30], 1e-4)
    for i in range(30, 34):
        close(runner.forward(ids[:, i : i + 1], cache, variant), expected[i : i + 1], 1e-4)
    runner.forward(random_ids(4, seed=9), cache, variant)  # rejected
    cache.crop(34)
    close(runner.forward(ids[:, 34:], cache, variant, keep=2), expected[-2:], 1e-4)


def test_a_long_prompt_is_the_same_in_chunks(draft: ElasticDraft) -> None:
    ids, runner = random_ids(3 * CHUNK + 5), draft_runner(draft)
    for variant in (Variant(2), Variant(4)):
        close(
            runner.forward(ids, runner.new_cache(400), variant, keep=60),
            trained_logits(draft, ids, [variant] * ids.shape[1])[-60:],
            1e-4,
        )


def test_mixed_widths_write_one_cache_as_in_training(draft: ElasticDraft) -> None:
    ids, runner = random_ids(24), draft_runner(draft)
    spans = [Variant(4, 1.0), Variant(4, 0.75), Variant(4, 1.5)]
    expected = trained_logits(draft, ids, [v for v in spans for _ in range(8)])
    cache = runner.new_cache(32)
    for i, variant in enumerate(spans):
        here = slice(8 * i, 8 * i + 8)
        close(runner.forward(ids[:, here], cache, variant), expected[here], 1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_depth_switch_equals_recomputation(draft: ElasticDraft, dtype: torch.dtype) -> None:
    """Up, down and up again with a rollback below what the deep layers had seen."""
    runner, ids = draft_runner(draft, dtype), random_ids(40)
    small, full = Variant(2), Variant(4)
    again = {v: runner.forward(ids, runner.new_cache(64), v) for v in (small, full)}
    cache = runner.new_cache(64)
    steps = [
        (0, 12, small),
        (12, 13, small),
        (13, 16, full),
        (16, 22, small),
        (22, 23, full),
        (23, 26, small),
        (26, 30, full),
        (30, 40, small),
    ]
    for start, end, variant in steps:
        close(runner.forward(ids[:, start:end], cache, variant), again[variant][start:end], 1e-5)
        if end == 26:
            cache.crop(20)  # below the 23 positions that are deep
            runner.forward(random_ids(3, seed=5), cache, small)
            cache.crop(20)
            close(runner.forward(ids[:, 20:26], cache, small), again[small][20:26], 1e-5)


def test_switching_down_runs_no_deep_layer(draft: ElasticDraft) -> None:
    runner, cache = draft_runner(draft), draft_runner(draft).new_cache(32)
    runner.forward(random_ids(8), cache, Variant(4))
    runner.forward(random_ids(4, seed=1), cache, Variant(2))
    assert (cache.lengths, cache.deep) == ([12], 8)


@pytest.mark.parametrize("variant", DRAFT_VARIANTS[1:3], ids=lambda v: v.name)
def test_narrow_widths_use_the_first_neurons(draft: ElasticDraft, variant: Variant) -> None:
    """Neurons past the width do not matter; the last one within it does."""
    ids, width = random_ids(10), draft.shape.width(variant)
    assert width == round(variant.alpha / FULL_ALPHA * 96)
    whole = draft_runner(draft).forward(ids, draft_runner(draft).new_cache(16), variant)

    def changed(first: int) -> torch.Tensor:
        other = copy.deepcopy(draft)
        for layer in other.layers:
            layer.mlp.down_proj.weight.data[:, first:] = 100.0
        runner = draft_runner(other)
        return runner.forward(ids, runner.new_cache(16), variant)

    assert torch.equal(changed(width), whole)
    assert not torch.allclose(changed(width - 1), whole)


def test_the_prompts_own_tokens_can_be_proposed(target: Any) -> None:
    """Answers repeat names that a trimmed vocabulary lacks; their logits are those of the target's rows."""
    draft = make_draft(target, head=40)
    embedding, head = target.model.get_input_embeddings().weight, target.model.get_output_embeddings().weight
    runner = DraftRunner(draft.config, draft.shape, draft.portable_state(), embedding, head)
    prompt = [200, 65, 201, 65]
    cache = runner.new_cache(16, prompt)
    assert cache.head_ids.tolist() == [*range(40), END, 65, 200, 201]
    logits = runner.forward(torch.tensor([prompt]), cache, Variant(4))
    trimmed = runner.forward(torch.tensor([prompt]), runner.new_cache(16), Variant(4))
    assert torch.equal(logits[:, :41], trimmed)
    mask = torch.ones(1, 1, 4, 4, dtype=torch.bool).tril()
    hidden = draft.exits(torch.tensor([prompt]), torch.arange(4)[None], mask)[4]
    torch.testing.assert_close(logits[:, 41:], hidden[0] @ head[[65, 200, 201]].T, rtol=1e-4, atol=1e-4)
