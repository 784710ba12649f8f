"""How much memory a decoder will take, said before it is allocated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from draftsmith.data import DraftsmithError
from draftsmith.distill.variants import DraftShape

from .device import Engine
from .flops import parameters_read
from .stack import cache_bytes, is_lean
from .target import Target

MIB = 1 << 20


@dataclass(frozen=True)
class Memory:
    """Bytes: weights of target and draft, and both caches for each token of a request."""

    target: int
    draft: int
    cache_per_token: int

    def describe(self, context: int) -> str:
        caches = self.cache_per_token * context / MIB
        return (f"{self.target / MIB:,.0f} MiB of weights and {self.draft / MIB:,.0f} MiB of draft; caches "
                f"{self.cache_per_token / 1024:,.0f} KiB a token, {caches:,.0f} MiB at {context} tokens")


def target_bytes(target: Target) -> int:
    """Weights as the runner will hold them."""
    engine, config = target.engine, target.config
    parameters, table = target.weights().parameters, config.vocab_size * config.hidden_size
    tied = getattr(config, "tie_word_embeddings", False)
    if engine.linear == "int8":
        plain = table if tied else 2 * table  # the embedding, and the head's rows that a draft may borrow
        return plain * engine.dtype.itemsize + (parameters if tied else parameters - table)
    # A packed head is a copy of its own beside the embedding, or beside the rows that a draft may borrow.
    copy = table if engine.linear == "packed" else 0
    return (parameters + copy) * engine.dtype.itemsize


def pass_bytes(target: Target) -> int:
    """Weights that a pass of one row reads: everything but an embedding that is not the head too."""
    engine = target.engine
    read = parameters_read(target.weights().parameters, target.config)
    return read * (1 if engine.linear == "int8" else engine.dtype.itemsize)


def expected(target: Target, draft_config: Any = None, shape: DraftShape | None = None,
             tensors: dict[str, torch.Tensor] | None = None) -> Memory:
    """What a target, and a draft with these tensors, will take."""
    config, engine = target.config, target.engine
    # A model whose positions are not limited still allocates by the request.
    per_token = cache_bytes(config, config.num_hidden_layers, 1, 1, engine.dtype)
    draft = 0
    if draft_config is not None and shape is not None and tensors is not None:
        draft = sum(t.numel() * engine.dtype.itemsize for t in tensors.values() if t.is_floating_point())
        per_token += cache_bytes(draft_config, shape.layers, 1, 1, engine.dtype)
        per_token += draft_config.hidden_size * engine.dtype.itemsize
    return Memory(target_bytes(target), draft, per_token)


def available(engine: Engine) -> int | None:
    """Free bytes on the device; None where it cannot be told."""
    if engine.device.type == "cuda":
        return int(torch.cuda.mem_get_info(engine.device)[0])
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            found = next((line for line in file if line.startswith("MemAvailable:")), None)
    except OSError:
        return None
    return int(found.split()[1]) * 1024 if found else None


def check_memory(target: Target, memory: Memory) -> None:
    """Refuse to load what cannot fit, rather than be killed half-way."""
    free = available(target.engine)
    need = memory.draft + (0 if target.loaded else memory.target)
    if free is not None and need > free:
        raise DraftsmithError(f"target '{target.name}' and its draft need {need / MIB:,.0f} MiB for their weights, and "
                              f"{free / MIB:,.0f} MiB are free; a smaller precision (bf16, int8) takes less")


def usual_context(target: Target) -> int:
    """A context to quote cache sizes at."""
    return min(2048, int(target.config.max_position_embeddings) if is_lean(target.config) else 2048)
