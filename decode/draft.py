"""The runner of an elastic draft: its variants over one cache."""

from __future__ import annotations

import time
import weakref
from typing import Any

import torch
from draftsmith.data import DraftsmithError
from draftsmith.distill.variants import DraftShape, Variant
from torch.nn import functional as F

from .device import Engine, draft_engine, synchronise
from .graphs import Pool, Storage, bucket_context, storage_size
from .linear import can_quantise, make_linear
from .runner import precise
from .stack import PREFILL_CHUNK, KVCache, Stack, cache_bytes, empty_kv, head_shape

PRECISIONS = ("auto", "plain", "int8")
# Below this many weights a draft stays in the processor's caches, where small weights have nothing to gain.
FEW_WEIGHTS = 1 << 22
GAIN = 0.95  # int8 must take at most this share of the time: it may cost some acceptance


class DraftCache:
    """An elastic draft's state for one request; the deep layers may lag behind the shallow ones.

    `lengths[0]` positions have keys of the layers up to the early exit and `exit_hidden` (their hidden
    states there); `deep` of them also have keys of the later layers. `head_ids` [D] are the tokens that can
    be proposed to this request; the last of them have their rows in `extra_head`.
    """

    head_ids: torch.Tensor
    extra_head: torch.Tensor | None = None

    def __init__(self, config: Any, shape: DraftShape, capacity: int, engine: Engine,
                 storage: Storage | None = None) -> None:
        """`storage`: keys and values and `exit_hidden` to use, and the graphs captured over them."""
        self.storage = storage
        self.kv = KVCache(config, shape.layers, 1, capacity, engine, storage)
        self.exit_hidden = storage.tensors[1] if storage else empty_hidden(config, capacity, engine)
        self.lengths, self.deep, self.capacity = [0], 0, capacity

    def crop(self, length: int, request: int = 0) -> None:
        self.lengths[0] = min(self.lengths[0], length)
        self.deep = min(self.deep, length)


def empty_hidden(config: Any, capacity: int, engine: Engine) -> torch.Tensor:
    return torch.zeros(1, capacity, config.hidden_size, dtype=engine.dtype, device=engine.device)


