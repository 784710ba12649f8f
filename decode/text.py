"""From token ids to text: incremental, in whole characters, cut at stop strings."""

from __future__ import annotations

from typing import Any

REPLACEMENT = "\ufffd"


class TextStream:
    """Detokenises as tokens arrive and cuts at the first stop string.

    `push` returns text that is final: never half of a UTF-8 character, and never the beginning of what
    may become a stop string. Ids after the cut are dropped by the caller: `kept` tokens belong to the
    text (the token that completes a stop string is the last of them).
    """

    def __init__(self, tokenizer: Any, stop: tuple[str, ...], skip: frozenset[int]) -> None:
        self.tokenizer, self.stop, self.skip = tokenizer, stop, skip
        self.ids: list[int] = []
        self.text = ""
        self.sent = 0
        self.start = 0  # ids before it are settled: their text no longer changes
        self.settled = ""
        self.stopped = False

    def _decode(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode([i for i in ids if i not in self.skip], skip_special_tokens=True,
                                         clean_up_tokenization_spaces=False))

    def push(self, token: int) -> str:
        """Add a token; returns newly final text. After a stop string is complete, `stopped` is true."""
        self.ids.append(token)
        self.text = self.settled + self._decode(self.ids[self.start :])
        if len(self.ids) - self.start >= 16:
            self._settle()
        for stop in self.stop:
            at = self.text.find(stop, max(0, self.sent - len(stop)))
            if at >= 0 and (not self.stopped or at < len(self.text)):
                self.text, self.stopped = self.text[:at], True
        return self._release(0 if self.stopped else self._held())

    def _settle(self) -> None:
        """Keep the decode window short. The kept ids are decoded with the last settled one for context,
        since tokenizers strip or join spaces at the start of a text."""
        keep = 8
        head, tail = self.ids[self.start : -keep], self.ids[-keep:]
        whole, part = self._decode(head + tail), self._decode(tail)
        if whole.endswith(part) and not self._decode(head).endswith(REPLACEMENT):
            self.settled += whole[: len(whole) - len(part)]
            self.start = len(self.ids) - keep

    def _held(self) -> int:
        """Characters at the end that are not final: an unfinished character's bytes (at most 3, each shown as a
        replacement character), and what could still turn into a stop string."""
        unfinished = min(3, len(self.text) - len(self.text.rstrip(REPLACEMENT)))
        body = self.text[: len(self.text) - unfinished]
        starts = (n for stop in self.stop for n in range(1, min(len(stop), len(body) + 1))
                  if body.endswith(stop[:n]))
        return unfinished + max(starts, default=0)

    def _release(self, hold: int) -> str:
        end = max(self.sent, len(self.text) - hold)
        new, self.sent = self.text[self.sent : end], end
        return new

    def finish(self) -> str:
        """The rest of the text, unfinished characters included, once no more tokens come."""
        if not self.stopped:
            self.text = self.settled + self._decode(self.ids[self.start :])
        return self._release(0)
