"""A lean decoder stack for the Llama family over static caches: the forward pass of target and draft.

Covers Llama, SmolLM, Mistral (within its window), Qwen2 and Qwen3. Shape letters: B requests, N new
tokens, H hidden, Q query heads, K key-value heads, G = Q / K, D head size, S cached positions, I neurons.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from .linear import PackedLinear

LEAN_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
PREFILL_CHUNK = 256  # rows of one prefill pass: bounds the mask, and oneDNN gains nothing from more


def is_lean(config: Any) -> bool:
    """Whether `Stack` computes this configuration exactly."""
    rope = getattr(config, "rope_parameters", None) or {}
    return (
        config.model_type in LEAN_FAMILIES
        and rope.get("rope_type", "default") in ("default", "linear", "llama3", "yarn")
        and not (getattr(config, "use_sliding_window", False) and config.sliding_window)
    )


def context_limit(config: Any) -> int:
    """Positions that the model can hold exactly: its trained context, and never past a sliding window."""
    limit = int(config.max_position_embeddings)
    window = getattr(config, "sliding_window", None)
    if window and getattr(config, "use_sliding_window", True):
        limit = min(limit, int(window))
    return limit


class KVCache:
    """Keys and values [layers, B, K, capacity, D], written in place; `lengths` counts per request."""

    def __init__(self, config: Any, layers: int, batch: int, capacity: int, dtype: torch.dtype,
                 device: torch.device) -> None:
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        shape = (layers, batch, heads, capacity, head_dim)
        self.k = torch.zeros(shape, dtype=dtype, device=device)
        self.v = torch.zeros(shape, dtype=dtype, device=device)
        self.capacity = capacity
        self.lengths = [0] * batch

    def crop(self, length: int, request: int = 0) -> None:
        """Forget the positions of a request from `length` on."""
        self.lengths[request] = min(self.lengths[request], length)

    def copy_prefix(self, source: int, to: int, length: int) -> None:
        """Give request `to` the first `length` positions of request `source`."""
        self.k[:, to, :, :length] = self.k[:, source, :, :length]
        self.v[:, to, :, :length] = self.v[:, source, :, :length]
        self.lengths[to] = length


class Layer:
    """Weights of one decoder layer, projections fused where they share an input."""

    def __init__(self, get: Callable[[str], torch.Tensor | None], pack: bool) -> None:
        def need(name: str) -> torch.Tensor:
            tensor = get(name)
            if tensor is None:
                raise KeyError(name)
            return tensor

        def fuse(names: list[str], part: str) -> torch.Tensor | None:
            tensors = [t for t in (get(f"{n}.{part}") for n in names) if t is not None]
            return torch.cat(tensors) if tensors else None

        qkv_names = [f"self_attn.{n}_proj" for n in "qkv"]
        qkv = fuse(qkv_names, "weight")
        assert qkv is not None
        self.qkv = self._linear(qkv, fuse(qkv_names, "bias"), pack)
        self.out = self._linear(need("self_attn.o_proj.weight"), get("self_attn.o_proj.bias"), pack)
        self.norm_in, self.norm_mlp = need("input_layernorm.weight"), need("post_attention_layernorm.weight")
        self.q_norm, self.k_norm = get("self_attn.q_norm.weight"), get("self_attn.k_norm.weight")
        gate, up, down = (need(f"mlp.{n}_proj.weight") for n in ("gate", "up", "down"))
        self.gate_up = self._linear(torch.cat([gate, up]), fuse(["mlp.gate_proj", "mlp.up_proj"], "bias"), pack)
        self.down = self._linear(down, get("mlp.down_proj.bias"), pack)
        self.gate_bias, self.up_bias = get("mlp.gate_proj.bias"), get("mlp.up_proj.bias")
        self.gate: torch.Tensor | None = None
        self.up: torch.Tensor | None = None
        self.down_T: torch.Tensor | None = None
        if not pack:
            self.gate, self.up = self.gate_up.weight.tensor_split(2)
            # Transposed, so that the neurons of a narrower variant are contiguous rows.
            self.down_T = down.T.contiguous()

    @staticmethod
    def _linear(weight: torch.Tensor, bias: torch.Tensor | None, pack: bool) -> Any:
        # Only products with a wide output gain from packing at 5 rows and more; the narrow ones lose at 1 to 3.
        # SmolLM2, milliseconds at 1 / 3 / 5 / 17 rows: all packed 37 / 46 / 52 / 84, wide ones 34 / 42 / 54 / 90.
        if pack and weight.shape[0] >= 2 * weight.shape[1]:
            return PackedLinear(weight, bias)
        linear = torch.nn.Linear(1, 1, bias=bias is not None, device="meta")
        linear.weight = torch.nn.Parameter(weight, requires_grad=False)
        if bias is not None:
            linear.bias = torch.nn.Parameter(bias, requires_grad=False)
        return linear


class Stack:
    """Decoder layers over a `KVCache`, without embedding, final norm and head."""

    def __init__(self, config: Any, tensors: dict[str, torch.Tensor], pack: bool) -> None:
        """`tensors` are named as in a stock model below `layers.`: `layers.0.self_attn.q_proj.weight`, ..."""
        self.config = config

        def layer(i: int) -> Layer:
            return Layer(lambda name: tensors.get(f"layers.{i}.{name}"), pack)

        self.layers = [layer(i) for i in range(config.num_hidden_layers)]
        first = tensors["layers.0.input_layernorm.weight"]
        self.dtype, self.device = first.dtype, first.device
        self.q_heads = config.num_attention_heads
        self.kv_heads = getattr(config, "num_key_value_heads", None) or self.q_heads
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // self.q_heads
        self.eps = config.rms_norm_eps
        self.act = ACT2FN[config.hidden_act]
        self._rope(min(2048, context_limit(config)))

    def _rope(self, length: int) -> None:
        """Cosine and signed sine tables [length, D] for positions below `length`."""
        rotary = LlamaRotaryEmbedding(self.config).to(self.device)
        probe = torch.zeros(1, dtype=torch.float64 if self.dtype == torch.float64 else torch.float32,
                            device=self.device)
        cos, sin = rotary(probe, torch.arange(length, device=self.device)[None])
        self.cos = cos[0].to(self.dtype)
        sin = sin[0].to(self.dtype)
        half = self.head_dim // 2
        # rotate_half(x) * sin == roll(x, D/2) * signed sin
        self.sin = torch.cat([-sin[:, :half], sin[:, half:]], dim=-1)

    def norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, weight.shape, weight, self.eps)

    def forward(self, x_BNH: torch.Tensor, starts: list[int], cache: KVCache, first: int = 0,
                last: int | None = None, width: int | None = None, request: int | None = None) -> torch.Tensor:
        """Run layers `first` to `last` over N new tokens a request and append their keys and values.

        `starts` are the position of the first new token of each request; `request` picks one slot of
        a larger cache (B = 1). `width` keeps the first neurons of every feed-forward block. Does not
        touch `cache.lengths`. Positions past a request's own are masked, so requests may differ.
        """
        B, N, _ = x_BNH.shape
        end = max(starts) + N
        if end > cache.capacity:
            raise ValueError(f"{end} positions in a cache of {cache.capacity}")
        if end > len(self.cos):
            self._rope(max(end, min(2 * len(self.cos), context_limit(self.config))))
        place = _Place(self, starts, N, cache, request)
        for i in range(first, len(self.layers) if last is None else last):
            layer = self.layers[i]
            x_BNH = x_BNH + self._attend(layer, self.norm(x_BNH, layer.norm_in), cache.k[i], cache.v[i], place)
            x_BNH = x_BNH + self._feed(layer, self.norm(x_BNH, layer.norm_mlp), width)
        return x_BNH

    def _attend(self, layer: Layer, x: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor,
                place: _Place) -> torch.Tensor:
        B, N, _ = x.shape
        Q, K, D = self.q_heads, self.kv_heads, self.head_dim
        qkv = layer.qkv(x).view(B, N, Q + 2 * K, D).transpose(1, 2)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = self.norm(qkv[:, :Q], layer.q_norm), self.norm(qkv[:, Q : Q + K], layer.k_norm)
            qk = torch.cat([q, k], dim=1)
        else:
            qk = qkv[:, : Q + K]
        qk = qk * place.cos + qk.roll(D // 2, -1) * place.sin
        place.write(k_cache, qk[:, Q:])
        place.write(v_cache, qkv[:, Q + K :])
        # Grouped heads are folded into rows, so keys and values are never expanded.
        q = qk[:, :Q].reshape(B, K, Q // K * N, D)
        o = F.scaled_dot_product_attention(q, place.read(k_cache), place.read(v_cache), attn_mask=place.mask)
        return layer.out(o.view(B, Q, N, D).transpose(1, 2).reshape(B, N, Q * D))

    def _feed(self, layer: Layer, x: torch.Tensor, width: int | None) -> torch.Tensor:
        if width is None or width == layer.down.weight.shape[1]:
            gate, up = layer.gate_up(x).chunk(2, dim=-1)
            return layer.down(self.act(gate) * up)
        assert layer.gate is not None
        assert layer.up is not None
        assert layer.down_T is not None
        gate_bias, up_bias = layer.gate_bias, layer.up_bias
        gate = F.linear(x, layer.gate[:width], None if gate_bias is None else gate_bias[:width])
        up = F.linear(x, layer.up[:width], None if up_bias is None else up_bias[:width])
        out = (self.act(gate) * up) @ layer.down_T[:width]
        return out if layer.down.bias is None else out + layer.down.bias


class _Place:
    """Where N new tokens go in the cache, and what they may see: shared by all layers of a pass."""

    def __init__(self, stack: Stack, starts: list[int], n: int, cache: KVCache, request: int | None) -> None:
        self.starts, self.n, self.end = starts, n, max(starts) + n
        self.uniform = len(set(starts)) == 1
        self.slot = slice(None) if request is None else slice(request, request + 1)
        device = stack.device
        groups = stack.q_heads // stack.kv_heads
        self.mask: torch.Tensor | None = None
        if self.uniform:
            here = slice(starts[0], self.end)
            self.cos, self.sin = stack.cos[here], stack.sin[here]
            if n > 1:
                seen = torch.ones(n, self.end, dtype=torch.bool, device=device).tril(starts[0])
                self.mask = seen.repeat(groups, 1)
            return
        position_BN = torch.tensor(starts, device=device)[:, None] + torch.arange(n, device=device)
        self.cos, self.sin = stack.cos[position_BN][:, None], stack.sin[position_BN][:, None]
        seen = torch.arange(self.end, device=device) <= position_BN[..., None]
        self.mask = seen.repeat(1, groups, 1)[:, None]
        self.index = (torch.arange(len(starts), device=device)[:, None, None],
                      torch.arange(stack.kv_heads, device=device)[None, :, None], position_BN[:, None, :])

    def write(self, store: torch.Tensor, new: torch.Tensor) -> None:
        if self.uniform:
            store[self.slot, :, self.starts[0] : self.end] = new
        else:
            store[self.index] = new

    def read(self, store: torch.Tensor) -> torch.Tensor:
        return store[self.slot, :, : self.end]
