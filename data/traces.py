"""Acceptance traces: one Parquet row per gating decision.

Columns: `prompt` (id), `position` (emitted tokens before the decision), `features` (list of floats: mean
target input embedding of the last 8 tokens, then the target's last hidden state, then scalars),
`acceptance` (variants x 8, flattened: sum of min(p, q) at each of the next 8 positions by teacher forcing
over the text that was emitted; NaN past its end), `variant` (the one in use), `drafted`, `accepted`,
`confidence` (ppl_target / ppl_draft over the context so far, cut at 1; NaN before any is known).
File metadata holds the variants' names, their measured step costs, the verification costs in seconds,
the temperature, and the hashes of the bundle and of the prompts.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .io import DraftsmithError, atomic_path

HORIZON = 8
META_KEY = b"draftsmith"


@dataclass
class Traces:
    """Rows of a trace file as arrays: F features, A variants, horizon of 8 positions."""

    prompt_N: list[str]
    position_N: np.ndarray
    features_NF: np.ndarray
    acceptance_NAH: np.ndarray
    variant_N: np.ndarray
    drafted_N: np.ndarray
    accepted_N: np.ndarray
    confidence_N: np.ndarray
    meta: dict[str, Any]

    def __len__(self) -> int:
        return len(self.prompt_N)

    def take(self, rows: np.ndarray) -> Traces:
        """The given rows (a boolean mask) as traces of their own."""
        return Traces([p for p, r in zip(self.prompt_N, rows, strict=True) if r], self.position_N[rows],
                      self.features_NF[rows], self.acceptance_NAH[rows], self.variant_N[rows],
                      self.drafted_N[rows], self.accepted_N[rows], self.confidence_N[rows], self.meta)


def write_traces(path: str | Path, traces: Traces) -> None:
    """Write a trace file; NaN in `acceptance` marks positions past the end of the text."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    n = len(traces)
    table = pa.table({
        "prompt": traces.prompt_N,
        "position": traces.position_N.astype(np.int32),
        "features": list(traces.features_NF.astype(np.float32)),
        "acceptance": list(traces.acceptance_NAH.reshape(n, -1).astype(np.float32)),
        "variant": traces.variant_N.astype(np.int32),
        "drafted": traces.drafted_N.astype(np.int32),
        "accepted": traces.accepted_N.astype(np.int32),
        "confidence": traces.confidence_N.astype(np.float32),
    })
    table = table.replace_schema_metadata({META_KEY: json.dumps(traces.meta).encode()})
    with atomic_path(path) as aside:
        pq.write_table(table, str(aside))


def read_meta(path: str | Path) -> dict[str, Any]:
    """The metadata of a trace file, without its rows."""
    import pyarrow.parquet as pq

    try:
        raw = pq.read_schema(str(path)).metadata or {}
    except Exception as error:  # pyarrow's own errors do not share a base class
        raise DraftsmithError(f"{path}: not a readable trace file ({error})") from error
    if META_KEY not in raw:
        raise DraftsmithError(f"{path}: a Parquet file, but not an acceptance trace")
    return dict(json.loads(raw[META_KEY]))


def read_traces(path: str | Path) -> Traces:
    """Read a trace file; a missing or truncated one is named and refused."""
    import pyarrow.parquet as pq

    if not Path(path).is_file():
        raise DraftsmithError(f"{path}: no such trace file; run train/trace.py first")
    meta = read_meta(path)
    try:
        columns = pq.read_table(str(path)).to_pydict()
    except Exception as error:
        raise DraftsmithError(f"{path}: truncated or damaged trace file ({error})") from error
    if "confidence" not in columns:
        raise DraftsmithError(f"{path}: written by an earlier release; delete it and run train/trace.py again")
    n, variants = len(columns["prompt"]), len(meta["variants"])
    return Traces(columns["prompt"], np.array(columns["position"]), np.array(columns["features"], np.float32),
                  np.array(columns["acceptance"], np.float32).reshape(n, variants, HORIZON),
                  np.array(columns["variant"]), np.array(columns["drafted"]), np.array(columns["accepted"]),
                  np.array(columns["confidence"], np.float32), meta)
