"""The thread that answers requests: the only one that touches the model."""

from __future__ import annotations

import logging
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from draftsmith.data import DraftsmithError

from ..costs import MAX_DRAFT
from ..decoder import Decoder
from ..memory import MIB, available
from ..policies import Round, make_policy
from ..sampling import SamplingParams
from ..schedule import Batch, Request
from ..stats import Stats, Token
from ..transcript import Chunk
from .metrics import Metrics

log = logging.getLogger("draftsmith.serving")
USUAL_CONTEXT = 4096
RETRY = 1.0  # seconds before caches that could not be made are tried for again


class QueueFull(DraftsmithError):
    """As many requests wait as may; try again later."""


class Closing(DraftsmithError):
    """The server is about to stop."""


@dataclass(frozen=True)
class Event:
    """What happened to answer number `index`: the tokens of a round, or its end by `finish_reason` or `error`."""

    index: int
    pieces: list[tuple[Token, str]] = field(default_factory=list)
    round: Round | None = None
    finish_reason: str | None = None
    stats: Stats | None = None
    error: BaseException | None = None

    @property
    def last(self) -> bool:
        return self.finish_reason is not None or self.error is not None


@dataclass(eq=False)
class Job:
    """One answer that was asked for. `deliver` is called in the engine's thread, and should only pass events on."""

    index: int
    request: Request
    deliver: Callable[[Event], None]


