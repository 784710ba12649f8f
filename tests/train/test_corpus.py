"""Training on text as it is: blocks dealt out over ranks, the teacher beside the student, drafts of their own shape."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import END, make_draft
from draftsmith.data.blocks import BlockManifest, BlockWriter, TokenBlocks
from draftsmith.data.packing import Batch
from draftsmith.data.teacher_cache import teacher_rows
from draftsmith.decode.draft import DraftRunner
from draftsmith.decode.runner import ModuleRunner
from draftsmith.decode.target import Target
from draftsmith.distill.elastic import llama_config
from draftsmith.distill.init import fresh_draft
from draftsmith.distill.losses import forward_kl, sparse_events
from draftsmith.train.batches import CorpusBatches
from draftsmith.train.sections import DistillSection
from draftsmith.train.teacher import OnlineTeacher


@pytest.fixture
def blocks(tmp_path: Path) -> TokenBlocks:
    """Documents of random lengths over the tiny target's vocabulary, 16 tokens a block."""
    rng = np.random.default_rng(0)
    writer = BlockWriter(tmp_path, BlockManifest({}, tokenizer_hash="t", vocab_size=259))
    for number in range(3):
        writer.write_shard(number, [rng.integers(0, 256, n).tolist() for n in rng.integers(1, 40, 6)])
    writer.finish(3)
    return TokenBlocks(tmp_path, 16)


def section(**changes: Any) -> DistillSection:
    return DistillSection(**{"steps": 4, "block": 16, "micro_batch": 1, "precision": "fp32", **changes})


def dealt(blocks: TokenBlocks, step: int, **changes: Any) -> list[list[int]]:
    """The tokens of all blocks of a step, over `world` ranks."""
    world = changes.pop("world", 1)
    ranks = [CorpusBatches(blocks, section(**changes), 3, rank, world) for rank in range(world)]
    return sorted(row for rank in ranks for micro in rank(step) for row in micro.batch.ids_BT.tolist())


def test_a_step_holds_the_same_blocks_on_any_number_of_ranks(blocks: TokenBlocks) -> None:
    for step in range(5):
        one = dealt(blocks, step, accumulation=4)
        assert one == dealt(blocks, step, accumulation=2, world=2) == dealt(blocks, step, micro_batch=2, world=2)
        assert len(one) == 4


