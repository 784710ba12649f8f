"""Greedy text of every policy equals stock transformers', run in another process, on every held-out prompt.

    bash scripts/prove.sh identity [BUNDLE [N [PROMPTS.jsonl [MAX_TOKENS]]]]

PROMPTS instead of the bundle's held-out ones, of any kinds ("kind" in a row); N of them, 0 for all.

A mismatch counts as a failure unless the two best tokens are closer than the rounding between passes of
different sizes (`draftsmith.decode.identity`).
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from _verdict import ROOT, conclude
from draftsmith.data.chat import prompt_ids
from draftsmith.data.io import DraftsmithError
from draftsmith.data.text import read_samples
from draftsmith.decode import Decoder, SamplingParams
from draftsmith.decode.identity import compare
from draftsmith.train.recipe import Recipe
from draftsmith.train.stage import load_prompts, run_job
from tqdm import tqdm

POLICIES = ("ar", "fixed(4)", "mtv(2,2,1,1)", "lookup(4)", "hybrid(4)", "paper", "goodput")

STOCK = """
import json, sys, torch
from transformers import AutoModelForCausalLM
folder, jobs, out, limit = sys.argv[1], json.load(open(sys.argv[2])), sys.argv[3], int(sys.argv[4])
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
texts = []
for ids in jobs["prompts"]:
    ids = torch.tensor([ids])
    out_ids = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=limit, do_sample=False,
                             eos_token_id=jobs["eos"] or None, pad_token_id=min(jobs["eos"], default=0))
    texts.append(out_ids[0, ids.shape[1]:].tolist())
json.dump(texts, open(out, "w"))
"""


def stock_texts(folder: str, prompts: list[list[int]], eos: list[int], limit: int) -> list[list[int]]:
    """Greedy ids from transformers alone: the child process imports nothing of ours."""
    with tempfile.TemporaryDirectory() as work:
        jobs, out = Path(work) / "jobs.json", Path(work) / "out.json"
        jobs.write_text(json.dumps({"prompts": prompts, "eos": eos}))
        subprocess.run([sys.executable, "-c", STOCK, folder, str(jobs), str(out), str(limit)], check=True)
        return list(json.loads(out.read_text()))


def main() -> None:
    from draftsmith.decode.target import resolve

    folder = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "runs/quickstart/bundle")
    if not folder.is_dir():
        raise DraftsmithError(f"{folder}: no bundle; run bash scripts/quickstart.sh first, or name one")
    decoder = Decoder.load(folder)
    assert decoder.bundle is not None
    recipe = Recipe.model_validate(decoder.bundle.manifest.provenance["recipe"])
    samples = read_samples(sys.argv[3]) if len(sys.argv) > 3 else load_prompts(recipe, "heldout")
    samples = samples[: (int(sys.argv[2]) if len(sys.argv) > 2 else 0) or None]
    limit = int(sys.argv[4]) if len(sys.argv) > 4 else 64
    prompts = [prompt_ids(decoder.tokenizer, s) for s in samples]
    stock = stock_texts(resolve(decoder.bundle.manifest.target["name"]), prompts, sorted(decoder.eos_ids), limit)
    failures, excused, rates = [], 0, {}
    for policy in POLICIES:
        tokens = steps = 0
        for i, prompt in enumerate(tqdm(prompts, desc=policy, unit="prompt")):
            output = decoder.generate(prompt, SamplingParams(max_tokens=limit), policy)
            tokens, steps = tokens + output.stats.emitted - 1, steps + output.stats.steps
            found = compare(decoder.runner, prompt, output.token_ids, stock[i])
            if found is not None and found.excused:
                excused += 1
            elif found is not None:
                failures.append({"policy": policy, "prompt": samples[i].id,
                                 **{k: min(v, 1e9) for k, v in asdict(found).items()}})
        rates[policy] = tokens / max(1, steps)
    print("tokens per target pass: " + ", ".join(f"{policy} {rate:.2f}" for policy, rate in rates.items()))
    texts = len(prompts) * len(POLICIES)
    kinds = {s.kind for s in samples}
    conclude("identity", not failures and excused <= max(1, texts // 1000),
             f"{texts - len(failures) - excused} of {texts} texts ({len(prompts)} prompts of {len(kinds)} kinds, "
             f"{len(POLICIES)} policies, up to {limit} tokens) are stock transformers' greedy text; {excused} differ "
             f"within rounding (bar: 1 in 1,000), {len(failures)} otherwise",
             texts=texts, excused=excused, failures=failures, tokens_per_pass=rates)


if __name__ == "__main__":
    run_job(main, "identity")