class DraftRunner:
    """Runs the variants of an elastic draft on one request.

    Cache rule: variants share one cache. A cache written by mixed widths is the defined semantics; a
    switch to full depth first runs the deep layers over the positions they have not seen, in one batch.
    """

    def __init__(self, config: Any, shape: DraftShape, tensors: dict[str, torch.Tensor], embedding_VH: torch.Tensor,
                 head_VH: torch.Tensor | None = None, precision: str = "plain") -> None:
        """`tensors` as written by `ElasticDraft.portable_state`; the other two are the target's own, of which a draft
        with an embedding of its own takes the device and dtype only. Without `head_VH` the draft proposes the
        tokens of its trimmed head only.

        `precision`: "plain" (the embedding's dtype), "int8" (weights; the rest in bfloat16), or "auto", which times
        both on a CPU and keeps the faster. It costs acceptance, never correctness.
        """
        device, dtype = embedding_VH.device, embedding_VH.dtype
        tensors = {k: v.to(device, dtype if v.is_floating_point() else None) for k, v in tensors.items()}
        if "embed" in tensors:  # the target's rows are of another size
            embedding_VH, head_VH = tensors["embed"], None
        self.config, self.shape, self.embedding, self.full_head = config, shape, embedding_VH, head_VH
        self.head_ids = tensors["head_ids"]
        self.head_set = set(self.head_ids.tolist())
        self.context = int(config.max_position_embeddings)
        self.widths = tuple(shape.width(v) for v in shape.variants())
        if precision not in PRECISIONS:
            raise DraftsmithError(f"draft precision '{precision}' is not one of {', '.join(PRECISIONS)}")
        if precision == "int8" and not can_quantise(embedding_VH):
            raise DraftsmithError("draft precision int8 needs a CPU and a target in fp32 or int8")
        self.pool = Pool()
        self.parameters = sum(t.numel() for t in tensors.values() if t.is_floating_point())
        self._build(tensors, "plain" if precision == "auto" else precision)
        if precision == "auto" and can_quantise(embedding_VH) and self.parameters >= FEW_WEIGHTS:
            self._choose_precision(tensors)

    def _build(self, tensors: dict[str, torch.Tensor], precision: str) -> None:
        device, dtype = self.embedding.device, self.embedding.dtype
        self.engine = draft_engine(device, dtype, precision == "int8", head_shape(self.config)[2])
        if precision == "int8":
            # Norms and biases; the products take their weights as they are and quantise them.
            tensors = {k: v.to(torch.bfloat16) if v.dim() == 1 and v.is_floating_point() else v
                       for k, v in tensors.items()}
        self.precision = precision
        self.stack = Stack(self.config, tensors.get, self.engine, self.widths)
        self.head = make_linear(tensors["head"], None, self.engine.linear)
        self.norms = {d: tensors[f"norms.{d}.weight"] for d in (self.shape.exit, self.shape.layers)}

    def _choose_precision(self, tensors: dict[str, torch.Tensor]) -> None:
        """Keep int8 weights if a full step is clearly faster with them here."""
        plain, seconds = self.__dict__.copy(), self._step_seconds()
        self._build(tensors, "int8")
        if self._step_seconds() > GAIN * seconds:
            self.__dict__ = plain

    def _step_seconds(self, repeats: int = 9) -> float:
        """Median seconds of one step of the full variant."""
        cache, ids = self.new_cache(64), torch.zeros(1, 1, dtype=torch.long, device=self.engine.device)
        times = []
        for _ in range(repeats + 2):
            started = time.perf_counter()
            self.forward(ids, cache, self.shape.variants()[-1])
            synchronise(self.engine.device)
            times.append(time.perf_counter() - started)
            cache.crop(32)
        return sorted(times[2:])[repeats // 2]

    @property
    def ahead(self) -> bool:
        return self.engine.graphs

    def cache_bytes(self, capacity: int) -> int:
        """What `new_cache` will allocate."""
        capacity = min(capacity, self.context)
        hidden = capacity * self.config.hidden_size * self.engine.dtype.itemsize
        return cache_bytes(self.config, self.shape.layers, 1, capacity, self.engine.dtype) + hidden

    def head_ids_for(self, prompt: list[int]) -> torch.Tensor:
        """The trimmed head's ids, then those of the prompt's tokens that it lacks: answers repeat names."""
        extra = sorted(set(prompt) - self.head_set) if self.full_head is not None else []
        return torch.cat([self.head_ids, torch.tensor(extra, dtype=torch.long, device=self.head_ids.device)])

    def new_cache(self, capacity: int, prompt: list[int] | None = None) -> DraftCache:
        """A cache for one request; `prompt` extends the head (`head_ids_for`) by the target's own rows."""
        cache = self._allocate(min(capacity, self.context))
        cache.head_ids = self.head_ids_for(prompt or [])
        if len(cache.head_ids) > len(self.head_ids):
            assert self.full_head is not None
            cache.extra_head = self.full_head[cache.head_ids[len(self.head_ids) :]].to(self.engine.dtype)
        return cache

    def _allocate(self, capacity: int) -> DraftCache:
        if not self.engine.graphs:
            return DraftCache(self.config, self.shape, capacity, self.engine)
        size = storage_size(capacity)
        storage = self.pool.take(1, size, lambda: (empty_kv(self.config, self.shape.layers, 1, size, self.engine),
                                                   empty_hidden(self.config, size, self.engine)))
        cache = DraftCache(self.config, self.shape, capacity, self.engine, storage)
        weakref.finalize(cache, self.pool.give, storage)
        return cache

    def declare(self, cache: DraftCache, context: int) -> None:
        cache.lengths[0] = cache.deep = context

    def forward(self, ids_1N: torch.Tensor, cache: DraftCache, variant: Variant,
                keep: int | None = None) -> torch.Tensor:
        """Append N tokens; returns logits [keep, D] over the cache's head for the last `keep` of them."""
        n = ids_1N.shape[1]
        keep = n if keep is None else keep
        # A graph holds a single step without a lag of the deep layers; anything else is rare.
        ready = variant.depth == self.shape.exit or cache.deep == cache.lengths[0]
        if cache.storage is not None and n == 1 and ready:
            return self._replay(ids_1N, cache, variant)
        for at in range(0, n, PREFILL_CHUNK):
            self._shallow(ids_1N[:, at : at + PREFILL_CHUNK], cache, variant)
        length = cache.lengths[0]
        if variant.depth == self.shape.exit:
            hidden = cache.exit_hidden[:, length - keep : length]
        else:
            hidden = self.catch_up(cache, variant, keep)
        hidden = self.stack.norm(hidden, self.norms[variant.depth])[0]
        return self._extend(hidden, self.head(hidden), cache)

    @staticmethod
    def _extend(hidden: torch.Tensor, logits: torch.Tensor, cache: DraftCache) -> torch.Tensor:
        """Add the logits of the request's own tokens."""
        if cache.extra_head is not None:
            logits = torch.cat([logits, F.linear(hidden, cache.extra_head)], -1)
        return precise(logits)

    def _replay(self, ids_11: torch.Tensor, cache: DraftCache, variant: Variant) -> torch.Tensor:
        """One step as a graph."""
        assert cache.storage is not None
        (kv, exits), length, width = cache.storage.tensors, cache.lengths[0], self.shape.width(variant)
        if length >= cache.capacity:
            raise ValueError(f"{length + 1} positions in a cache of {cache.capacity}")
        end, deep = bucket_context(length + 1, kv.shape[-2]), variant.depth == self.shape.layers

        def run(ids: torch.Tensor, start_B: torch.Tensor) -> tuple[torch.Tensor, ...]:
            place = self.stack.static_place(start_B, 1, end, kv)
            x = F.embedding(ids, self.embedding).to(self.engine.dtype)
            x = self.stack.forward(x, place, 0, self.shape.exit, width)
            exits.index_copy_(1, start_B, x)
            if deep:
                x = self.stack.forward(x, place, self.shape.exit, self.shape.layers, width)
            hidden = self.stack.norm(x, self.norms[variant.depth])[0]
            return hidden, self.head(hidden)

        hidden, logits = cache.storage.run((variant.name, end), run, ids_11, [length], 1)
        cache.lengths[0] = length + 1
        cache.deep = length + 1 if deep else cache.deep
        return self._extend(hidden, logits.clone(), cache)

    def _shallow(self, ids: torch.Tensor, cache: DraftCache, variant: Variant) -> None:
        start, n = cache.lengths[0], ids.shape[1]
        x = self.stack.forward(F.embedding(ids, self.embedding).to(self.engine.dtype),
                               self.stack.place([start], n, cache.kv), 0, self.shape.exit, self.shape.width(variant))
        cache.exit_hidden[:, start : start + n] = x
        cache.lengths[0] = start + n

    def catch_up(self, cache: DraftCache, variant: Variant, keep: int) -> torch.Tensor:
        """Run the deep layers over every position they have not seen; hidden states of the last `keep`."""
        length = cache.lengths[0]
        outs: list[torch.Tensor] = []
        # `keep` positions may already be deep only if nothing new was appended, which forward() excludes.
        for at in range(cache.deep, length, PREFILL_CHUNK):
            end = min(at + PREFILL_CHUNK, length)
            outs.append(self.stack.forward(cache.exit_hidden[:, at:end], self.stack.place([at], end - at, cache.kv),
                                           self.shape.exit, self.shape.layers, self.shape.width(variant)))
        cache.deep = length
        return torch.cat(outs, 1)[:, -keep:]
