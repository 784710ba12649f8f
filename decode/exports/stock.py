"""Exporting a variant of a draft for other engines, compared with the bundle's before it is called done."""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from draftsmith.data import DraftsmithError
from draftsmith.data.io import atomic_dir
from draftsmith.distill.variants import EXIT_ALPHA, FULL_ALPHA, DraftShape, Variant

from ..bundle import Bundle
from ..target import Target, quiet
from .parity import Parity, compare_written
from .use import Settings, settings_for, usage

STOCK_FORMATS = ("hf", "vllm", "sglang")
FORMATS = (*STOCK_FORMATS, "gguf")
DTYPES = ("float32", "bfloat16", "float16")

Say = Callable[[str], None]


def tell(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def choose_variant(shape: DraftShape, name: str, alpha: float | None = None) -> Variant:
    """The variant called "4layer" or "2layer" (by the shape's depths), narrowed to the width that alpha selects."""
    depths = {f"{d}layer": d for d in (shape.layers, shape.exit)}
    if name not in depths:
        raise DraftsmithError(f"no variant '{name}' in this bundle; there are {' and '.join(depths)}")
    if alpha is None:
        return Variant(depths[name])
    if not 0 < alpha <= FULL_ALPHA:
        raise DraftsmithError(f"--alpha must be in [{EXIT_ALPHA:g}, {FULL_ALPHA:g}], not {alpha:g}")
    chosen = shape.choose(alpha)
    if chosen.depth != depths[name]:
        meant = "below" if chosen.depth == shape.exit else "from"
        raise DraftsmithError(f"--alpha {alpha:g} selects the {chosen.depth}-layer variant ({meant} {EXIT_ALPHA:g}), "
                              f"not {name}: leave --alpha out, or ask for --variant {chosen.depth}layer")
    return chosen


def stock_model(bundle: Bundle, target: Target, variant: Variant) -> Any:
    """A stock causal LM of a variant, with the target's full vocabulary.

    The trimmed head is a speed measure of our own runner; a stock model gets the frozen full rows back.
    """
    from transformers import AutoModelForCausalLM

    config, depth, width = copy.deepcopy(bundle.draft_config), variant.depth, bundle.shape.width(variant)
    config.num_hidden_layers, config.intermediate_size = depth, width
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:depth]
    config.vocab_size = target.config.vocab_size
    embedding, head = target.embedding, target.head
    if "embed" in bundle.tensors:
        embedding, head = bundle.tensors["embed"], bundle.tensors["head"]
        if len(head) != config.vocab_size:
            raise DraftsmithError(f"the draft has a head of its own with {len(head)} of {config.vocab_size} tokens; a "
                                  "stock model needs a row for each: train it with draft.vocab at the full size")
    config.tie_word_embeddings = embedding.data_ptr() == head.data_ptr()
    model: Any = AutoModelForCausalLM.from_config(config)
    state = {f"model.{k}": narrowed(k, v, width) for k, v in bundle.tensors.items()
             if k.startswith("layers.") and int(k.split(".")[1]) < depth}
    state["model.norm.weight"] = bundle.tensors[f"norms.{depth}.weight"]
    state["model.embed_tokens.weight"], state["lm_head.weight"] = embedding, head
    missing, unexpected = model.load_state_dict(state, strict=False)
    missing = [m for m in missing if "rotary" not in m]
    if missing or unexpected:
        raise DraftsmithError(f"the draft does not fit its own architecture: missing {missing}, extra {unexpected}")
    return model.eval()


def narrowed(name: str, tensor: torch.Tensor, width: int) -> torch.Tensor:
    """The first `width` neurons of a feed-forward weight; any other tensor as it is."""
    if ".mlp.gate_proj." in name or ".mlp.up_proj." in name:
        return tensor[:width]
    return tensor[:, :width].contiguous() if name.endswith(".mlp.down_proj.weight") else tensor


def fresh_folder(out: str | os.PathLike[str]) -> Path:
    """The folder to write; an export never replaces anything."""
    folder = Path(out).expanduser().resolve()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise DraftsmithError(f"{folder}: exists already; an export goes to a new folder")
    return folder


def export_stock(bundle: Bundle, target: Target, variant: Variant, out: str | os.PathLike[str], engine: str = "hf",
                 dtype: str = "float32", say: Say = tell) -> Parity:
    """Write a Hugging Face folder with instructions for `engine`, reload it with the stock loader and compare.

    Raises `DraftsmithError`, and writes nothing, when the two differ by more than rounding to `dtype`.
    """
    if engine not in STOCK_FORMATS:
        raise DraftsmithError(f"format '{engine}' is not one of {', '.join(STOCK_FORMATS)}")
    if dtype not in DTYPES:
        raise DraftsmithError(f"--dtype {dtype} is not one of {', '.join(DTYPES)}")
    folder, model = fresh_folder(out), stock_model(bundle, target, variant)
    settings = settings_for(bundle, target, variant, model, folder, engine)
    say(f"Writing {variant.name} in {dtype} ...")
    with atomic_dir(folder) as aside:
        model.to(getattr(torch, dtype)).save_pretrained(aside)
        target.tokenizer.save_pretrained(aside)
        del model  # it is made anew for the comparison
        say("Reloading it with transformers, and comparing ...")
        parity = compare_folder(aside, bundle, target, variant)
        parity.require(dtype, f"the exported model in {dtype}")
        write_usage(aside, settings, f"reloaded with transformers: {parity.describe()}")
    return parity


def compare_folder(folder: Path, bundle: Bundle, target: Target, variant: Variant) -> Parity:
    """A written folder, computed in float32, against our own runner."""
    from transformers import AutoModelForCausalLM

    with quiet(str(folder), "export"):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    if model.config.vocab_size != target.config.vocab_size:
        raise DraftsmithError(f"the exported model has {model.config.vocab_size} token rows and the target "
                              f"{target.config.vocab_size}; other engines need as many")
    return compare_written(model, stock_model(bundle, target, variant), bundle, target, variant)


def write_usage(folder: Path, settings: Settings, checked: str) -> None:
    (folder / "USE.md").write_text(usage(settings, checked), encoding="utf-8")


def export_huggingface(bundle: Bundle, target: Target, depth: int, out: str | os.PathLike[str]) -> float:
    """The folder of the variant of this depth in float32; returns the relative difference of its logits."""
    return export_stock(bundle, target, Variant(depth), out, say=lambda message: None).difference


def export(bundle: Bundle, target: Target, variant: Variant, out: str | os.PathLike[str], form: str = "hf",
           dtype: str | None = None, quant: str | None = None, target_gguf: str | None = None, say: Say = tell) -> str:
    """Write a variant for an engine (one of `FORMATS`); returns what was written and how it was checked.

    `dtype`: of a Hugging Face folder; `quant` and `target_gguf`: of a GGUF file, see `llamacpp.export_gguf`.
    """
    if form == "gguf":
        from .llamacpp import export_gguf

        if dtype is not None:
            raise DraftsmithError("--dtype is for Hugging Face folders; of a GGUF file choose --quant")
        return export_gguf(bundle, target, variant, out, quant or "f16", target_gguf, say)
    if quant is not None or target_gguf is not None:
        raise DraftsmithError("--quant and --target-gguf are for --format gguf")
    parity = export_stock(bundle, target, variant, out, form, dtype or "float32", say)
    return f"{variant.name} for {form}, reloaded with transformers; {parity.describe()}"
