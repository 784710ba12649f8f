"""Batched generation for data jobs: continuous refill, prompts read together, teacher rows on the fly."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from draftsmith.data.teacher_cache import teacher_rows

from .runner import Runner
from .sampling import SamplingParams, process

PREFILL_ROWS = 2048  # tokens of prompts read in one pass
PREFILL_SPREAD = 32  # by which their lengths may differ: the padding is computed for nothing


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


def write_answers(
    runner: Runner, prompts: Sequence[list[int]], answers: int, temperatures: Sequence[float], max_tokens: int,
    eos_ids: frozenset[int], slots: int, seed: int, teacher_k: int = 0, teacher_temperature: float = 1.0,
    numbers: Sequence[int] | None = None,
) -> Iterator[Answer]:
    """Yield `answers` answers to every prompt as they finish.

    Answer i is sampled at temperatures[i % len]. Prompts are taken longest first, so that rows in flight
    have similar lengths; finished rows are refilled at once, and a row whose prompt is already in another
    slot copies its cache instead of running it again. `teacher_k` > 0 records the target's top-k rows.
    `numbers` are the prompts' numbers in the whole corpus (default: from 0): randomness is keyed by them, so
    that a resumed job, or one on several ranks, writes the same text.
    """
    sampler = _Sampler([SamplingParams(temperature=t) for t in temperatures], seed,
                       range(len(prompts)) if numbers is None else numbers, teacher_k, teacher_temperature)
    order = sorted(range(len(prompts)), key=lambda j: (-len(prompts[j]), j))
    todo = deque((j, i) for j in order for i in range(answers))
    slots = max(1, min(slots, len(todo), runner.max_batch or slots))
    longest = max((len(p) for p in prompts), default=0)
    return _Batch(runner, prompts, todo, slots, longest + max_tokens, max_tokens, eos_ids, sampler).run()


@dataclass
class _Sampler:
    """Draws one token a row and records its teacher row."""

    params: list[SamplingParams]
    seed: int
    numbers: Sequence[int]
    teacher_k: int
    teacher_temperature: float

    def take(self, logits_RV: torch.Tensor, rows: list[Answer]) -> None:
        k = self.teacher_k
        if k:
            top_ids, top_logp, tail = (x.cpu().numpy() for x in teacher_rows(logits_RV, k, self.teacher_temperature))
        for r, answer in enumerate(rows):
            answer.ids.append(self._draw(logits_RV[r], answer))
            if k:
                answer.top_ids.append(top_ids[r])
                answer.top_logp.append(top_logp[r])
                answer.tail.append(float(tail[r]))

    def _draw(self, logits_V: torch.Tensor, answer: Answer) -> int:
        p = self.params[answer.index % len(self.params)]
        if p.greedy:
            return int(logits_V.argmax())
        cdf = process(logits_V[None], p)[0].double().cumsum(0)
        u = uniform(self.seed, self.numbers[answer.job], answer.index, len(answer.ids)) * float(cdf[-1])
        return min(int(torch.searchsorted(cdf, u, right=True)), len(cdf) - 1)


class _Batch:
    """The slots of one cache, and what runs in them."""

    def __init__(self, runner: Runner, prompts: Sequence[list[int]], todo: deque[tuple[int, int]], slots: int,
                 capacity: int, max_tokens: int, eos_ids: frozenset[int], sampler: _Sampler) -> None:
        self.runner, self.prompts, self.todo, self.sampler = runner, prompts, todo, sampler
        self.max_tokens, self.eos_ids = max_tokens, eos_ids
        self.cache = runner.new_cache(slots, capacity)
        self.active: list[Answer | None] = [None] * slots
        self.resident: list[int | None] = [None] * slots  # whose prompt lies in the slot
        self.first_logits: dict[int, torch.Tensor] = {}  # [V], of the prompts whose answers are being started

    @torch.no_grad()
    def run(self) -> Iterator[Answer]:
        slots = range(len(self.active))
        yield from self.fill()
        while any(self.active):
            # Idle slots run along with a dummy token at position 0: their cache is not read again.
            for s in slots:
                if self.active[s] is None:
                    self.cache.crop(0, s)
                    self.resident[s] = None
            ids = torch.tensor([[a.ids[-1] if a else 0] for a in self.active], device=self.runner.device)
            _, logits = self.runner.forward(ids, self.cache)
            rows = [s for s in slots if self.active[s] is not None]
            self.sampler.take(logits[rows, 0], [a for a in self.active if a is not None])
            yield from self.finished()
            yield from self.fill()

    def finished(self) -> Iterator[Answer]:
        """Give up the answers that are complete."""
        for s, answer in enumerate(self.active):
            if answer and (answer.ids[-1] in self.eos_ids or len(answer.ids) >= self.max_tokens):
                self.active[s] = None
                yield answer

    def fill(self) -> Iterator[Answer]:
        """Start answers in the free slots until all are taken or none is left to start."""
        while self.todo and None in self.active:
            free = [s for s, answer in enumerate(self.active) if answer is None]
            new = [self.todo.popleft() for _ in range(min(len(free), len(self.todo)))]
            started = [n for n in new if n[0] in self.first_logits]  # of the prompt that was read last, if any
            for job, index in started:
                # Where the prompt lies, if that is free: overwritten, it could not be copied to the next.
                slot = next((s for s in free if self.resident[s] == job), free[0])
                free.remove(slot)
                self.start(slot, job, index)
            unread = list(dict.fromkeys(job for job, _ in new[len(started) :]))
            slot_of, free = dict(zip(unread, free, strict=False)), free[len(unread) :]
            self.read(slot_of)
            for job, index in new[len(started) :]:
                self.start(slot_of.pop(job) if job in slot_of else free.pop(0), job, index)
            last = new[-1][0]
            self.first_logits = {last: self.first_logits[last]}
            yield from self.finished()

    def start(self, slot: int, job: int, index: int) -> None:
        """Begin an answer to a prompt that lies in some slot."""
        length = len(self.prompts[job])
        if self.resident[slot] == job:
            self.cache.crop(length, slot)
        else:
            self.cache.copy_prefix(self.resident.index(job), slot, length)
        answer = Answer(job, index)
        self.resident[slot], self.active[slot] = job, answer
        self.sampler.take(self.first_logits[job][None], [answer])

    def read(self, slot_of: dict[int, int]) -> None:
        """Run prompts in their slots: those beside each other and of similar length in one pass."""
        group: list[int] = []
        for job, slot in slot_of.items():
            longest = len(self.prompts[group[0]]) if group else 0
            if group and (slot != slot_of[group[-1]] + 1 or longest - len(self.prompts[job]) > PREFILL_SPREAD
                          or longest * (len(group) + 1) > PREFILL_ROWS):
                self._read(group, slot_of[group[0]])
                group = []
            group.append(job)
        if group:
            self._read(group, slot_of[group[0]])

    def _read(self, jobs: list[int], first: int) -> None:
        lengths = [len(self.prompts[job]) for job in jobs]
        slots = range(first, first + len(jobs))
        for s in slots:
            self.cache.crop(0, s)
        # What is past the end of a shorter prompt is seen by nothing before it, and forgotten.
        ids = torch.tensor([self.prompts[job] + [0] * (lengths[0] - n) for job, n in zip(jobs, lengths, strict=True)],
                           device=self.runner.device)
        keep = lengths[0] - lengths[-1] + 1
        _, logits = self.runner.forward(ids, self.cache, keep, slots if len(self.active) > 1 else None)
        for row, (job, s) in enumerate(zip(jobs, slots, strict=True)):
            self.cache.crop(lengths[row], s)
            self.resident[s] = job
            self.first_logits[job] = logits[row, lengths[row] - lengths[-1]].clone()
