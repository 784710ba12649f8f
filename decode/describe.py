"""What a model is, from its configuration and tokenizer alone: no weights are read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from draftsmith.data import DraftsmithError
from draftsmith.data.vocabulary import vocabulary

from .bundle import MANIFEST, Bundle, load_bundle
from .flops import parameters_read
from .stack import is_lean, sliding_window
from .target import eos_ids_of, generation_defaults, load_description, quiet, resolve

LEAN = "lean: chains and trees, many requests at a time"
MODULE = "module: chains only, one request at a time"
BUNDLE = "elastic draft"


@dataclass(frozen=True)
class Description:
    """vocab_size: rows of the embedding; tokens: by id. context: positions, None without a limit. read: parameters
    that a pass of one row reads, of each variant. experts: of a mixture."""

    name: str
    model_type: str
    parameters: int
    read: dict[str, int]
    vocab_size: int
    tokens: list[str | None]
    context: int | None
    cache: str
    recurrent: bool
    runner: str
    eos_ids: list[int]
    chat_template: bool
    quantised: bool = False
    weights: bool = True  # whether a folder holds safetensors; of a hub name it is not known
    experts: bool = False
    bundle: Bundle | None = None

    def to_json(self) -> dict[str, Any]:
        hidden = ("tokens", "bundle")
        return {**{k: v for k, v in vars(self).items() if k not in hidden}, "tokens": len(self.tokens)}


def describe_model(name: str, role: str, trust_remote_code: bool = False) -> Description:
    """A folder or hub name. `role`: what messages call it. Raises `DraftsmithError` for what is no causal LM or cannot
    be read."""
    from transformers import AutoModelForCausalLM

    config, tokenizer = load_description(name, trust_remote_code, role)
    require_causal(name, role, config)
    with quiet(name, role), torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    text, parameters = config.get_text_config(), sum(p.numel() for p in model.parameters())
    recurrent, context = bool(getattr(model, "_is_stateful", False)), getattr(text, "max_position_embeddings", None)
    folder = Path(resolve(name))
    return Description(
        name, config.model_type, parameters, {"whole": parameters_read(parameters, text)}, int(text.vocab_size),
        vocabulary(tokenizer), None if context is None else int(context), cache_kind(text, recurrent), recurrent,
        LEAN if is_lean(config) else MODULE, sorted(eos_ids_of(generation_defaults(str(folder)), config, tokenizer)),
        bool(getattr(tokenizer, "chat_template", None)), bool(getattr(config, "quantization_config", None)),
        not folder.is_dir() or any(folder.glob("*.safetensors")),
        any(getattr(text, key, None) for key in ("num_experts", "num_local_experts", "n_routed_experts")))


def describe_bundle(folder: str) -> Description:
    """The draft of a bundle, each variant with its trimmed head."""
    bundle = load_bundle(folder)
    shape, tensors, config = bundle.shape, bundle.tensors, bundle.draft_config
    parameters = sum(t.numel() for t in tensors.values() if t.is_floating_point())
    read = {}
    for variant in shape.variants():
        layers = sum(t.numel() for k, t in tensors.items()
                     if k.startswith("layers.") and int(k.split(".")[1]) < variant.depth)
        idle = 3 * variant.depth * config.hidden_size * (shape.intermediate - shape.width(variant))
        read[variant.name] = layers - idle + tensors["head"].numel()
    return Description(folder, f"bundle ({config.model_type})", parameters, read, int(config.vocab_size),
                       bundle.vocabulary, int(config.max_position_embeddings), cache_kind(config, False), False, BUNDLE,
                       [], False, bundle=bundle)


def is_bundle(name: str) -> bool:
    return (Path(name).expanduser() / MANIFEST).is_file()


def require_causal(name: str, role: str, config: Any) -> None:
    """Refuse what does not write text from left to right."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as causal

    classes = getattr(config, "architectures", None) or []
    own_code = "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    known = config.model_type in causal and (not classes or any(c in causal.values() for c in classes))
    if getattr(config, "is_encoder_decoder", False) or not (known or own_code):
        what = f"{config.model_type}, {', '.join(classes)}" if classes else config.model_type
        raise DraftsmithError(f"{role} '{name}' is no causal language model ({what}): an encoder, or an encoder with a "
                              "decoder, cannot be decoded speculatively here. Give a decoder-only model")


def cache_kind(config: Any, recurrent: bool) -> str:
    """How the model remembers what it has read."""
    if recurrent:
        return "recurrent state"
    kinds = getattr(config, "layer_types", None) or []
    windows = sum(kind != "full_attention" for kind in kinds)
    if kinds and windows:
        return f"sliding window of {config.sliding_window} in {windows} of {len(kinds)} layers"
    window = sliding_window(config) if not kinds else None
    return f"sliding window of {window}" if window else "full"
