"""Packed blocks: what each token may see, its position, its teacher rows; and that packing changes no output."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from conftest import make_draft
from draftsmith.data.packing import Batch, Families, collate, merge, pack, positions, truncate
from draftsmith.data.teacher_cache import Document

K = 3


def make_document(prompt: int, answers: list[int], seed: int) -> Document:
    """Random tokens; every row from the last prompt token on has a teacher, the answers' last rows left out."""
    rng = np.random.default_rng(seed)
    branch = np.repeat(np.arange(len(answers) + 1), [prompt, *answers])
    last = np.append(branch[1:] != branch[:-1], True)
    rows = np.array([i for i in range(prompt - 1, len(branch)) if i == prompt - 1 or not last[i]])
    shape = (len(rows), K)
    return Document(
        rng.integers(3, 120, len(branch)),
        branch,
        rows,
        rng.integers(0, 120, shape).astype(np.int32),
        np.log(rng.dirichlet(np.ones(K + 1), len(rows))[:, :K]).astype(np.float32),
        rng.random(len(rows)).astype(np.float32),
    )


@pytest.fixture
def documents() -> list[Document]:
    sizes: list[tuple[int, list[int]]] = [(5, [4, 6]), (3, [7]), (6, [3, 2, 4]), (1, [9])]
    return [make_document(prompt, answers, seed) for seed, (prompt, answers) in enumerate(sizes)]


def paths(document: Document) -> list[np.ndarray]:
    """For each answer, the indices of its text: the prompt, then the answer."""
    prompt = np.nonzero(document.branch == 0)[0]
    return [np.concatenate([prompt, np.nonzero(document.branch == b)[0]]) for b in range(1, document.branch.max() + 1)]


def test_every_answer_continues_right_after_the_prompt() -> None:
    branch = np.array([0, 0, 0, 1, 1, 2, 2, 2, 3])
    assert positions(branch).tolist() == [0, 1, 2, 3, 4, 3, 4, 5, 3]
    assert positions(np.zeros(4, int)).tolist() == [0, 1, 2, 3]
    assert positions(np.array([1, 1])).tolist() == [0, 1]


def test_a_token_sees_its_own_prefix_and_nothing_else(documents: list[Document]) -> None:
    """The whole mask against a reference that asks, pair by pair, whether one text holds both in this order."""
    blocks, length = [documents[:2], documents[2:]], 32
    mask = collate(blocks, length).attention_mask()
    assert mask.shape == (2, 1, length, length)
    for b, block in enumerate(blocks):
        expected = torch.zeros(length, length, dtype=torch.bool)
        at = 0
        for document in block:
            for path in paths(document):
                for i, query in enumerate(path):
                    expected[at + query, at + path[: i + 1]] = True
            at += len(document.tokens)
        assert torch.equal(mask[b, 0, :at, :at], expected[:at, :at])
        assert not mask[b, 0, :at, at:].any(), "text sees padding"
        assert not mask[b, 0, at:, :at].any(), "padding sees text"


@pytest.mark.parametrize("seed", range(3))
def test_packing_loses_no_document_and_fits_every_block(seed: int) -> None:
    lengths = np.random.default_rng(seed).integers(1, 90, 200).tolist()
    blocks = pack(lengths, 64)
    assert sorted(i for block in blocks for i in block) == list(range(200))
    for block in blocks:
        assert sum(min(lengths[i], 64) for i in block) <= 64
    assert len(blocks) < 1.2 * sum(min(n, 64) for n in lengths) / 64 + 1, "packing wastes space"


def test_packing_nothing_gives_no_blocks() -> None:
    assert pack([], 64) == []


@pytest.mark.parametrize("length", [0, 4, 5, 8, 12, 15, 99])
def test_a_cut_document_keeps_the_rows_of_the_tokens_that_stay(length: int, documents: list[Document]) -> None:
    whole = documents[0]
    cut = truncate(whole, length)
    assert cut.tokens.tolist() == whole.tokens[:length].tolist()
    assert len(cut.branch) == len(cut.tokens)
    kept = [i for i, token in enumerate(whole.row_token) if token < length]
    assert cut.row_token.tolist() == whole.row_token[kept].tolist()
    for name in ("top_ids", "top_logp", "tail"):
        assert np.array_equal(getattr(cut, name), getattr(whole, name)[kept])