class Engine:
    """Runs up to `slots` answers of up to `context` tokens, prompt included, at a time; `queue` more may wait.

    An answer that fails ends alone. Whatever else ends the work, the thread's own death included, ends the answers
    that were running, each with an error, and the engine goes on with those that wait.
    """

    def __init__(self, decoder: Decoder, slots: int = 4, context: int | None = None, queue: int = 64,
                 metrics: Metrics | None = None) -> None:
        """Raises `DraftsmithError` for caches that the memory does not hold."""
        for name, value, least in (("slots", slots, 1), ("queue", queue, 0), ("context", context, 2)):
            if value is not None and value < least:
                raise DraftsmithError(f"{name} must be {least} or more, not {value}")
        limit = decoder.runner.context
        if context is not None and context > limit:
            raise DraftsmithError(f"a context of {context} tokens is more than the target's {limit}")
        self.decoder, self.slots, self.queue = decoder, slots, queue
        self.context = context or min(limit, USUAL_CONTEXT)
        self._check_memory()
        self.metrics = metrics or Metrics()
        self.metrics.slots.set(slots)
        self.batch: Batch | None = self._new_batch()
        self.changed = threading.Condition()  # guards what follows
        self.waiting: deque[Job] = deque()
        self.running: dict[Request, Job] = {}
        self.ending: Job | None = None  # taken from the running ones, its last event not yet delivered
        self.unwanted: list[Job] = []
        self.closing = False
        self.thread = threading.Thread(target=self._supervise, name="draftsmith-engine", daemon=True)
        self.thread.start()

    def _new_batch(self) -> Batch:
        return Batch(self.decoder.runner, self.decoder.tokenizer, self.slots, self.context)

    def _check_memory(self) -> None:
        free = available(self.decoder.target.engine)
        need = self.decoder.runner.cache_bytes(1, self.context + MAX_DRAFT) * self.slots
        if free is not None and need > free:
            raise DraftsmithError(f"{self.slots} slots of {self.context} tokens need {need / MIB:,.0f} MiB of caches, "
                                  f"and {free / MIB:,.0f} MiB are free; fewer slots or a shorter context take less")

    @property
    def alive(self) -> bool:
        return self.thread.is_alive() and not self.closing

    def check(self, prompt: Sequence[int], params: SamplingParams, policy: str | None) -> None:
        """Raise `DraftsmithError` for what could never be answered."""
        make_policy(policy, self.decoder.context)
        self.decoder.check(prompt, params)
        if len(prompt) + params.max_tokens > self.context:
            raise DraftsmithError(f"this server's context is {self.context} tokens, and {len(prompt)} of prompt and "
                                  f"{params.max_tokens} to complete (max_tokens) are more")

    def require_room(self, number: int) -> None:
        """Raise `QueueFull` where so many answers more cannot even wait, and `Closing` once the engine is to stop."""
        if not self.alive:
            raise Closing("the server is stopping")
        if len(self.running) + len(self.waiting) + number > self.slots + self.queue:
            self.metrics.refused.inc()
            raise QueueFull(f"the queue is full: {len(self.running)} answers are being written and "
                            f"{len(self.waiting)} wait; try again later")

    def submit(self, prompts: Sequence[list[int]], params: Sequence[SamplingParams], policy: str | None,
               deliver: Callable[[Event], None]) -> list[Job]:
        """Ask for as many answers to each prompt as there are `params`, all of them or none; events number them, those
        to the first prompt first.

        Raises `QueueFull`, and `Closing` once the engine is to stop.
        """
        jobs = [Job(i * len(params) + choice, self.decoder.request(prompt, p, policy, choice, group=prompt), deliver)
                for i, prompt in enumerate(prompts) for choice, p in enumerate(params)]
        with self.changed:
            self.require_room(len(jobs))
            self.waiting.extend(jobs)
            self._count()
            self.changed.notify()
        return jobs

    def cancel(self, jobs: Sequence[Job]) -> None:
        """Nothing more will be delivered; slots are free once the round in progress has ended."""
        with self.changed:
            for job in jobs:
                if job in self.waiting:
                    self.waiting.remove(job)
                    self.metrics.requests.labels("cancelled").inc()
                elif job.request in self.running:
                    self.unwanted.append(job)
            self._count()
            self.changed.notify()

    def close(self, timeout: float = 10.0) -> None:
        """Stop after the round in progress; answers not finished end with an error."""
        with self.changed:
            self.closing = True
            self.changed.notify()
        self.thread.join(timeout)

    def _count(self) -> None:
        self.metrics.waiting.set(len(self.waiting))
        self.metrics.running.set(len(self.running))

    def _supervise(self) -> None:
        try:
            while not self.closing:
                try:
                    self.batch = self.batch or self._new_batch()
                    self._work(self.batch)
                except BaseException as error:  # SystemExit in this thread ends nothing but its work
                    self._abandon(error)
        finally:
            self.closing = True
            with self.changed:
                left = [*self.waiting, *self._under_way()]
                self.waiting.clear()
            self._fail(left, Closing("the server is stopping"))

    def _work(self, batch: Batch) -> None:
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self.closing or self.waiting or self.running)
                if self.closing:
                    return
                self._drop_unwanted(batch)
                self._admit(batch)
            with self.metrics.round_seconds.time():
                news = batch.step()
            for request, chunk in news:
                self._tell(request, chunk)

    def _drop_unwanted(self, batch: Batch) -> None:
        for job in self.unwanted:
            if self.running.pop(job.request, None):
                batch.cancel(job.request)
                self.metrics.requests.labels("cancelled").inc()
        self.unwanted.clear()
        self._count()

    def _admit(self, batch: Batch) -> None:
        while self.waiting and len(self.running) < self.slots:
            job = self.waiting[0]
            self.running[job.request] = job  # never in neither, whatever happens here
            self.waiting.popleft()
            batch.submit(job.request)
        self._count()

    def _tell(self, request: Request, chunk: Chunk | None) -> None:
        job = self.running.get(request)
        if job is None:
            return
        if request.error is not None:
            self._fail([job], request.error)
        elif chunk is None:  # asked for no token
            stats = request.answer.output.stats if request.answer else None
            self._end(job, Event(job.index, finish_reason="length", stats=stats))
        elif not chunk.done:
            self._deliver(job, Event(job.index, chunk.pieces, chunk.round))
        else:
            output = chunk.output
            self._end(job, Event(job.index, chunk.pieces, chunk.round, output.finish_reason, output.stats))

    def _deliver(self, job: Job, event: Event) -> None:
        try:
            job.deliver(event)
        except Exception:  # whoever asked is gone
            self.cancel([job])

    def _end(self, job: Job, event: Event) -> None:
        with self.changed:
            self.ending = job
            self.running.pop(job.request, None)
            self._count()
        if event.stats is not None:
            self.metrics.finished(event.stats)
        self.metrics.requests.labels(event.finish_reason or "error").inc()
        self._deliver(job, event)
        self.ending = None

    def _fail(self, jobs: Sequence[Job], error: BaseException) -> None:
        if not isinstance(error, DraftsmithError):
            log.error("an answer failed\n%s", "".join(traceback.format_exception(error)))
        # Its frames hold activations and caches.
        traceback.clear_frames(error.__traceback__)
        error.__traceback__ = error.__context__ = error.__cause__ = None
        for job in jobs:
            self._end(job, Event(job.index, error=error))

    def _under_way(self) -> list[Job]:
        return [*self.running.values(), *([self.ending] if self.ending else [])]

    def _abandon(self, error: BaseException) -> None:
        """End what was running, of which nothing is known any more; the slots are made anew. Where that fails, too, end
        what waits."""
        self.metrics.restarts.inc()
        with self.changed:
            lost = self._under_way()
            if self.batch is None:
                lost += self.waiting
            self.waiting = deque(job for job in self.waiting if job not in lost)
            self.unwanted.clear()
        log.error("the engine failed: %d answers end, and it starts anew", len(lost))
        self._fail(lost, error)
        for job in lost:
            if job.request.answer is not None:
                job.request.answer.generation.close()  # its caches, whoever still holds the request
        if self.batch is None:
            time.sleep(RETRY)
        self.batch = None
