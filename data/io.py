"""Files that are never half-written, and errors a person can act on.

Every writer in Draftsmith goes through this module: write aside, fsync, rename. A reader therefore
sees either the old file, the new file or none.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any


class DraftsmithError(Exception):
    """A mistake the user can fix; commands print its message without a traceback."""


def fsync_path(path: Path) -> None:
    """Flush a file or directory entry to disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def atomic_path(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a path beside `path` to write a file to; it replaces `path` when the block succeeds."""
    path = Path(path)
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield aside
        fsync_path(aside)
        os.replace(aside, path)
        fsync_path(path.parent)
    except OSError as error:
        raise DraftsmithError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        with contextlib.suppress(OSError):  # a folder that could not be made
            aside.unlink(missing_ok=True)


@contextlib.contextmanager
def atomic_dir(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield an empty directory beside `path`; it becomes `path` when the block succeeds.

    An existing `path` is replaced; between its removal and the rename a crash leaves no `path`, never
    a mixture.
    """
    path = Path(path)
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        yield aside
        for file in sorted(aside.rglob("*")):
            fsync_path(file)
        fsync_path(aside)
        if path.exists():
            old = path.with_name(f".{path.name}.{os.getpid()}.old")
            os.replace(path, old)
            try:
                os.replace(aside, path)
            except OSError:
                os.replace(old, path)
                raise
            shutil.rmtree(old)
        else:
            os.replace(aside, path)
        fsync_path(path.parent)
    except OSError as error:
        raise DraftsmithError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def write_text(path: str | os.PathLike[str], text: str) -> None:
    with atomic_path(path) as aside:
        aside.write_text(text, encoding="utf-8")


def write_json(path: str | os.PathLike[str], value: Any) -> None:
    """Write JSON; NaN and infinities are refused, since other readers cannot parse them."""
    write_text(path, json.dumps(value, indent=2, sort_keys=True, allow_nan=False) + "\n")


def read_json(path: str | os.PathLike[str]) -> Any:
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise DraftsmithError(f"{path}: no such file") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise DraftsmithError(f"{path}: not valid JSON ({error})") from error


def write_jsonl(path: str | os.PathLike[str], rows: Iterable[dict[str, Any]]) -> None:
    with atomic_path(path) as aside, aside.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


def read_jsonl(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Read a JSON-lines file of objects; a bad line is named by its number."""
    path = Path(path)
    if not path.is_file():
        raise DraftsmithError(f"{path}: no such file")
    rows = []
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:  # bad JSON, or bytes that are not UTF-8
                raise DraftsmithError(f"{path}, line {number}: not valid JSON ({error})") from error
            if not isinstance(row, dict):
                raise DraftsmithError(f"{path}, line {number}: expected an object, got {type(row).__name__}")
            rows.append(row)
    return rows


def save_tensors(path: str | os.PathLike[str], tensors: dict[str, Any]) -> None:
    """Write a safetensors file; a full disk is a `DraftsmithError`, as with every other file."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        with atomic_path(path) as aside:
            save_file({k: v.detach().cpu().contiguous() for k, v in tensors.items()}, str(aside))
    except SafetensorError as error:
        raise DraftsmithError(f"cannot write {path}: {error}") from error


def load_tensors(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a safetensors file; a missing or truncated one is named."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return dict(load_file(str(path)))
    except (SafetensorError, FileNotFoundError, OSError) as error:
        raise DraftsmithError(f"{path}: missing or damaged ({error})") from error


def sha256_file(path: str | os.PathLike[str]) -> str:
    digest = hashlib.sha256()
    with Path(path).open("rb") as file:
        for block in iter(lambda: file.read(1 << 20), b""):
            digest.update(block)
    return digest.hexdigest()


def sha256_json(value: Any) -> str:
    """Hash of a JSON-able value, independent of key order."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, ensure_ascii=True).encode()).hexdigest()


def nearest(word: str, choices: Iterable[str]) -> str:
    """`; did you mean 'x'?` for the closest of `choices`, or their list when none is close; nothing for no choices."""
    import difflib

    choices = sorted(choices)
    match = difflib.get_close_matches(word, choices, n=1, cutoff=0.5)
    if match:
        return f"; did you mean '{match[0]}'?"
    return f"; known: {', '.join(choices)}" if choices else ""
