"""What a training step is given: packed blocks of a teacher cache, or blocks of a tokenized corpus.

Both are functions of the step alone, so that a resumed job goes on where it was, and are dealt out to the ranks
block by block: a step holds the same blocks on any number of ranks with the same global batch.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch
from draftsmith.data import DraftsmithError
from draftsmith.data.blocks import TokenBlocks
from draftsmith.data.packing import Batch, Families, Unit, collate, merge, pack
from draftsmith.data.teacher_cache import TeacherCache

from .sections import DistillSection, PretrainSection
from .stage import say


@dataclass
class MicroBatch:
    """A batch with the step it belongs to, and the number of its first block in the whole run: the numbers of blocks
    seed their widths."""

    batch: Batch
    step: int
    number: int

    def emptied(self) -> MicroBatch:
        """The same shape with nothing in it to learn from, whatever its tokens did."""
        b = self.batch
        none = {name: getattr(b, name)[:0] for name in ("row_index_R", "top_ids_RK", "top_logp_RK", "tail_R")}
        return replace(self, batch=replace(b, ids_BT=torch.zeros_like(b.ids_BT), **none))


class Batches:
    """Deals out numbered blocks: micro_batch * accumulation * world of them a step, in the order of their numbers."""

    def __init__(self, d: DistillSection | PretrainSection, rank: int, world: int) -> None:
        self.micro_batch, self.accumulation, self.rank, self.world = d.micro_batch, d.accumulation, rank, world
        self.per_step = d.micro_batch * d.accumulation * world

    def numbers(self, step: int) -> list[list[int]]:
        """The blocks of each of this rank's micro-batches."""
        first = [step * self.per_step + (a * self.world + self.rank) * self.micro_batch
                 for a in range(self.accumulation)]
        return [list(range(n, n + self.micro_batch)) for n in first]

    def batch(self, numbers: list[int]) -> Batch:
        raise NotImplementedError

    def __call__(self, step: int) -> list[MicroBatch]:
        """This rank's micro-batches of a step."""
        return [MicroBatch(self.batch(numbers), step, numbers[0]) for numbers in self.numbers(step)]


class CorpusBatches(Batches):
    """Blocks of a tokenized corpus, each once an epoch, in an order drawn from (seed, epoch); the last `heldout` are
    left out."""

    def __init__(self, blocks: TokenBlocks, d: DistillSection | PretrainSection, seed: int, rank: int, world: int,
                 heldout: int = 0) -> None:
        super().__init__(d, rank, world)
        self.blocks, self.seed, self.each_epoch = blocks, seed, len(blocks) - heldout
        if self.each_epoch < 1:
            raise DraftsmithError(f"{blocks.directory}: {len(blocks)} blocks, of which {heldout} are held out: nothing "
                                  "is left to train on")
        self.order = lru_cache(maxsize=2)(self._order)

    def _order(self, epoch: int) -> np.ndarray:
        return np.random.default_rng([self.seed, epoch]).permutation(self.each_epoch)

    def batch(self, numbers: list[int]) -> Batch:
        return self.blocks.batch([int(self.order(n // self.each_epoch)[n % self.each_epoch]) for n in numbers])


class CachedBatches(Batches):
    """Documents of a teacher cache in packed blocks, in an order drawn from (seed, epoch).

    In every epoch the documents of a family (prompts that begin alike) are merged anew, as many as a block holds.
    """

    def __init__(self, cache: TeacherCache, d: DistillSection, seed: int, rank: int, world: int) -> None:
        super().__init__(d, rank, world)
        self.cache, self.length, self.seed = cache, d.block, seed
        self.starts = [0]  # number of the first block of each epoch packed so far
        self.packed: tuple[int, list[list[Unit]]] = (-1, [])
        documents = [cache[i] for i in range(len(cache))]
        # A document whose prompt fills a block has no row left to learn from.
        self.kept = [i for i, doc in enumerate(documents) if doc.row_token[0] < self.length]
        if not self.kept:
            raise DraftsmithError(f"every prompt is longer than a block of {self.length} tokens: raise distill.block")
        cut = sum(len(documents[i].tokens) > self.length for i in self.kept)
        if len(self.kept) < len(documents) or cut:
            say(f"distill: {len(documents) - len(self.kept)} documents left out and {cut} cut, being longer than a "
                f"block of {self.length} tokens (distill.block)")
        self.families = Families({i: documents[i] for i in self.kept})

    def _epoch(self, epoch: int) -> list[list[Unit]]:
        if self.packed[0] != epoch:
            units = self.families.units(self.length, np.random.default_rng([self.seed, epoch]))
            blocks = pack([unit.length for unit in units], self.length)
            self.packed = (epoch, [[units[i] for i in block] for block in blocks])
        return self.packed[1]

    def _block(self, number: int) -> list[Unit]:
        """What stands in the n-th block of the endless stream of epochs."""
        while number >= self.starts[-1]:
            self.starts.append(self.starts[-1] + len(self._epoch(len(self.starts) - 1)))
        epoch = bisect.bisect_right(self.starts, number) - 1
        return self._epoch(epoch)[number - self.starts[epoch]]

    @property
    def each_epoch(self) -> int:
        """Blocks of the first epoch; others differ by a few, being packed anew."""
        return len(self._epoch(0))

    def batch(self, numbers: list[int]) -> Batch:
        return collate([[merge([self.cache[i] for i in unit.documents], unit.shared) for unit in self._block(n)]
                        for n in numbers], self.length)


def batches_of(source: TeacherCache | TokenBlocks, d: DistillSection, seed: int, rank: int,
               world: int) -> CachedBatches | CorpusBatches:
    """What distillation is given, of whichever source it has."""
    if isinstance(source, TokenBlocks):
        return CorpusBatches(source, d, seed, rank, world)
    return CachedBatches(source, d, seed, rank, world)
