"""Corpora of prompts and documents: JSON lines, Parquet, plain text, and datasets of the Hugging Face hub."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .io import DraftsmithError, read_json, read_jsonl, sha256_json

Messages = list[dict[str, str]]
BINARY = (".json", ".arrow", ".gz", ".zst", ".zip")  # would be read as text, and make no sense
HUB = "hf:"  # before the name of a dataset of the hub: hf:NAME[:CONFIGURATION][@SPLIT]
SHUFFLED = 10_000  # rows of a streamed dataset among which the next one is drawn
# Who speaks in ShareGPT's `conversations`.
SHAREGPT_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "assistant": "assistant",
                  "bing": "assistant", "bard": "assistant", "system": "system"}


@dataclass(frozen=True)
class Sample:
    """One prompt or document: exactly one of `messages` (chat) and `text` (raw) is set."""

    id: str
    kind: str
    messages: Messages | None = None
    text: str | None = None

    @property
    def content(self) -> str:
        """What tells one sample from another; empty where there is nothing in it."""
        return str(self.messages or self.text or "")


def parse_row(row: dict[str, Any], where: str, index: int, schemas: dict[str, str] | None = None) -> Sample:
    """Read `{"messages": [...]}` (as UltraChat has them), `{"conversations": [...]}` (as ShareGPT), `{"prompt": "..."}`
    (one user turn) or `{"text": "..."}`.

    Also questions about tables: `{"question": ..., "context": "CREATE TABLE ..."}`, and with `schemas` (database
    id to CREATE TABLE text) `{"db_id": ..., "question": ...}`, as in Spider.
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
    if "conversations" in row:
        return Sample(sample_id, "chat", messages=_sharegpt(row["conversations"], where))
    if isinstance(row.get("prompt"), str):
        return Sample(sample_id, kind, messages=[{"role": "user", "content": row["prompt"]}])
    if isinstance(row.get("question"), str):
        tables = row.get("context")
        if schemas is not None and "db_id" in row:
            if row["db_id"] not in schemas:
                raise DraftsmithError(f"{where}: no schema for database '{row['db_id']}'")
            tables = schemas[row["db_id"]]
        if isinstance(tables, str):
            text = f"{tables}\n\nWrite one SQL query, nothing else: {row['question']}"
            return Sample(sample_id, "sql", messages=[{"role": "user", "content": text}])
    if isinstance(row.get("text"), str):
        return Sample(sample_id, kind, text=row["text"])
    raise DraftsmithError(f"{where}: expected one of 'messages', 'conversations', 'prompt', 'text', or a "
                          "'question' with its 'context' (or with a 'db_id' where prompts.schemas is set), found "
                          f"{sorted(row)}")


def _sharegpt(turns: Any, where: str) -> Messages:
    """ShareGPT's turns as chat messages, from the first that is not the assistant's on; none may be left. Raises
    `DraftsmithError` for turns that are none or of an unknown speaker."""
    if not isinstance(turns, list) or not all(
            isinstance(t, dict) and isinstance(t.get("value"), str) and isinstance(t.get("from"), str) for t in turns):
        raise DraftsmithError(f"{where}: 'conversations' must be a list of objects with 'from' and 'value'")
    if unknown := [t["from"] for t in turns if t["from"] not in SHAREGPT_ROLES]:
        raise DraftsmithError(f"{where}: unknown speaker '{unknown[0]}'; known: {', '.join(SHAREGPT_ROLES)}")
    messages = [{"role": SHAREGPT_ROLES[t["from"]], "content": t["value"]} for t in turns]
    return list(itertools.dropwhile(lambda m: m["role"] == "assistant", messages))


