"""Requests that share the target's passes: slots of one cache, refilled as answers end."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from draftsmith.data import DraftsmithError
from draftsmith.data.prefixes import common_prefix, worth_sharing

from .attention import Tree
from .candidates import Draft
from .costs import MAX_DRAFT
from .device import synchronise
from .loop import Generation
from .runner import Runner
from .stats import Token
from .transcript import Chunk, Transcript

PIECE = 256  # tokens of a prompt that are read in one pass

# (cache, slot) -> the loop of a request whose keys and values lie there
Start = Callable[[Any, int], Generation]


@dataclass(eq=False)
class Request:
    """One answer that was asked for. `prompt`: its ids, for a slot that holds their beginning already. `group`: of
    requests with the same prompt, which is read once for all that start together. `error`: why it ended early; other
    requests go on."""

    start: Start
    group: object = None
    prompt: Sequence[int] = ()
    answer: Transcript | None = None
    error: Exception | None = None
    cancelled: bool = False
    arrived: float = field(default_factory=time.perf_counter)

    @property
    def done(self) -> bool:
        return self.cancelled or self.error is not None or (self.answer is not None and self.answer.done)


News = tuple[Request, Chunk | None]


@dataclass
class _Read:
    """A prompt that lies in a slot, and the target's rows of its end."""

    group: object
    hidden_RH: torch.Tensor
    logits_RV: torch.Tensor