def check_rows(batch: Batch, blocks: list[list[Document]], length: int) -> None:
    """Every teacher row stands at its own token, in the order of the documents."""
    row = 0
    for b, block in enumerate(blocks):
        at = 0
        for document in block:
            for i, token in enumerate(document.row_token):
                if at + token >= length:
                    continue
                assert batch.row_index_R[row] == b * length + at + token
                assert batch.ids_BT.flatten()[batch.row_index_R[row]] == document.tokens[token]
                assert batch.top_ids_RK[row].tolist() == document.top_ids[i].tolist()
                assert np.array_equal(batch.top_logp_RK[row].numpy(), document.top_logp[i])
                assert batch.tail_R[row] == document.tail[i]
                row += 1
            at = min(length, at + len(document.tokens))
    assert row == len(batch.row_index_R) == len(batch.top_ids_RK) == len(batch.top_logp_RK) == len(batch.tail_R)


@pytest.mark.parametrize("length", [15, 20, 25, 32])
def test_rows_stay_with_their_tokens_also_where_a_document_is_cut(length: int, documents: list[Document]) -> None:
    blocks = [documents[:2], documents[2:]]
    batch = collate(blocks, length)
    assert batch.ids_BT.shape == batch.position_BT.shape == batch.document_BT.shape == (2, length)
    assert batch.ids_BT.dtype == batch.top_ids_RK.dtype == torch.int64
    check_rows(batch, blocks, length)


def test_the_row_check_notices_rows_shifted_by_one(documents: list[Document]) -> None:
    blocks = [documents[:2], documents[2:]]
    batch = collate(blocks, 32)
    batch.row_index_R = batch.row_index_R + 1
    with pytest.raises(AssertionError):
        check_rows(batch, blocks, 32)


def run_packed(draft: Any, batch: Batch, by_runs: bool = False) -> dict[int, torch.Tensor]:
    mask = batch.attention_mask() | torch.eye(batch.ids_BT.shape[1], dtype=torch.bool)  # as in training
    seen = batch.seen(torch.device("cpu")) if by_runs else mask
    with torch.no_grad():
        exits = draft.exits(batch.ids_BT, batch.position_BT, seen)
        return {depth: draft.logits(hidden) for depth, hidden in exits.items()}


def run_alone(draft: Any, tokens: np.ndarray) -> dict[int, torch.Tensor]:
    n = len(tokens)
    mask = torch.ones(1, 1, n, n, dtype=torch.bool).tril()
    with torch.no_grad():
        exits = draft.exits(torch.from_numpy(tokens)[None], torch.arange(n)[None], mask)
    return {depth: draft.logits(hidden)[0] for depth, hidden in exits.items()}


def largest_difference(draft: Any, batch: Batch, blocks: list[list[Document]], by_runs: bool = False) -> float:
    """Largest difference of logits between the packed pass and each text (prompt and one answer) on its own."""
    packed, worst = run_packed(draft, batch, by_runs), 0.0
    for b, block in enumerate(blocks):
        at = 0
        for document in block:
            for path in paths(document):
                for depth, logits in run_alone(draft, document.tokens[path]).items():
                    worst = max(worst, float((packed[depth][b, at + path] - logits).abs().max()))
            at += len(document.tokens)
    return worst


