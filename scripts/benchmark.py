"""Compare methods on tasks, resumably, and write a report.

    python scripts/benchmark.py --recipe recipes/eval-cpu.yaml [--ablate] [section.key=value ...]

Run the same command again to go on after an interruption; nothing is measured twice.
"""

from __future__ import annotations

import argparse
import sys

from draftsmith.data import DraftsmithError
from draftsmith.decode.evaluation.benchmark import run
from draftsmith.decode.evaluation.recipe import load_eval_recipe


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", required=True)
    parser.add_argument("--ablate", action="store_true", help="each part of both controllers left out in turn, and tau")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="override recipe values")
    args = parser.parse_args()
    try:
        print(f"Report: {run(load_eval_recipe(args.recipe, args.overrides), args.ablate)}")
    except DraftsmithError as error:
        print(f"benchmark: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nbenchmark: interrupted; run the same command again to go on", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
