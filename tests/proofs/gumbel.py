"""With a seed the text is the target's alone: the same for every draft, policy and proposer, and rightly distributed.

Bitwise on tiny models in float64; under the margin rule on a bundle's target (SmolLM2 by default); and the first two
tokens over many seeds against the tiny target's exact probabilities.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from _verdict import ROOT, conclude
from draftsmith.decode import Decoder, SamplingParams
from draftsmith.decode.bundle import load_bundle
from draftsmith.decode.identity import compare
from draftsmith.decode.sampling import GumbelNoise
from draftsmith.decode.target import load_target
from draftsmith.distill.init import build_draft
from draftsmith.train.stage import run_job
from scipy import stats
from tqdm import tqdm

sys.path.insert(0, str(ROOT / "tests"))

from conftest import make_bundle, make_draft, save_model  # noqa: E402

TREES = ("mtv(2,2,1,1)", "mtv(8,4,2)", "mtv(1,1,4)")
LOOKUPS = ("lookup(4)", "lookup(16)", "hybrid(4)")
TINY = (*(f"fixed({k})" for k in range(1, 17)), *TREES, *LOOKUPS, "paper", "goodput")
REAL = ("fixed(4)", "mtv(2,2,1,1)", "hybrid(4)", "paper", "goodput")
PROMPTS = ("SELECT name", "ab ab ab ab", "x")
QUESTIONS = ("Name three rivers of Europe.", "Write a haiku about rain.", "List the numbers from one to ten, in words.",
             "Translate to French: good morning, good night.")
SEEDS, TEXTS = 4, 4000


def tiny_decoders(folder: Path) -> dict[str, Decoder]:
    """One target with each kind of draft, in float64."""
    save_model(folder / "target")
    made = {}
    for name in ("layers of the target", "random weights", "the target itself"):
        target = load_target(str(folder / "target"), dtype=torch.float64)
        if name == "the target itself":
            draft = build_draft(target.model, [0, 1, 2, 3, 4], 2, (1.0, 1.5), torch.arange(259),
                                [torch.arange(90)[None]])
        else:
            draft = make_draft(target)
        variant = f"{draft.shape.layers}L"
        bundle = load_bundle(make_bundle(folder / name, target, draft, str(folder / "target"), variant=variant))
        if name == "random weights":
            torch.manual_seed(9)
            bundle.tensors.update({k: torch.randn_like(t) * 0.2 for k, t in bundle.tensors.items()
                                   if t.is_floating_point()})
        made[name] = Decoder.assemble(target, bundle)
    return made


def bitwise(decoders: dict[str, Decoder]) -> tuple[int, list[str]]:
    """Texts compared, and those that differ from the target's without a draft."""
    count, wrong = 0, []
    settings: list[dict[str, Any]] = [{"temperature": 1.0}, {"temperature": 0.7, "top_k": 40, "top_p": 0.9},
                                      {"temperature": 1.0, "frequency_penalty": 0.6, "repetition_penalty": 1.2}]
    alone = decoders["layers of the target"]
    for prompt in tqdm(PROMPTS, desc="bitwise", unit="prompt"):
        for seed in range(SEEDS):
            params = SamplingParams(max_tokens=40, ignore_eos=True, seed=seed, **settings[seed % len(settings)])
            expected = alone.generate(prompt, params, "ar").token_ids
            for name, decoder in decoders.items():
                for policy in TINY:
                    count += 1
                    if decoder.generate(prompt, params, policy).token_ids != expected:
                        wrong.append(f"{policy} with {name}, seed {seed}, {prompt!r}")
    return count, wrong


def on_a_real_target(folder: Path) -> tuple[int, int, list[dict[str, Any]]]:
    """Texts compared, those that differ within rounding, and the others."""
    decoder, count, excused, wrong = Decoder.load(folder), 0, 0, []
    for i, question in enumerate(tqdm(QUESTIONS, desc="real target", unit="prompt")):
        prompt = decoder.prompt_ids([{"role": "user", "content": question}])
        params = SamplingParams(max_tokens=48, temperature=0.8, seed=i)
        noise = GumbelNoise(i, decoder.runner.vocab_size)
        expected = decoder.generate(prompt, params, "ar").token_ids

        def score(logits: torch.Tensor, position: int, noise: GumbelNoise = noise) -> torch.Tensor:
            return torch.log_softmax(logits / 0.8, -1) + noise.gumbel(position)

        for policy in REAL:
            count += 1
            found = compare(decoder.runner, prompt, decoder.generate(prompt, params, policy).token_ids, expected, score)
            if found is not None and found.excused:
                excused += 1
            elif found is not None:
                wrong.append({"policy": policy, "question": question, **asdict(found)})
    return count, excused, wrong


def distribution(decoder: Decoder) -> float:
    """p-value of a chi-square test of two-token texts over seeds against the target's probabilities."""
    prompt = decoder.prompt_ids("SELECT name")
    texts = Counter(tuple(decoder.generate(prompt, SamplingParams(max_tokens=2, temperature=0.7, seed=s,
                                                                  ignore_eos=True), "fixed(2)").token_ids)
                    for s in tqdm(range(TEXTS), desc="distribution", unit="text"))

    def row(ids: list[int]) -> torch.Tensor:
        with torch.no_grad():
            logits = decoder.runner.forward(torch.tensor([ids]), decoder.runner.new_cache(1, len(ids)), 1)[1]
        return torch.softmax(logits[0, 0] / 0.7, -1)

    first = row(prompt)
    likely = first.topk(12).indices.tolist()
    expected = {(a, b): float(first[a] * p) for a in likely for b, p in enumerate(row([*prompt, a]).tolist())}
    cells = [text for text, p in expected.items() if p * TEXTS >= 10]
    rest = 1.0 - sum(expected[c] for c in cells)
    found = [*(texts[c] for c in cells), TEXTS - sum(texts[c] for c in cells)]
    return float(stats.chisquare(found, [TEXTS * p for p in (*(expected[c] for c in cells), rest)]).pvalue)


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "runs/quickstart/bundle")
    with tempfile.TemporaryDirectory() as work:
        decoders = tiny_decoders(Path(work))
        count, wrong = bitwise(decoders)
        p = distribution(decoders["layers of the target"])
    text, real_wrong = f"{count - len(wrong)} of {count} tiny float64 texts identical; p = {p:.3f} of {TEXTS} texts", []
    if folder.is_dir():
        real, excused, real_wrong = on_a_real_target(folder)
        text += f"; {real - len(real_wrong)} of {real} texts of a real target, {excused} of them within rounding"
    else:
        text += f"; no bundle at {folder}, so no real target"
    conclude("gumbel", not wrong and not real_wrong and p > 0.01, text, wrong=wrong[:20], real_wrong=real_wrong)


if __name__ == "__main__":
    run_job(main, "gumbel")
