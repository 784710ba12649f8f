"""Runners: the interface between the decoding loop and a model, with static caches.

A runner embeds, runs and heads a model; the loop above knows token ids, hidden states and logits, not
torch modules. Shapes as in `stack`: B requests, N new tokens, H hidden, V vocabulary. Draft runners are in
`draft`.
"""

from __future__ import annotations

import weakref
from typing import Any, Protocol

import torch
from draftsmith.data import DraftsmithError
from draftsmith.distill.variants import DraftShape, Variant
from torch.nn import functional as F

from .attention import Tree
from .graphs import Pool, bucket_context, bucket_rows, storage_size
from .linear import make_linear, swap_linears
from .memory import pass_bytes
from .stack import PREFILL_CHUNK, KVCache, Stack, cache_bytes, empty_kv, is_lean
from .target import Target


class Cache(Protocol):
    """A runner's memory of committed positions."""

    lengths: list[int]

    def crop(self, length: int, request: int = 0) -> None: ...

    def compact(self, length: int, keep: list[int], request: int = 0) -> None:
        """Keep `length` positions of a request, then those at the indices `keep`: a tree's accepted path."""
        ...


class Runner(Protocol):
    """What the loop needs of a target; another engine can implement it."""

    vocab_size: int
    context: int
    max_batch: int | None  # None: any
    trees: bool  # whether forward() takes a tree
    cheap_trees: bool  # and at the price of a chain of as many tokens
    narrow: bool  # whether a pass over some slots of a cache costs less than over all
    device: torch.device
    precision: str
    weight_bytes: int  # that a pass of one row reads

    def new_cache(self, batch: int, capacity: int) -> Any: ...

    def cache_bytes(self, batch: int, capacity: int) -> int:
        """What `new_cache` will allocate."""
        ...

    def forward(self, ids_BN: torch.Tensor, cache: Any, keep: int | None = None, slots: range | None = None,
                tree: Tree | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Append N tokens a request, a chain or a tree. Returns normed hidden states [B, keep, H] and logits
        [B, keep, V] of the last `keep` tokens (all by default). `slots`: where in a larger cache the B requests
        lie."""
        ...

    def embed(self, ids: torch.Tensor) -> torch.Tensor: ...


class DraftModel(Protocol):
    """What proposes for one request: the loop asks it for logits over the tokens it can propose."""

    context: int
    precision: str

    @property
    def shape(self) -> DraftShape: ...

    @property
    def ahead(self) -> bool:
        """Whether a plan is best drafted whole on the device, without waiting for each token."""
        ...

    def new_cache(self, capacity: int, prompt: list[int] | None = None) -> Any:
        """For one request; its `head_ids` [D] are the tokens that can be proposed to it, `lengths[0]` the positions
        that it has read, and `deep` those of them that the deep layers have, too."""
        ...

    def declare(self, cache: Any, context: int) -> None:
        """Make an empty cache hold `context` positions of whatever content, for a clock."""
        ...

    def cache_bytes(self, capacity: int) -> int: ...

    def forward(self, ids_1N: torch.Tensor, cache: Any, variant: Variant, keep: int | None = None) -> torch.Tensor:
        """Append N tokens; logits [keep, D] for the last `keep` of them."""
        ...

    def catch_up(self, cache: Any, variant: Variant, keep: int) -> torch.Tensor:
        """Run what a shallower variant left out."""
        ...


def precise(logits: torch.Tensor) -> torch.Tensor:
    """Logits in float32 at least: probabilities of half-precision models are computed there, as in `transformers`."""
    return logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits


def fill(target: Runner, cache: Any, batch: int, context: int) -> None:
    """Make a cache hold `context` positions: by declaring them where it is static (their content does not
    matter to a clock), else by running them."""
    if target.max_batch is None:
        cache.lengths[:] = [context] * batch
    elif context:
        target.forward(torch.zeros(batch, context, dtype=torch.long, device=target.device), cache, keep=1)


def load_runner(target: Target) -> Runner:
    """The fastest exact runner for the target."""
    return LeanRunner(target) if is_lean(target.config) else ModuleRunner(target)


class LeanRunner:
    """A target of the Llama family on a `Stack`."""

    max_batch: int | None = None
    trees = True

    def __init__(self, target: Target) -> None:
        self.config, self.engine = target.config, target.engine
        weights = target.weights()
        norm = weights.get("norm.weight")
        assert norm is not None
        self.norm_weight = norm
        self.stack = Stack(self.config, weights.get, self.engine)
        self.embedding = target.embedding
        self.head = make_linear(target.head, None, self.engine.linear)
        self.vocab_size, self.context = len(target.head), int(self.config.max_position_embeddings)
        self.device, self.precision = self.engine.device, self.engine.precision
        self.weight_bytes, self.pool = pass_bytes(target), Pool()
        self.cheap_trees = self.narrow = not self.engine.graphs  # graphs are of chains, over whole caches

    def new_cache(self, batch: int, capacity: int) -> KVCache:
        layers, capacity = len(self.stack.layers), min(capacity, self.context)
        if not self.engine.graphs:
            return KVCache(self.config, layers, batch, capacity, self.engine)
        size = storage_size(capacity)
        storage = self.pool.take(batch, size, lambda: (empty_kv(self.config, layers, batch, size, self.engine),))
        cache = KVCache(self.config, layers, batch, capacity, self.engine, storage)
        weakref.finalize(cache, self.pool.give, storage)
        return cache

    def cache_bytes(self, batch: int, capacity: int) -> int:
        return cache_bytes(self.config, len(self.stack.layers), batch, min(capacity, self.context), self.engine.dtype)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(ids, self.embedding)

    def forward(self, ids_BN: torch.Tensor, cache: KVCache, keep: int | None = None, slots: range | None = None,
                tree: Tree | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        N = ids_BN.shape[1]
        keep = N if keep is None else keep
        requests = range(len(ids_BN)) if slots is None else slots
        if cache.storage is not None and slots is None and tree is None and (rows := bucket_rows(N)) is not None:
            return self._replay(ids_BN, cache, keep, rows)
        if tree is not None and N > PREFILL_CHUNK:
            raise ValueError(f"a tree of {N} tokens; a pass has at most {PREFILL_CHUNK}")
        kept = []
        for at in range(0, N, PREFILL_CHUNK):
            ids = ids_BN[:, at : at + PREFILL_CHUNK]
            n = ids.shape[1]
            place = self.stack.place([cache.lengths[r] for r in requests], n, cache, slots, tree)
            x = self.stack.forward(self.embed(ids), place, tree=tree is not None)
            for r in requests:
                cache.lengths[r] += n
            if (skip := max(0, N - keep - at)) < n:
                kept.append(x[:, skip:])
        hidden = self.stack.norm(torch.cat(kept, 1) if len(kept) > 1 else kept[0], self.norm_weight)
        return hidden, precise(self.head(hidden))

    def _replay(self, ids_BN: torch.Tensor, cache: KVCache, keep: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """`forward` as a graph. Rows that only fill the bucket write past the end, where nothing is read."""
        assert cache.storage is not None
        N, kv = ids_BN.shape[1], cache.kv
        if max(cache.lengths) + N > cache.capacity:
            raise ValueError(f"{max(cache.lengths) + N} positions in a cache of {cache.capacity}")
        end = bucket_context(max(cache.lengths) + rows, kv.shape[-2])

        def run(ids: torch.Tensor, start_B: torch.Tensor) -> tuple[torch.Tensor, ...]:
            x = self.stack.forward(self.embed(ids), self.stack.static_place(start_B, rows, end, kv))
            hidden = self.stack.norm(x, self.norm_weight)
            return hidden, self.head(hidden)

        hidden, logits = cache.storage.run((rows, end), run, ids_BN, cache.lengths, rows)
        cache.lengths[:] = [length + N for length in cache.lengths]
        return hidden[:, N - keep : N].clone(), precise(logits[:, N - keep : N].clone())


class ModuleCache:
    """The Hugging Face dynamic cache, cropped by absolute length. One request."""

    def __init__(self, capacity: int) -> None:
        from transformers import DynamicCache

        # Made without a configuration every layer keeps all positions, so that sliding-window layers can
        # be rolled back; the model's own mask still applies the window.
        self.inner, self.capacity, self.lengths = DynamicCache(), capacity, [0]

    def crop(self, length: int, request: int = 0) -> None:
        surplus = self.lengths[0] - length
        if surplus > 0:
            self.inner.crop(-surplus)
            self.lengths[0] = length

    def compact(self, length: int, keep: list[int], request: int = 0) -> None:
        if keep != list(range(length, length + len(keep))):
            raise ValueError("this cache holds chains only")
        self.crop(length + len(keep))


class ModuleRunner:
    """Any other Hugging Face causal LM, one request at a time, its linear layers swapped for faster ones."""

    max_batch: int | None = 1
    trees = cheap_trees = narrow = False

    def __init__(self, target: Target) -> None:
        self.model, self.config = target.model, target.config
        self.embedding = self.model.get_input_embeddings()
        swap_linears(self.model, target.engine.linear)
        self.vocab_size = int(self.config.vocab_size)
        # Models without position embeddings (ALiBi) state no limit.
        self.context = int(getattr(self.config, "max_position_embeddings", None) or 2**30)
        self.device, self.precision = target.engine.device, target.engine.precision
        self.weight_bytes, self.dtype = pass_bytes(target), target.engine.dtype

    def new_cache(self, batch: int, capacity: int) -> ModuleCache:
        if batch != 1:
            raise DraftsmithError(f"{self.config.model_type} targets run one request at a time, not {batch}")
        return ModuleCache(min(capacity, self.context))

    def cache_bytes(self, batch: int, capacity: int) -> int:
        """The cache grows with the text, so this is what it will have taken at `capacity`."""
        return cache_bytes(self.config, self.config.num_hidden_layers, batch, min(capacity, self.context), self.dtype)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        return self.embedding(ids)

    def forward(self, ids_BN: torch.Tensor, cache: ModuleCache, keep: int | None = None, slots: range | None = None,
                tree: Tree | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        if tree is not None:
            raise ValueError(f"the module runner of {self.config.model_type} takes chains only")
        n = ids_BN.shape[1]
        keep = n if keep is None else keep
        out = self.model(input_ids=ids_BN, past_key_values=cache.inner, use_cache=True, output_hidden_states=True,
                         logits_to_keep=keep)
        cache.lengths[0] += n
        return out.hidden_states[-1][:, -keep:], precise(out.logits[:, -keep:])