class Batch:
    """Runs requests in up to `slots` slots of `capacity` positions each.

    What a slot has read stays in it: a prompt that begins as an earlier text did (the next turn of a conversation, the
    same instructions) is read from there on, and a long one in pieces, between which others write. A target that runs
    one request at a time (`Runner.max_batch`) gives each request a cache and passes of its own. An exception of one
    request, a caller's logits processor's for instance, ends that request alone.
    """

    def __init__(self, runner: Runner, tokenizer: Any, slots: int, capacity: int) -> None:
        self.runner, self.tokenizer = runner, tokenizer
        self.shared, self.capacity = runner.max_batch is None, capacity
        self.cache = runner.new_cache(slots, capacity + MAX_DRAFT) if self.shared else None
        self.slots: list[Request | None] = [None] * slots
        self.held: list[list[int]] = [[] for _ in range(slots)]  # the tokens that lie in a slot which is free
        self.freed, self.clock = [0] * slots, 0  # when each was
        self.reading: dict[int, int] = {}  # slots whose prompts are not read yet -> positions that are
        self.waiting: deque[Request] = deque()

    def submit(self, request: Request) -> None:
        self.waiting.append(request)

    def cancel(self, request: Request) -> None:
        """Its slot is free from now on."""
        request.cancelled = True
        if request in self.waiting:
            self.waiting.remove(request)
        self._release()

    @property
    def busy(self) -> bool:
        return bool(self.waiting) or any(self.slots)

    @torch.no_grad()
    def step(self) -> list[News]:
        """Start what there is room for, read some of its prompts, then one round of all that are read; what came of it,
        None for a request that failed or was asked for no token."""
        news: list[News] = []
        self._fill(news)
        self._read(news)
        active = [(slot, request) for slot, request in enumerate(self.slots)
                  if request is not None and slot not in self.reading]
        if self.shared:
            self._round(active, news)
        else:
            for _, request in active:
                assert request.answer is not None
                self._try(request, news, request.answer.generation.round)
        self._release()
        return news

    def _release(self) -> None:
        for slot, request in enumerate(self.slots):
            if request is not None and request.done:
                self._free(slot, request)

    def _free(self, slot: int, request: Request) -> None:
        """Let go of a request, but remember what its slot has read; of one that failed nothing is known."""
        assert request.answer is not None
        generation = request.answer.generation
        if self.cache is not None:
            read = self.cache.lengths[slot] if request.error is None else 0
            self.cache.crop(read, slot)
            self.held[slot] = generation.tokens[:read]
        self.clock += 1
        self.freed[slot] = self.clock
        generation.close()
        self.slots[slot] = None
        self.reading.pop(slot, None)

    def _try(self, request: Request, news: list[News], work: Callable[[], list[Token]]) -> None:
        """Take what a request's work gives."""
        assert request.answer is not None
        try:
            news.append((request, request.answer.take(work())))
        except Exception as error:  # whatever it is, it is this request's
            request.error = error
            news.append((request, None))

    def _fill(self, news: list[News]) -> None:
        """Give requests the free slots."""
        while self.waiting and (free := [slot for slot, taken in enumerate(self.slots) if taken is None]):
            request = self.waiting.popleft()
            # The slot that holds most of the prompt; of several, the one that was not used for the longest time.
            slot = max(free, key=lambda s: (self._known(s, request.prompt), -self.freed[s], -s))
            try:
                generation = request.start(self.cache, slot)
            except Exception as error:
                request.error = error
                news.append((request, None))
                continue
            request.answer = Transcript(generation, self.tokenizer, request.arrived)
            if (length := generation.prompt_length + generation.max_tokens) > self.capacity:
                request.error = DraftsmithError(f"a request of {length} tokens, prompt and answer, in a batch made for "
                                                f"{self.capacity}")
            if request.done:
                generation.close()
                news.append((request, None))
                continue
            known = min(self._known(slot, request.prompt), generation.prompt_length - generation.prompt_rows)
            if self.cache is not None:
                self.cache.crop(known, slot)
                self.held[slot] = []
            generation.stats.cached_tokens = known
            self.slots[slot], self.reading[slot] = request, known

    def _read(self, news: list[News]) -> None:
        """Read prompts, first come first, a piece or two a step: others need not wait for a long one."""
        read: dict[int, _Read] = {}
        left = PIECE
        for slot in list(self.reading):
            request = self.slots[slot]
            assert request is not None
            assert request.answer is not None
            generation = request.answer.generation
            source = next((s for s in read if read[s].group is request.group is not None), None)
            if source is None:
                left -= self._read_pieces(slot, request, left, news)
            if not request.done and (source is not None or left > 0):
                left -= 0 if source is not None else generation.prompt_length - self.reading[slot]
                self._try(request, news, partial(self._prefill, generation, request, slot, read, source))
                self.reading.pop(slot)
            if request.done:
                self._free(slot, request)

    def _read_pieces(self, slot: int, request: Request, limit: int, news: list[News]) -> int:
        """Read what is before a prompt's last piece, piece by piece, until `limit` tokens are used up; returns how many
        were, a shortened piece counting as a whole one."""
        assert request.answer is not None
        generation, used = request.answer.generation, 0
        while used < limit and (rest := generation.prompt_length - self.reading[slot]) > PIECE:
            piece = min(PIECE, rest - generation.prompt_rows)
            try:
                generation.read(self.reading[slot], piece)
            except Exception as error:
                request.error = error
                news.append((request, None))
                break
            self.reading[slot] += piece
            used += PIECE
        return used

    def _known(self, slot: int, prompt: Sequence[int]) -> int:
        """Tokens of a prompt that a free slot holds, where they are worth keeping."""
        shared = common_prefix(self.held[slot], prompt)
        return shared if worth_sharing(shared, len(prompt)) else 0

    def _prefill(self, generation: Generation, request: Request, slot: int, read: dict[int, _Read],
                 source: int | None) -> list[Token]:
        """The first token; from another slot's rows, where the same prompt has just been read there."""
        if source is None or self.cache is None:
            return generation.prefill(lambda hidden, logits: read.update({slot: _Read(request.group, hidden, logits)}),
                                      self.reading[slot])
        self.cache.copy_prefix(source, slot, generation.prompt_length)
        generation.stats.cached_tokens = generation.prompt_length
        generation.laps.start()
        return generation.begin(read[source].hidden_RH, read[source].logits_RV)

    def _round(self, active: list[tuple[int, Request]], news: list[News]) -> None:
        """One pass for the drafts of all."""
        assert self.cache is not None
        cache, drafts, where = self.cache, {}, self._span([slot for slot, _ in active])
        ends = [len(r.answer.generation.tokens) for _, r in active if r.answer] + [n + 1 for n in self.reading.values()]
        room = min((cache.capacity - end for end in ends), default=0)
        for slot, request in active:
            assert request.answer is not None
            try:
                drafts[slot] = request.answer.generation.propose(len(where), room)
            except Exception as error:
                request.error = error
                news.append((request, None))
        active = [(slot, request) for slot, request in active if slot in drafts]
        if not active:
            return
        started = time.perf_counter()
        try:
            hidden, logits = self._pass(active, drafts, where)
            synchronise(self.runner.device)
        except Exception as error:  # of memory, say: the requests of this pass end, those that wait go on
            for _, request in active:
                request.error = error
                news.append((request, None))
            return
        seconds = time.perf_counter() - started
        for slot, request in active:
            row, n = slot - where.start, len(drafts[slot].nodes) + 1
            assert request.answer is not None
            self._try(request, news, partial(request.answer.generation.finish, drafts[slot], hidden[row, :n],
                                             logits[row, :n], len(where), seconds))

    def _span(self, taken: list[int]) -> range:
        """The slots that a pass runs over: those from the first to the last that are taken, where that is cheaper
        than all."""
        if not (self.runner.narrow and taken):
            return range(len(self.slots))
        return range(min(taken), max(taken) + 1)

    def _pass(self, active: list[tuple[int, Request]], drafts: dict[int, Draft],
              where: range) -> tuple[torch.Tensor, torch.Tensor]:
        """The target's rows [len(where), N, ...]; rows past a request's own are of padding, which nothing sees."""
        assert self.cache is not None
        n = 1 + max(len(draft.nodes) for draft in drafts.values())
        ids, parents = [[0] * n for _ in where], [list(range(-1, n - 1)) for _ in where]
        idle = {slot: self.cache.lengths[slot] for slot in set(where) - drafts.keys()}
        for slot, length in idle.items():  # runs along after what it holds
            if length + n > self.cache.capacity:
                self.held[slot], idle[slot] = [], 0
                self.cache.crop(0, slot)
        for slot, request in active:
            assert request.answer is not None
            generation, draft, row = request.answer.generation, drafts[slot], slot - where.start
            rows = generation.pass_ids(draft)
            ids[row][: len(rows)] = rows
            parents[row][: len(rows)] = generation.pass_parents(draft)
        device, tree = self.runner.device, None
        if not all(draft.is_chain for draft in drafts.values()):
            trees = [Tree.of(p, device) for p in parents]
            tree = Tree(torch.cat([t.depth_BN for t in trees]), torch.cat([t.sees_BNN for t in trees]))
        slots = None if len(where) == len(self.slots) else where
        try:
            return self.runner.forward(torch.tensor(ids, device=device), self.cache, slots=slots, tree=tree)
        finally:
            for slot, length in idle.items():
                self.cache.crop(length, slot)
