"""Weights of a layer of the Llama kind: what a pass multiplies by, and reads."""

from __future__ import annotations

from typing import Any

from .stack import head_shape


def layer_weights(hidden: int, intermediate: int, heads: int, kv_heads: int, head_size: int | None = None) -> float:
    """Of attention with `heads` heads of `head_size` (default: hidden / heads) and a gated feed-forward."""
    size = hidden / heads if head_size is None else head_size
    return 2 * hidden * size * (heads + kv_heads) + 3 * hidden * intermediate


def layer_weights_of(config: Any, intermediate: int | None = None) -> float:
    """Of a model's configuration, or of a narrower feed-forward; other kinds are counted as if they were Llamas."""
    heads, kv_heads, size = head_shape(config)
    neurons = intermediate or getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    return layer_weights(config.hidden_size, neurons, heads, kv_heads, size)


def parameters_read(parameters: int, config: Any) -> int:
    """Of all parameters those that a pass of one row reads: not an embedding that is not the head too."""
    tied = getattr(config, "tie_word_embeddings", False)
    return parameters - (0 if tied else config.vocab_size * config.hidden_size)