@pytest.mark.parametrize("by_runs", [False, True])
def test_packed_logits_equal_those_of_each_text_alone(target: Any, documents: list[Document], by_runs: bool) -> None:
    """At both exits, with a mask and run by run. A position or a mask off by one, planted below, must show."""
    draft = make_draft(target)
    blocks = [documents[:2], documents[2:]]
    batch = collate(blocks, 32)
    assert torch.isfinite(run_packed(draft, batch, by_runs)[4]).all(), "padding makes NaN"
    assert largest_difference(draft, batch, blocks, by_runs) < 1e-5
    faults: list[dict[str, torch.Tensor]] = [
        {"document_BT": torch.where(batch.document_BT < 0, -1, 0)},  # documents see each other
        {"branch_BT": batch.branch_BT.clamp_max(1)},  # answers see each other
        {"position_BT": torch.arange(32).expand(2, -1)},  # answers do not continue after the prompt
    ]
    for fault in faults[by_runs:]:  # a run is of one document whatever its number
        assert largest_difference(draft, Batch(**{**vars(batch), **fault}), blocks, by_runs) > 1e-3


def test_attention_by_runs_has_the_gradients_of_attention_with_a_mask(target: Any, documents: list[Document]) -> None:
    draft = make_draft(target)
    batch = collate([documents[:2], documents[2:]], 32)
    mask = batch.attention_mask() | torch.eye(32, dtype=torch.bool)
    found = []
    for seen in (batch.seen(torch.device("cpu")), mask):
        draft.zero_grad()
        hidden = draft.exits(batch.ids_BT, batch.position_BT, seen)[4].flatten(0, 1)
        draft.logits(hidden[batch.row_index_R]).square().sum().backward()
        found.append([p.grad.clone() for p in draft.parameters() if p.grad is not None])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-3)


# --- prompts that begin alike


def alike(shared: int, rests: list[int], answers: list[list[int]]) -> dict[int, Document]:
    """Documents whose prompts have their first `shared` tokens in common."""
    beginning = make_document(shared, [1], 99).tokens[:shared]
    out = {}
    for i, (rest, lengths) in enumerate(zip(rests, answers, strict=True)):
        document = make_document(shared + rest, lengths, 10 + i)
        document.tokens[:shared] = beginning
        document.tokens[shared] = i  # they part here, and nowhere later
        out[i] = document
    return out


def with_prompt_rows(document: Document, first: int) -> Document:
    """Rows of the prompt's tokens, too, from the `first` on."""
    own = np.arange(first, document.row_token[0])
    more = make_document(len(own) + 1, [len(own) + 1], 77)  # for its rows
    return Document(document.tokens, document.branch, np.concatenate([own, document.row_token]), *(
        np.concatenate([getattr(more, name)[: len(own)], getattr(document, name)])
        for name in ("top_ids", "top_logp", "tail")))


def texts_with_rows(document: Document) -> dict[tuple[int, ...], tuple[object, ...]]:
    """What each teacher row follows (the whole text up to its token), and the row."""
    out: dict[tuple[int, ...], tuple[object, ...]] = {}
    for i, token in enumerate(document.row_token):
        here = document.branch[: token + 1]
        seen = (here == 0) | (here == document.branch[token])
        text = tuple(document.tokens[: token + 1][seen].tolist())
        assert text not in out, "a row twice"
        out[text] = (*document.top_ids[i], *document.top_logp[i], document.tail[i])
    return out


@pytest.mark.parametrize("of_prompts", [False, True])
def test_merged_documents_keep_every_row_behind_its_own_text(of_prompts: bool) -> None:
    """Also the rows of what they share, which one of them has, whichever it is."""
    documents = alike(70, [3, 1, 5], [[4], [2, 6], [7]])
    if of_prompts:
        documents = {i: with_prompt_rows(document, 0 if i == 1 else 70) for i, document in documents.items()}
    merged = merge(list(documents.values()), 70)
    expected: dict[tuple[int, ...], tuple[object, ...]] = {}
    for document in documents.values():
        expected |= texts_with_rows(document)
    assert texts_with_rows(merged) == expected
    # The shared tokens once; the rest of a prompt once an answer.
    assert len(merged.tokens) == 70 + (3 + 4) + (1 + 2) + (1 + 6) + (5 + 7)
    assert merge([documents[1]], 70) is documents[1]


