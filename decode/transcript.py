"""The text of an answer in the making, cut where it ends."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from .loop import Generation
from .policies import Round
from .stats import Stats, Token
from .text import TextStream


@dataclass
class GenerationOutput:
    """A finished generation. finish_reason: "stop" (end of sequence, stop string or id) or "length"."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    tokens: list[Token] = field(default_factory=list)
    finish_reason: str = "length"
    stats: Stats = field(default_factory=Stats)


@dataclass
class Chunk:
    """A piece of a stream: the tokens of one round, each with the text that became final with it, and the
    output so far. `done`: it is the last. `round`: None for the token that follows the prompt."""

    pieces: list[tuple[Token, str]]
    output: GenerationOutput
    done: bool = True
    round: Round | None = None

    @property
    def text(self) -> str:
        return "".join(text for _, text in self.pieces)


class Transcript:
    """Takes the tokens of each round, and cuts at stop ids, stop strings and max_tokens."""

    def __init__(self, generation: Generation, tokenizer: Any, started: float | None = None) -> None:
        """`started`: when the request came, by `time.perf_counter`."""
        self.generation, self.started = generation, time.perf_counter() if started is None else started
        self.output = GenerationOutput(stats=generation.stats)
        self.stream = TextStream(tokenizer, tuple(generation.params.stop), generation.stop_ids)
        self.done = generation.max_tokens == 0

    def take(self, fresh: list[Token]) -> Chunk:
        """Add a round's tokens; afterwards `done` says whether the answer is complete."""
        generation, output, stats = self.generation, self.output, self.generation.stats
        laps = generation.laps
        laps.start()
        pieces: list[tuple[Token, str]] = []
        for token in fresh:
            ends = token.id in generation.stop_ids
            pieces.append((token, "" if ends else self.stream.push(token.id)))
            if ends or self.stream.stopped:
                self.done, output.finish_reason = True, "stop"
                break
        stats.trimmed += len(fresh) - len(pieces)
        output.tokens += [token for token, _ in pieces]
        output.token_ids += [token.id for token, _ in pieces]
        stats.emitted = len(output.tokens)
        self.done = self.done or stats.emitted >= generation.max_tokens
        if self.done:
            pieces[-1] = (pieces[-1][0], pieces[-1][1] + self.stream.finish())
        output.text += "".join(text for _, text in pieces)
        laps.lap("detokenisation")
        if not stats.ttft:
            stats.ttft = time.perf_counter() - self.started
        stats.seconds = time.perf_counter() - self.started
        if self.done:
            stats.policy = generation.policy.report()
            stats.check()
        return Chunk(pieces, output, self.done, generation.last_round)
