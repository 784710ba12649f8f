"""Runners: the interface between the decoding loop and a model, with static caches.

A runner embeds, runs and heads a model; the loop above knows token ids, hidden states and logits, not
torch modules. Shapes as in `stack`: B requests, N new tokens, H hidden, V vocabulary.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from draftsmith.data import DraftsmithError
from draftsmith.distill.variants import DraftShape, Variant
from torch.nn import functional as F

from .linear import PackedLinear, pack_linears
from .stack import PREFILL_CHUNK, KVCache, Stack, context_limit, is_lean
from .target import Target


class Cache(Protocol):
    """A runner's memory of committed positions."""

    lengths: list[int]

    def crop(self, length: int, request: int = 0) -> None: ...


class Runner(Protocol):
    """What the loop needs of a target."""

    vocab_size: int
    context: int
    max_batch: int | None  # None: any
    device: torch.device

    def new_cache(self, batch: int, capacity: int) -> Any: ...

    def forward(self, ids_BN: torch.Tensor, cache: Any, keep: int | None = None,
                request: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Append N tokens a request. Returns normed hidden states [B, keep, H] and logits [B, keep, V] of
        the last `keep` tokens (all by default). `request` addresses one slot of a larger cache."""
        ...

    def embed(self, ids: torch.Tensor) -> torch.Tensor: ...


def precise(logits: torch.Tensor) -> torch.Tensor:
    """Logits in float32 at least: probabilities of half-precision models are computed there, as in `transformers`."""
    return logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits


def synchronise(device: torch.device) -> None:
    """Wait for the device, so that a clock read afterwards means something."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def load_runner(target: Target) -> Runner:
    """The fastest exact runner for the target."""
    return LeanRunner(target) if is_lean(target.config) else ModuleRunner(target)


class LeanRunner:
    """A target of the Llama family on a `Stack` with packed weights."""

    max_batch: int | None = None

    def __init__(self, target: Target) -> None:
        model = target.model
        self.config = model.config
        tensors = {k.removeprefix("model."): v for k, v in model.state_dict().items()}
        self.embedding = model.get_input_embeddings().weight.detach()
        self.norm_weight = tensors["norm.weight"]
        self.stack = Stack(self.config, tensors, pack=True)
        self.head = PackedLinear(model.get_output_embeddings().weight)
        self.vocab_size, self.context = self.head.out_features, context_limit(self.config)
        self.device = self.embedding.device

    def new_cache(self, batch: int, capacity: int) -> KVCache:
        return KVCache(self.config, len(self.stack.layers), batch, min(capacity, self.context), self.stack.dtype,
                       self.device)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(ids, self.embedding)

    def forward(self, ids_BN: torch.Tensor, cache: KVCache, keep: int | None = None,
                request: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        N = ids_BN.shape[1]
        keep = N if keep is None else keep
        slots = list(range(len(ids_BN))) if request is None else [request]
        kept = []
        for at in range(0, N, PREFILL_CHUNK):
            ids = ids_BN[:, at : at + PREFILL_CHUNK]
            n = ids.shape[1]
            x = self.stack.forward(self.embed(ids), [cache.lengths[s] for s in slots], cache, request=request)
            for s in slots:
                cache.lengths[s] += n
            if (skip := max(0, N - keep - at)) < n:
                kept.append(x[:, skip:])
        hidden = self.stack.norm(torch.cat(kept, 1) if len(kept) > 1 else kept[0], self.norm_weight)
        return hidden, precise(self.head(hidden))


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


class ModuleRunner:
    """Any other Hugging Face causal LM, one request at a time, its linear layers packed."""

    max_batch: int | None = 1

    def __init__(self, target: Target) -> None:
        self.model, self.config = target.model, target.model.config
        self.embedding = self.model.get_input_embeddings()
        if self.embedding.weight.device.type == "cpu":
            pack_linears(self.model)
        self.vocab_size = int(self.config.vocab_size)
        # Models without position embeddings (ALiBi) state no limit.
        self.context = int(getattr(self.config, "max_position_embeddings", None) or 2**30)
        self.device = self.embedding.weight.device

    def new_cache(self, batch: int, capacity: int) -> ModuleCache:
        if batch != 1:
            raise DraftsmithError(f"{self.config.model_type} targets run one request at a time, not {batch}")
        return ModuleCache(min(capacity, self.context))

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        return self.embedding(ids)

    def forward(self, ids_BN: torch.Tensor, cache: ModuleCache, keep: int | None = None,
                request: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        n = ids_BN.shape[1]
        keep = n if keep is None else keep
        out = self.model(input_ids=ids_BN, past_key_values=cache.inner, use_cache=True, output_hidden_states=True,
                         logits_to_keep=keep)
        cache.lengths[0] += n
        return out.hidden_states[-1][:, -keep:], precise(out.logits[:, -keep:])


class DraftCache:
    """An elastic draft's state for one request; the deep layers may lag behind the shallow ones.

    `lengths[0]` positions have keys of the layers up to the early exit and `exit_hidden` (their hidden
    states there); `deep` of them also have keys of the later layers. `head_ids` [D] are the tokens that can
    be proposed to this request; the last of them have their rows in `extra_head`.
    """

    head_ids: torch.Tensor
    extra_head: torch.Tensor | None = None

    def __init__(self, config: Any, shape: DraftShape, capacity: int, dtype: torch.dtype,
                 device: torch.device) -> None:
        self.kv = KVCache(config, shape.layers, 1, capacity, dtype, device)
        self.exit_hidden = torch.zeros(1, capacity, config.hidden_size, dtype=dtype, device=device)
        self.lengths, self.deep, self.capacity = [0], 0, capacity

    def crop(self, length: int, request: int = 0) -> None:
        self.lengths[0] = min(self.lengths[0], length)
        self.deep = min(self.deep, length)


class DraftRunner:
    """Runs the variants of an elastic draft on one request.

    Cache rule: variants share one cache. A cache written by mixed widths is the defined semantics; a
    switch to full depth first runs the deep layers over the positions they have not seen, in one batch.
    """

    def __init__(self, config: Any, shape: DraftShape, tensors: dict[str, torch.Tensor], embedding_VH: torch.Tensor,
                 head_VH: torch.Tensor | None = None) -> None:
        """`tensors` as written by `ElasticDraft.portable_state`; the other two are the target's own. Without
        `head_VH` the draft proposes the tokens of its trimmed head only."""
        embedding = embedding_VH
        self.config, self.shape, self.embedding, self.full_head = config, shape, embedding, head_VH
        move = {k: v.to(embedding.device) for k, v in tensors.items()}
        tensors = {k: v.to(embedding.dtype) if v.is_floating_point() else v for k, v in move.items()}
        # Drafting is one row at a time, where plain weights reach the memory's bandwidth; slices for the
        # narrower widths are then free.
        self.stack = Stack(config, tensors, pack=False)
        self.norms = {d: tensors[f"norms.{d}.weight"] for d in (shape.exit, shape.layers)}
        self.head, self.head_ids = tensors["head"], tensors["head_ids"]
        self.head_set = set(self.head_ids.tolist())
        self.context = context_limit(config)

    def head_ids_for(self, prompt: list[int]) -> torch.Tensor:
        """The trimmed head's ids, then those of the prompt's tokens that it lacks: answers repeat names."""
        extra = sorted(set(prompt) - self.head_set) if self.full_head is not None else []
        return torch.cat([self.head_ids, torch.tensor(extra, dtype=torch.long, device=self.head_ids.device)])

    def new_cache(self, capacity: int, prompt: list[int] | None = None) -> DraftCache:
        """A cache for one request; `prompt` extends the head (`head_ids_for`) by the target's own rows."""
        cache = DraftCache(self.config, self.shape, min(capacity, self.context), self.stack.dtype,
                           self.embedding.device)
        cache.head_ids = self.head_ids_for(prompt or [])
        if len(cache.head_ids) > len(self.head_ids):
            assert self.full_head is not None
            cache.extra_head = self.full_head[cache.head_ids[len(self.head_ids) :]]
        return cache

    def forward(self, ids_1N: torch.Tensor, cache: DraftCache, variant: Variant,
                keep: int | None = None) -> torch.Tensor:
        """Append N tokens; returns logits [keep, D] over the cache's head for the last `keep` of them."""
        n = ids_1N.shape[1]
        keep = n if keep is None else keep
        for at in range(0, n, PREFILL_CHUNK):
            self._shallow(ids_1N[:, at : at + PREFILL_CHUNK], cache, variant)
        length = cache.lengths[0]
        if variant.depth == self.shape.exit:
            hidden = cache.exit_hidden[:, length - keep : length]
        else:
            hidden = self.catch_up(cache, variant, keep)
        hidden = self.stack.norm(hidden, self.norms[variant.depth])[0]
        logits = F.linear(hidden, self.head)
        if cache.extra_head is not None:
            logits = torch.cat([logits, F.linear(hidden, cache.extra_head)], -1)
        return precise(logits)

    def _shallow(self, ids: torch.Tensor, cache: DraftCache, variant: Variant) -> None:
        start, n = cache.lengths[0], ids.shape[1]
        x = self.stack.forward(F.embedding(ids, self.embedding), [start], cache.kv, 0, self.shape.exit,
                               self.shape.width(variant))
        cache.exit_hidden[:, start : start + n] = x
        cache.lengths[0] = start + n

    def catch_up(self, cache: DraftCache, variant: Variant, keep: int) -> torch.Tensor:
        """Run the deep layers over every position they have not seen; hidden states of the last `keep`."""
        length = cache.lengths[0]
        outs: list[torch.Tensor] = []
        # `keep` positions may already be deep only if nothing new was appended, which forward() excludes.
        for at in range(cache.deep, length, PREFILL_CHUNK):
            end = min(at + PREFILL_CHUNK, length)
            outs.append(self.stack.forward(cache.exit_hidden[:, at:end], [at], cache.kv, self.shape.exit,
                                           self.shape.layers, self.shape.width(variant)))
        cache.deep = length
        return torch.cat(outs, 1)[:, -keep:]
