"""How weights are held and moved: precisions, trees, reading from a folder, memory, costs, dispatch by device."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import make_draft, make_target_model, make_tokenizer
from draftsmith.data import DraftsmithError
from draftsmith.decode import Decoder, SamplingParams, bench, linear, memory
from draftsmith.decode import device as devices
from draftsmith.decode.attention import Tree
from draftsmith.decode.bundle import load_bundle
from draftsmith.decode.costs import PROBE_CONTEXT, Costs, cost_key, measure_costs
from draftsmith.decode.device import Engine, choose_engine
from draftsmith.decode.draft import DraftRunner
from draftsmith.decode.linear import (
    BlockedLinear,
    Int8Linear,
    PackedLinear,
    PlainLinear,
    can_pack,
    can_quantise,
    make_linear,
    swap_linears,
)
from draftsmith.decode.runner import LeanRunner, load_runner
from draftsmith.decode.target import Target, load_target
from draftsmith.distill.variants import Variant

CPU = torch.device("cpu")
needs_int8 = pytest.mark.skipif(not can_quantise(torch.zeros(1, 1)), reason="no int8 products in this build")


def random_ids(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (1, count), generator=torch.Generator().manual_seed(seed))


# Linear layers


@needs_int8
@pytest.mark.parametrize("packed", [True, False], ids=["quantised product", "integer product"])
@pytest.mark.parametrize("bias", [False, True])
def test_an_int8_row_does_not_depend_on_the_rows_beside_it(bias: bool, packed: bool,
                                                           monkeypatch: pytest.MonkeyPatch) -> None:
    if not packed:
        monkeypatch.setattr(linear, "prepack", lambda *_: None)
    torch.manual_seed(0)
    weight, offset = torch.randn(96, 64), torch.randn(96) if bias else None
    layer = Int8Linear(weight, offset)
    x = torch.randn(17, 64) * torch.logspace(-3, 3, 17)[:, None]
    together = layer(x)
    assert torch.equal(together, torch.cat([layer(row[None]) for row in x]))
    exact = torch.nn.functional.linear(x, weight, offset)
    error = (together - exact).abs().amax(1) / exact.abs().amax(1)
    assert float(error.max()) < 0.02
    assert torch.equal(layer(torch.zeros(2, 64)), torch.zeros(2, 96) if offset is None else offset.expand(2, -1))


@needs_int8
@pytest.mark.parametrize("inputs", [96, 100, 1081, 3243])
@pytest.mark.parametrize("rows", [1, 2, 3])
def test_an_int8_draft_product_takes_any_width(inputs: int, rows: int) -> None:
    """The kernel for few rows works in whole vectors: a width that does not fill them must not read past it."""
    torch.manual_seed(0)
    weight, x = torch.randn(64, inputs), torch.randn(rows, inputs)
    expected = x @ weight.T
    found = linear.Int8DraftLinear(weight)(x.bfloat16()).float()
    assert float((found - expected).abs().max()) < 0.05 * float(expected.abs().max())


@pytest.mark.parametrize("kind", ["plain", "blocked", "packed", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_every_kind_of_linear_layer_falls_back_to_one_that_this_machine_has(kind: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight, bias, x = torch.randn(64, 32).to(dtype), torch.randn(64).to(dtype), torch.randn(2, 3, 32).to(dtype)
    layer = make_linear(weight, bias, kind)
    expected = torch.nn.functional.linear(x.double(), weight.double(), bias.double())
    coarse = isinstance(layer, Int8Linear)
    tolerance = 0.05 if coarse else {torch.float64: 1e-12, torch.float32: 1e-4}.get(dtype, 0.05)
    assert float((layer(x).double() - expected).abs().max()) < tolerance * float(expected.abs().max())
    if dtype == torch.float64:
        assert isinstance(layer, PlainLinear)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("outputs", [50, 96, 192, 960, 1000])
@pytest.mark.parametrize("rows", [1, 3, 4, 9, 16, 17, 40])
def test_a_product_in_blocks_is_the_plain_product(rows: int, outputs: int, bias: bool) -> None:
    torch.manual_seed(0)
    weight, offset = torch.randn(outputs, 24).double(), torch.randn(outputs).double() if bias else None
    x, residual = torch.randn(rows, 24).double(), torch.randn(rows, outputs).double()
    layer, expected = BlockedLinear(weight, offset), torch.nn.functional.linear(x, weight, offset)
    torch.testing.assert_close(layer(x), expected)
    torch.testing.assert_close(layer(x[None]), expected[None])
    torch.testing.assert_close(layer.add_to(residual, x), residual + expected)


@pytest.mark.skipif(not can_pack(torch.zeros(1, 1)), reason="no packed products in this build")
def test_packed_products_are_asked_for_in_few_sizes() -> None:
    """oneDNN keeps what it compiles for every number of rows: prompts of a thousand lengths would fill the memory."""
    torch.manual_seed(0)
    weight, asked = torch.randn(32, 16), set[int]()
    layer = PackedLinear(weight)
    product = layer.product

    def counted(x: torch.Tensor, *rest: Any) -> torch.Tensor:
        asked.add(len(x))
        return product(x, *rest)

    layer.product = counted
    for rows in (65, 500, 512, 513, 577, *range(600, 3000, 17)):
        x = torch.randn(1, rows, 16)
        torch.testing.assert_close(layer(x), x @ weight.T, rtol=1e-4, atol=1e-4)
    assert {n for n in asked if n > 64} <= set(range(128, 513, 64))


def test_swapping_reaches_gpt2s_transposed_layers() -> None:
    import transformers

    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=259, n_embd=32, n_layer=1, n_head=2, n_positions=64)
    model = transformers.GPT2LMHeadModel(config).eval().requires_grad_(False)
    ids = random_ids(9)
    before = model(input_ids=ids).logits
    assert swap_linears(model, "blocked") == 5
    assert isinstance(model.transformer.h[0].mlp.c_proj, BlockedLinear)
    torch.testing.assert_close(model(input_ids=ids).logits, before, rtol=1e-4, atol=1e-4)


# Trees


PARENTS = [-1, 0, 1, 0, 3, 1]  # a chain 0-1-2, with branches 3-4 below 0 and 5 below 1


def test_a_tree_pass_equals_a_chain_pass_down_each_branch() -> None:
    model = make_target_model(seed=2).double()
    runner: Any = load_runner(Target("tiny", model, None))
    prompt, tree_ids = random_ids(12), random_ids(len(PARENTS), seed=1)
    cache = runner.new_cache(1, 32)
    runner.forward(prompt, cache)
    _, logits = runner.forward(tree_ids, cache, tree=Tree.of(PARENTS))
    for leaf in range(len(PARENTS)):
        path, node = [], leaf
        while node >= 0:
            path, node = [node, *path], PARENTS[node]
        chain = runner.new_cache(1, 32)
        runner.forward(prompt, chain)
        _, expected = runner.forward(tree_ids[:, path], chain)
        torch.testing.assert_close(logits[0, leaf], expected[0, -1], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("path", [[0, 1, 2], [0, 3, 4], [0, 1, 5], [0], []])
def test_the_accepted_path_of_a_tree_stays_in_the_cache_without_recomputing(path: list[int]) -> None:
    model = make_target_model(seed=2).double()
    runner: Any = load_runner(Target("tiny", model, None))
    prompt, tree_ids, after = random_ids(12), random_ids(len(PARENTS), seed=1), random_ids(3, seed=2)
    cache = runner.new_cache(1, 32)
    runner.forward(prompt, cache)
    runner.forward(tree_ids, cache, tree=Tree.of(PARENTS))
    cache.compact(12, [12 + i for i in path])
    assert cache.lengths == [12 + len(path)]
    expected = model(input_ids=torch.cat([prompt, tree_ids[:, path], after], 1)).logits[:, -3:]
    torch.testing.assert_close(runner.forward(after, cache)[1], expected, rtol=1e-5, atol=1e-5)


def test_requests_of_one_pass_have_trees_of_their_own() -> None:
    model = make_target_model(seed=2).double()
    runner: Any = load_runner(Target("tiny", model, None))
    other = [-1, 0, 0, 2, 3, 0]
    trees = [Tree.of(PARENTS), Tree.of(other)]
    together = Tree(torch.cat([t.depth_BN for t in trees]), torch.cat([t.sees_BNN for t in trees]))
    prompts, ids = [random_ids(7, 3), random_ids(11, 4)], torch.cat([random_ids(6, 5), random_ids(6, 6)])
    cache = runner.new_cache(2, 24)
    for slot, prompt in enumerate(prompts):
        runner.forward(prompt, cache, slots=range(slot, slot + 1))
    _, logits = runner.forward(ids, cache, tree=together)
    for slot, prompt in enumerate(prompts):
        alone = runner.new_cache(1, 24)
        runner.forward(prompt, alone)
        expected = runner.forward(ids[slot : slot + 1], alone, tree=trees[slot])[1]
        torch.testing.assert_close(logits[slot], expected[0], rtol=1e-6, atol=1e-6)


# Reading a folder


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("shards", ["5GB", "40KB"])
def test_a_target_read_by_name_equals_the_loaded_module(tmp_path: Path, tied: bool, shards: str) -> None:
    model = make_target_model(seed=5, tie_word_embeddings=tied)
    model.save_pretrained(tmp_path, max_shard_size=shards)
    make_tokenizer().save_pretrained(tmp_path)
    target = load_target(str(tmp_path))
    runner = load_runner(target)
    assert target._model is None, "a lean runner needs no module"
    ids = random_ids(9)
    torch.testing.assert_close(runner.forward(ids, runner.new_cache(1, 16))[1], model(input_ids=ids).logits,
                               rtol=1e-4, atol=1e-4)
    assert target.weights().parameters == sum(p.numel() for p in model.parameters())
    assert target.eos_ids == {258}
    torch.testing.assert_close(target.model(input_ids=ids).logits, model(input_ids=ids).logits)


def test_a_truncated_weight_file_is_named(tmp_path: Path) -> None:
    make_target_model().save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(DraftsmithError, match="model.safetensors"):
        load_target(str(tmp_path))


# Precision


@needs_int8
def test_an_int8_target_says_the_same_with_every_policy(bundle_folder: Path) -> None:
    decoder = Decoder.load(bundle_folder, precision="int8")
    assert isinstance(decoder.runner, LeanRunner)
    assert all(isinstance(layer.qkv, Int8Linear) for layer in decoder.runner.stack.layers)
    texts = {p: decoder.generate("one two", SamplingParams(max_tokens=40), p).token_ids for p in ("ar", "fixed(4)")}
    assert texts["ar"] == texts["fixed(4)"]


@needs_int8
def test_a_small_precision_of_the_draft_changes_its_guesses_only(bundle_folder: Path) -> None:
    plain = Decoder.load(bundle_folder, draft_precision="plain")
    small = Decoder.load(bundle_folder, draft_precision="int8")
    assert small.draft is not None
    assert small.draft.precision == "int8"
    params = SamplingParams(max_tokens=40)
    assert small.generate("one", params, "fixed(4)").token_ids == plain.generate("one", params, "ar").token_ids


@needs_int8
@pytest.mark.parametrize("variant", [Variant(2), Variant(4, 0.75), Variant(4)], ids=lambda v: v.name)
@pytest.mark.parametrize("rows", [1, 20])
def test_every_variant_of_an_int8_draft_is_close_to_the_plain_one(target: Any, rows: int, variant: Variant) -> None:
    draft = make_draft(target)

    def logits(kind: str) -> torch.Tensor:
        runner = DraftRunner(draft.config, draft.shape, draft.portable_state(), target.embedding, None, kind)
        return runner.forward(random_ids(rows), runner.new_cache(32), variant)

    plain = logits("plain")
    assert float((logits("int8") - plain).abs().max()) < 0.15 * float(plain.abs().max())


def test_unknown_precisions_are_refused(bundle_folder: Path) -> None:
    with pytest.raises(DraftsmithError, match="precision 'int4' is not one of auto, fp32, bf16, int8"):
        Decoder.load(bundle_folder, precision="int4")
    with pytest.raises(DraftsmithError, match="draft precision 'int4' is not one of"):
        Decoder.load(bundle_folder, draft_precision="int4")
    with pytest.raises(DraftsmithError, match="int8 needs a CPU and a target in fp32 or int8"):
        Decoder.load(bundle_folder, precision="bf16", draft_precision="int8")


# Dispatch


def test_the_engine_follows_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "has_avx512", lambda: False)
    assert choose_engine("cpu") == Engine(CPU, torch.float32, "packed")
    monkeypatch.setattr(devices, "has_avx512", lambda: True)
    assert choose_engine("cpu") == Engine(CPU, torch.float32, "blocked")
    assert choose_engine("cpu", "int8") == Engine(CPU, torch.float32, "int8")
    assert choose_engine("cpu", "bf16") == Engine(CPU, torch.bfloat16, "packed")
    assert choose_engine("cpu", dtype=torch.float64).dtype == torch.float64
    gpu = torch.device("cuda")
    monkeypatch.setattr(devices, "has_flash", lambda: True)
    assert choose_engine("cuda") == Engine(gpu, torch.bfloat16, "plain", "flash", True)
    assert choose_engine("cuda", "fp32") == Engine(gpu, torch.float32, "plain", "sdpa", True), "flash is half precision"
    assert choose_engine("cuda", head_dim=512).attention == "sdpa", "heads too large for flash"
    monkeypatch.setattr(devices, "has_flash", lambda: False)
    assert choose_engine("cuda").attention == "sdpa"
    with pytest.raises(DraftsmithError, match="int8 runs on a CPU only"):
        choose_engine("cuda", "int8")


# Memory


def test_memory_is_said_and_what_cannot_fit_is_refused(bundle_folder: Path, capsys: pytest.CaptureFixture[str],
                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    Decoder.load(bundle_folder, quiet=False)
    assert "KiB a token" in capsys.readouterr().err
    monkeypatch.setattr(memory, "available", lambda engine: 1000)
    with pytest.raises(DraftsmithError, match="need .* MiB for their weights, and 0 MiB are free"):
        Decoder.load(bundle_folder)


def test_a_module_in_memory_is_not_asked_for_again(target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    memory_needed = memory.expected(target)
    monkeypatch.setattr(memory, "available", lambda engine: memory_needed.target // 2)
    with pytest.raises(DraftsmithError, match="are free"):
        memory.check_memory(target, memory_needed)
    assert target.model is not None
    memory.check_memory(target, memory_needed)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_a_pass_reads_every_weight_but_an_untied_embedding(tmp_path: Path, tied: bool, precision: str) -> None:
    make_target_model(tie_word_embeddings=tied).save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    target = load_target(str(tmp_path), precision=precision)
    table, size = 259 * 64, 1 if precision == "int8" else 4
    parameters = sum(p.numel() for p in make_target_model(tie_word_embeddings=tied).parameters())
    assert load_runner(target).weight_bytes == size * (parameters if tied else parameters - table)


def test_a_target_of_one_request_at_a_time_is_timed_without_batches() -> None:
    import transformers

    config = transformers.GPT2Config(vocab_size=259, n_embd=32, n_layer=1, n_head=2, n_positions=64)
    runner = load_runner(Target("gpt2", transformers.GPT2LMHeadModel(config).eval().requires_grad_(False), None))
    decoder: Any = SimpleNamespace(runner=runner)
    table = bench.pass_table(decoder, (1, 2), (8, 4000), (1, 4))
    assert [(e["rows"], e["context"], e["batch"]) for e in table] == [(1, 8, 1), (2, 8, 1)]


def test_expected_cache_memory_is_what_is_allocated(bundle_folder: Path) -> None:
    decoder, bundle = Decoder.load(bundle_folder, draft_precision="plain"), load_bundle(bundle_folder)
    assert decoder.draft is not None
    said = memory.expected(decoder.target, bundle.draft_config, bundle.shape, bundle.tensors)
    cache, draft = decoder.runner.new_cache(1, 50), decoder.draft.new_cache(50)
    held = [cache.kv, draft.kv.kv, draft.exit_hidden]
    assert said.cache_per_token * 50 == sum(t.numel() * t.element_size() for t in held)
    assert decoder.runner.cache_bytes(1, 50) + decoder.draft.cache_bytes(50) == said.cache_per_token * 50


# Costs


def test_costs_grow_with_rows_context_and_batch() -> None:
    costs = Costs([1.0, 1.5, 2.0], {"4L": 0.1}, 0.0, [0.001, 0.002, 0.003], [0.2, 0.4, 0.6], {"4L": 0.0001})
    assert costs.rows(2) == 1.5
    assert costs.rows(2, PROBE_CONTEXT + 100) == pytest.approx(1.7)
    assert costs.rows(2, batch=3) == pytest.approx(2.3)
    assert costs.rows(2, PROBE_CONTEXT + 100, 3) == pytest.approx(2.9)
    assert costs.draft_step("4L", PROBE_CONTEXT + 1000) == pytest.approx(0.2)
    assert costs.scaled(2.0, 3.0).rows(2, PROBE_CONTEXT + 100, 3) == pytest.approx(5.8)


def test_a_slow_pass_at_a_long_context_does_not_raise_the_cost_of_a_short_one() -> None:
    costs = Costs([1.0], {"4L": 0.1}, 0.0, [0.001], [0.0], {"4L": 0.001})
    costs.update_verify(1, 2.0, PROBE_CONTEXT + 1000)
    costs.update_step("4L", 1.1, PROBE_CONTEXT + 1000)
    assert costs.rows(1) == pytest.approx(1.0)
    assert costs.draft_step("4L") == pytest.approx(0.1)
    costs.update_verify(1, 1.5)
    assert costs.rows(1) == pytest.approx(1.05)


def test_costs_are_measured_once_and_kept_in_the_bundle(bundle_folder: Path) -> None:
    decoder = Decoder.load(bundle_folder, draft_precision="plain")
    assert decoder.draft is not None
    key = cost_key(decoder.runner, decoder.draft)
    stored = load_bundle(bundle_folder).manifest.costs[key]
    assert len(stored["verify"]) == 17
    assert set(stored["step"]) == {v.name for v in decoder.draft.shape.variants()}
    again = Decoder.load(bundle_folder, draft_precision="plain")
    assert load_bundle(bundle_folder).manifest.costs[key] == stored
    assert again.costs is not None
    ratio = again.costs.verify[0] / stored["verify"][0]
    assert again.costs.verify[5] / stored["verify"][5] == pytest.approx(ratio)


@pytest.mark.parametrize("value", [{"verify": []}, {"verify": [0.0]}, {"verify": [1.0], "steps": {}}, {"verify": 3}])
def test_a_table_that_is_not_one_is_refused(value: dict[str, Any]) -> None:
    with pytest.raises(DraftsmithError, match="not a cost table"):
        Costs.from_json(value)


def test_measuring_leaves_every_cost_positive(target: Any) -> None:
    draft = make_draft(target)
    runner = load_runner(target)
    costs = measure_costs(runner, DraftRunner(draft.config, draft.shape, draft.portable_state(), target.embedding))
    assert len(costs.verify) == len(costs.context) == len(costs.batch) == 17
    assert min(costs.verify) > 0
    assert min(costs.step.values()) > 0
    assert costs.catch_up > 0
    assert min(costs.context) >= 0
    assert min(costs.batch) >= 0
