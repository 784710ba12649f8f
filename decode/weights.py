"""A model's weights by name: from a loaded module, or tensor by tensor from a folder.

Reading tensor by tensor lets a runner fuse and repack layer after layer, so that the weights are never
in memory twice.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from draftsmith.data import DraftsmithError

# Looks a tensor up by its stock name without the leading "model."; None where the model has none.
Lookup = Callable[[str], torch.Tensor | None]


@dataclass(frozen=True)
class Weights:
    """`get` looks a tensor up; `parameters` counts all of them, shared ones once."""

    get: Lookup
    parameters: int


def module_weights(model: Any) -> Weights:
    """The tensors of a Hugging Face causal LM in memory."""
    tensors = {name.removeprefix("model."): tensor.detach() for name, tensor in model.state_dict().items()}
    return Weights(tensors.get, sum(p.numel() for p in model.parameters()))


def folder_weights(folder: str | Path, dtype: torch.dtype, device: torch.device) -> Weights | None:
    """The tensors of a folder or hub name, each read when asked for; None where it holds no safetensors with
    stock names.

    Raises `DraftsmithError` for a truncated file.
    """
    from safetensors import SafetensorError, safe_open

    where: dict[str, tuple[Path, str]] = {}
    parameters = 0
    for file in _files(str(folder)):
        try:
            with safe_open(str(file), framework="pt") as handle:
                for name in handle.keys():  # noqa: SIM118
                    where[name.removeprefix("model.")] = (file, name)
                    parameters += math.prod(handle.get_slice(name).get_shape())
        except (SafetensorError, OSError) as error:
            raise DraftsmithError(f"{file}: missing or damaged ({error})") from error
    if "embed_tokens.weight" not in where or "layers.0.self_attn.q_proj.weight" not in where:
        return None

    def lookup(name: str) -> torch.Tensor | None:
        if name not in where:
            return None
        file, stored = where[name]
        with safe_open(str(file), framework="pt") as handle:
            tensor = handle.get_tensor(stored)
        # Copied out of the mapped file: aligned memory of our own, and the mapping goes away.
        return torch.empty(tensor.shape, dtype=dtype, device=device).copy_(tensor)

    return Weights(lookup, parameters)


def _files(folder: str) -> list[Path]:
    """The safetensors files of a folder or hub name; none when there are none."""
    from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
    from transformers.utils.hub import cached_file, get_checkpoint_shard_files

    def find(name: str) -> str | None:
        found: str | None = cached_file(folder, name, _raise_exceptions_for_missing_entries=False)
        return found

    if single := find(SAFE_WEIGHTS_NAME):
        return [Path(single)]
    if index := find(SAFE_WEIGHTS_INDEX_NAME):
        return sorted({Path(p) for p in get_checkpoint_shard_files(folder, index)[0]})
    return []
