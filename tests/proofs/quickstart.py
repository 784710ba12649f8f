"""A fresh clone with a fresh environment reaches a validated, faster decoder within 25 minutes after the install."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from _verdict import ROOT, conclude
from draftsmith.data.io import read_json

LIMIT_MINUTES = 25


def main() -> None:
    work = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(tempfile.mkdtemp(prefix="draftsmith-"))
    clone = work / "draftsmith"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
    # An environment of its own: nothing from the one that runs this proof, and no converted target.
    environment = {k: v for k, v in os.environ.items() if k not in ("VIRTUAL_ENV", "PYTHONPATH")}
    environment["PATH"] = ":".join(p for p in environment["PATH"].split(":") if str(ROOT) not in p)
    environment["DRAFTSMITH_CACHE"] = str(work / "cache")
    began = time.monotonic()
    install = "source scripts/setup.sh && setup"
    subprocess.run(["bash", "-c", install], cwd=clone, env=environment, check=True)
    installed = time.monotonic()
    done = subprocess.run(["bash", "scripts/quickstart.sh"], cwd=clone, env=environment, check=False)
    minutes = (time.monotonic() - installed) / 60
    report = clone / "runs/quickstart/report/report.json"
    if done.returncode != 0 or not report.is_file():
        conclude("quickstart", False, f"exit code {done.returncode} after {minutes:.1f} minutes in {clone}")
    found = read_json(report)
    summary, default = found["summary"], found["default"]
    up, stock = summary[default]["speedup"], summary["transformers"]["speedup"]
    mine = summary[default]
    passed = minutes <= LIMIT_MINUTES and up["low"] > 1 and stock["mean"] <= 1
    conclude(
        "quickstart",
        passed,
        f"{minutes:.1f} minutes after {(installed - began) / 60:.1f} of install; {default} "
        f"is {up['mean']:.2f} x AR (95 % {up['low']:.2f} to {up['high']:.2f}, n = {up['n']}), AR "
        f"{summary['ar']['tokens_per_second']:.1f} tokens/s against "
        f"{summary['transformers']['tokens_per_second']:.1f} of transformers; acceptance "
        f"{mine['acceptance']:.3f}, {mine['tokens_per_step']:.2f} tokens per step, "
        f"{mine['identical']} of {mine['prompts']} texts the target's own",
        minutes=minutes,
        summary=summary,
    )


if __name__ == "__main__":
    main()