def read_parquet(path: Path) -> list[dict[str, Any]]:
    """Rows of a Parquet file; one that is missing or damaged is named."""
    import pyarrow.parquet as pq

    if not path.is_file():
        raise DraftsmithError(f"{path}: no such file")
    try:
        rows: list[dict[str, Any]] = pq.read_table(str(path)).to_pylist()
    except Exception as error:  # pyarrow's own errors do not share a base class
        raise DraftsmithError(f"{path}: not a readable Parquet file ({error})") from error
    return [{k: v for k, v in row.items() if v is not None} for row in rows]


def stream_hub(name: str, seed: int | None) -> Iterator[dict[str, Any]]:
    """Rows of a dataset of the hub, `NAME[:CONFIGURATION][@SPLIT]`, streamed in an order drawn from the seed, or (None)
    in its own."""
    try:
        import datasets
    except ImportError as error:
        raise DraftsmithError(f"{HUB}{name} needs the package datasets: pip install 'draftsmith[train]'") from error
    path, _, split = name.partition("@")
    dataset, _, configuration = path.partition(":")
    try:
        stream = datasets.load_dataset(dataset, configuration or None, split=split or "train", streaming=True)
        for row in stream if seed is None else stream.shuffle(seed=seed, buffer_size=SHUFFLED):
            yield {k: v for k, v in row.items() if v is not None}
    except Exception as error:  # of the network, of the hub, or of the dataset's own files
        raise DraftsmithError(f"{HUB}{name}: cannot be read ({str(error).splitlines()[0] if str(error) else error!r}); "
                              "is the name right, and is there a network?") from error


def read_samples(path: str | Path, schemas: str | Path | None = None) -> list[Sample]:
    """Read a `.jsonl` or `.parquet` file of rows, or any other file as plain text with blank-line separated documents.

    `schemas`: a JSON object of CREATE TABLE texts by database id, for rows that name a database.
    """
    path = Path(path).expanduser()
    if path.suffix in (".jsonl", ".parquet"):
        rows = read_jsonl(path) if path.suffix == ".jsonl" else read_parquet(path)
        tables = read_json(schemas) if schemas is not None else None
        samples = [parse_row(row, f"{path}, row {i + 1}", i, tables) for i, row in enumerate(rows)]
    elif path.suffix in BINARY:
        raise DraftsmithError(f"{path}: expected .jsonl, .parquet or plain text, not {path.suffix}")
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


def stream_sources(shares: dict[str, float], schemas: str | Path | None, seed: int) -> Iterator[Sample]:
    """Samples of several files or datasets, each one's in an order drawn from the seed, mixed in these shares.

    Where one is used up the others go on. Raises as `read_samples` does.
    """
    sources = {path: _source(path, schemas, seed, number, len(shares) > 1) for number, path in enumerate(shares)}
    taken = dict.fromkeys(shares, 0)
    while sources:
        path = min(sources, key=lambda p: (taken[p] + 1) / shares[p])
        sample = next(sources[path], None)
        if sample is None:
            del sources[path]
            continue
        taken[path] += 1
        yield sample


def _source(path: str, schemas: str | Path | None, seed: int, number: int, several: bool) -> Iterator[Sample]:
    if path.startswith(HUB):
        rows = stream_hub(path.removeprefix(HUB), seed)
        samples: Iterator[Sample] = (parse_row(row, f"{path}, row {i + 1}", i) for i, row in enumerate(rows))
    else:
        read = read_samples(path, schemas)
        random.Random(f"{seed} {number}").shuffle(read)
        samples = iter(read)
    for sample in samples:  # ids are unique in one file only
        yield replace(sample, id=f"{Path(path).stem}/{sample.id}") if several else sample


def read_sources(shares: dict[str, float], schemas: str | Path | None, seed: int, count: int) -> list[Sample]:
    """The first `count` samples of `stream_sources`: a larger count continues a smaller one."""
    return list(itertools.islice(stream_sources(shares, schemas, seed), count))


def corpus_hash(samples: list[Sample]) -> str:
    """Hash of the content of the samples, in order; goes into the manifests of what is made from them."""
    return sha256_json([[s.messages, s.text] for s in samples])
