"""Tokenized corpora: blocks without padding, documents told apart, shards complete or refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from draftsmith.data import DraftsmithError
from draftsmith.data.blocks import BlockManifest, BlockWriter, TokenBlocks

DOCUMENTS = [[1, 2, 3, 4, 5], [6, 7], [8, 9, 10, 11, 12, 13, 14], [15], [16, 17, 18, 19, 20, 21]]


def manifest(vocab: int = 300, tokenizer: str = "t") -> BlockManifest:
    return BlockManifest({"seed": 0}, tokenizer_hash=tokenizer, vocab_size=vocab)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Two shards of 14 and 7 tokens."""
    writer = BlockWriter(tmp_path, manifest())
    writer.write_shard(1, DOCUMENTS[3:])  # in any order
    writer.write_shard(0, DOCUMENTS[:3])
    writer.finish(2)
    return tmp_path


def test_blocks_are_the_stream_cut_without_padding(corpus: Path) -> None:
    blocks = TokenBlocks(corpus, 4)
    assert len(blocks) == 3 + 1  # what is left at a shard's end is not used
    assert [blocks.block(n)[0].tolist() for n in range(4)] == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12],
                                                              [15, 16, 17, 18]]
    ids, position, document = blocks.block(1)
    assert document.tolist() == [0, 1, 1, 2]
    assert position.tolist() == [0, 0, 1, 0], "a document that goes on is read from this block alone"


def test_every_token_with_a_successor_of_its_document_carries_the_loss(corpus: Path) -> None:
    batch = TokenBlocks(corpus, 4).batch([1, 0])
    assert batch.ids_BT.tolist() == [[5, 6, 7, 8], [1, 2, 3, 4]]
    assert batch.row_index_R.tolist() == [1, 4, 5, 6]
    assert batch.top_ids_RK.shape == batch.top_logp_RK.shape == (4, 0)
    mask = batch.attention_mask()[0, 0]
    assert mask.tolist() == [[True, False, False, False], [False, True, False, False], [False, True, True, False],
                             [False, False, False, True]]


def test_small_vocabularies_take_two_bytes_a_token_and_large_ones_four(tmp_path: Path) -> None:
    for vocab, dtype in ((65536, np.uint16), (65537, np.uint32)):
        writer = BlockWriter(tmp_path / str(vocab), manifest(vocab))
        writer.write_shard(0, [[vocab - 1, 0, 1, 2]])
        writer.finish(1)
        blocks = TokenBlocks(tmp_path / str(vocab), 2)
        assert blocks.shards[0]["tokens"].dtype == dtype
        assert blocks.block(0)[0].tolist() == [vocab - 1, 0]
        assert blocks.batch([0]).ids_BT.dtype == torch.int64


def test_counts_are_of_all_tokens(corpus: Path) -> None:
    assert TokenBlocks(corpus, 4).token_counts(30)[0].tolist() == [0, *[1] * 21, *[0] * 8]


@pytest.mark.parametrize("fault", ["truncated", "missing", "shorter"])
def test_a_damaged_shard_is_named(corpus: Path, fault: str) -> None:
    file = corpus / "shard-00000.tokens.npy"
    if fault == "truncated":
        file.write_bytes(file.read_bytes()[:-2])
    elif fault == "missing":
        file.unlink()
    else:
        np.save(file, np.zeros(3, np.uint16))
    with pytest.raises(DraftsmithError, match=r"shard-00000\.tokens\.npy: "):
        TokenBlocks(corpus, 4)


def test_an_unfinished_or_foreign_corpus_is_refused(tmp_path: Path, corpus: Path) -> None:
    BlockWriter(tmp_path / "half", manifest()).write_shard(0, DOCUMENTS)
    with pytest.raises(DraftsmithError, match=r"tokenized corpus is unfinished; run train/prepare\.py again"):
        TokenBlocks(tmp_path / "half", 4)
    with pytest.raises(DraftsmithError, match=r"no tokenized corpus here .* run train/prepare\.py first"):
        TokenBlocks(tmp_path / "none", 4)
    with pytest.raises(DraftsmithError, match="another tokenizer"):
        TokenBlocks(corpus, 4, "u")
    with pytest.raises(DraftsmithError, match="no shard has a whole block of 15 tokens"):
        TokenBlocks(corpus, 15)
    with pytest.raises(DraftsmithError, match="made with tokenizer_hash = t, not u"):
        BlockWriter(corpus, manifest(tokenizer="u"))


def test_a_writer_goes_on_with_what_is_missing(tmp_path: Path) -> None:
    BlockWriter(tmp_path, manifest()).write_shard(1, DOCUMENTS[3:])
    again = BlockWriter(tmp_path, manifest())
    assert again.missing(3) == [0, 2]
    with pytest.raises(DraftsmithError, match="shard 0 has not been written"):
        again.finish(2)
    again.write_shard(0, DOCUMENTS[:3])
    again.skip_shard(2)
    again.finish(3)
    assert len(TokenBlocks(tmp_path, 7)) == 3
    assert again.missing(3) == []