def test_a_merged_document_computes_what_each_of_its_texts_does_alone(target: Any) -> None:
    documents = list(alike(70, [3, 1], [[4], [2, 6]]).values())
    draft, block = make_draft(target), [merge(documents, 70)]
    assert largest_difference(draft, collate([block], 96), [block], by_runs=True) < 1e-4


def test_a_run_without_a_prompt_of_its_own_document_sees_itself_alone() -> None:
    """A document that is all answers, first in a block and after another: neither a later token nor another's."""
    empty = make_document(1, [3, 4], 0)
    answers = Document(empty.tokens[1:], empty.branch[1:], empty.row_token[1:] - 1, empty.top_ids[1:],
                       empty.top_logp[1:], empty.tail[1:])
    batch = collate([[answers, make_document(3, [2], 1), answers]], 32)
    mask = batch.attention_mask()[0, 0]
    at = 0
    for n, prompt in batch.segments()[0]:
        starts = np.cumsum([0] + [m for m, _ in batch.segments()[0]])
        seen = torch.zeros(n, 32, dtype=torch.bool)
        seen[:, at : at + n] = torch.ones(n, n, dtype=torch.bool).tril()
        if prompt is not None:
            seen[:, starts[prompt] : starts[prompt + 1]] = True
        if batch.document_BT[0, at] >= 0:
            assert torch.equal(mask[at : at + n], seen)
        at += n
    assert at == 32


def test_documents_that_would_share_nothing_stay_apart() -> None:
    """Texts scored as they are: the prompt is their first token, often the same for all."""
    documents = {i: make_document(1, [9], i) for i in range(4)}
    for document in documents.values():
        document.tokens[0] = 7
    units = Families(documents).units(64, np.random.default_rng(0))
    assert [len(unit.documents) for unit in units] == [1] * 4
    assert {unit.length for unit in units} == {10}


def test_documents_are_not_merged_where_that_costs_more() -> None:
    """Three answers each: the rest of the prompt would come three times."""
    documents = alike(70, [60, 50, 70], [[5, 5, 5]] * 3)
    units = Families(documents).units(4096, np.random.default_rng(0))
    assert sum(unit.length for unit in units) <= sum(len(d.tokens) for d in documents.values())
    assert all(len(unit.documents) == 1 for unit in units)


def test_a_prompt_that_is_all_shared_cannot_be_merged() -> None:
    documents = list(alike(70, [1, 1], [[4], [2]]).values())
    with pytest.raises(ValueError, match="leave its last one"):
        merge(documents, 71)


def test_units_hold_every_document_once_and_fit_their_block() -> None:
    documents = alike(70, [3, 1, 5, 2, 9, 4], [[4], [2, 6], [7], [20], [3], [11]])
    documents |= {100 + i: make_document(8, [5], 50 + i) for i in range(4)}
    families = Families(documents)
    units = families.units(128, np.random.default_rng(0))
    assert sorted(i for unit in units for i in unit.documents) == sorted(documents)
    assert any(len(unit.documents) > 1 for unit in units)
    for unit in units:
        merged = merge([documents[i] for i in unit.documents], unit.shared)
        assert len(merged.tokens) == unit.length <= 128
        assert len(unit.documents) == 1 or unit.shared == 70
    again = families.units(128, np.random.default_rng(0))
    other = families.units(128, np.random.default_rng(1))
    assert again == units != other


def test_a_row_follows_the_one_of_the_token_before_it_in_its_answer(documents: list[Document]) -> None:
    batch = collate([documents[:2], documents[2:]], 32)
    rows, expected = batch.row_index_R.tolist(), []
    for before, row in zip([-2, *rows], rows, strict=False):
        b, at = divmod(row, 32)
        beside = before == row - 1 and before // 32 == b
        first = batch.branch_BT[b, at] != batch.branch_BT[b, at - 1]
        after_prompt = batch.branch_BT[b, at] == 1  # only the first answer stands right after its prompt
        same = batch.document_BT[b, at] == batch.document_BT[b, at - 1]
        expected.append(bool(beside and same and (not first or after_prompt)))
    assert batch.follows_R.tolist() == expected
    assert any(expected)
    assert not all(expected)
