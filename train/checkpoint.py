"""Checkpoints that are complete or absent: written aside, fsynced, hashed, renamed.

A checkpoint is a folder `step-NNNNNNNN` with what DeepSpeed saves and `checkpoint.json` listing the
SHA-256 of every file. Loading verifies the newest and falls back to the one before if it is damaged.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from draftsmith.data import DraftsmithError
from draftsmith.data.io import fsync_path, read_json, sha256_file, write_json

from .stage import first_makes, rank, say, wait_for_all, world_size

MARKER = "checkpoint.json"
KEEP = 2
TAG = "state"


def rng_state() -> dict[str, Any]:
    # Libraries use the global generators.
    return {"torch": torch.get_rng_state(), "numpy": np.random.get_state(), "python": random.getstate()}  # noqa: NPY002


def set_rng_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    np.random.set_state(state["numpy"])  # noqa: NPY002 (libraries use the global state)
    random.setstate(state["python"])


def save_checkpoint(engine: Any, folder: Path, step: int, inputs: str) -> None:
    """Save a DeepSpeed engine after `step` steps. Collective: every rank calls it.

    Raises `DraftsmithError` when the disk refuses; earlier checkpoints stay.
    """
    aside, final = folder / f".step-{step:08d}.tmp", folder / f"step-{step:08d}"
    if rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(aside, ignore_errors=True)
    wait_for_all()
    try:
        engine.save_checkpoint(str(aside), tag=TAG, client_state={"step": step, "rng": rng_state()})
        wait_for_all()
        if rank() == 0:
            files = sorted(p for p in aside.rglob("*") if p.is_file())
            for file in files:
                fsync_path(file)
            write_json(aside / MARKER, {"step": step, "inputs": inputs, "ranks": world_size(), "files": {
                str(p.relative_to(aside)): sha256_file(p) for p in files}})
            shutil.rmtree(final, ignore_errors=True)
            os.replace(aside, final)
            fsync_path(folder)
            for old in checkpoints(folder)[:-KEEP]:
                shutil.rmtree(old)
    except (OSError, RuntimeError) as error:  # torch reports a full disk as a RuntimeError
        shutil.rmtree(aside, ignore_errors=True)
        raise DraftsmithError(f"cannot write checkpoint {final}: {error}") from error
    wait_for_all()


def checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    return sorted(p for p in folder.glob("step-*") if (p / MARKER).is_file())


def damage(checkpoint: Path) -> str | None:
    """What is wrong with a checkpoint, or None."""
    try:
        listed = read_json(checkpoint / MARKER)["files"]
    except (DraftsmithError, KeyError) as error:
        return str(error)
    for name, digest in listed.items():
        if not (checkpoint / name).is_file():
            return f"{name} is missing"
        if sha256_file(checkpoint / name) != digest:
            return f"{name} is truncated or altered"
    return None


def newest_checkpoint(folder: Path, inputs: str, discard_stale: bool = False) -> Path | None:
    """The newest sound checkpoint, if any.

    A damaged one is named and the one before is used. One made from other inputs is refused, or thrown away.
    """
    for checkpoint in reversed(checkpoints(folder)):
        if problem := damage(checkpoint):
            say(f"checkpoint {checkpoint} is damaged ({problem}); falling back to the one before")
            continue
        if read_json(checkpoint / MARKER)["inputs"] == inputs:
            return checkpoint
        if not discard_stale:
            raise DraftsmithError(f"{folder}: checkpoints of a different recipe, data or number of blocks a step; "
                                  "choose another 'out' folder or delete it")
        wait_for_all()  # others may still be reading it
        if rank() == 0:
            shutil.rmtree(checkpoint)
    return None


def of_other_ranks(checkpoint: Path) -> bool:
    """Whether another number of ranks wrote it."""
    return bool(read_json(checkpoint / MARKER).get("ranks", world_size()) != world_size())


def load_checkpoint(engine: Any, checkpoint: Path) -> int:
    """Load a checkpoint into the engine; returns its step.

    What ZeRO has spread over another number of ranks is first converted to a universal checkpoint, which an engine
    made for one (`universal`) can read.
    """
    source = checkpoint
    if rank() == 0:
        for left in checkpoint.parent.glob(".step-*.universal"):  # by a run that was killed while it converted
            shutil.rmtree(left)
    if engine.load_universal_checkpoint():
        source = checkpoint.parent / f".{checkpoint.name}.universal"
        say(f"{checkpoint}: written by another number of ranks; converting it")
        first_makes(lambda: convert(checkpoint, source))
    path, client = engine.load_checkpoint(str(source), tag=TAG)
    if path is None:
        raise DraftsmithError(f"{checkpoint}: DeepSpeed could not load it")
    wait_for_all()
    if source != checkpoint:
        if rank() == 0:
            shutil.rmtree(source)
        for weight, state in engine.basic_optimizer.state.items():
            # Read as one tensor for all weights, on the CPU: each weight has its own, where it lies.
            state["step"] = torch.as_tensor(state["step"], dtype=torch.float32).clone().to(weight.device)
    set_rng_state(client["rng"])
    return int(client["step"])


def convert(checkpoint: Path, universal: Path) -> bool:
    """Write a checkpoint in DeepSpeed's universal format, for any number of ranks."""
    from deepspeed.checkpoint import ds_to_universal

    if rank() == 0:
        settings = argparse.Namespace(
            input_folder=str(checkpoint / TAG), output_folder=str(universal / TAG), num_extract_workers=1,
            num_merge_workers=1, keep_temp_folder=False, strict=True, inject_missing_state=True)
        try:
            with open(os.devnull, "w") as quiet, contextlib.redirect_stdout(quiet), contextlib.redirect_stderr(quiet):
                ds_to_universal.main(settings)
        except Exception as error:  # it raises whatever its parts do
            shutil.rmtree(universal, ignore_errors=True)
            raise DraftsmithError(f"cannot convert checkpoint {checkpoint}: {error!r}") from error
    return True
