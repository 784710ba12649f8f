"""The adaptive loop against plain decoding, the best fixed length, and transformers' two ways, interleaved by prompt.

    bash scripts/prove.sh speed BUNDLE [N [OTHER_KINDS.jsonl]]

N held-out prompts of the bundle's recipe (default 24), 128 tokens, greedy. The fixed length is tuned on other
held-out prompts. OTHER_KINDS: prompts with a "kind" in each row, of which each kind must not get slower.
"""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from pathlib import Path

from _verdict import conclude
from draftsmith.data.chat import encode_prompts
from draftsmith.data.io import DraftsmithError
from draftsmith.data.text import read_samples
from draftsmith.decode import Decoder, SamplingParams
from draftsmith.decode.attention import Tree
from draftsmith.decode.device import device_name
from draftsmith.decode.evaluation.interleave import acceptance, interleave, rates, rotated
from draftsmith.decode.evaluation.methods import ours
from draftsmith.decode.evaluation.statistics import Interval, paired_ratio
from draftsmith.decode.policies import make_policy
from draftsmith.decode.references import references, run_references
from draftsmith.train.recipe import Recipe
from draftsmith.train.stage import load_prompts, run_job
from tqdm import tqdm

import torch  # isort: skip  (after ours, which sets its threads)

TOKENS, TUNED_ON, LENGTHS, EACH_KIND = 128, 8, (1, 2, 3, 4, 6, 8), 4
OURS = "goodput"
BARS = {"AR": 1.6, "transformers generate": 2.1, "best fixed k": 1.0, "transformers assisted": 2.0,
        "AR, worst kind": 0.97, "prediction": 0.92}


def against_ar(decoder: Decoder, prompts: list[list[int]], temperature: float, what: str) -> Interval:
    """Goodput over AR, pair by pair. With a seed both write the same text."""
    each = [SamplingParams(max_tokens=TOKENS, temperature=temperature, seed=i if temperature else None)
            for i in range(len(prompts))]
    found = interleave({name: ours(decoder, name) for name in (OURS, "ar")}, prompts, each,
                       lambda some: tqdm(some, desc=what, unit="prompt"))
    row = paired_ratio(rates(found[OURS]), rates(found["ar"]))
    print(f"{what}: {OURS} / AR {row.mean:.2f} ({row.low:.2f} to {row.high:.2f}, n = {row.n})", flush=True)
    return row


def best_length(decoder: Decoder, prompts: list[list[int]]) -> tuple[str, dict[str, dict[str, float]]]:
    """The fixed length with the most tokens a second, and of each: the rate over the first's, acceptance, tokens a
    step."""
    names = [f"fixed({k})" for k in LENGTHS]
    found = interleave({name: ours(decoder, name) for name in names}, prompts, SamplingParams(max_tokens=TOKENS),
                       lambda some: tqdm(some, desc="tuning k", unit="prompt"))
    table = {}
    for name, some in found.items():
        accepted, per_step = acceptance(some)
        table[name] = {"rate": paired_ratio(rates(some), rates(found[names[0]])).mean, "acceptance": accepted or 0.0,
                       "tokens_per_step": per_step or 1.0}
    return max(table, key=lambda name: table[name]["rate"]), table


def prediction(decoder: Decoder, prompts: list[list[int]]) -> float:
    """Measured over predicted speed-up: what the cost table says of the rounds that were run, and of plain decoding."""
    costs = decoder.costs
    assert costs is not None
    measured, plain, told = defaultdict(float), 0.0, 0.0
    for i, prompt in enumerate(tqdm(prompts, desc="prediction", unit="prompt")):
        for name in rotated([OURS, "ar"], i):
            policy = make_policy(name, decoder.context)
            generation = decoder.start(prompt, SamplingParams(max_tokens=TOKENS), policy)
            generation.prefill()
            started = time.perf_counter()
            while generation.emitted < TOKENS and generation.tokens[-1] not in decoder.eos_ids:
                context, draft = len(generation.tokens), generation.propose()
                tree = None if draft.is_chain else Tree.of(generation.pass_parents(draft), decoder.runner.device)
                ids = torch.tensor([generation.pass_ids(draft)], device=decoder.runner.device)
                hidden, logits = decoder.runner.forward(ids, generation.cache, tree=tree)
                generation.finish(draft, hidden[0], logits[0])
                if name == "ar":
                    plain += costs.rows(1, context)
                    continue
                told += costs.rows(len(draft.nodes) + 1, context)
                if draft.variant is not None:
                    told += draft.steps * costs.draft_step(draft.variant.name, context)
                    told += max(0, draft.read - 1) * costs.read  # the prompt, the first time
            measured[name] += time.perf_counter() - started
            generation.close()
    return (measured["ar"] / measured[OURS]) / (plain / told)


