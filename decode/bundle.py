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
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from draftsmith.data import DraftsmithError
from draftsmith.data.io import atomic_dir, read_json, sha256_file, write_json
from draftsmith.data.vocabulary import first_difference, tokenizer_hash
from draftsmith.distill.gate import Gate
from draftsmith.distill.variants import DraftShape

MANIFEST = "draftsmith.json"
DRAFT, GATE = "draft.safetensors", "gate.safetensors"
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
    thresholds: dict[str, Any] = field(default_factory=dict)


@dataclass
class Bundle:
    folder: Path
    manifest: Manifest
    shape: DraftShape
    tensors: dict[str, torch.Tensor]
    gate: Gate | None

    @property
    def draft_config(self) -> Any:
        from transformers import AutoConfig

        return AutoConfig.for_model(**self.manifest.draft["config"])


def save_bundle(folder: str | os.PathLike[str], manifest: Manifest, tensors: dict[str, torch.Tensor],
                gate: Gate | None) -> None:
    """Write a bundle; it appears whole or not at all."""
    with atomic_dir(folder) as aside:
        save_file({k: v.contiguous() for k, v in tensors.items()}, str(aside / DRAFT))
        if gate is not None:
            save_file({k: v.contiguous() for k, v in gate.state_dict().items()}, str(aside / GATE))
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
    if value.get("schema") != SCHEMA:
        raise DraftsmithError(f"{folder / MANIFEST}: schema {value.get('schema')} is not the {SCHEMA} that this "
                              "release reads")
    files = value.pop("files", {})
    value.pop("schema")
    if DRAFT not in files:
        raise DraftsmithError(f"{folder / MANIFEST}: lists no {DRAFT}")
    for name, digest in files.items():
        if Path(name).name != name:
            raise DraftsmithError(f"{folder / MANIFEST}: file name '{name}' leads outside the bundle")
        if not (folder / name).is_file():
            raise DraftsmithError(f"{folder / name}: listed in the bundle but missing")
        if sha256_file(folder / name) != digest:
            raise DraftsmithError(f"{folder / name}: truncated or altered (SHA-256 differs from {MANIFEST})")
    try:
        manifest = Manifest(**value)
        tensors = load_file(str(folder / DRAFT))
        gate = None
        if GATE in files:
            gate = Gate(manifest.gate["features"], manifest.gate["hidden"])
            gate.load_state_dict(load_file(str(folder / GATE)))
            gate.eval().requires_grad_(False)
        return Bundle(folder, manifest, DraftShape.from_json(manifest.draft["shape"]), tensors, gate)
    except (TypeError, KeyError, RuntimeError, SafetensorError) as error:
        raise DraftsmithError(f"{folder}: not a valid bundle ({error})") from error


def check_compatible(manifest: Manifest, target: Any, tokenizer: Any, tokenizer_of_bundle: Any = None) -> None:
    """Refuse a target whose tokenizer is not the one the draft was distilled for.

    `target`: a configuration. A vocabulary padded at the end is fine; a permuted or different one is not.
    """
    wanted = manifest.target
    if tokenizer_hash(tokenizer) != wanted["tokenizer_hash"]:
        difference = first_difference(tokenizer_of_bundle, tokenizer) if tokenizer_of_bundle is not None else None
        detail = f": {difference}" if difference else ""
        raise DraftsmithError(f"the bundle's draft was made for target '{wanted['name']}', and this target's "
                              f"tokenizer is a different one{detail}")
    if target.vocab_size < wanted["vocab_size"]:
        raise DraftsmithError(f"the target has {target.vocab_size} tokens, the bundle's draft knows "
                              f"{wanted['vocab_size']}")
    if target.hidden_size != manifest.draft["config"]["hidden_size"]:
        raise DraftsmithError(f"the target's hidden size is {target.hidden_size}, the draft needs its embedding "
                              f"of size {manifest.draft['config']['hidden_size']}")


def device_name() -> str:
    """A name for the machine's compute device, under which its cost table is stored."""
    if torch.cuda.is_available():
        return str(torch.cuda.get_device_name())
    model = ""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            model = next((line.split(":", 1)[1].strip() for line in file if line.startswith("model name")), "")
    except OSError:
        import platform

        model = platform.processor()
    return f"{model or 'CPU'} ({torch.get_num_threads()} threads)"
