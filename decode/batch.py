"""Batched generation for data jobs: continuous refill, prompts read together, teacher rows on the fly."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from draftsmith.data.prefixes import common_prefix, families, worth_sharing
from draftsmith.data.teacher_cache import teacher_rows

from .runner import Runner
from .sampling import SamplingParams, process

PREFILL_ROWS = 2048  # tokens of prompts read in one pass
PREFILL_SPREAD = 32  # by which their lengths may differ: the padding is computed for nothing


class Answer:
    """One answer in progress: `ids` with a teacher row (`top_ids`, `top_logp` [length, k], `tail` [length]) for the
    position before each of them."""

    def __init__(self, job: int, index: int, ids_T: np.ndarray, top_ids_TK: np.ndarray, top_logp_TK: np.ndarray,
                 tail_T: np.ndarray) -> None:
        """Arrays that hold as many tokens as it may have."""
        self.job, self.index, self.length = job, index, 0
        self._ids_T, self._top_ids_TK, self._top_logp_TK, self._tail_T = ids_T, top_ids_TK, top_logp_TK, tail_T

    def add(self, token: int) -> None:
        self._ids_T[self.length] = token
        self.length += 1

    def set_row(self, top_ids_K: np.ndarray, top_logp_K: np.ndarray, tail: float) -> None:
        """The teacher row of the token to come."""
        at = self.length
        self._top_ids_TK[at], self._top_logp_TK[at], self._tail_T[at] = top_ids_K, top_logp_K, tail

    @property
    def last(self) -> int:
        return int(self._ids_T[self.length - 1])

    @property
    def ids(self) -> list[int]:
        found: list[int] = self._ids_T[: self.length].tolist()
        return found

    @property
    def top_ids(self) -> np.ndarray:
        return self._top_ids_TK[: self.length]

    @property
    def top_logp(self) -> np.ndarray:
        return self._top_logp_TK[: self.length]

    @property
    def tail(self) -> np.ndarray:
        return self._tail_T[: self.length]


class Sheets:
    """Room for all answers, taken at once: what is kept for long must not lie between what every pass allocates and
    frees, or each pass leaves a hole that the next does not fit into. (Gigabytes, with a vocabulary of 49k.)"""

    def __init__(self, answers: int, max_tokens: int, k: int) -> None:
        shape = (answers, max_tokens)
        self.arrays = (np.empty(shape, np.int64), np.empty((*shape, k), np.int32), np.empty((*shape, k), np.float32),
                       np.empty(shape, np.float32))

    def answer(self, number: int, job: int, index: int) -> Answer:
        return Answer(job, index, *(array[number] for array in self.arrays))


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
    have similar lengths, those which begin alike one after the other: what lies in a slot of the cache
    already is copied there instead of being run again. Finished rows are refilled at once. `teacher_k` > 0
    records the target's top-k rows.
    `numbers` are the prompts' numbers in the whole corpus (default: from 0): randomness is keyed by them, so
    that a resumed job, or one on several ranks, writes the same text.
    """
    sampler = _Sampler([SamplingParams(temperature=t) for t in temperatures], seed,
                       range(len(prompts)) if numbers is None else numbers, teacher_k, teacher_temperature)
    alike = [sorted(family, key=lambda j: (-len(prompts[j]), j)) for family in families(prompts)]
    alike.sort(key=lambda family: (-len(prompts[family[0]]), family[0]))
    todo = deque((j, i) for family in alike for j in family for i in range(answers))
    slots = max(1, min(slots, len(todo), runner.max_batch or slots))
    longest = max((len(p) for p in prompts), default=0)
    capacity = longest + max(max_tokens, PREFILL_SPREAD)
    return _Batch(runner, prompts, todo, slots, capacity, max_tokens, eos_ids, sampler).run()


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
            if k:
                answer.set_row(top_ids[r], top_logp[r], tail[r])
            answer.add(self._draw(logits_RV[r], answer))

    def _draw(self, logits_V: torch.Tensor, answer: Answer) -> int:
        p = self.params[answer.index % len(self.params)]
        if p.greedy:
            return int(logits_V.argmax())
        cdf = process(logits_V[None], p)[0].double().cumsum(0)
        u = uniform(self.seed, self.numbers[answer.job], answer.index, answer.length) * float(cdf[-1])
        return min(int(torch.searchsorted(cdf, u, right=True)), len(cdf) - 1)


