"""Where the time of a generation goes."""

from __future__ import annotations

import time

PARTS = ("target", "draft", "verification", "policy", "sampling", "detokenisation")


class Laps:
    """A stopwatch that gives the time since the last lap to a part; parts are `PARTS`.

    "target" and "draft" are forward passes; "sampling" turns logits into distributions and draws from them;
    "verification" judges drafted tokens, commits them and rolls the caches back; "policy" plans and learns;
    "detokenisation" makes text.
    """

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self.last = time.perf_counter()

    def start(self) -> None:
        """Time until now belongs to nobody (the caller had it)."""
        self.last = time.perf_counter()

    def add(self, part: str, seconds: float) -> None:
        """Time that was measured elsewhere; the next lap starts now."""
        self.seconds[part] += seconds
        self.start()

    def lap(self, part: str) -> float:
        now = time.perf_counter()
        spent = now - self.last
        self.seconds[part] += spent
        self.last = now
        return spent
