"""Token blocks: a corpus as one long stream of token ids on disk, read in blocks of any length.

Per shard two memory-mapped arrays, `shard-NNNNN.tokens.npy` (uint16 [N], uint32 for vocabularies over 65,536) and
`shard-NNNNN.ends.npy` (int64 [D]: where each of its D documents ends in it). Blocks are cut without padding; what
a block holds of different documents is told apart, so that attention does not cross them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from .io import DraftsmithError, atomic_path, sha256_file, write_json
from .packing import Batch
from .shards import ShardManifest, ShardWriter


@dataclass
class BlockManifest(ShardManifest):
    """What a corpus was tokenized with and from."""

    tokenizer_hash: str = ""
    vocab_size: int = 0
    version: int = 1

    VERSION = 1
    WHAT = "tokenized corpus"
    JOB = "train/prepare.py"


class BlockWriter(ShardWriter):
    """Writes numbered shards of tokenized documents, in any order and from any number of processes."""

    manifest: BlockManifest

    def write_shard(self, number: int, documents: list[list[int]]) -> None:
        """Write shard `number`, of at least one document with at least one token."""
        dtype = np.uint16 if self.manifest.vocab_size <= 1 << 16 else np.uint32
        arrays = {"tokens": np.concatenate([np.asarray(d, dtype) for d in documents]),
                  "ends": np.cumsum([len(d) for d in documents]).astype(np.int64)}
        files = {}
        for name, array in arrays.items():
            path = self._record(number).with_suffix(f".{name}.npy")
            with atomic_path(path) as aside, aside.open("wb") as file:
                np.save(file, array)
            files[name] = {"file": path.name, "sha256": sha256_file(path)}
        write_json(self._record(number), {"files": files, "documents": len(documents), "tokens": len(arrays["tokens"])})


class TokenBlocks:
    """A finished corpus, read `length` tokens at a time; what is left at a shard's end is not used."""

    def __init__(self, directory: str | Path, length: int, tokenizer_hash: str | None = None) -> None:
        """Raises `DraftsmithError` for a corpus of another tokenizer, and for a shard that is missing or truncated."""
        self.directory, self.length = Path(directory), length
        self.manifest = BlockManifest.load_complete(self.directory)
        if tokenizer_hash not in (None, self.manifest.tokenizer_hash):
            raise DraftsmithError(f"{directory}: tokenized with another tokenizer; run train/prepare.py into another "
                                  "folder")
        self.shards = [{name: self._open(facts["file"]) for name, facts in shard["files"].items()}
                       for shard in self.manifest.shards]
        for shard, facts in zip(self.shards, self.manifest.shards, strict=True):
            if len(shard["tokens"]) != facts["tokens"]:
                raise DraftsmithError(f"{self.directory / facts['files']['tokens']['file']}: truncated or altered")
        self.first = np.cumsum([0] + [len(shard["tokens"]) // length for shard in self.shards])
        if len(self) == 0:
            raise DraftsmithError(f"{directory}: no shard has a whole block of {length} tokens; lower the block, or "
                                  "take more text")

    def _open(self, name: str) -> np.ndarray:
        try:
            found: np.ndarray = np.load(self.directory / name, mmap_mode="r")
        except (OSError, ValueError) as error:
            raise DraftsmithError(f"{self.directory / name}: missing, truncated or altered ({error})") from error
        return found

    def __len__(self) -> int:
        return int(self.first[-1])

    def block(self, number: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Token ids, positions within their documents' part of the block, and documents, int64 [length] each."""
        which = int(np.searchsorted(self.first, number, side="right")) - 1
        shard, start = self.shards[which], (number - int(self.first[which])) * self.length
        ids = shard["tokens"][start : start + self.length].astype(np.int64)
        document = np.searchsorted(shard["ends"], np.arange(start, start + self.length), side="right")
        document -= document[0]
        begins = np.flatnonzero(np.diff(document, prepend=-1))
        return ids, np.arange(self.length) - begins[document], document

    def batch(self, numbers: list[int]) -> Batch:
        """Blocks as a batch in which every token whose successor is of its document carries the loss. The teacher's
        rows are empty: they come from the teacher itself."""
        ids, position, document = (np.stack(parts) for parts in zip(*map(self.block, numbers), strict=True))
        rows = np.flatnonzero(np.pad(document[:, 1:] == document[:, :-1], ((0, 0), (0, 1))).ravel())
        none = torch.zeros(len(rows), 0)
        return Batch(torch.from_numpy(ids), torch.from_numpy(position), torch.from_numpy(document),
                     torch.zeros(ids.shape, dtype=torch.int64), torch.from_numpy(rows), none.long(), none,
                     torch.zeros(len(rows)))

    def token_counts(self, vocab_size: int, most: int = 50_000_000) -> tuple[np.ndarray, None]:
        """How often each token occurs, int64 [vocab_size], in about the first `most` tokens; none are prompts."""
        counts, seen = np.zeros(vocab_size, np.int64), 0
        for shard in self.shards:
            counts += np.bincount(shard["tokens"], minlength=vocab_size)
            seen += len(shard["tokens"])
            if seen >= most:
                break
        return counts, None
