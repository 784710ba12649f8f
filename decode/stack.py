"""A lean decoder stack for the Llama family over static caches: the forward pass of target and draft.

Covers Llama, SmolLM, Mistral (its sliding window included), Qwen2 and Qwen3. Shape letters: B requests, N new
tokens, H hidden, Q query heads, K key-value heads, D head size, S cached positions, I neurons.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from .attention import Place, Tree, attend_with, chain_place, ragged_place
from .device import Engine
from .graphs import Storage, storage_size
from .linear import PlainLinear, make_linear
from .weights import Lookup

LEAN_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
PREFILL_CHUNK = 512  # rows of one prefill pass: bounds its memory, and products gain little from more


def is_lean(config: Any) -> bool:
    """Whether `Stack` computes this configuration exactly."""
    rope = getattr(config, "rope_parameters", None) or {}
    return (
        config.model_type in LEAN_FAMILIES
        and rope.get("rope_type", "default") in ("default", "linear", "llama3", "yarn")
        and not (getattr(config, "use_sliding_window", False) and config.sliding_window)
    )


def sliding_window(config: Any) -> int | None:
    """Positions that a token sees, in a model whose layers all have the same window; None: all before it."""
    window = getattr(config, "sliding_window", None)
    return int(window) if window and getattr(config, "use_sliding_window", True) else None


def head_shape(config: Any) -> tuple[int, int, int]:
    """Query heads, key-value heads, head size."""
    heads = int(config.num_attention_heads)
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    return heads, int(getattr(config, "num_key_value_heads", None) or heads), int(size)


class KVCache:
    """Keys and values [layers, 2, B, K, capacity, D], written in place; `lengths` counts per request.

    `storage`: memory to use, of at least that capacity, and the graphs captured over it.
    """

    def __init__(self, config: Any, layers: int, batch: int, capacity: int, engine: Engine,
                 storage: Storage | None = None) -> None:
        self.kv = storage.tensors[0] if storage else empty_kv(config, layers, batch, capacity, engine)
        self.capacity, self.storage = capacity, storage
        self.lengths = [0] * batch

    def crop(self, length: int, request: int = 0) -> None:
        """Forget the positions of a request from `length` on."""
        self.lengths[request] = min(self.lengths[request], length)

    def compact(self, length: int, keep: list[int], request: int = 0) -> None:
        """Keep the first `length` positions of a request, then those at the indices `keep` (rising), moved up
        against them: the accepted path of a tree."""
        end = length + len(keep)
        if keep != list(range(length, end)):
            self.kv[:, :, request, :, length:end] = self.kv[:, :, request, :, keep]
        self.lengths[request] = end

    def copy_prefix(self, source: int, to: int, length: int) -> None:
        """Give request `to` the first `length` positions of request `source`."""
        self.kv[:, :, to, :, :length] = self.kv[:, :, source, :, :length]
        self.lengths[to] = length


def empty_kv(config: Any, layers: int, batch: int, capacity: int, engine: Engine) -> torch.Tensor:
    _, heads, size = head_shape(config)
    return torch.zeros(layers, 2, batch, heads, capacity, size, dtype=engine.dtype, device=engine.device)


def cache_bytes(config: Any, layers: int, batch: int, capacity: int, dtype: torch.dtype) -> int:
    """What a `KVCache` will take."""
    _, heads, size = head_shape(config)
    return 2 * layers * batch * heads * capacity * size * dtype.itemsize


class Layer:
    """Weights of one decoder layer, projections fused where they share an input.

    `widths`: narrower feed-forward blocks that will be asked for. Plain weights are sliced for them; int8
    ones are made for each.
    """

    def __init__(self, weights: Lookup, number: int, kind: str, widths: tuple[int, ...] = ()) -> None:
        def get(name: str) -> torch.Tensor | None:
            return weights(f"layers.{number}.{name}")

        def need(name: str) -> torch.Tensor:
            tensor = get(name)
            if tensor is None:
                raise KeyError(f"layers.{number}.{name}")
            return tensor

        def fuse(names: list[str], part: str) -> torch.Tensor | None:
            tensors = [t for t in (get(f"{n}.{part}") for n in names) if t is not None]
            return torch.cat(tensors) if tensors else None

        qkv_names = [f"self_attn.{n}_proj" for n in "qkv"]
        qkv = fuse(qkv_names, "weight")
        assert qkv is not None
        self.qkv = make_linear(qkv, fuse(qkv_names, "bias"), kind)
        self.out = make_linear(need("self_attn.o_proj.weight"), get("self_attn.o_proj.bias"), kind)
        self.norm_in, self.norm_mlp = need("input_layernorm.weight"), need("post_attention_layernorm.weight")
        self.q_norm, self.k_norm = get("self_attn.q_norm.weight"), get("self_attn.k_norm.weight")
        gate, up = need("mlp.gate_proj.weight"), need("mlp.up_proj.weight")
        gate_bias, up_bias = get("mlp.gate_proj.bias"), get("mlp.up_proj.bias")
        down, down_bias = need("mlp.down_proj.weight"), get("mlp.down_proj.bias")
        self.neurons = len(gate)

        def block(width: int) -> tuple[Any, Any]:
            bias = None if gate_bias is None or up_bias is None else torch.cat([gate_bias[:width], up_bias[:width]])
            return (make_linear(torch.cat([gate[:width], up[:width]]), bias, kind),
                    make_linear(down[:, :width].contiguous(), down_bias, kind))

        self.blocks = {self.neurons: block(self.neurons)}
        if not all(isinstance(part, PlainLinear) for part in self.blocks[self.neurons]):
            self.blocks.update({width: block(width) for width in widths if width != self.neurons})


class Stack:
    """Decoder layers over a `KVCache`, without embedding, final norm and head."""

    def __init__(self, config: Any, weights: Lookup, engine: Engine, widths: tuple[int, ...] = ()) -> None:
        """`weights` are named as in a stock model below `layers.`: `layers.0.self_attn.q_proj.weight`, ..."""
        self.config, self.engine = config, engine
        self.layers = [Layer(weights, i, engine.linear, widths) for i in range(config.num_hidden_layers)]
        self.dtype, self.device = engine.dtype, engine.device
        self.q_heads, self.kv_heads, self.head_dim = head_shape(config)
        self.eps, self.window = config.rms_norm_eps, sliding_window(config)
        # Whether reading a number from a tensor costs nothing and keeps its precision.
        self.scalars = engine.device.type == "cpu" and engine.dtype in (torch.float32, torch.float64)
        self.act = F.silu if config.hidden_act == "silu" else ACT2FN[config.hidden_act]
        # Graphs keep the address of these tables, which must then not grow.
        positions = int(config.max_position_embeddings)
        self._rope(storage_size(positions) if engine.graphs else min(2048, positions))

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
        if x.numel() == len(weight) and self.scalars:
            # One row: half the time of the general operator, which a pass asks for twice a layer.
            square = float(torch.linalg.vector_norm(x)) ** 2
            return torch.mul(x, weight).mul_((square / len(weight) + self.eps) ** -0.5)
        return F.rms_norm(x, weight.shape, weight, self.eps)

    def place(self, starts: list[int], n: int, cache: KVCache, slots: range | None = None,
              tree: Tree | None = None) -> Place:
        """Where N new tokens of each request go, after `starts` positions of it; `slots`: see `Runner.forward`."""
        end = max(starts) + n
        if end > cache.capacity:
            raise ValueError(f"{end} positions in a cache of {cache.capacity}")
        if end > len(self.cos):
            self._rope(max(end, min(2 * len(self.cos), int(self.config.max_position_embeddings))))
        flash = self.engine.attention == "flash" and tree is None
        if tree is None and len(set(starts)) == 1:
            lengths = torch.tensor(starts, dtype=torch.int32, device=self.device) if flash else None
            place = chain_place(self.cos, self.sin, starts[0], n, slots, lengths, self.window)
        else:
            start_B = torch.tensor(starts, device=self.device)
            place = ragged_place(self.cos, self.sin, start_B, n, end, tree, slots, not flash, self.window)
        return place.bind(cache.kv, self.q_heads // self.kv_heads, n, whole=flash)

    def static_place(self, start_B: torch.Tensor, n: int, end: int, kv: torch.Tensor) -> Place:
        """The same for a graph: positions come from a tensor, and `end` cached positions are read."""
        flash = self.engine.attention == "flash"
        place = ragged_place(self.cos, self.sin, start_B, n, end, masked=not flash, window=self.window)
        return place.bind(kv, self.q_heads // self.kv_heads, n, whole=flash)

    def forward(self, x_BNH: torch.Tensor, place: Place, first: int = 0, last: int | None = None,
                width: int | None = None, tree: bool = False) -> torch.Tensor:
        """Run layers `first` to `last` over N new tokens a request and write their keys and values at `place`.

        `width` keeps the first neurons of every feed-forward block. Does not touch the cache's lengths.
        """
        B, N, H = x_BNH.shape
        attend = attend_with(self.engine.attention, tree)
        x = x_BNH.reshape(B * N, H)
        for i in range(first, len(self.layers) if last is None else last):
            layer = self.layers[i]
            heads = layer.qkv(self.norm(x, layer.norm_in)).view(B, N, -1, self.head_dim)
            self._rotate(layer, heads, place)
            x = layer.out.add_to(x, attend(heads, self.kv_heads, i, place))
            x = self._feed(layer, x, width)
        return x.view(B, N, H)

    def _rotate(self, layer: Layer, heads_BNHD: torch.Tensor, place: Place) -> None:
        """Norm and rotate queries and keys in place."""
        Q, K = self.q_heads, self.kv_heads
        if layer.q_norm is not None and layer.k_norm is not None:
            heads_BNHD[:, :, :Q] = self.norm(heads_BNHD[:, :, :Q], layer.q_norm)
            heads_BNHD[:, :, Q : Q + K] = self.norm(heads_BNHD[:, :, Q : Q + K], layer.k_norm)
        qk = heads_BNHD[:, :, : Q + K]
        torch.addcmul(qk * place.cos, qk.roll(self.head_dim // 2, -1), place.sin, out=qk)

    def _feed(self, layer: Layer, x: torch.Tensor, width: int | None) -> torch.Tensor:
        """x plus its feed-forward block."""
        inner = self.norm(x, layer.norm_mlp)
        width = layer.neurons if width is None else width
        if width in layer.blocks:
            gate_up, down = layer.blocks[width]
            hidden = gate_up(inner)
            gate, up = hidden.chunk(2, 1)
            return down.add_to(x, self.act(gate).mul_(up))
        gate_up, down = layer.blocks[layer.neurons]
        gate = gate_up.outputs(inner, 0, width)
        up = gate_up.outputs(inner, layer.neurons, layer.neurons + width)
        return x + down.inputs(self.act(gate) * up, width)
