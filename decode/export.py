"""Exporting a variant as a stock Hugging Face model, compared with the original before it is called done."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import torch
from draftsmith.data import DraftsmithError
from draftsmith.data.io import atomic_dir
from draftsmith.distill.variants import Variant

from .bundle import Bundle
from .draft import DraftRunner
from .target import Target

TOLERANCE = 1e-3  # of the largest logit: two implementations of the same fp32 arithmetic


def stock_model(bundle: Bundle, target: Target, depth: int) -> Any:
    """A stock causal LM of the first `depth` layers at full width, with the target's full vocabulary.

    The trimmed head is a speed measure of our own runner; a stock model gets the frozen full rows back.
    """
    from transformers import AutoModelForCausalLM

    config = copy.deepcopy(bundle.draft_config)
    config.num_hidden_layers = depth
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
    state = {f"model.{k}": v for k, v in bundle.tensors.items()
             if k.startswith("layers.") and int(k.split(".")[1]) < depth}
    state["model.norm.weight"] = bundle.tensors[f"norms.{depth}.weight"]
    state["model.embed_tokens.weight"], state["lm_head.weight"] = embedding, head
    missing, unexpected = model.load_state_dict(state, strict=False)
    missing = [m for m in missing if "rotary" not in m]
    if missing or unexpected:
        raise DraftsmithError(f"the draft does not fit its own architecture: missing {missing}, extra {unexpected}")
    return model.eval()


@torch.no_grad()
def compare_with_bundle(model: Any, bundle: Bundle, target: Target, depth: int) -> float:
    """Largest difference between the stock model's logits and our runner's, relative to the largest logit."""
    runner = DraftRunner(bundle.draft_config, bundle.shape, bundle.tensors, target.embedding)
    generator = torch.Generator().manual_seed(0)
    ids = bundle.tensors["head_ids"][torch.randint(0, len(bundle.tensors["head_ids"]), (1, 24), generator=generator)]
    ours = runner.forward(ids, runner.new_cache(32), Variant(depth))
    theirs = model(input_ids=ids).logits[0][:, bundle.tensors["head_ids"]]
    return float((ours - theirs).abs().max() / theirs.abs().max())


def export_huggingface(bundle: Bundle, target: Target, depth: int, out: str | os.PathLike[str]) -> float:
    """Write the folder, reload it with the stock loader and compare; returns the relative difference.

    Raises `DraftsmithError`, and writes nothing, when they differ by more than rounding.
    """
    from transformers import AutoModelForCausalLM

    out = Path(out).expanduser().resolve()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise DraftsmithError(f"{out}: exists already; an export goes to a new folder")
    with atomic_dir(out) as aside:
        stock_model(bundle, target, depth).save_pretrained(aside)
        target.tokenizer.save_pretrained(aside)
        reloaded = AutoModelForCausalLM.from_pretrained(aside, dtype=torch.float32).eval()
        difference = compare_with_bundle(reloaded, bundle, target, depth)
        if not difference <= TOLERANCE:
            raise DraftsmithError(f"the exported model differs from the bundle's by {difference:.1e} of its logits")
    return difference
