"""Formats and I/O: corpora, chat formats, packing, teacher-cache shards, acceptance-trace files."""

from .io import DraftsmithError

__all__ = ["DraftsmithError"]
