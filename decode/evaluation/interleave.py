"""Methods on the same prompts, taking turns: a machine that slows down does so for all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..sampling import SamplingParams
from .methods import Answer, Method

WARM_UP = 8  # tokens of a first run, which is slower and not counted


def rotated(names: Sequence[str], turn: int) -> list[str]:
    """The names, starting with another one each turn: who runs first must not decide who is fast."""
    at = turn % len(names)
    return [*names[at:], *names[:at]]


def interleave(methods: Mapping[str, Method], prompts: Sequence[list[int]],
               params: SamplingParams | Sequence[SamplingParams], progress: Callable[[Any], Any] = lambda x: x,
               most: Mapping[str, int] | None = None) -> dict[str, list[Answer]]:
    """The answers of every method to the prompts, in their order. `params`: of all prompts, or of each. `most`: the
    number of prompts that a method is given, for slow ones."""
    each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
    for method in methods.values():
        method(prompts[0], replace(each[0], max_tokens=WARM_UP))
    found: dict[str, list[Answer]] = {name: [] for name in methods}
    for i, prompt in enumerate(progress(prompts)):
        taking_part = [name for name in methods if i < (most or {}).get(name, len(prompts))]
        for name in rotated(taking_part, i):
            found[name].append(methods[name](prompt, each[i]))
    return found


def rates(answers: Sequence[Answer]) -> list[float]:
    """Tokens a second of each, from the request to its end."""
    return [len(answer.ids) / answer.seconds for answer in answers]


def rate(answers: Sequence[Answer]) -> float:
    """Tokens a second of all together."""
    return sum(len(answer.ids) for answer in answers) / sum(answer.seconds for answer in answers)


def acceptance(answers: Sequence[Answer]) -> tuple[float | None, float | None]:
    """Acceptance rate and tokens a target pass of all together; None where nothing was judged, or no pass was made."""
    stats = [answer.stats for answer in answers if answer.stats is not None]
    judged, steps = sum(s.accepted + s.rejected for s in stats), sum(s.steps for s in stats)
    return (sum(s.accepted for s in stats) / judged if judged else None,
            sum(s.emitted - 1 for s in stats) / steps if steps else None)
