"""Corpora of prompts and documents: JSON lines and plain text."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .io import DraftsmithError, read_jsonl, sha256_json

Messages = list[dict[str, str]]


@dataclass(frozen=True)
class Sample:
    """One prompt or document: exactly one of `messages` (chat) and `text` (raw) is set."""

    id: str
    kind: str
    messages: Messages | None = None
    text: str | None = None


def parse_row(row: dict[str, Any], where: str, index: int) -> Sample:
    """Read `{"messages": [...]}`, `{"prompt": "..."}` (one user turn) or `{"text": "..."}`.

    Raises `DraftsmithError` naming `where` for a row with none of these or with malformed messages.
    """
    sample_id, kind = str(row.get("id", index)), str(row.get("kind", "text"))
    if "messages" in row:
        messages = row["messages"]
        valid = isinstance(messages, list) and messages and all(
            isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str)
            for m in messages
        )
        if not valid:
            raise DraftsmithError(f"{where}: 'messages' must be a list of objects with 'role' and 'content'")
        return Sample(sample_id, kind, messages=[{"role": m["role"], "content": m["content"]} for m in messages])
    if isinstance(row.get("prompt"), str):
        return Sample(sample_id, kind, messages=[{"role": "user", "content": row["prompt"]}])
    if isinstance(row.get("text"), str):
        return Sample(sample_id, kind, text=row["text"])
    raise DraftsmithError(f"{where}: expected one of 'messages', 'prompt' or 'text', found {sorted(row)}")


def read_samples(path: str | Path) -> list[Sample]:
    """Read a `.jsonl` file of rows, or any other file as plain text with blank-line separated documents."""
    path = Path(path)
    if path.suffix == ".jsonl":
        rows = read_jsonl(path)
        samples = [parse_row(row, f"{path}, row {i + 1}", i) for i, row in enumerate(rows)]
    else:
        if not path.is_file():
            raise DraftsmithError(f"{path}: no such file")
        parts = path.read_text(encoding="utf-8", errors="replace").split("\n\n")
        samples = [Sample(str(i), "text", text=part.strip()) for i, part in enumerate(parts) if part.strip()]
    if not samples:
        raise DraftsmithError(f"{path}: holds no prompts or documents")
    return samples


def corpus_hash(samples: list[Sample]) -> str:
    """Hash of the content of the samples, in order; goes into the manifests of what is made from them."""
    return sha256_json([[s.messages, s.text] for s in samples])
