"""Prompt lookup: what followed the last tokens when they occurred before, in the prompt or in the answer.

Saxena, "Prompt Lookup Decoding" (2023). Proposed with certainty (a one-hot q), at no cost.
"""

from __future__ import annotations

from .candidates import Draft

SIZES = (4, 3, 2)  # tokens that have to agree; the longest match counts, and of those the last


class PromptLookup:
    """The n-grams of one request's text."""

    def __init__(self) -> None:
        self.ends: dict[tuple[int, ...], int] = {}  # n-gram -> index of the token after its last occurrence
        self.seen = 0

    def _read(self, tokens: list[int]) -> None:
        """Take in the n-grams that something follows."""
        for end in range(self.seen, len(tokens)):
            for n in SIZES:
                if end >= n:
                    self.ends[tuple(tokens[end - n : end])] = end
        self.seen = max(self.seen, len(tokens))

    def match(self, tokens: list[int]) -> tuple[int, int]:
        """(n, tokens there are after it) of the longest earlier occurrence of the text's end; (0, 0): none."""
        n, start = self._find(tokens)
        return n, len(tokens) - start if n else 0

    def _find(self, tokens: list[int]) -> tuple[int, int]:
        self._read(tokens)
        for n in SIZES:
            if len(tokens) >= n and (start := self.ends.get(tuple(tokens[-n:]))) is not None:
                return n, start
        return 0, 0

    def propose(self, tokens: list[int], limit: int, stop_ids: frozenset[int]) -> Draft:
        """A chain of up to `limit` one-hot nodes; it ends after a token in `stop_ids`."""
        n, start = self._find(tokens)
        draft = Draft("lookup", matched=n)
        for token in tokens[start : start + limit] if n else []:
            draft.side.append((len(draft.side) - 1, token))
            if token in stop_ids:
                break
        return draft
