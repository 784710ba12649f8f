"""Initialising a draft from layers of the target, neurons sorted by measured importance."""

from __future__ import annotations

from typing import Any

import torch
from draftsmith.data import DraftsmithError
from transformers import PretrainedConfig

from .elastic import GATED_FAMILIES, ElasticDraft, draft_config
from .variants import DraftShape


@torch.no_grad()
def neuron_importance(model: Any, layers: list[int], batches: list[torch.Tensor]) -> list[torch.Tensor]:
    """Importance of each feed-forward neuron of the given layers, one [intermediate] tensor a layer.

    Mean |activation| over the tokens of `batches` (int64 [B, T] each) times the norm of the neuron's
    output column: the expected size of what the block loses without it.
    """
    sums = [torch.zeros(model.model.layers[i].mlp.down_proj.in_features) for i in layers]

    def record(slot: int) -> Any:
        def hook(_module: Any, args: tuple[torch.Tensor, ...]) -> None:
            sums[slot] += args[0].detach().abs().flatten(0, -2).sum(0).float().cpu()
        return hook

    hooks = [model.model.layers[i].mlp.down_proj.register_forward_pre_hook(record(s)) for s, i in enumerate(layers)]
    try:
        for batch in batches:
            model.model(input_ids=batch.to(model.device), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    tokens = max(1, sum(b.numel() for b in batches))
    return [s / tokens * model.model.layers[i].mlp.down_proj.weight.norm(dim=0).float().cpu()
            for s, i in zip(sums, layers, strict=True)]


def fresh_draft(config: PretrainedConfig, exit_depth: int, buckets: tuple[float, ...],
                head_ids_D: torch.Tensor) -> ElasticDraft:
    """An untrained draft of sizes of its own, embedding and head included."""
    shape = DraftShape(config.num_hidden_layers, exit_depth, buckets, config.hidden_size, config.intermediate_size,
                       len(head_ids_D))
    embed = torch.randn(config.vocab_size, config.hidden_size) * config.initializer_range
    return ElasticDraft(config, shape, embed, embed[head_ids_D], head_ids_D, own=True)


@torch.no_grad()
def build_draft(
    target: Any, layers: list[int], exit_depth: int, buckets: tuple[float, ...], head_ids_D: torch.Tensor,
    calibration: list[torch.Tensor],
) -> ElasticDraft:
    """An elastic draft for the Hugging Face causal LM `target`, copied from its `layers`.

    Where the target's layers are not of a gated family, the stack is Llama-shaped with fresh weights.
    Raises `DraftsmithError` for layer numbers that the target does not have.
    """
    config = draft_config(target.config, len(layers))
    embed = target.get_input_embeddings().weight.detach().float().cpu()
    head = target.get_output_embeddings().weight.detach().float().cpu()
    shape = DraftShape(len(layers), exit_depth, buckets, config.hidden_size, config.intermediate_size,
                       len(head_ids_D))
    draft = ElasticDraft(config, shape, embed, head[head_ids_D], head_ids_D)
    if target.config.model_type not in GATED_FAMILIES:
        return draft
    count = target.config.num_hidden_layers
    if bad := [i for i in layers if not 0 <= i < count]:
        raise DraftsmithError(f"draft.init_layers names layer {bad[0]}, but the target has layers 0 to {count - 1}")
    importance = neuron_importance(target, layers, calibration)
    for layer, source, score in zip(draft.layers, layers, importance, strict=True):
        layer.load_state_dict(target.model.layers[source].state_dict())
        order = score.argsort(descending=True, stable=True)
        for name in ("gate_proj", "up_proj"):
            linear = getattr(layer.mlp, name)
            linear.weight.copy_(linear.weight[order])
            if linear.bias is not None:
                linear.bias.copy_(linear.bias[order])
        layer.mlp.down_proj.weight.copy_(layer.mlp.down_proj.weight[:, order])
    for norm in draft.norms.values():
        norm.load_state_dict(target.model.norm.state_dict())
    return draft
