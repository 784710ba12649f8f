"""Packing documents into fixed blocks, with attention that does not cross documents or answers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from .teacher_cache import Document


def positions(branch: np.ndarray) -> np.ndarray:
    """Position of each token in its own text: answers all continue right after the prompt.

    `branch` is 0 on the prompt (which comes first) and 1, 2, ... on the answers.
    """
    prompt = int((branch == 0).sum())
    position = np.arange(len(branch))
    for b in np.unique(branch[branch > 0]):
        where = np.nonzero(branch == b)[0]
        position[where] = prompt + np.arange(len(where))
    return position


def truncate(document: Document, length: int) -> Document:
    """The first `length` tokens of a document, with the rows that still have their token."""
    keep = document.row_token < length
    return Document(document.tokens[:length], document.branch[:length], document.row_token[keep],
                    document.top_ids[keep], document.top_logp[keep], document.tail[keep])


@dataclass
class Batch:
    """B packed blocks of T tokens with R teacher rows; row r belongs to token `row_index_R[r]` of B*T.

    Padding has document -1.
    """

    ids_BT: torch.Tensor
    position_BT: torch.Tensor
    document_BT: torch.Tensor
    branch_BT: torch.Tensor
    row_index_R: torch.Tensor
    top_ids_RK: torch.Tensor
    top_logp_RK: torch.Tensor
    tail_R: torch.Tensor

    def attention_mask(self) -> torch.Tensor:
        """Boolean [B, 1, T, T]: same document, not later, and in the prompt or in the same answer."""
        doc, branch, pos = self.document_BT, self.branch_BT, self.position_BT
        same = doc[:, :, None] == doc[:, None, :]
        visible = (branch[:, None, :] == 0) | (branch[:, None, :] == branch[:, :, None])
        return (same & visible & (pos[:, None, :] <= pos[:, :, None]))[:, None]


def pack(lengths: list[int], block: int) -> list[list[int]]:
    """First-fit in the given order: indices of the documents that share each block of `block` tokens."""
    blocks: list[list[int]] = []
    room: list[int] = []
    for i, length in enumerate(lengths):
        length = min(length, block)
        # Only the last few open blocks are tried, so that packing stays linear and nearly in order.
        for b in range(max(0, len(blocks) - 16), len(blocks)):
            if room[b] >= length:
                blocks[b].append(i)
                room[b] -= length
                break
        else:
            blocks.append([i])
            room.append(block - length)
    return blocks


def collate(blocks: list[list[Document]], length: int) -> Batch:
    """Lay out documents in blocks of `length` tokens; a document over `length` is cut."""
    B = len(blocks)
    ids = np.zeros((B, length), np.int64)
    position = np.zeros((B, length), np.int64)
    doc_id = np.full((B, length), -1, np.int64)
    branch = np.zeros((B, length), np.int64)
    rows, tops, logps, tails = [], [], [], []
    for b, documents in enumerate(blocks):
        at = 0
        for d, document in enumerate(documents):
            document = truncate(document, length - at)
            here = slice(at, at + len(document.tokens))
            ids[b, here], branch[b, here] = document.tokens, document.branch
            position[b, here], doc_id[b, here] = positions(document.branch), d
            rows.append(b * length + at + document.row_token)
            tops.append(document.top_ids)
            logps.append(document.top_logp)
            tails.append(document.tail)
            at = here.stop
    tensor = torch.from_numpy
    return Batch(tensor(ids), tensor(position), tensor(doc_id), tensor(branch),
                 tensor(np.concatenate(rows).astype(np.int64)), tensor(np.concatenate(tops).astype(np.int64)),
                 tensor(np.concatenate(logps)), tensor(np.concatenate(tails)))
