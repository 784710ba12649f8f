"""What changes logits position by position: penalties, biases, bans, and a caller's own processors (a grammar).

Row i of a block is processed with the text that row i continues, drafted tokens included, so that a block says
what single steps would have said.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch

# (generated token ids so far, logits [V]) -> logits [V]; impossible tokens get -inf. Must depend on these alone.
LogitsProcessor = Callable[[list[int], torch.Tensor], torch.Tensor]


class Processors:
    """The processors of one request, in vLLM's order: bans, biases, penalties, the caller's own.

    Repetition counts tokens of prompt and answer; presence and frequency those of the answer.
    """

    def __init__(self, params: Any, prompt: Sequence[int], stop_ids: frozenset[int], vocab_size: int) -> None:
        self.params, self.prompt_length, self.prompt, self.vocab_size = params, len(prompt), set(prompt), vocab_size
        # Before min_tokens neither end-of-sequence nor a stop token can be sampled.
        self.ban_until = len(prompt) + params.min_tokens if stop_ids else 0
        self.banned = sorted(stop_ids)
        penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
        self.penalised = penalties != (1.0, 0.0, 0.0)
        self.stateful = self.penalised or bool(params.logits_processors)

    def active(self, position: int) -> bool:
        return position < self.ban_until or bool(self.params.logit_bias) or self.stateful

    def __call__(self, logits_V: torch.Tensor, text: Sequence[int], places: dict[int, int] | None = None
                 ) -> torch.Tensor:
        """Logits for the token after `text` (prompt included). `places` maps the token ids of a trimmed head to
        indices of `logits_V`, in the head's order."""
        p, logits_V = self.params, logits_V.clone()
        if len(text) < self.ban_until:
            where, _ = self._where(self.banned, [0.0] * len(self.banned), places, logits_V)
            logits_V[where] = float("-inf")
        if p.logit_bias:
            where, bias = self._where(list(p.logit_bias), list(p.logit_bias.values()), places, logits_V)
            logits_V[where] += bias
        if self.penalised:
            self._penalise(logits_V, Counter(text[self.prompt_length :]), places)
        if p.logits_processors:
            # They know whole vocabularies only.
            head = None if places is None else torch.tensor(list(places), device=logits_V.device)
            whole = logits_V
            if head is not None:
                whole = logits_V.new_full((self.vocab_size,), -torch.inf).index_copy(0, head, logits_V)
            for processor in p.logits_processors:
                whole = processor(list(text[self.prompt_length :]), whole)
            logits_V = whole if head is None else whole[head]
        return logits_V

    def _penalise(self, logits_V: torch.Tensor, answer: Counter[int], places: dict[int, int] | None) -> None:
        p = self.params
        if p.repetition_penalty != 1.0:
            seen = list(self.prompt | answer.keys())
            where, _ = self._where(seen, [0.0] * len(seen), places, logits_V)
            found = logits_V[where]
            logits_V[where] = torch.where(found > 0, found / p.repetition_penalty, found * p.repetition_penalty)
        cost = [p.presence_penalty + p.frequency_penalty * n for n in answer.values()]
        where, costs = self._where(list(answer), cost, places, logits_V)
        logits_V[where] -= costs

    @staticmethod
    def _where(ids: list[int], values: list[float], places: dict[int, int] | None, like: torch.Tensor
               ) -> tuple[torch.Tensor, torch.Tensor]:
        """Indices into `like` of those ids that it has, and their values."""
        if places is not None:
            kept = [(places[i], v) for i, v in zip(ids, values, strict=True) if i in places]
            ids, values = [i for i, _ in kept], [v for _, v in kept]
        return (torch.tensor(ids, dtype=torch.long, device=like.device),
                torch.tensor(values, dtype=like.dtype, device=like.device))
