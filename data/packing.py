"""Packing documents into fixed blocks, with attention that does not cross documents or answers.

Documents whose prompts begin alike are merged first, so that the beginning is computed once for all of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import torch

from .prefixes import common_prefix, families
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


@dataclass(frozen=True)
class Unit:
    """Documents laid out as one: their numbers, how many leading tokens they share, and the tokens in all."""

    documents: tuple[int, ...]
    shared: int
    length: int


class Families:
    """Documents by how their prompts begin, to be merged a blockful at a time."""

    def __init__(self, documents: dict[int, Document]) -> None:
        numbers = list(documents)
        prompts = [documents[i].tokens[documents[i].branch == 0] for i in numbers]
        self.whole = {i: len(documents[i].tokens) for i in numbers}
        self.prompt = {i: len(prompt) for i, prompt in zip(numbers, prompts, strict=True)}
        self.answers = {i: int(documents[i].branch.max()) for i in numbers}
        self.families: list[tuple[int, list[int]]] = []  # tokens shared, the last of each prompt left out; members
        for family in families(prompts):
            first = prompts[family[0]]
            shared = min(min(common_prefix(first, prompts[j]), len(prompts[j]) - 1) for j in family)
            if shared > 0:
                self.families.append((shared, [numbers[j] for j in family]))
            else:  # nothing would be left to share
                self.families += [(0, [numbers[j]]) for j in family]

    def units(self, block: int, random: np.random.Generator) -> list[Unit]:
        """Every document once, in random order; those of a family merged while that saves tokens and fits a block."""
        out: list[Unit] = []
        for shared, members in self.families:
            unit: Unit | None = None
            for i in random.permutation(members).tolist():
                if unit:
                    together = (*unit.documents, i)
                    length = shared + sum(self._own(j, shared) for j in together)
                    if length <= block and length < unit.length + self.whole[i]:
                        unit = Unit(together, shared, length)
                        continue
                    out.append(unit)
                unit = Unit((i,), shared, self.whole[i])
            out += [unit] if unit else []
        return [out[j] for j in random.permutation(len(out))]

    def _own(self, i: int, shared: int) -> int:
        """Tokens that a document adds to a merged one: the rest of its prompt comes once an answer."""
        return self.whole[i] - self.prompt[i] + max(1, self.answers[i]) * (self.prompt[i] - shared)


def merge(documents: list[Document], shared: int) -> Document:
    """One document of several whose prompts have their first `shared` tokens in common.

    Each answer becomes a branch that starts with the rest of its own prompt, at least its last token: a
    prompt of several answers has that rest once an answer, and its own teacher rows in the first.
    """
    if len(documents) == 1:
        return documents[0]
    tokens, branch = [documents[0].tokens[:shared]], [np.zeros(shared, np.int64)]
    rows: list[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]] = []
    at, number = shared, 0
    for document in documents:
        prompt = np.flatnonzero(document.branch == 0)[shared:]
        if not len(prompt):
            raise ValueError("a prompt shares all its tokens: leave its last one to its own branch")
        for answer in range(1, max(2, int(document.branch.max()) + 1)):
            own = np.flatnonzero(document.branch == answer)
            number += 1
            tokens += [document.tokens[prompt], document.tokens[own]]
            branch.append(np.full(len(prompt) + len(own), number))
            place = np.full(len(document.tokens), -1)  # where the document's tokens went
            place[own] = at + len(prompt) + np.arange(len(own))
            if answer == 1:
                place[:shared], place[prompt] = np.arange(shared), at + np.arange(len(prompt))
            new = place[document.row_token]
            here = new >= 0
            rows.append((new[here], document.top_ids[here], document.top_logp[here], document.tail[here]))
            at += len(prompt) + len(own)
    return Document(np.concatenate(tokens), np.concatenate(branch), *map(np.concatenate, zip(*rows, strict=True)))


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

    def attention_mask(self, device: torch.device | None = None) -> torch.Tensor:
        """Boolean [B, 1, T, T]: same document, not later, and in the prompt or in the same answer. Made on `device`."""
        doc, branch, pos = (t.to(device) for t in (self.document_BT, self.branch_BT, self.position_BT))
        same = doc[:, :, None] == doc[:, None, :]
        visible = (branch[:, None, :] == 0) | (branch[:, None, :] == branch[:, :, None])
        return (same & visible & (pos[:, None, :] <= pos[:, :, None]))[:, None]

    @property
    def follows_R(self) -> torch.Tensor:
        """Whether a row is of the token right after that of the row before it, in the same answer."""
        rows, place = self.row_index_R, torch.stack([self.document_BT.flatten(), self.position_BT.flatten()])
        now, before = place[:, rows[1:]], place[:, rows[:-1]]
        next_one = (rows[1:] == rows[:-1] + 1) & (now[0] == before[0]) & (now[1] == before[1] + 1)
        return torch.cat([torch.zeros(min(1, len(rows)), dtype=torch.bool), next_one])

    def seen(self, device: torch.device) -> dict[str, Any]:
        """What a token sees, as layers take it: runs on a CPU; on a GPU a mask, with which one kernel does it all."""
        if device.type == "cpu":
            return {"runs": self.segments(), "attention_mask": None}
        return {"attention_mask": self.training_mask(device)}

    def training_mask(self, device: torch.device) -> torch.Tensor:
        """The attention mask, with padding seeing itself alone, so that its softmax is defined."""
        return self.attention_mask(device) | torch.eye(self.ids_BT.shape[1], dtype=torch.bool, device=device)

    def segments(self) -> list[list[tuple[int, int | None]]]:
        """The same, block by block, as runs of tokens (their number, and the run that is their prompt, or None):
        a token sees the whole run that is its prompt, and its own run up to itself."""
        return [_runs(*pair) for pair in zip(self.document_BT.tolist(), self.branch_BT.tolist(), strict=True)]


def _runs(document_T: list[int], branch_T: list[int]) -> list[tuple[int, int | None]]:
    out: list[tuple[int, int | None]] = []
    prompt: tuple[int, int | None] = (-1, None)  # a document, and the run that is its prompt
    for (document, branch), tokens in groupby(zip(document_T, branch_T, strict=True)):
        if branch == 0:
            prompt = (document, len(out))
        out.append((len(list(tokens)), prompt[1] if branch and prompt[0] == document else None))
    return out


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