def main() -> None:
    if len(sys.argv) < 2 or not Path(sys.argv[1]).is_dir():
        raise DraftsmithError("usage: bash scripts/prove.sh speed BUNDLE [N [OTHER_KINDS.jsonl]]")
    count = int(sys.argv[2]) if len(sys.argv) > 2 else 24
    decoder = Decoder.load(sys.argv[1])
    assert decoder.bundle is not None
    recipe = Recipe.model_validate(decoder.bundle.manifest.provenance["recipe"])
    _, prompts = encode_prompts(decoder.tokenizer, load_prompts(recipe, "heldout"), decoder.runner.context - TOKENS)
    prompts, others = prompts[:count], prompts[count : count + TUNED_ON]
    if len(others) < TUNED_ON:
        raise DraftsmithError(f"{count + TUNED_ON} held-out prompts are needed, {len(prompts) + len(others)} are there")
    fixed, lengths = best_length(decoder, others)
    for name, row in lengths.items():
        print(f"{name}: {row['rate']:.2f} x fixed({LENGTHS[0]}), acceptance {row['acceptance']:.3f}, "
              f"{row['tokens_per_step']:.2f} tokens a step (n = {len(others)})", flush=True)
    outside = {name: run for name, run in references(decoder).items()
                                     if name == "transformers generate" or "assisted" in name}
    table = run_references(decoder, outside, prompts, [OURS, "ar", fixed], TOKENS,
                           lambda p: tqdm(p, desc="speed", unit="prompt"))
    for name, row in table.items():
        print(f"{name}: {row['tokens_per_second']:.1f} tokens/s, {row['identical']} of {row['prompts']} texts the same",
              flush=True)
    ratio = {name: 1 / row["ratio"]["mean"] for name, row in table.items()}
    assisted = next(name for name in table if "assisted" in name)
    found = {"AR": ratio["ar"], "transformers generate": ratio["transformers generate"], "best fixed k": ratio[fixed],
             "transformers assisted": ratio[assisted], "prediction": prediction(decoder, others)}
    kinds: dict[str, list[list[int]]] = defaultdict(list)
    if len(sys.argv) > 3:
        usable = zip(*encode_prompts(decoder.tokenizer, read_samples(sys.argv[3]), decoder.runner.context - TOKENS),
                     strict=True)
        for sample, prompt in usable:
            if len(kinds[sample.kind]) < EACH_KIND:
                kinds[sample.kind].append(prompt)
    by_kind = {kind: against_ar(decoder, some, 0.0, kind) for kind, some in kinds.items()}
    if by_kind:
        found["AR, worst kind"] = min(row.mean for row in by_kind.values())
    sampled = {f"{t:g}": against_ar(decoder, others, t, f"temperature {t:g}") for t in (0.7, 1.0)}
    missed = [name for name, value in found.items() if value < BARS[name]]
    conclude("speed", not missed, "; ".join(f"{OURS} / {name} {value:.2f} (bar {BARS[name]:g})"
                                            for name, value in found.items())
             + f"; n = {len(prompts)}" + ("" if by_kind else "; other kinds of text not measured"),
             found=found, fixed=fixed, table=table, lengths=lengths, machine=device_name(),
             kinds={kind: vars(row) for kind, row in by_kind.items()},
             sampled={t: vars(row) for t, row in sampled.items()})


if __name__ == "__main__":
    run_job(main, "speed")
