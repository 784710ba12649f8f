"""Teacher cache: documents with the target's top-k log-probabilities and exact tail mass.

A document is a prompt (branch 0) followed by the target's answers to it (branches 1, 2, ...), so that a
prompt is stored and computed once for all its answers. Shards are safetensors files; each is complete or
absent. Per shard, for N tokens, D documents and R target rows:

    tokens_N int32, branch_N int32, doc_offsets int64 [D + 1],
    row_token_R int64 (the token whose successor the row predicts), top_ids_RK int32,
    top_logp_RK float32 (log-probabilities at the cache's temperature), tail_R float32 (mass outside top-k)
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

from .io import DraftsmithError, save_tensors, sha256_file, write_json
from .shards import ShardManifest, ShardWriter


@dataclass
class Document:
    """A prompt with its answers and the teacher's rows; arrays as in the module's table."""

    tokens: np.ndarray
    branch: np.ndarray
    row_token: np.ndarray
    top_ids: np.ndarray
    top_logp: np.ndarray
    tail: np.ndarray


@dataclass
class CacheManifest(ShardManifest):
    """What a cache was made from. `temperature` is the one the stored distributions were divided by."""

    target: dict[str, Any] = field(default_factory=dict)
    tokenizer_hash: str = ""
    corpus_hash: str = ""
    k: int = 0
    temperature: float = 0.0
    version: int = 1

    VERSION = 1
    WHAT = "teacher cache"
    JOB = "train/respond.py"


def teacher_rows(
    logits_RV: torch.Tensor, k: int, temperature: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Top-k ids, their log-probabilities and the mass outside them, of softmax(logits / temperature).

    The tail is summed over the tokens that were left out, not taken as 1 - sum, which would lose all
    its digits when the top-k holds nearly everything.
    """
    logp = torch.log_softmax(logits_RV.float() / temperature, dim=-1)
    top_logp, top_ids = logp.topk(min(k, logp.shape[-1]), dim=-1)
    tail = logp.exp().scatter(-1, top_ids, 0.0).sum(-1)
    return top_ids.int(), top_logp, tail


class CacheWriter(ShardWriter):
    """Writes numbered shards into a cache directory, in any order and from any number of processes."""

    manifest: CacheManifest

    def write_shard(self, number: int, documents: list[Document]) -> None:
        """Write shard `number`, of at least one document."""
        offsets = np.cumsum([0] + [len(d.tokens) for d in documents])
        starts = zip(offsets[:-1], documents, strict=True)
        arrays: dict[str, np.ndarray] = {
            "tokens": np.concatenate([d.tokens for d in documents]).astype(np.int32),
            "branch": np.concatenate([d.branch for d in documents]).astype(np.int32),
            "doc_offsets": offsets.astype(np.int64),
            "row_token": np.concatenate([start + d.row_token for start, d in starts]).astype(np.int64),
            "top_ids": np.concatenate([d.top_ids for d in documents]).astype(np.int32),
            "top_logp": np.concatenate([d.top_logp for d in documents]).astype(np.float32),
            "tail": np.concatenate([d.tail for d in documents]).astype(np.float32),
        }
        path = self._record(number).with_suffix(".safetensors")
        save_tensors(path, {key: torch.from_numpy(value) for key, value in arrays.items()})
        write_json(self._record(number), {
            "file": path.name, "sha256": sha256_file(path), "documents": len(documents), "tokens": int(offsets[-1]),
            "rows": int(len(arrays["tail"])),
        })


class TeacherCache:
    """A complete cache opened for reading, tensors memory-mapped from the shards.

    `expect` holds manifest fields that the caller's recipe needs; a mismatch names the field and both
    values. A shard that is missing, truncated or altered is named and refused.
    """

    def __init__(self, directory: str | Path, expect: dict[str, Any] | None = None) -> None:
        self.directory = Path(directory)
        self.manifest = CacheManifest.load_complete(self.directory)
        for key, value in (expect or {}).items():
            found = getattr(self.manifest, key)
            if found != value:
                raise DraftsmithError(f"{directory}: made with {key} = {found}, but the recipe asks for {value}")
        self.shards = [self._open(shard) for shard in self.manifest.shards]
        self.index = [
            (s, d) for s, shard in enumerate(self.shards) for d in range(len(shard["doc_offsets"]) - 1)
        ]

    def _open(self, shard: dict[str, Any]) -> dict[str, np.ndarray]:
        path = self.directory / shard["file"]
        if not path.is_file():
            raise DraftsmithError(f"{path}: shard named in the manifest is missing")
        if sha256_file(path) != shard["sha256"]:
            raise DraftsmithError(f"{path}: truncated or altered (SHA-256 differs from the manifest); delete the "
                                  "cache folder and run train/respond.py again")
        with safe_open(str(path), "pt") as file:
            arrays = {key: file.get_tensor(key).numpy() for key in file.keys()}  # noqa: SIM118 (no __iter__)
        arrays["row_bounds"] = np.searchsorted(arrays["row_token"], arrays["doc_offsets"])
        return arrays

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, i: int) -> Document:
        s, d = self.index[i]
        shard = self.shards[s]
        a, b = shard["doc_offsets"][d : d + 2]
        r0, r1 = shard["row_bounds"][d : d + 2]
        return Document(
            tokens=shard["tokens"][a:b], branch=shard["branch"][a:b], row_token=shard["row_token"][r0:r1] - a,
            top_ids=shard["top_ids"][r0:r1], top_logp=shard["top_logp"][r0:r1], tail=shard["tail"][r0:r1],
        )

    def token_counts(self, vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
        """How often each token occurs in answers (branches > 0) and in prompts; two arrays [vocab_size]."""
        counts = np.zeros((2, vocab_size), dtype=np.int64)
        for shard in self.shards:
            for part, where in enumerate((shard["branch"] > 0, shard["branch"] == 0)):
                counts[part] += np.bincount(shard["tokens"][where], minlength=vocab_size)
        return counts[0], counts[1]
