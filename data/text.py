"""Corpora of prompts and documents: JSON lines and plain text."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .io import DraftsmithError, read_json, read_jsonl, sha256_json

Messages = list[dict[str, str]]
BINARY = (".json", ".parquet", ".arrow", ".gz", ".zst", ".zip")  # would be read as text, and make no sense


@dataclass(frozen=True)
class Sample:
    """One prompt or document: exactly one of `messages` (chat) and `text` (raw) is set."""

    id: str
    kind: str
    messages: Messages | None = None
    text: str | None = None


def parse_row(row: dict[str, Any], where: str, index: int, schemas: dict[str, str] | None = None) -> Sample:
    """Read `{"messages": [...]}`, `{"prompt": "..."}` (one user turn) or `{"text": "..."}`.

    With `schemas` (database id to CREATE TABLE text) also `{"db_id": ..., "question": ...}`, as in Spider.
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
    if schemas is not None and isinstance(row.get("question"), str):
        if row.get("db_id") not in schemas:
            raise DraftsmithError(f"{where}: no schema for database '{row.get('db_id')}'")
        text = f"{schemas[row['db_id']]}\n\nWrite one SQL query, nothing else: {row['question']}"
        return Sample(sample_id, "sql", messages=[{"role": "user", "content": text}])
    if isinstance(row.get("text"), str):
        return Sample(sample_id, kind, text=row["text"])
    raise DraftsmithError(f"{where}: expected one of 'messages', 'prompt' or 'text', found {sorted(row)}")


def read_samples(path: str | Path, schemas: str | Path | None = None) -> list[Sample]:
    """Read a `.jsonl` file of rows, or any other file as plain text with blank-line separated documents.

    `schemas`: a JSON object of CREATE TABLE texts by database id, for rows that name a database.
    """
    path = Path(path).expanduser()
    if path.suffix == ".jsonl":
        rows = read_jsonl(path)
        tables = read_json(schemas) if schemas is not None else None
        samples = [parse_row(row, f"{path}, row {i + 1}", i, tables) for i, row in enumerate(rows)]
    elif path.suffix in BINARY:
        raise DraftsmithError(f"{path}: expected .jsonl or plain text, not {path.suffix}")
    else:
        if not path.is_file():
            raise DraftsmithError(f"{path}: no such file")
        parts = path.read_text(encoding="utf-8", errors="replace").split("\n\n")
        samples = [Sample(str(i), "text", text=part.strip()) for i, part in enumerate(parts) if part.strip()]
    if not samples:
        raise DraftsmithError(f"{path}: holds no prompts or documents")
    seen: set[str] = set()
    for number, sample in enumerate(samples, 1):
        if sample.id in seen:
            raise DraftsmithError(f"{path}, row {number}: the id '{sample.id}' occurs twice")
        seen.add(sample.id)
    return samples


def corpus_hash(samples: list[Sample]) -> str:
    """Hash of the content of the samples, in order; goes into the manifests of what is made from them."""
    return sha256_json([[s.messages, s.text] for s in samples])
