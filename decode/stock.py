"""Any Hugging Face causal LM as a draft, as it is: what `DraftRunner` offers the loop, for a stock model."""

from __future__ import annotations

from typing import Any

import torch
from draftsmith.data import DraftsmithError
from draftsmith.data.vocabulary import first_difference, vocabulary
from draftsmith.distill.variants import DraftShape, Variant

from .runner import Runner, fill, load_runner
from .target import Target


class StockShape(DraftShape):
    """One variant: the whole model."""

    def variants(self) -> list[Variant]:
        return [Variant(self.layers)]

    def choose(self, alpha: float) -> Variant:
        return Variant(self.layers)


class StockCache:
    """A runner's cache for one request, seen as a draft's."""

    def __init__(self, inner: Any, head_ids: torch.Tensor) -> None:
        self.inner, self.head_ids, self.deep = inner, head_ids, 0
        self.capacity: int = inner.capacity

    @property
    def lengths(self) -> list[int]:
        lengths: list[int] = self.inner.lengths
        return lengths

    def crop(self, length: int, request: int = 0) -> None:
        self.inner.crop(length)


class StockDraft:
    """A model of the target's vocabulary that drafts with all its layers. Ids past the end of
    the smaller of the two vocabularies are never proposed."""

    ahead = False

    def __init__(self, model: Target, target: Target) -> None:
        """Raises `DraftsmithError` if the two do not read and write the same tokens."""
        if difference := first_difference(vocabulary(target.tokenizer), vocabulary(model.tokenizer)):
            raise DraftsmithError(f"the draft '{model.name}' has another tokenizer than the target '{target.name}': "
                                  f"token {difference}")
        self.runner: Runner = load_runner(model)
        self.config, self.precision = model.config, model.engine.precision
        layers = int(model.config.num_hidden_layers)
        size = min(self.runner.vocab_size, len(target.head))
        self.shape = StockShape(layers, layers, (), int(model.config.hidden_size), 1, size)
        self.context = self.runner.context
        self.head_ids = torch.arange(size, device=self.runner.device)

    def cache_bytes(self, capacity: int) -> int:
        return self.runner.cache_bytes(1, capacity)

    def declare(self, cache: StockCache, context: int) -> None:
        fill(self.runner, cache.inner, 1, context)

    def new_cache(self, capacity: int, prompt: list[int] | None = None) -> StockCache:
        return StockCache(self.runner.new_cache(1, capacity), self.head_ids)

    def forward(self, ids_1N: torch.Tensor, cache: StockCache, variant: Variant,
                keep: int | None = None) -> torch.Tensor:
        """Append N tokens; logits [keep, D] of the last `keep` of them."""
        # Of a token that only the target has, the draft knows nothing: it reads another, at the cost of acceptance.
        ids_1N = ids_1N.clamp(max=self.runner.vocab_size - 1)
        return self.runner.forward(ids_1N, cache.inner, keep)[1][0, :, : len(self.head_ids)]

    def catch_up(self, cache: StockCache, variant: Variant, keep: int) -> torch.Tensor:
        """Nothing lags in a model of one depth."""
        return torch.empty(0)
