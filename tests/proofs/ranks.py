"""One rank and two, ZeRO 0 to 3, at the same global batch: the same losses, through real `deepspeed` launches.

One rank accumulates the two micro-batches that two ranks compute side by side; 20 steps in float32.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from _verdict import ROOT, conclude

sys.path.insert(0, str(ROOT / "tests"))  # the tiny target is the tests' own
from launching import launch
from tiny import write_tiny_recipe

STEPS, BAR = 20, 1e-4
# name -> (ranks, ZeRO stage, layers computed twice)
RUNS = {"1 rank": (1, 0, False), "1 rank, recompute": (1, 0, True),
        **{f"2 ranks, ZeRO {stage}": (2, stage, False) for stage in range(4)},
        "2 ranks, ZeRO 3, recompute": (2, 3, True)}


def losses(recipe: Path, folder: Path, ranks: int, stage: int, recompute: bool) -> list[float]:
    out = folder / f"{ranks}-{stage}-{recompute}"
    out.mkdir()
    (out / "teacher").symlink_to(folder / "out" / "teacher")
    launch("distill", recipe, f"out={out}", f"distill.zero_stage={stage}", f"distill.accumulation={2 // ranks}",
           f"distill.recompute={str(recompute).lower()}", ranks=ranks)
    lines = [json.loads(line) for line in (out / "distill.jsonl").read_text().splitlines()]
    return [line["train/loss"] for line in lines if "train/loss" in line]


def main() -> None:
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work)
        recipe = write_tiny_recipe(folder, distill={"steps": STEPS, "save_every": STEPS, "eval_every": STEPS})
        launch("respond", recipe)
        found = {}
        for name, run in RUNS.items():
            found[name] = losses(recipe, folder, *run)
            print(f"{name}: {found[name][0]:.6f} to {found[name][-1]:.6f}", file=sys.stderr, flush=True)
    reference = found["1 rank"]
    worst = {name: max(abs(a - b) for a, b in zip(values, reference, strict=True)) for name, values in found.items()}
    falls = reference[-1] < 0.9 * reference[0]
    conclude("ranks", max(worst.values()) < BAR and falls,
             f"largest difference of a loss in {STEPS} steps from one rank's: "
             + ", ".join(f"{name} {value:.1e}" for name, value in worst.items() if name != "1 rank")
             + f" (bar {BAR:g}); the loss fell from {reference[0]:.3f} to {reference[-1]:.3f}", losses=found)


if __name__ == "__main__":
    main()
