"""Validate a trained bundle: identical text, acceptance, speed. Exits 1 when a threshold is missed.

    python scripts/validate_acceptance.py runs/quickstart/bundle [--recipe recipes/quickstart.yaml]
    python scripts/validate_acceptance.py runs/new/bundle --against runs/old/bundle    is the new draft better?
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from draftsmith.data import DraftsmithError
from draftsmith.data.chat import encode_prompts
from draftsmith.data.text import read_samples
from draftsmith.decode.bundle import load_bundle, update_manifest
from draftsmith.decode.decoder import Decoder
from draftsmith.decode.device import device_name
from draftsmith.decode.evaluation.against import compare_drafts
from draftsmith.decode.evaluation.methods import stock
from draftsmith.decode.report import table, write_report
from draftsmith.decode.sampling import SamplingParams
from draftsmith.decode.target import load_target
from draftsmith.decode.validate import Result, check, run_methods, summarise
from draftsmith.train.recipe import Recipe, load_recipe
from draftsmith.train.stage import load_prompts, run_job
from pydantic import ValidationError
from tqdm import tqdm

REFERENCE_PROMPTS = 4  # enough to compare plain decoding with; its speed is not what is being judged
EXAMPLES = 4


def recipe_of(args: argparse.Namespace, manifest: Any) -> Recipe:
    if args.recipe:
        return load_recipe(args.recipe)
    try:
        return Recipe.model_validate(manifest.provenance["recipe"])
    except (KeyError, ValidationError) as error:
        raise DraftsmithError("the bundle holds no recipe that this release reads; name one with --recipe") from error


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("bundle")
    parser.add_argument("--recipe", help="take prompts, limits and thresholds from here (default: the bundle's own)")
    parser.add_argument("--prompts", help="JSONL or text file of prompts instead of the recipe's held-out ones")
    parser.add_argument("--target", help="target folder or hub name (default: the one named in the bundle)")
    parser.add_argument("--count", type=int, help="number of prompts")
    parser.add_argument("--against", help="another bundle: say whether this one's draft is better, and end; exits 1 "
                        "where it is worse")
    parser.add_argument("--out", help="report folder (default: report, beside the bundle)")
    parser.add_argument("--trust-remote-code", action="store_true", help="let the target's folder run its own code")
    args = parser.parse_args()
    bundle = load_bundle(args.bundle)
    recipe = recipe_of(args, bundle.manifest)
    v, thresholds = recipe.validate_, recipe.validate_.thresholds.model_dump()
    out = Path(args.out or Path(args.bundle).resolve().parent / "report")
    samples = read_samples(args.prompts) if args.prompts else load_prompts(recipe, "heldout")
    samples = samples[: v.count if args.count is None else max(0, args.count)]
    if len(samples) < 2:
        raise DraftsmithError(f"validation compares prompts in pairs and needs at least 2, not {len(samples)}")
    trust = args.trust_remote_code or recipe.target.trust_remote_code
    decoder = Decoder.load(args.bundle, args.target, quiet=False, trust_remote_code=trust)
    if args.against:
        _, prompts = encode_prompts(decoder.tokenizer, samples, decoder.runner.context - v.max_tokens)
        found = compare_drafts(decoder, decoder.beside(args.against), prompts, v.k, v.max_tokens,
                               lambda x: tqdm(x, desc="against", unit="prompt"))
        print(found)
        sys.exit(int(found.worse))
    default = decoder.context.default
    methods = list(dict.fromkeys(["ar", f"fixed({v.k})", "paper", "goodput", default]))
    reference = None
    if v.reference:
        own = load_target(args.target or bundle.manifest.target["name"], trust_remote_code=trust)
        reference = stock(own.model, own.tokenizer, own.eos_ids)
    samples, prompts = encode_prompts(decoder.tokenizer, samples, decoder.runner.context - v.max_tokens)
    rows = run_methods(decoder, samples, prompts, methods, v.max_tokens, reference, REFERENCE_PROMPTS,
                       lambda some: tqdm(some, desc="validate", unit="prompt"))
    result = Result(rows, default, summarise(rows, [*methods, "transformers"]), machine=device_name())
    for prompt in prompts[:EXAMPLES]:
        example = decoder.generate(prompt, SamplingParams(max_tokens=v.max_tokens), default)
        result.examples.append([(decoder.tokenizer.decode([t.id]), t.source) for t in example.tokens])
    misses = check(result.summary, thresholds, default)
    report = write_report(out, result, thresholds, misses, f"Acceptance validation: {recipe.name}")
    print(f"\n{table(result)}\n\nReport: {report}")
    update_manifest(args.bundle, evaluation={**bundle.manifest.evaluation, "validation": result.summary})
    for miss in misses:
        print(f"MISS: {miss}", file=sys.stderr)
    if misses:
        sys.exit(1)


if __name__ == "__main__":
    run_job(main, "validate_acceptance")
