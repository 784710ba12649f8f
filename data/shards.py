"""Folders of numbered shards with a manifest: written in any order by any number of processes, complete or refused.

A shard counts once the small record beside it is written; `finish` gathers the records into the manifest.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from .io import DraftsmithError, read_json, write_json

MANIFEST = "manifest.json"
M = TypeVar("M", bound="ShardManifest")


@dataclass
class ShardManifest:
    """What a folder of shards was made from: `settings`, and the fields that a kind of folder adds."""

    settings: dict[str, Any]
    shards: list[dict[str, Any]] = field(default_factory=list)
    complete: bool = False
    version: int = 0

    VERSION: ClassVar[int] = 0
    WHAT: ClassVar[str] = "folder of shards"
    JOB: ClassVar[str] = "its job"

    def identity(self) -> dict[str, Any]:
        """Everything that decides the content, progress left out."""
        return {k: v for k, v in asdict(self).items() if k not in ("shards", "complete")}

    @classmethod
    def load(cls: type[M], directory: str | Path) -> M:
        path = Path(directory) / MANIFEST
        if not path.is_file():
            raise DraftsmithError(f"{directory}: no {cls.WHAT} here (no {MANIFEST}); run {cls.JOB} first")
        found = read_json(path)
        if not isinstance(found, dict):
            raise DraftsmithError(f"{path}: not a manifest of a {cls.WHAT}")
        if found.get("version") != cls.VERSION:
            raise DraftsmithError(f"{path}: version {found.get('version')} is not the {cls.VERSION} that this release "
                                  "reads")
        try:
            return cls(**found)
        except TypeError as error:
            raise DraftsmithError(f"{path}: not a manifest of a {cls.WHAT} ({error})") from error

    @classmethod
    def load_complete(cls: type[M], directory: str | Path) -> M:
        """The manifest of a finished folder; an unfinished one is refused."""
        found = cls.load(directory)
        if not found.complete:
            raise DraftsmithError(f"{directory}: the {cls.WHAT} is unfinished; run {cls.JOB} again")
        return found


class ShardWriter:
    """What all writers of shards share; a subclass writes a shard's files and then its record."""

    def __init__(self, directory: str | Path, manifest: ShardManifest) -> None:
        """Raises `DraftsmithError` where the folder holds shards that were made otherwise."""
        self.directory = Path(directory)
        self.manifest = manifest
        if not (self.directory / MANIFEST).exists():
            self.directory.mkdir(parents=True, exist_ok=True)
            write_json(self.directory / MANIFEST, asdict(manifest))
            return
        found = type(manifest).load(self.directory)
        # A setting that an earlier release did not record says nothing against its shards.
        known = {key: value for key, value in manifest.settings.items() if key in found.settings}
        if found.identity() != {**manifest.identity(), "settings": known}:
            theirs, ours = ({**m.identity(), **m.settings} for m in (found, manifest))
            key = next(k for k in [*manifest.settings, *ours] if k in theirs and theirs[k] != ours[k])
            raise DraftsmithError(f"{self.directory}: holds a {manifest.WHAT} made with {key} = {theirs.get(key)}, not "
                                  f"{ours.get(key)}; choose another folder or delete it")
        self.manifest = found

    def _record(self, number: int) -> Path:
        return self.directory / f"shard-{number:05d}.json"

    def missing_one(self, number: int) -> bool:
        return not self.manifest.complete and not self._record(number).is_file()

    def missing(self, shards: int) -> list[int]:
        """Which of the first `shards` numbers have not been written."""
        return [n for n in range(shards) if self.missing_one(n)]

    def skip_shard(self, number: int) -> None:
        """Record that there is nothing in this shard to learn from."""
        write_json(self._record(number), {"documents": 0})

    def finish(self, shards: int) -> None:
        """Declare the folder complete with its first `shards` shards, all of which must have been written."""
        if left := self.missing(shards):
            raise DraftsmithError(f"{self.directory}: shard {left[0]} has not been written; run the job again")
        records = [read_json(self._record(n)) for n in range(shards)]
        self.manifest.shards = [r for r in records if r["documents"]]
        if not self.manifest.shards:
            raise DraftsmithError(f"{self.directory}: no text has a token to learn from")
        self.manifest.complete = True
        write_json(self.directory / MANIFEST, asdict(self.manifest))
        for number in range(shards):
            self._record(number).unlink(missing_ok=True)
