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
from torch.utils.checkpoint import checkpoint
from transformers import AutoModel, LlamaConfig, PretrainedConfig

from .attention import NAME, Runs
from .variants import DraftShape

# Families whose layers have a gated feed-forward block and whose cache the lean runner understands.
GATED_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


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
        config = LlamaConfig(
            vocab_size=target.vocab_size, hidden_size=target.hidden_size,
            intermediate_size=4 * target.hidden_size, num_hidden_layers=layers,
            num_attention_heads=target.num_attention_heads,
            num_key_value_heads=getattr(target, "num_key_value_heads", None) or target.num_attention_heads,
            max_position_embeddings=getattr(target, "max_position_embeddings", None) or 2048,
            bos_token_id=target.bos_token_id, eos_token_id=target.eos_token_id, tie_word_embeddings=True,
        )
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    return config


class ElasticDraft(nn.Module):
    """Layers, one norm per exit, the target's embedding and a trimmed head (both frozen by default).

    `head_ids` int64 [D] maps head rows to target token ids.
    """

    head_ids: torch.Tensor
    embed: torch.Tensor
    head: torch.Tensor

    def __init__(
        self, config: PretrainedConfig, shape: DraftShape, embed_VH: torch.Tensor, head_DH: torch.Tensor,
        head_ids_D: torch.Tensor,
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
        # Buffers: frozen, and whole on every rank however the parameters are spread over them.
        self.register_buffer("embed", embed_VH.clone(), persistent=False)
        self.register_buffer("head", head_DH.clone())
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

    def forward(
        self, ids_BT: torch.Tensor, position_BT: torch.Tensor, mask_B1TT: torch.Tensor | None = None,
        width_BT: torch.Tensor | None = None, runs: Runs | None = None,
    ) -> dict[int, torch.Tensor]:
        """Normed hidden states [B, T, H] by exit depth; `width_BT` neurons a token, None for all.

        What a token sees is said by a mask, or by runs of tokens (`distill.attention`)."""
        x = nn.functional.embedding(ids_BT, self.embed)
        seen = {"attention_mask": mask_B1TT, "position_embeddings": self.rotary(x, position_BT),
                "position_ids": position_BT, "runs": runs}
        exits = {}
        for i, layer in enumerate(self.layers, 1):
            call = partial(self._layer, layer, width_BT, seen)
            x = checkpoint(call, x, use_reentrant=False) if self.recompute and self.training else call(x)
            if str(i) in self.norms:
                exits[i] = self.norms[str(i)](x)
        return exits

    def _layer(self, layer: nn.Module, width_BT: torch.Tensor | None, seen: dict[str, Any],
               x_BTH: torch.Tensor) -> torch.Tensor:
        """One layer at these widths, also where the backward pass computes it once more."""
        self._width_BT = width_BT
        try:
            out = layer(x_BTH, **seen)
        finally:
            self._width_BT = None
        return out[0] if isinstance(out, tuple) else out

    def logits(self, hidden_RH: torch.Tensor) -> torch.Tensor:
        """Logits over the trimmed head, [R, D]."""
        return hidden_RH @ self.head.T

    def portable_state(self) -> dict[str, torch.Tensor]:
        """Tensors of a bundle's `draft.safetensors`: layers, norms, head rows and their ids.

        The embedding is left out: it is the target's, frozen, and is taken from the target at load.
        """
        return {k: v.detach().clone().contiguous() for k, v in self.state_dict().items()}
