"""The path of a GPU, on a CPU: everything but the recording of kernels is the same code."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_draft, make_target_model
from draftsmith.decode import Decoder, SamplingParams, attention, graphs
from draftsmith.decode import draft as draft_module
from draftsmith.decode.draft import DraftRunner
from draftsmith.decode.graphs import ROW_BUCKETS, Tensors
from draftsmith.decode.runner import LeanRunner
from draftsmith.decode.sampling import Noise
from draftsmith.decode.target import Target
from draftsmith.distill.variants import Variant


def imitate(function: Callable[[], Tensors]) -> tuple[Callable[[], None], Tensors]:
    """A graph without a GPU: replaying runs the function again and overwrites the same outputs."""
    function()
    outputs = function()

    def replay() -> None:
        for held, fresh in zip(outputs, function(), strict=True):
            held.copy_(fresh)

    return replay, outputs


@pytest.fixture(autouse=True)
def imitated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "capture", imitate)


def random_ids(count: int, seed: int = 0, batch: int = 1) -> torch.Tensor:
    return torch.randint(0, 256, (batch, count), generator=torch.Generator().manual_seed(seed))


def graphed_runner(seed: int = 2) -> tuple[Any, Any]:
    model = make_target_model(seed=seed).double()
    target = Target("tiny", model, None)
    target.engine = replace(target.engine, graphs=True)
    return model, LeanRunner(target)


def test_replayed_passes_equal_the_stock_model() -> None:
    """Every bucket and the sizes between, with a rollback, past a change of the context bucket."""
    model, runner = graphed_runner()
    ids = random_ids(300)
    expected = model(input_ids=ids).logits
    cache = runner.new_cache(1, 330)
    runner.forward(ids[:, :200], cache)
    at = 200
    for n in (1, 2, 3, 4, 5, 8, 9, 16, 17, 17, 1):
        runner.forward(random_ids(n, seed=n), cache)  # rejected
        cache.crop(at)
        hidden, logits = runner.forward(ids[:, at : at + n], cache)
        torch.testing.assert_close(logits, expected[:, at : at + n], rtol=1e-5, atol=1e-5)
        at += n
        assert cache.lengths == [at]
    assert {key[0] for key in cache.storage.passes} == set(ROW_BUCKETS)
    assert {key[1] for key in cache.storage.passes} == {256, 512}


def test_requests_of_different_lengths_share_a_replayed_pass() -> None:
    model, runner = graphed_runner()
    texts, starts = [random_ids(24, 1), random_ids(24, 2)], [7, 18]
    cache = runner.new_cache(2, 40)
    for slot, (text, start) in enumerate(zip(texts, starts, strict=True)):
        runner.forward(text[:, :start], cache, slots=range(slot, slot + 1))
    together = torch.cat([t[:, s : s + 3] for t, s in zip(texts, starts, strict=True)])
    _, logits = runner.forward(together, cache, keep=2)
    for slot, (text, start) in enumerate(zip(texts, starts, strict=True)):
        expected = model(input_ids=text[:, : start + 3]).logits[0, -2:]
        torch.testing.assert_close(logits[slot], expected, rtol=1e-5, atol=1e-5)


def test_a_result_survives_the_next_replay() -> None:
    _, runner = graphed_runner()
    cache = runner.new_cache(1, 40)
    runner.forward(random_ids(30), cache)
    first = runner.forward(random_ids(1, 1), cache)
    kept = [t.clone() for t in first]
    runner.forward(random_ids(1, 2), cache)
    assert all(torch.equal(a, b) for a, b in zip(first, kept, strict=True))


def test_a_new_request_takes_over_storage_and_graphs_and_sees_nothing_of_the_old_one() -> None:
    model, runner = graphed_runner()
    cache = runner.new_cache(1, 40)
    runner.forward(random_ids(30, 3), cache)
    runner.forward(random_ids(1, 4), cache)
    storage = cache.storage
    other = runner.new_cache(1, 40)
    assert other.storage is not storage, "two live requests never share storage"
    del cache
    gc.collect()
    again = runner.new_cache(1, 44)
    assert again.storage is storage
    assert again.lengths == [0]
    ids = random_ids(21, 5)
    runner.forward(ids[:, :20], again)
    _, logits = runner.forward(ids[:, 20:], again)
    torch.testing.assert_close(logits[0], model(input_ids=ids).logits[0, -1:], rtol=1e-5, atol=1e-5)


def test_little_idle_storage_is_kept() -> None:
    pool = graphs.Pool()
    for size in (256, 512, 1024, 2048, 4096, 8192):
        pool.give(graphs.Storage((), 1, size))
    assert [s.size for s in pool.free] == [1024, 2048, 4096, 8192]
    assert pool.take(1, 900, lambda: ()).size == 1024
    assert pool.take(1, 900, lambda: ()).size == 900, "2048 would be more than twice what is asked"
    assert pool.take(2, 2048, lambda: ()).batch == 2, "storage of other batch sizes does not fit"


def test_a_replayed_pass_never_leaves_its_cache() -> None:
    _, runner = graphed_runner()
    cache = runner.new_cache(1, 20)
    runner.forward(random_ids(19), cache)
    runner.forward(random_ids(1), cache)
    with pytest.raises(ValueError, match="21 positions in a cache of 20"):
        runner.forward(random_ids(1), cache)


def graphed_draft(target: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[DraftRunner, DraftRunner]:
    """The same draft without and with graphs."""
    made = make_draft(target)

    def runner() -> DraftRunner:
        return DraftRunner(made.config, made.shape, made.portable_state(), target.embedding, target.head)

    plain, choose = runner(), draft_module.draft_engine
    monkeypatch.setattr(draft_module, "draft_engine", lambda *a: replace(choose(*a), graphs=True))
    return plain, runner()


def test_replayed_draft_steps_equal_plain_ones_over_depth_switches(
    target: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, graphed = graphed_draft(target, monkeypatch)
    prompt = [*range(40, 60), 200, 201]
    a, b = plain.new_cache(64, prompt), graphed.new_cache(64, prompt)
    ids = torch.tensor([prompt])
    variants = [Variant(4), Variant(4), Variant(2), Variant(2), Variant(4), Variant(4, 0.75), Variant(4), Variant(2)]
    torch.testing.assert_close(graphed.forward(ids, b, Variant(4)), plain.forward(ids, a, Variant(4)))
    for i, variant in enumerate(variants):
        step = random_ids(1, i)
        torch.testing.assert_close(graphed.forward(step, b, variant), plain.forward(step, a, variant),
                                   rtol=1e-4, atol=1e-4)
        assert (a.lengths, a.deep) == (b.lengths, b.deep)
    assert b.storage is not None
    assert len(b.storage.passes) == 3


@pytest.mark.parametrize("policy", ["fixed(4)", "fixed(3,2L)", "paper", "goodput"])
@pytest.mark.parametrize("params", [SamplingParams(max_tokens=48), SamplingParams(max_tokens=48, min_tokens=20),
                                    SamplingParams(max_tokens=48, temperature=0.9, seed=5)],
                         ids=["greedy", "min_tokens", "seeded"])
def test_drafting_ahead_proposes_what_drafting_step_by_step_does(
    bundle_folder: Path, monkeypatch: pytest.MonkeyPatch, policy: str, params: SamplingParams
) -> None:
    """Same tokens, sources and counters, the device's loop being the same rules over the same rows."""
    plain = Decoder.load(bundle_folder, draft_precision="plain")
    choose = draft_module.draft_engine
    monkeypatch.setattr(draft_module, "draft_engine", lambda *a: replace(choose(*a), graphs=True))
    ahead = Decoder.load(bundle_folder, draft_precision="plain")
    assert ahead.draft is not None
    assert ahead.draft.engine.graphs
    ahead.costs = plain.costs  # measured ones would differ
    ahead.context.costs = plain.context.costs
    outputs = [d.generate("one two three", params, policy) for d in (plain, ahead)]
    assert outputs[0].token_ids == outputs[1].token_ids
    if policy != "goodput":  # which follows the clock
        assert [t.source for t in outputs[0].tokens] == [t.source for t in outputs[1].tokens]
        assert outputs[0].stats.drafted == outputs[1].stats.drafted


