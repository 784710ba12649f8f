"""Is a new draft better than another one? Both on the same prompts, interleaved, over one loaded target."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..decoder import Decoder
from ..sampling import SamplingParams
from .interleave import acceptance, interleave, rates
from .methods import ours
from .statistics import Paired, of_differences, of_ratios


@dataclass
class Against:
    """Of the new draft less the other one's: acceptance of a fixed length, prompt by prompt; and the ratio of tokens
    a second with each bundle's own policy."""

    acceptance: Paired
    speed: Paired

    @property
    def sign(self) -> int:
        """1 for better, -1 for worse, 0 where neither can be said. Speed decides; acceptance, where speed does not:
        a draft that is accepted less often and is faster all the same is the better one."""
        for found, neutral in ((self.speed, 1.0), (self.acceptance, 0.0)):
            if found.significant:
                return 1 if found.ratio > neutral else -1
        return 0

    @property
    def better(self) -> bool:
        return self.sign > 0

    @property
    def worse(self) -> bool:
        return self.sign < 0

    def __str__(self) -> str:
        verdict = "better" if self.better else "worse" if self.worse else "not measurably different"
        a, s = self.acceptance, self.speed
        text = (f"The draft is {verdict}: acceptance {a.ratio:+.3f} ({a.low:+.3f} to {a.high:+.3f}), tokens a second "
                f"{s.ratio:.2f} x ({s.low:.2f} to {s.high:.2f}), n = {s.n}.")
        if verdict == "not measurably different":
            text += (f" A difference of {a.detectable:.3f} in acceptance or a ratio of {s.detectable:.2f} would have "
                     "been found four times in five.")
        return text


def compare_drafts(new: Decoder, other: Decoder, prompts: Sequence[list[int]], k: int, max_tokens: int,
                   progress: Callable[[Iterable[Any]], Iterable[Any]] = lambda x: x) -> Against:
    """Greedy, with fixed(k) and with the policy that each bundle has as its default."""
    found = {}
    for policy in (f"fixed({k})", None):
        methods = {name: ours(decoder, policy or decoder.context.default)
                   for name, decoder in (("new", new), ("other", other))}
        found[policy] = interleave(methods, prompts, SamplingParams(max_tokens=max_tokens), progress)
    accepted = {name: [acceptance([answer])[0] or 0.0 for answer in some]
                for name, some in found[f"fixed({k})"].items()}
    return Against(of_differences(np.array(accepted["new"]) - np.array(accepted["other"])),
                   of_ratios(rates(found[None]["new"]), rates(found[None]["other"])))
