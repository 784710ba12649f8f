"""Export a variant of a bundle for transformers, vLLM, SGLang or llama.cpp.

    python scripts/export.py runs/quickstart/bundle --variant 4layer --out draft-4layer
    python scripts/export.py runs/quickstart/bundle --variant 4layer --format gguf --quant q8_0 --out draft-gguf
"""

from __future__ import annotations

import argparse

import torch
from draftsmith.decode.bundle import check_compatible, load_bundle
from draftsmith.decode.exports.llamacpp import QUANTS
from draftsmith.decode.exports.stock import DTYPES, FORMATS, choose_variant, export
from draftsmith.decode.target import load_description, load_target
from draftsmith.train.stage import run_job


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("bundle")
    parser.add_argument("--format", choices=FORMATS, default="hf", help="for which engine (default: hf, transformers)")
    parser.add_argument("--variant", required=True, help="4layer or 2layer: a depth of this bundle's draft")
    parser.add_argument("--alpha", type=float, help="in [0.7, 1.5]: the narrower width that alpha selects")
    parser.add_argument("--out", required=True, help="folder to write")
    parser.add_argument("--dtype", choices=DTYPES, help="of a Hugging Face folder (default: float32)")
    parser.add_argument("--quant", choices=QUANTS, help="of a GGUF file (default: f16)")
    parser.add_argument("--target-gguf", help="the target's own GGUF, whose tokenizer a GGUF draft takes")
    parser.add_argument("--target", help="target folder or hub name (default: the one named in the bundle)")
    parser.add_argument("--trust-remote-code", action="store_true", help="let the target's folder run its own code")
    args = parser.parse_args()
    bundle = load_bundle(args.bundle)
    variant = choose_variant(bundle.shape, args.variant, args.alpha)
    name = args.target or bundle.manifest.target["name"]
    check_compatible(bundle, *load_description(name, args.trust_remote_code))
    target = load_target(name, torch.float32, "cpu", args.trust_remote_code)
    done = export(bundle, target, variant, args.out, args.format, args.dtype, args.quant, args.target_gguf)
    print(f"{args.out}: {done}")


if __name__ == "__main__":
    run_job(main, "export")
