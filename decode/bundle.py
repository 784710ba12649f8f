"""The bundle: a folder with a draft, its gate, and everything needed to check and run them.

`draftsmith.json` holds the schema version, the target's name and fingerprint, the draft's configuration
and shape, policy defaults and calibration, cost tables by device, provenance, evaluation figures and the
SHA-256 of each file. Weights are safetensors; nothing else is read.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from draftsmith.data import DraftsmithError
from draftsmith.data.io import atomic_dir, load_tensors, read_json, save_tensors, sha256_file, write_json
from draftsmith.data.vocabulary import first_difference, vocabulary
from draftsmith.distill.gate import Gate
from draftsmith.distill.variants import DraftShape

MANIFEST = "draftsmith.json"
DRAFT, GATE, VOCABULARY = "draft.safetensors", "gate.safetensors", "vocabulary.json"
SCHEMA = 1


@dataclass
class Manifest:
    """The content of `draftsmith.json`, less `schema` and `files`, which `save_bundle` writes."""

    target: dict[str, Any]  # name, tokenizer_hash, vocab_size, config_hash
    draft: dict[str, Any]  # config (of the Hugging Face class), shape
    policy: dict[str, Any]  # default, variant, use_gate, paper, goodput
    gate: dict[str, Any] = field(default_factory=dict)  # features, hidden, report
    costs: dict[str, Any] = field(default_factory=dict)  # by device name
    provenance: dict[str, Any] = field(default_factory=dict)
    evaluation: dict[str, Any] = field(default_factory=dict)


@dataclass
class Bundle:
    folder: Path
    manifest: Manifest
    shape: DraftShape
    tensors: dict[str, torch.Tensor]
    gate: Gate | None
    draft_config: Any
    vocabulary: list[str | None]  # the target's tokens by id


def save_bundle(folder: str | os.PathLike[str], manifest: Manifest, tensors: dict[str, torch.Tensor],
                gate: Gate | None, tokenizer: Any) -> None:
    """Write a bundle for the target that `tokenizer` belongs to; it appears whole or not at all."""
    with atomic_dir(folder) as aside:
        save_tensors(aside / DRAFT, tensors)
        write_json(aside / VOCABULARY, vocabulary(tokenizer))
        if gate is not None:
            save_tensors(aside / GATE, gate.state_dict())
        files = {p.name: sha256_file(p) for p in sorted(aside.iterdir())}
        write_json(aside / MANIFEST, {"schema": SCHEMA, "files": files, **vars(manifest)})


def update_manifest(folder: str | os.PathLike[str], **changes: Any) -> None:
    """Replace top-level fields of a bundle's manifest (evaluation figures, cost tables)."""
    path = Path(folder) / MANIFEST
    write_json(path, {**read_json(path), **changes})


def load_bundle(folder: str | os.PathLike[str]) -> Bundle:
    """Read and check a bundle. Raises `DraftsmithError` naming the file that is missing, altered or of
    another schema."""
    folder = Path(folder)
    if not folder.is_dir():
        raise DraftsmithError(f"{folder}: no such bundle folder")
    if not (folder / MANIFEST).is_file():
        raise DraftsmithError(f"{folder}: not a bundle (no {MANIFEST})")
    value = read_json(folder / MANIFEST)
    if not isinstance(value, dict) or not isinstance(value.get("files"), dict):
        raise DraftsmithError(f"{folder / MANIFEST}: not a bundle's manifest")
    if value.get("schema") != SCHEMA:
        raise DraftsmithError(f"{folder / MANIFEST}: schema {value.get('schema')} is not the {SCHEMA} that this "
                              "release reads")
    files = value.pop("files")
    value.pop("schema")
    _check_files(folder, files)
    try:
        return _build(folder, Manifest(**value), GATE in files)
    except (TypeError, KeyError, ValueError, AttributeError, RuntimeError) as error:
        raise DraftsmithError(f"{folder}: not a valid bundle ({type(error).__name__}: {error})") from error


def _check_files(folder: Path, files: dict[str, str]) -> None:
    for name in (DRAFT, VOCABULARY):
        if name not in files:
            raise DraftsmithError(f"{folder / MANIFEST}: lists no {name}")
    for name, digest in files.items():
        if Path(name).name != name:
            raise DraftsmithError(f"{folder / MANIFEST}: file name '{name}' leads outside the bundle")
        if not (folder / name).is_file():
            raise DraftsmithError(f"{folder / name}: listed in the bundle but missing")
        if sha256_file(folder / name) != digest:
            raise DraftsmithError(f"{folder / name}: truncated or altered (SHA-256 differs from {MANIFEST})")


def _build(folder: Path, manifest: Manifest, has_gate: bool) -> Bundle:
    from transformers import AutoConfig

    tensors = load_tensors(folder / DRAFT)
    shape = DraftShape.from_json(manifest.draft["shape"])
    for depth in (shape.exit, shape.layers):
        if f"norms.{depth}.weight" not in tensors or f"layers.{depth - 1}.input_layernorm.weight" not in tensors:
            raise ValueError(f"{DRAFT} has no exit after layer {depth}")
    shape.find(manifest.policy["variant"])
    gate = None
    if has_gate:
        gate = Gate(manifest.gate["features"], manifest.gate["hidden"])
        gate.load_state_dict(load_tensors(folder / GATE))
        gate.eval().requires_grad_(False)
    return Bundle(folder, manifest, shape, tensors, gate, AutoConfig.for_model(**manifest.draft["config"]),
                  list(read_json(folder / VOCABULARY)))


def check_compatible(bundle: Bundle, target: Any, tokenizer: Any) -> None:
    """Refuse a target whose tokenizer is not the one the draft was distilled for.

    `target`: a configuration. A vocabulary padded at the end is fine; a permuted or shorter one is not.
    """
    name, theirs = bundle.manifest.target["name"], vocabulary(tokenizer)
    if difference := first_difference(bundle.vocabulary, theirs):
        raise DraftsmithError(f"the bundle's draft was made for target '{name}', and this target's tokenizer is "
                              f"another: token {difference}")
    if len(theirs) < len(bundle.vocabulary) or target.vocab_size < int(bundle.tensors["head_ids"].max()) + 1:
        raise DraftsmithError(f"the target knows {min(len(theirs), target.vocab_size)} tokens, fewer than the "
                              f"bundle's draft was made for ('{name}')")
    hidden = bundle.manifest.draft["config"]["hidden_size"]
    if target.hidden_size != hidden and "embed" not in bundle.tensors:
        raise DraftsmithError(f"the target's hidden size is {target.hidden_size}, the draft needs its embedding of "
                              f"size {hidden}")
