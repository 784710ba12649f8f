"""A tiny target, prompts and recipe for whole-pipeline tests and proofs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from conftest import save_model
from draftsmith.data.io import write_jsonl

WORDS = ["red", "blue", "cat", "dog", "sun", "sea", "map", "key", "oak", "ice", "jam", "owl"]


def write_tiny_recipe(folder: Path, **sections: dict[str, Any]) -> Path:
    """A folder with target, prompts and recipe.yaml (output below `out`); `sections` update the recipe's."""
    folder.mkdir(parents=True, exist_ok=True)
    save_model(folder / "target")
    pairs = [(a, b) for a in WORDS for b in WORDS if a != b]
    for name, some in (("train", pairs[:60]), ("heldout", pairs[60:72])):
        write_jsonl(folder / f"{name}.jsonl", [{"id": f"{a}-{b}", "prompt": f"{a} {b}"} for a, b in some])
    recipe: dict[str, Any] = {
        "name": "tiny",
        "out": str(folder / "out"),
        "target": {"name": str(folder / "target")},
        "prompts": {"train": str(folder / "train.jsonl"), "heldout": str(folder / "heldout.jsonl"), "train_count": 40},
        "respond": {"max_tokens": 24, "batch": 8, "k": 8, "shard_documents": 10, "precision": "fp32"},
        "draft": {"init_layers": [0, 1, 3, 4], "vocab": 200, "calibration_tokens": 200},
        "distill": {
            "steps": 40,
            "block": 64,
            "micro_batch": 2,
            "lr": 0.01,
            "warmup": 2,
            "save_every": 10,
            "eval_every": 20,
            "eval_prompts": 2,
            "eval_tokens": 12,
            "precision": "fp32",
        },
        "trace": {"prompts": 12, "max_tokens": 24},
        "gate": {"steps": 20, "hidden": 8, "batch": 32},
        "bundle": {"policy": "fixed(3)"},
        "validate": {"count": 3, "max_tokens": 16, "thresholds": {"acceptance": 0, "tokens_per_step": 1, "speedup": 0}},
    }
    for section, changes in sections.items():
        recipe[section].update(changes)
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe, sort_keys=False), encoding="utf-8")
    return path
