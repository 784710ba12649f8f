"""Five SIGKILLs, one of them inside checkpoint writing, change nothing: the final weights and optimiser state
have the SHA-256 of an uninterrupted run (two ranks, ZeRO 1, accumulation 2), through real `deepspeed` launches."""

from __future__ import annotations

import hashlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from _verdict import ROOT, conclude

sys.path.insert(0, str(ROOT / "tests"))  # the tiny target is the tests' own
from draftsmith.train.checkpoint import checkpoints
from launching import start
from tiny import write_tiny_recipe

STEPS, KILLS, RANKS = 120, 5, 2


def launch(job: str, recipe: Path) -> subprocess.Popen[bytes]:
    return start(job, recipe, recipe.parent / f"{job}.log", ranks=RANKS)


def kill(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL to the launcher and the ranks it started."""
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def digest(value: Any, into: Any) -> None:
    """Hash every tensor and number of a nested state, in order."""
    if isinstance(value, torch.Tensor):
        into.update(
            str(value.dtype).encode() + value.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
            if value.dim()
            else str((value.dtype, value.item())).encode()
        )
    elif isinstance(value, dict):
        for key in sorted(value, key=str):
            into.update(str(key).encode())
            digest(value[key], into)
    elif isinstance(value, (list, tuple)):
        for item in value:
            digest(item, into)
    elif isinstance(value, (int, float, str, bool)):
        into.update(repr(value).encode())


def state_hash(out: Path) -> str:
    """SHA-256 over the weights and the optimiser state of the last checkpoint."""
    last = checkpoints(out / "checkpoints" / "distill")[-1]
    assert last.name == f"step-{STEPS:08d}", f"{last} is not the last step's"
    found = hashlib.sha256()
    for file in sorted(last.rglob("*_states.pt")):
        state = torch.load(file, map_location="cpu", weights_only=False)
        digest({k: state.get(k) for k in ("module", "optimizer", "optimizer_state_dict")}, found)
    return found.hexdigest()


def writing(out: Path) -> bool:
    return any((out / "checkpoints" / "distill").glob(".step-*.tmp"))


def newest(out: Path) -> int:
    done = checkpoints(out / "checkpoints" / "distill")
    return int(done[-1].name.split("-")[1]) if done else 0


def interrupted_run(recipe: Path, out: Path, chooser: random.Random) -> list[str]:
    """Run to the end with KILLS kills; one waits for a checkpoint in the making."""
    moments = []
    inside = chooser.randrange(KILLS)
    for number in range(KILLS):
        process, before, began = launch("distill", recipe), newest(out), time.monotonic()
        # Wait for training to move on, so that kills are spread over the run and not over the start-up.
        while newest(out) <= before and process.poll() is None and not (number == inside and writing(out)):
            time.sleep(0.001)
        if number != inside:
            time.sleep(chooser.uniform(0.0, 0.5))
        else:
            while not writing(out) and process.poll() is None:
                time.sleep(0.0005)
        if process.poll() is not None:
            raise SystemExit(f"the job ended before kill {number + 1}; see {recipe.parent}/distill.log")
        in_write = writing(out)
        kill(process)
        moments.append(
            f"after step {newest(out)}{', inside a checkpoint write' if in_write else ''} "
            f"({time.monotonic() - began:.1f} s)"
        )
        print(f"kill {number + 1}: {moments[-1]}", file=sys.stderr, flush=True)
    if launch("distill", recipe).wait() != 0:
        raise SystemExit(f"the resumed job failed; see {recipe.parent}/distill.log")
    return moments


def main() -> None:
    seed = int(sys.argv[1]) if len(sys.argv) > 1 else random.randrange(10**6)
    with tempfile.TemporaryDirectory() as work:
        hashes = {}
        moments: list[str] = []
        for name in ("whole", "killed"):
            folder = Path(work) / name
            recipe = write_tiny_recipe(
                folder, distill={"steps": STEPS, "accumulation": 2, "zero_stage": 1, "save_every": 6, "eval_prompts": 0}
            )
            if launch("respond", recipe).wait() != 0:
                raise SystemExit(f"respond failed:\n{(folder / 'respond.log').read_text()[-2000:]}")
            if name == "whole":
                if launch("distill", recipe).wait() != 0:
                    raise SystemExit(f"distill failed:\n{(folder / 'distill.log').read_text()[-2000:]}")
            else:
                moments = interrupted_run(recipe, folder / "out", random.Random(seed))
            hashes[name] = state_hash(folder / "out")
    inside = sum("inside" in m for m in moments)
    passed = hashes["whole"] == hashes["killed"] and len(moments) == KILLS and inside >= 1
    conclude(
        "resume",
        passed,
        f"{len(moments)} SIGKILLs ({inside} inside a checkpoint write, seed {seed}); weights "
        f"and optimiser {hashes['killed'][:12]} against {hashes['whole'][:12]} uninterrupted",
        moments=moments,
        **hashes,
    )


if __name__ == "__main__":
    main()