class _Batch:
    """The slots of one cache, and what runs in them."""

    def __init__(self, runner: Runner, prompts: Sequence[list[int]], todo: deque[tuple[int, int]], slots: int,
                 capacity: int, max_tokens: int, eos_ids: frozenset[int], sampler: _Sampler) -> None:
        self.runner, self.prompts, self.todo, self.sampler = runner, prompts, todo, sampler
        self.max_tokens, self.eos_ids = max_tokens, eos_ids
        self.cache = runner.new_cache(slots, capacity)
        self.active: list[Answer | None] = [None] * slots
        self.held: list[list[int]] = [[] for _ in range(slots)]  # the tokens of a prompt that lie in each slot
        self.started, self.sheets = 0, Sheets(len(todo), max_tokens, min(sampler.teacher_k, runner.vocab_size))

    @torch.no_grad()
    def run(self) -> Iterator[Answer]:
        slots = range(len(self.active))
        yield from self.fill()
        while any(self.active):
            # Idle slots run along with a dummy token at position 0: their cache is not read again.
            for s in slots:
                if self.active[s] is None:
                    self.cache.crop(0, s)
                    self.held[s] = []
            ids = torch.tensor([[a.last if a else 0] for a in self.active], device=self.runner.device)
            _, logits = self.runner.forward(ids, self.cache)
            rows = [s for s in slots if self.active[s] is not None]
            self.sampler.take(logits[rows, 0], [a for a in self.active if a is not None])
            yield from self.finished()
            yield from self.fill()

    def finished(self) -> Iterator[Answer]:
        """Give up the answers that are complete."""
        for s, answer in enumerate(self.active):
            if answer and (answer.last in self.eos_ids or answer.length >= self.max_tokens):
                self.active[s] = None
                yield answer

    def fill(self) -> Iterator[Answer]:
        """Start answers in the free slots until all are taken or none is left to start."""
        while self.todo and None in self.active:
            self.read(self.place())
            yield from self.finished()

    def place(self) -> dict[int, Answer]:
        """The next answers to start by their slots, which hold the beginnings of their prompts that lay in the
        cache already. A prompt that shares more with one of these waits until that one has been read."""
        free = [s for s, answer in enumerate(self.active) if answer is None]
        placed: dict[int, Answer] = {}
        while free and self.todo:
            job, index = self.todo[0]
            prompt = self.prompts[job]
            source, shared = self._longest(prompt)
            ahead = max((common_prefix(prompt, self.prompts[a.job]) for a in placed.values()), default=0)
            if worth_sharing(min(ahead, len(prompt) - 1) - shared, len(prompt)):
                break
            self.todo.popleft()
            slot = source if source in free else free[0]
            free.remove(slot)
            if slot != source and shared:
                self.cache.copy_prefix(source, slot, shared)
            self.cache.crop(shared, slot)
            self.held[slot] = prompt[:shared]
            placed[slot] = self.sheets.answer(self.started, job, index)
            self.started += 1
        return placed

    def _longest(self, prompt: list[int]) -> tuple[int, int]:
        """The slot that holds the longest beginning of `prompt`, its last token left to be read, and its length."""
        lengths = [min(common_prefix(prompt, held), len(prompt) - 1) for held in self.held]
        source = max(range(len(lengths)), key=lambda s: (lengths[s], self.active[s] is None, -s))
        return source, lengths[source] if worth_sharing(lengths[source], len(prompt)) else 0

    def read(self, placed: dict[int, Answer]) -> None:
        """Run what is missing of the prompts, those beside each other and of similar length in one pass."""
        missing = {s: self.prompts[placed[s].job][len(self.held[s]) :] for s in sorted(placed)}
        group: list[int] = []
        for slot, rest in missing.items():
            lengths = [len(missing[s]) for s in group] + [len(rest)]
            end = max(len(self.held[s]) for s in [*group, slot]) + max(lengths)  # of the padded rows
            if group and (slot != group[-1] + 1 or max(lengths) - min(lengths) > PREFILL_SPREAD
                          or max(lengths) * len(lengths) > PREFILL_ROWS or end > self.cache.capacity):
                self._read(group, [missing[s] for s in group], placed)
                group = []
            group.append(slot)
        self._read(group, [missing[s] for s in group], placed)
        for slot, answer in placed.items():
            self.held[slot], self.active[slot] = self.prompts[answer.job], answer

    def _read(self, slots: list[int], rests: list[list[int]], placed: dict[int, Answer]) -> None:
        longest, shortest = max(map(len, rests)), min(map(len, rests))
        # What is past the end of a shorter prompt is seen by nothing before it, and forgotten.
        ids = torch.tensor([rest + [0] * (longest - len(rest)) for rest in rests], device=self.runner.device)
        where = range(slots[0], slots[-1] + 1) if len(self.active) > 1 else None
        _, logits = self.runner.forward(ids, self.cache, longest - shortest + 1, where)
        rows = []
        for row, (slot, rest) in enumerate(zip(slots, rests, strict=True)):
            self.cache.crop(len(self.held[slot]) + len(rest), slot)
            rows.append(logits[row, len(rest) - shortest])
        self.sampler.take(torch.stack(rows), [placed[s] for s in slots])
