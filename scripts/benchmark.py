"""Compare methods on tasks, resumably, and write a report.

    python scripts/benchmark.py --recipe recipes/eval-cpu.yaml [--ablate] [section.key=value ...]

Run the same command again to go on after an interruption; nothing is measured twice.
"""

from __future__ import annotations

import argparse

from draftsmith.decode.evaluation.benchmark import run
from draftsmith.decode.evaluation.recipe import load_eval_recipe
from draftsmith.train.stage import run_job


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", required=True)
    parser.add_argument("--ablate", action="store_true", help="each part of both controllers left out in turn, and tau")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="override recipe values")
    args = parser.parse_args()
    print(f"Report: {run(load_eval_recipe(args.recipe, args.overrides), args.ablate)}")


if __name__ == "__main__":
    run_job(main, "benchmark")
