"""Can a test tell speculative from plain sampling? Many continuations of a tiny model, under all the usual options.

    bash scripts/prove.sh sampling [COUNT]

Two samples are compared token by token and by pairs of tokens (chi-square, Bonferroni). The same test has to notice
a bias of 2 %, or its silence means nothing.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from _verdict import ROOT, conclude
from draftsmith.decode import Decoder, SamplingParams
from draftsmith.decode.bundle import load_bundle
from draftsmith.decode.sampling import Noise
from draftsmith.decode.schedule import Batch
from draftsmith.decode.target import load_target
from draftsmith.train.stage import run_job
from scipy import stats
from tqdm import tqdm

sys.path.insert(0, str(ROOT / "tests"))

from conftest import make_bundle, make_draft, save_model  # noqa: E402

COUNT = int(sys.argv[1]) if len(sys.argv) > 1 else 20000
LENGTH, SLOTS, LEAST, BIAS = 4, 50, 10, 0.02
POLICIES = ("fixed(3)", "mtv(3,2,1)")
OPTIONS = dict(temperature=1.0, top_k=50, top_p=0.9, repetition_penalty=1.1, presence_penalty=0.3,
               frequency_penalty=0.2, max_tokens=LENGTH, ignore_eos=True)
Texts = list[tuple[int, ...]]


class Biased(Noise):
    """In 2 % of its draws it takes the least likely of the possible tokens."""

    def draw(self, probs_V: torch.Tensor, position: int) -> int:
        if float(torch.rand((), generator=self.generator)) < BIAS:
            return int(torch.where(probs_V > 0, probs_V, torch.inf).argmin())
        return super().draw(probs_V, position)


def continuations(decoder: Decoder, policy: str, seed: int, noise: Callable[[torch.Generator], Noise]) -> Texts:
    """COUNT texts, each with noise of its own."""
    prompt, params = decoder.prompt_ids("SELECT name"), SamplingParams(**OPTIONS)  # type: ignore[arg-type]
    batch = Batch(decoder.runner, decoder.tokenizer, SLOTS, len(prompt) + LENGTH)
    texts: Texts = []
    for number in range(COUNT):
        request = decoder.request(prompt, params, policy, group=prompt)
        generator = torch.Generator().manual_seed(seed * COUNT + number)
        request.start = with_noise(request.start, noise(generator))
        batch.submit(request)
    with tqdm(total=COUNT, desc=policy, unit="text") as bar:
        while batch.busy:
            for request, chunk in batch.step():
                if chunk is None or request.error:
                    raise RuntimeError(str(request.error))
                if chunk.done:
                    texts.append(tuple(chunk.output.token_ids))
                    bar.update()
    return texts


def with_noise(start: Callable, noise: Noise) -> Callable:  # type: ignore[type-arg]
    def started(cache: object, slot: int) -> object:
        generation = start(cache, slot)
        generation.noise = noise
        if generation.proposer is not None:
            generation.proposer.noise = noise
        return generation
    return started


def difference(a: Texts, b: Texts) -> float:
    """The smallest p-value of the tests, times their number."""
    views: list[Callable[[tuple[int, ...]], tuple[int, ...]]] = [
        *((lambda t, i=i: (t[i],)) for i in range(LENGTH)),  # type: ignore[misc]
        *((lambda t, i=i: t[i : i + 2]) for i in range(LENGTH - 1))]  # type: ignore[misc]
    p = []
    for view in views:
        x, y = Counter(map(view, a)), Counter(map(view, b))
        cells = [c for c in x.keys() | y.keys() if x[c] + y[c] >= 2 * LEAST]
        table = np.array([[n[c] for c in cells] + [len(t) - sum(n[c] for c in cells)] for n, t in ((x, a), (y, b))])
        p.append(float(stats.chi2_contingency(table[:, table.sum(0) > 0]).pvalue))
    return min(1.0, min(p) * len(p))


def main() -> None:
    with tempfile.TemporaryDirectory() as work:
        folder = save_model(Path(work) / "target")
        target = load_target(str(folder))
        bundle = make_bundle(Path(work) / "bundle", target, make_draft(target, head=250), str(folder))
        decoder = Decoder.assemble(target, load_bundle(bundle))
        plain = continuations(decoder, "ar", 0, Noise)
        p = {policy: difference(plain, continuations(decoder, policy, 1 + i, Noise))
             for i, policy in enumerate(POLICIES)}
        told = difference(plain, continuations(decoder, "fixed(3)", 9, Biased))
    print("\n| sampled with | p against plain |\n|---|---|")
    for policy, value in p.items():
        print(f"| {policy} | {value:.3f} |")
    print(f"| fixed(3), {BIAS:.0%} biased | {told:.1e} |")
    conclude("sampling", min(p.values()) > 0.01 and told < 1e-4,
             f"{COUNT} texts each: smallest p {min(p.values()):.3f} (bar 0.01) over {', '.join(POLICIES)}; a planted "
             f"bias of {BIAS:.0%} is told with p = {told:.1e}", p=p, told=told)


if __name__ == "__main__":
    run_job(main, "sampling")
