"""Export a variant of a bundle as a stock Hugging Face folder.

    python scripts/export.py runs/quickstart/bundle --variant 4layer --out runs/quickstart/draft-4layer
"""

from __future__ import annotations

import argparse

import torch
from draftsmith.data import DraftsmithError
from draftsmith.decode.bundle import check_compatible, load_bundle
from draftsmith.decode.export import export_huggingface
from draftsmith.decode.target import load_description, load_target
from draftsmith.train.stage import run_job


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("bundle")
    parser.add_argument("--variant", required=True, help="4layer or 2layer: a depth of this bundle's draft")
    parser.add_argument("--out", required=True, help="folder to write")
    parser.add_argument("--target", help="target folder or hub name (default: the one named in the bundle)")
    parser.add_argument("--trust-remote-code", action="store_true", help="let the target's folder run its own code")
    args = parser.parse_args()
    bundle = load_bundle(args.bundle)
    depths = {f"{d}layer": d for d in (bundle.shape.layers, bundle.shape.exit)}
    if args.variant not in depths:
        raise DraftsmithError(f"no variant '{args.variant}' in {args.bundle}; there are {' and '.join(depths)}")
    name = args.target or bundle.manifest.target["name"]
    check_compatible(bundle, *load_description(name, args.trust_remote_code))
    target = load_target(name, torch.float32, "cpu", args.trust_remote_code)
    difference = export_huggingface(bundle, target, depths[args.variant], args.out)
    print(f"{args.out}: {args.variant} variant, reloaded with transformers; logits agree to {difference:.1e}")


if __name__ == "__main__":
    run_job(main, "export")
