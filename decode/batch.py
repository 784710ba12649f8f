"""Batched generation for data jobs: continuous refill, shared prompts, teacher rows on the fly."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from draftsmith.data.teacher_cache import teacher_rows

from .runner import Runner
from .sampling import SamplingParams, process


@dataclass
class Answer:
    """One answer in progress: `ids` with a teacher row for the position before each of them."""

    job: int
    index: int
    ids: list[int] = field(default_factory=list)
    top_ids: list[np.ndarray] = field(default_factory=list)
    top_logp: list[np.ndarray] = field(default_factory=list)
    tail: list[float] = field(default_factory=list)


def uniform(seed: int, job: int, index: int, position: int) -> float:
    """A uniform keyed by what is drawn, so that text does not depend on how requests were batched."""
    bits = np.random.Philox(key=np.array([seed & (2**64 - 1), job], np.uint64), counter=[0, 0, index, position])
    return float(np.random.Generator(bits).random())


@torch.no_grad()
def generate_batch(
    runner: Runner, prompts: Sequence[list[int]], answers: int, temperatures: Sequence[float], max_tokens: int,
    eos_ids: frozenset[int], slots: int, seed: int, teacher_k: int = 0, teacher_temperature: float = 1.0,
    numbers: Sequence[int] | None = None,
) -> Iterator[Answer]:
    """Yield `answers` answers to every prompt as they finish.

    Answer i is sampled at temperatures[i % len]. Prompts are taken longest first, so that rows in flight
    have similar lengths; a finished row is refilled at once, and a row whose prompt is already in another
    slot copies its cache instead of running it again. `teacher_k` > 0 records the target's top-k rows.
    `numbers` are the prompts' numbers in the whole corpus (default: from 0): randomness is keyed by them, so
    that a resumed job, or one on several ranks, writes the same text.
    """
    numbers = range(len(prompts)) if numbers is None else numbers
    order = sorted(range(len(prompts)), key=lambda j: (-len(prompts[j]), j))
    todo = deque((j, i) for j in order for i in range(answers))
    slots = max(1, min(slots, len(todo), runner.max_batch or slots))
    capacity = max((len(p) for p in prompts), default=0) + max_tokens
    cache = runner.new_cache(slots, capacity)
    active: list[Answer | None] = [None] * slots
    resident: list[int | None] = [None] * slots  # whose prompt lies in the slot
    first_logits: dict[int, torch.Tensor] = {}
    params = [SamplingParams(temperature=t) for t in temperatures]

    def take(logits_RV: torch.Tensor, rows: list[Answer]) -> None:
        """Sample one token a row and record its teacher row."""
        if teacher_k:
            top_ids, top_logp, tail = (x.cpu().numpy() for x in teacher_rows(logits_RV, teacher_k, teacher_temperature))
        for r, answer in enumerate(rows):
            p = params[answer.index % len(params)]
            if p.greedy:
                token = int(logits_RV[r].argmax())
            else:
                cdf = process(logits_RV[r : r + 1], p)[0].double().cumsum(0)
                u = uniform(seed, numbers[answer.job], answer.index, len(answer.ids)) * float(cdf[-1])
                token = min(int(torch.searchsorted(cdf, u, right=True)), len(cdf) - 1)
            answer.ids.append(token)
            if teacher_k:
                answer.top_ids.append(top_ids[r])
                answer.top_logp.append(top_logp[r])
                answer.tail.append(float(tail[r]))

    def finished(answer: Answer) -> bool:
        return answer.ids[-1] in eos_ids or len(answer.ids) >= max_tokens

    def fill(slot: int) -> Iterator[Answer]:
        """Start answers in a slot until one needs another token."""
        while todo:
            job, index = todo.popleft()
            prompt = prompts[job]
            if job not in first_logits:
                cache.crop(0, slot)
                _, logits = runner.forward(torch.tensor([prompt], device=runner.device), cache, 1,
                                           slot if slots > 1 else None)
                first_logits.clear()
                first_logits[job] = logits[0]
            elif resident[slot] == job:
                cache.crop(len(prompt), slot)
            else:
                cache.copy_prefix(resident.index(job), slot, len(prompt))
            resident[slot] = job
            answer = Answer(job, index)
            take(first_logits[job], [answer])
            if not finished(answer):
                active[slot] = answer
                return
            yield answer

    for slot in range(slots):
        yield from fill(slot)
    while any(active):
        rows = [s for s in range(slots) if active[s] is not None]
        # Idle slots run along with a dummy token at position 0: their cache is not read again.
        ids = torch.tensor([[a.ids[-1] if a else 0] for a in active], device=runner.device)
        idle = [s for s in range(slots) if active[s] is None]
        for s in idle:
            cache.crop(0, s)
            resident[s] = None
        _, logits = runner.forward(ids, cache)
        take(logits[rows, 0], [a for a in active if a is not None])
        for s in rows:
            answer = active[s]
            assert answer is not None
            if finished(answer):
                active[s] = None
                yield answer
                yield from fill(s)