def test_every_epoch_has_every_block_once_in_another_order(blocks: TokenBlocks) -> None:
    batches, n = CorpusBatches(blocks, section(), 3, 0, 1, heldout=2), len(blocks) - 2
    epochs = [[batches(e * n + i)[0].batch.ids_BT[0].tolist() for i in range(n)] for e in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(blocks.block(i)[0].tolist() for i in range(n))
    assert epochs[0] != epochs[1]


def alone(target: Any, batch: Batch) -> torch.Tensor:
    """The target's logits at every row, each document's part of a block on its own."""
    out = []
    for row in batch.row_index_R.tolist():
        b, t = divmod(row, batch.ids_BT.shape[1])
        start = t - int(batch.position_BT[b, t])
        out.append(target.model(input_ids=batch.ids_BT[b : b + 1, start : t + 1]).logits[0, -1])
    return torch.stack(out)


@pytest.mark.parametrize("chunk", [1, 10**9])
def test_the_online_teachers_rows_are_those_of_each_document_alone(
    target: Any, blocks: TokenBlocks, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    monkeypatch.setattr("draftsmith.train.teacher.CHUNK_BYTES", chunk)
    batch = blocks.batch([0, 1])
    ids, logp, tail = OnlineTeacher(target, 8, 0.5)(batch)
    expected = teacher_rows(alone(target, batch), 8, 0.5)
    assert torch.equal(ids, expected[0].long())
    torch.testing.assert_close(logp, expected[1], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(tail, expected[2], rtol=1e-3, atol=1e-5)


def test_the_online_teacher_outlives_a_runner_that_repacks_its_module(blocks: TokenBlocks) -> None:
    """As in the job, for a target that runs through its own module: the head's weight is taken before."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=259, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=0,
                                       eos_token_id=1))
    target = Target("t", model.to(torch.bfloat16).eval().requires_grad_(False), None)
    teacher, batch = OnlineTeacher(target, 8, 0.5), blocks.batch([0])
    _, before, _ = teacher(batch)
    ModuleRunner(target)
    _, after, _ = teacher(batch)
    torch.testing.assert_close(after, before, rtol=0.02, atol=0.02)


def test_a_batch_without_rows_gets_no_rows(target: Any, blocks: TokenBlocks) -> None:
    (micro,) = CorpusBatches(blocks, section(), 0, 0, 1)(0)
    ids, logp, tail = OnlineTeacher(target, 8, 0.5)(micro.emptied().batch)
    assert ids.shape == logp.shape == (0, 8)
    assert len(tail) == 0


def own_draft(target: Any) -> Any:
    torch.manual_seed(1)
    config = llama_config(target.config, 4, hidden=32, heads=4, kv_heads=2, intermediate=48)
    return fresh_draft(config, 2, (0.75, 1.5), torch.tensor([*range(120), END]))


def test_a_draft_of_its_own_shape_trains_its_embedding_and_head(target: Any, blocks: TokenBlocks) -> None:
    draft, batch = own_draft(target), blocks.batch([0])
    ids, logp, tail = OnlineTeacher(target, 8, 0.5)(batch)
    ids = torch.where(ids < 120, ids, 121)  # the head holds the first 120 and the end

    def kl(logits: torch.Tensor, *teacher: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        events = sparse_events(logits, *teacher, 0.5)
        return forward_kl(events), events.acceptance()

    def gradients(by_chunks: bool) -> dict[str, torch.Tensor]:
        draft.zero_grad()
        hidden = draft.exits(batch.ids_BT, batch.position_BT, batch.seen(torch.device("cpu")))[4].flatten(0, 1)
        hidden = hidden[batch.row_index_R]
        loss = draft.head(kl, hidden, ids, logp, tail) if by_chunks else kl(draft.logits(hidden), ids, logp, tail)
        (0.3 * loss[0].sum()).backward()
        return {name: p.grad.clone() for name, p in draft.named_parameters() if p.grad is not None}

    chunks, whole = gradients(True), gradients(False)
    assert {"embed", "head.weight"} <= chunks.keys() == whole.keys()
    for name, value in whole.items():
        torch.testing.assert_close(chunks[name], value, rtol=1e-4, atol=1e-6, msg=name)


def test_rows_of_a_trained_head_cannot_weigh_differently() -> None:
    from draftsmith.distill.losses import headed_loss

    head, hidden = torch.randn(5, 3).requires_grad_(), torch.randn(4, 3).requires_grad_()
    loss, _ = headed_loss(lambda logits: (logits.square().sum(-1), logits.sum(-1)), hidden, head)
    with pytest.raises(ValueError, match="must weigh the same"):
        (loss * torch.arange(4)).sum().backward()


def test_a_draft_of_its_own_shape_runs_as_it_was_trained(target: Any) -> None:
    """The runner takes its embedding from its own tensors, and no rows of the target's head."""
    draft = own_draft(target)
    state = draft.portable_state()
    assert state["embed"].shape == (259, 32)
    assert "embed" not in make_draft(target).portable_state()
    runner = DraftRunner(draft.config, draft.shape, state, target.embedding, target.head)
    ids = torch.arange(3, 23)[None]
    mask = torch.ones(1, 1, 20, 20, dtype=torch.bool).tril()
    with torch.no_grad():
        for variant in (draft.shape.variants()[0], draft.shape.variants()[-1]):
            expected = draft.logits(draft.exits(ids, torch.arange(20)[None], mask)[variant.depth])[0]
            found = runner.forward(ids, runner.new_cache(32, [200, 201]), variant)
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
