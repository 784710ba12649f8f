"""Comparing tokenizers by content."""

from __future__ import annotations

import hashlib
from typing import Any


def vocabulary(tokenizer: Any) -> list[str | None]:
    """Token strings by id; ids without a token are None."""
    table = tokenizer.get_vocab()
    tokens: list[str | None] = [None] * (max(table.values(), default=-1) + 1)
    for token, index in table.items():
        tokens[index] = token
    return tokens


def tokenizer_hash(tokenizer: Any) -> str:
    """SHA-256 over the (id, token) pairs: equal exactly when the vocabularies are."""
    digest = hashlib.sha256()
    for index, token in enumerate(vocabulary(tokenizer)):
        if token is not None:
            digest.update(f"{index}\0{token}\0".encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


def first_difference(ours: list[str | None], theirs: list[str | None]) -> str | None:
    """Where two vocabularies (token strings by id) first differ, or None when every shared id agrees.

    A vocabulary padded with extra ids at the end agrees; a permuted one does not.
    """
    for index, (x, y) in enumerate(zip(ours, theirs, strict=False)):
        if x is not None and y is not None and x != y:
            return f"id {index} is {x!r} in one and {y!r} in the other"
    return None
