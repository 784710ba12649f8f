"""What has been measured so far: a file that only grows, one JSON line a record, safe against a kill at any moment."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from typing import Any, BinaryIO

from draftsmith.data import DraftsmithError
from draftsmith.data.io import fsync_path


class Journal:
    """Records in the order in which they were added; the first is the header, which says what run they belong to."""

    def __init__(self, path: Path, header: dict[str, Any]) -> None:
        """Open a journal, or begin one. A line that a kill has cut is dropped. Raises `DraftsmithError` where the
        journal is of another run."""
        self.path, self.records = path, [header]
        self.file: BinaryIO
        path.parent.mkdir(parents=True, exist_ok=True)
        self.lock = (path.parent / f".{path.name}.lock").open("a")
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise DraftsmithError(f"{path}: another run is writing to it; wait for it, or choose another 'out'"
                                  ) from error
        except OSError:  # a file system without locks
            pass
        if path.is_file():
            self._open(header)
        else:
            self.file = path.open("ab")
            self.add(header, keep=False)
            fsync_path(path.parent)

    def _open(self, header: dict[str, Any]) -> None:
        content = self.path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        try:
            found = [json.loads(line) for line in whole.splitlines()]
        except ValueError as error:
            raise DraftsmithError(f"{self.path}: damaged ({error}); delete it to begin again") from error
        self.file = self.path.open("r+b")
        self.file.truncate(len(whole))
        self.file.seek(len(whole))
        if not found:
            self.add(header, keep=False)
            return
        if different := sorted(k for k in {*found[0], *header} if found[0].get(k) != header.get(k)):
            raise DraftsmithError(f"{self.path}: rows of another run, which differs in {', '.join(different)}; choose "
                                  "another 'out', or delete that folder")
        self.records = found

    def add(self, record: dict[str, Any], keep: bool = True) -> None:
        """Append a record; when this returns it is on the disk."""
        try:
            self.file.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")
            self.file.flush()
            os.fsync(self.file.fileno())
        except OSError as error:
            raise DraftsmithError(f"cannot write {self.path}: {error.strerror or error}") from error
        if keep:
            self.records.append(record)

    def of(self, what: str) -> list[dict[str, Any]]:
        """The records of a kind, by their key "what"."""
        return [record for record in self.records[1:] if record.get("what") == what]

    def close(self) -> None:
        self.file.close()
        self.lock.close()

    @staticmethod
    def header_of(path: Path) -> dict[str, Any]:
        """The header of a journal that may not be there."""
        try:
            with path.open("rb") as file:
                found = json.loads(file.readline())
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}
