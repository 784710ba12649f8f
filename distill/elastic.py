"""The elastic draft: one decoder stack in the target's architecture, with exits and prunable widths.

Layers are the stock layers of the target's own model class, so that every sub-network exports as a
stock model. A narrower feed-forward block keeps the first neurons, which initialisation sorts by
measured importance.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch
from draftsmith.data import DraftsmithError
from torch import nn
from transformers import AutoModel, LlamaConfig, PretrainedConfig

from .attention import NAME, through_layer
from .losses import LossHead
from .variants import DraftShape

# Families whose layers have a gated feed-forward block and whose cache the lean runner understands.
GATED_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


def llama_config(target: PretrainedConfig, layers: int, hidden: int, heads: int, kv_heads: int | None,
               intermediate: int) -> PretrainedConfig:
    """A Llama of these sizes over the target's vocabulary and context."""
    return LlamaConfig(
        vocab_size=target.vocab_size, hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads or heads,
        max_position_embeddings=getattr(target, "max_position_embeddings", None) or 2048,
        bos_token_id=target.bos_token_id, eos_token_id=target.eos_token_id, tie_word_embeddings=False,
    )


def draft_config(target: PretrainedConfig, layers: int) -> PretrainedConfig:
    """The configuration of a draft with `layers` layers for `target`.

    The target's own class with fewer layers for the gated families; otherwise a Llama of the target's
    hidden size and heads, with fresh layers.
    """
    if target.model_type in GATED_FAMILIES:
        config = copy.deepcopy(target)
        config.num_hidden_layers = layers
        if getattr(config, "layer_types", None):
            config.layer_types = ["full_attention"] * layers
        # Training packs blocks longer than any one text; a window would never be reached within one.
        if getattr(config, "use_sliding_window", None):
            config.use_sliding_window = False
        if getattr(config, "sliding_window", None):
            config.max_position_embeddings = min(config.max_position_embeddings, config.sliding_window)
            config.sliding_window = None
    else:
        config = llama_config(target, layers, target.hidden_size, target.num_attention_heads,
                            getattr(target, "num_key_value_heads", None), 4 * target.hidden_size)
        config.tie_word_embeddings = True
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    return config


class ElasticDraft(nn.Module):
    """Layers, one norm per exit, an embedding and a trimmed head: the target's own, frozen, or with `own` trained.

    `head_ids` int64 [D] maps head rows to target token ids.
    """

    head_ids: torch.Tensor
    embed: torch.Tensor

    def __init__(
        self, config: PretrainedConfig, shape: DraftShape, embed_VH: torch.Tensor, head_DH: torch.Tensor,
        head_ids_D: torch.Tensor, own: bool = False,
    ) -> None:
        super().__init__()
        if not 0 < shape.exit < shape.layers == config.num_hidden_layers:
            raise DraftsmithError(f"a draft of {shape.layers} layers cannot have an exit after {shape.exit}")
        small = copy.deepcopy(config)
        small.vocab_size, small.pad_token_id = 1, None  # the stock embedding is not used
        stock: Any = AutoModel.from_config(small, attn_implementation=NAME)
        self.config, self.shape = config, shape
        self.layers = stock.layers
        self.rotary = stock.rotary_emb
        self.norms = nn.ModuleDict({str(depth): copy.deepcopy(stock.norm) for depth in (shape.exit, shape.layers)})
        if own:
            self.embed = nn.Parameter(embed_VH.clone())
        else:
            self.register_buffer("embed", embed_VH.clone(), persistent=False)
        self.head = LossHead(head_DH, own)
        self.register_buffer("head_ids", head_ids_D.clone())
        self.recompute = False  # activations of a layer in the backward pass, instead of keeping them
        self._width_BT: torch.Tensor | None = None
        for layer in self.layers:
            layer.mlp.down_proj.register_forward_pre_hook(self._mask_neurons)

    def _mask_neurons(self, _module: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...] | None:
        if self._width_BT is None:
            return None
        neurons = torch.arange(args[0].shape[-1], device=args[0].device)
        return (args[0] * (neurons < self._width_BT[..., None]),)

    def exits(
        self, ids_BT: torch.Tensor, position_BT: torch.Tensor, seen: torch.Tensor | dict[str, Any],
        width_BT: torch.Tensor | None = None,
    ) -> dict[int, torch.Tensor]:
        """Normed hidden states [B, T, H] by exit depth; `width_BT` neurons a token, None for all.

        `seen`: a mask [B, 1, T, T], or what layers are to be told (`data.packing.Batch.seen`)."""
        return dict(zip(sorted(map(int, self.norms)), self(ids_BT, position_BT, seen, width_BT), strict=True))

    def forward(
        self, ids_BT: torch.Tensor, position_BT: torch.Tensor, seen: torch.Tensor | dict[str, Any],
        width_BT: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """The values of `exits`, which is what to call; a tuple, as ZeRO 3 wants of a module."""
        x = nn.functional.embedding(ids_BT, self.embed)
        told = {"position_embeddings": self.rotary(x, position_BT), "position_ids": position_BT,
                **({"attention_mask": seen} if isinstance(seen, torch.Tensor) else seen)}
        found = []
        for i, layer in enumerate(self.layers, 1):
            x = through_layer(partial(self._layer, layer, width_BT, told), x, self.recompute and self.training)
            if str(i) in self.norms:
                found.append(self.norms[str(i)](x))
        return tuple(found)

    def _layer(self, layer: nn.Module, width_BT: torch.Tensor | None, told: dict[str, Any],
               x_BTH: torch.Tensor) -> Any:
        """One layer at these widths, also where the backward pass computes it once more."""
        self._width_BT = width_BT
        try:
            return layer(x_BTH, **told)
        finally:
            self._width_BT = None

    def logits(self, hidden_RH: torch.Tensor) -> torch.Tensor:
        """Logits over the trimmed head, [R, D]."""
        return hidden_RH @ self.head.weight.T

    def portable_state(self) -> dict[str, torch.Tensor]:
        """Tensors of a bundle's `draft.safetensors`: layers, norms, head rows and their ids, and an embedding of its
        own.

        The target's embedding is left out: it is frozen, and taken from the target at load.
        """
        state = {k: v.detach().clone().contiguous() for k, v in self.state_dict().items()}
        state["head"] = state.pop("head.weight")
        return state
