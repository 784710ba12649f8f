"""Sampling parameters, logits processing, and the sources of randomness."""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from draftsmith.data import DraftsmithError

from .processors import LogitsProcessor

LEAST_TEMPERATURE = 1e-3  # below it the quotient could leave the range of float32


@dataclass(frozen=True)
class SamplingParams:
    """How to generate one answer; names and meanings as users of vLLM and OpenAI's API expect.

    temperature 0 is greedy. `stop` strings end the text and are not part of it; `stop_token_ids` end it
    and are kept as ids. With a `seed` the text depends on nothing but the seed and the
    target (up to rounding, as greedy text does). `min_p` keeps tokens at least that likely relative to the
    likeliest. `logprobs`: None, or how many alternatives to report with each token's log-probability, which is
    that of the target's own logits, before any processing. `logits_processors` are called at every position
    of a block with the tokens generated up to it and the logits; a grammar is one. `n` answers a prompt, through
    `Decoder.generate_batch`.
    """

    max_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    seed: int | None = None
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: int | None = None
    logits_processors: Sequence[LogitsProcessor] = ()
    n: int = 1

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        try:  # keys are strings in JSON
            bias = {int(key): float(value) for key, value in self.logit_bias.items()}
        except (TypeError, ValueError, AttributeError) as error:
            raise DraftsmithError(f"logit_bias maps token ids to numbers, unlike {self.logit_bias!r}") from error
        object.__setattr__(self, "logit_bias", bias)
        checks = [
            (self.max_tokens >= 0, f"max_tokens must be 0 or more, not {self.max_tokens}"),
            (self.temperature == 0.0 or LEAST_TEMPERATURE <= self.temperature < float("inf"),
             f"temperature must be 0 (greedy), or {LEAST_TEMPERATURE} or more, not {self.temperature}"),
            (0.0 < self.top_p <= 1.0, f"top_p must be in (0, 1], not {self.top_p}"),
            (self.top_k >= 0, f"top_k must be 0 (off) or more, not {self.top_k}"),
            (self.min_tokens >= 0, f"min_tokens must be 0 or more, not {self.min_tokens}"),
            (self.n >= 1, f"n must be 1 or more, not {self.n}"),
            (all(self.stop), "stop strings must not be empty"),
            (0.0 <= self.min_p <= 1.0, f"min_p must be in [0, 1], not {self.min_p}"),
            (0.01 <= self.repetition_penalty <= 100.0,
             f"repetition_penalty must be in [0.01, 100], not {self.repetition_penalty}"),
            (-2.0 <= self.presence_penalty <= 2.0, f"presence_penalty must be in [-2, 2], not {self.presence_penalty}"),
            (-2.0 <= self.frequency_penalty <= 2.0,
             f"frequency_penalty must be in [-2, 2], not {self.frequency_penalty}"),
            (all(-100 <= b <= 100 for b in self.logit_bias.values()), "logit_bias values must be in [-100, 100]"),
            (self.logprobs is None or 0 <= self.logprobs <= 20,
             f"logprobs must be from 0 to 20, or None, not {self.logprobs}"),
        ]
        for fine, message in checks:
            if not fine:
                raise DraftsmithError(message)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


def process(logits_RV: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Probabilities [R, V] after temperature, min-p, top-k and top-p, in the logits' precision.

    Ties at the top-k boundary are all kept, as in `transformers`; top-p keeps the smallest set of most
    likely tokens whose mass reaches top_p. Greedy gives one-hot rows.
    """
    if params.greedy:
        return torch.zeros_like(logits_RV).scatter_(-1, logits_RV.argmax(-1, keepdim=True), 1.0)
    logits = logits_RV / params.temperature
    if params.min_p > 0.0:
        floor = logits.amax(-1, keepdim=True) + math.log(params.min_p)
        logits = logits.masked_fill(logits < floor, float("-inf"))
    if 0 < params.top_k < logits.shape[-1]:
        floor = logits.topk(params.top_k, dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < floor, float("-inf"))
    probs = torch.softmax(logits, dim=-1)
    if params.top_p < 1.0:
        ordered, order = probs.sort(dim=-1, descending=True, stable=True)
        beyond = ordered.cumsum(-1) - ordered >= params.top_p
        probs = probs.masked_fill(torch.zeros_like(beyond).scatter(-1, order, beyond), 0.0)
        probs = probs / probs.sum(-1, keepdim=True)
    return probs


class Noise:
    """Independent randomness: acceptance tests and draws. Tests replace it to enumerate outcomes."""

    coupled = False

    def __init__(self, generator: torch.Generator | None = None) -> None:
        self.generator = generator or torch.Generator().manual_seed(secrets.randbits(62))
        self.clocks: torch.Generator | None = None

    def accept(self, probability: float) -> bool:
        return float(torch.rand((), generator=self.generator, dtype=torch.float64)) < probability

    def draw(self, probs_V: torch.Tensor, position: int) -> int:
        """A token from probs (unnormalised allowed); `position` is its absolute position in the text."""
        return int(torch.multinomial(probs_V.cpu(), 1, generator=self.generator))

    def pick(self, probs_D: torch.Tensor, position: int, ids_D: torch.Tensor) -> torch.Tensor:
        """`draw` without leaving the device: an index into `probs_D`, whose entries are the tokens `ids_D`.

        The winner of a race of exponential clocks, argmax p / E, is a draw from p.
        """
        if self.clocks is None or self.clocks.device != probs_D.device:
            seed = int(torch.randint(2**62, (), generator=self.generator))
            self.clocks = torch.Generator(probs_D.device).manual_seed(seed)
        return (probs_D / torch.empty_like(probs_D).exponential_(generator=self.clocks)).argmax()


class GumbelNoise(Noise):
    """Noise keyed by (seed, choice, absolute position, token id), shared by draft and target.

    Both take argmax(log p + g), so a drafted token is kept exactly when the target would have drawn it,
    and the text does not depend on the draft (Gumbel-max coupling).
    """

    coupled = True

    def __init__(self, seed: int, vocab_size: int, choice: int = 0) -> None:
        self.key, self.vocab_size = (seed & (2**64 - 1), choice), vocab_size
        self.rows: dict[int, torch.Tensor] = {}

    def accept(self, probability: float) -> bool:
        raise AssertionError("coupled sampling accepts by equality")

    def gumbel(self, position: int) -> torch.Tensor:
        if position not in self.rows:
            if len(self.rows) > 64:  # draft and target meet within one round; older rows are done with
                self.rows.clear()
            bits = np.random.Philox(key=np.array(self.key, np.uint64), counter=[0, 0, position, 0])
            u = np.random.Generator(bits).random(self.vocab_size)
            self.rows[position] = torch.from_numpy(-np.log(-np.log(np.clip(u, 1e-300, None)) + 1e-300))
        return self.rows[position]

    def draw(self, probs_V: torch.Tensor, position: int, ids: torch.Tensor | None = None) -> int:
        """argmax of log p + g; `ids` maps entries of a trimmed head to token ids (default: identity)."""
        noise = self.gumbel(position)
        noise = noise[: probs_V.shape[-1]] if ids is None else noise[ids.cpu()]
        return int((probs_V.cpu().double().log() + noise).argmax())

    def pick(self, probs_D: torch.Tensor, position: int, ids_D: torch.Tensor) -> torch.Tensor:
        noise = self.gumbel(position).to(probs_D.device, non_blocking=True)[ids_D]
        return (probs_D.double().log() + noise).argmax()