def test_a_race_of_clocks_draws_from_the_distribution() -> None:
    probs = torch.tensor([0.0, 0.5, 0.3, 0.15, 0.05])
    noise, ids = Noise(torch.Generator().manual_seed(0)), torch.arange(5)
    counts = torch.bincount(torch.stack([noise.pick(probs, 0, ids) for _ in range(8000)]), minlength=5) / 8000
    assert float((counts - probs).abs().max()) < 0.025
    assert counts[0] == 0


@pytest.mark.parametrize("family", [{}, {"family": "mistral", "sliding_window": 9}], ids=["full", "window"])
def test_flash_attention_is_asked_for_what_plain_attention_computes(family: Any,
                                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel is imitated; what is tested is how it is called: layouts, lengths, and that it writes the cache."""
    import sys
    import types

    def imitation(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
                  cache_seqlens: torch.Tensor, causal: bool, window_size: tuple[int, int]) -> torch.Tensor:
        assert causal
        assert window_size[1] == (-1 if window_size[0] < 0 else 0)
        assert cache_seqlens.dtype == torch.int32
        B, N, Q, D = q.shape
        out = torch.empty_like(q)
        for b, start in enumerate(cache_seqlens.tolist()):
            k_cache[b, start : start + N], v_cache[b, start : start + N] = k[b], v[b]
            keys = k_cache[b, : start + N].repeat_interleave(Q // k.shape[2], 1).transpose(0, 1)
            values = v_cache[b, : start + N].repeat_interleave(Q // k.shape[2], 1).transpose(0, 1)
            mask = torch.ones(N, start + N, dtype=torch.bool).tril(start)
            mask = mask if window_size[0] < 0 else mask.triu(start - window_size[0])
            o = torch.nn.functional.scaled_dot_product_attention(q[b].transpose(0, 1), keys, values, attn_mask=mask)
            out[b] = o.transpose(0, 1)
        return out

    module: Any = types.ModuleType("flash_attn")
    module.flash_attn_with_kvcache = imitation
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    model = make_target_model(seed=2, **family).double()
    target = Target("tiny", model, None)
    for engine in (replace(target.engine, attention="flash"), replace(target.engine, attention="flash", graphs=True)):
        target.engine = engine
        runner = LeanRunner(target)
        cache, texts = runner.new_cache(2, 40), random_ids(20, batch=2)
        for slot, start in enumerate((6, 15)):
            runner.forward(texts[slot : slot + 1, :start], cache, slots=range(slot, slot + 1))
        together = torch.stack([texts[0, 6:10], texts[1, 15:19]])
        _, logits = runner.forward(together, cache)
        for slot, end in enumerate((10, 19)):
            expected = model(input_ids=texts[slot : slot + 1, :end]).logits[0, -4:]
            torch.testing.assert_close(logits[slot], expected, rtol=1e-5, atol=1e-5)
    assert attention.attend_with("flash", tree=False) is attention.attend_flash
    assert attention.attend_with("flash", tree=True) is attention.attend_sdpa
    assert attention.attend_with("sdpa", tree=False) is attention.attend_sdpa
