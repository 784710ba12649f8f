"""Job `trace`: decode prompts the draft was not trained on and log acceptance for every variant.

    deepspeed train/trace.py --recipe recipes/quickstart.yaml
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from draftsmith.data import DraftsmithError
from draftsmith.data.chat import encode_prompts
from draftsmith.data.io import load_tensors, read_json
from draftsmith.data.text import Sample
from draftsmith.data.traces import HORIZON, Traces, read_meta, write_traces
from draftsmith.decode.costs import Costs, cost_key, measure_costs
from draftsmith.decode.draft import DraftRunner
from draftsmith.decode.loop import FEATURE_TOKENS, Generation
from draftsmith.decode.policies import Fixed, Plan, Round, View
from draftsmith.decode.runner import Runner, load_runner
from draftsmith.decode.sampling import GumbelNoise, SamplingParams, process
from draftsmith.decode.schedule import Batch, Request
from draftsmith.decode.target import Target
from draftsmith.distill.variants import DraftShape, Variant
from draftsmith.train.recipe import Recipe, parse_args
from draftsmith.train.stage import (
    from_first,
    gather,
    inputs_hash,
    load_trace_prompts,
    own_folder,
    rank,
    ranks_together,
    run_job,
    say,
    shared_target,
    world_size,
)
from tqdm import tqdm


class Logged(Fixed):
    """Fixed-length speculation of one request that keeps one row per gating decision, every 8 emitted tokens, and
    (margin, label) pairs, to calibrate `goodput`."""

    wants_margin = wants_perplexity = True

    def __init__(self, k: int, variant: Variant, number: int) -> None:
        """`number` of the variant."""
        super().__init__(k, variant)
        self.number, self.due = number, 0
        self.rows: list[dict[str, Any]] = []
        self.pairs: list[tuple[float, float]] = []

    def plan(self, view: View) -> Plan:
        if view.emitted >= self.due:
            confidence = view.meter.confidence()
            self.rows.append({"position": view.emitted, "features": view.features().numpy(), "variant": self.number,
                              "drafted": 0, "accepted": 0,
                              "confidence": np.nan if confidence is None else confidence})
            self.due = view.emitted + FEATURE_TOKENS
        return super().plan(view)

    def observe(self, finished: Round) -> None:
        self.rows[-1]["drafted"] += finished.drafted
        self.rows[-1]["accepted"] += finished.accepted
        self.pairs += zip(finished.margins, finished.labels, strict=False)


@torch.no_grad()
def teacher_forced_acceptance(runner: Runner, draft: DraftRunner, tokens: list[int], prompt_length: int,
                              params: SamplingParams) -> np.ndarray:
    """Sum of min(p, q) at every emitted position for every variant, float32 [A, emitted]."""
    ids = torch.tensor([tokens[:-1]], device=runner.device)
    emitted = len(tokens) - prompt_length
    cache = runner.new_cache(1, len(tokens))
    p_EV = process(runner.forward(ids, cache, emitted)[1][0], params)
    p_ED = p_EV[:, draft.head_ids_for(tokens[:prompt_length])]
    out = []
    for variant in draft.shape.variants():
        logits = draft.forward(ids, draft.new_cache(len(tokens), tokens[:prompt_length]), variant, emitted)
        out.append(torch.minimum(p_ED, process(logits, params).to(p_ED.dtype)).sum(-1).float().cpu().numpy())
    return np.stack(out)


def fit_margin(pairs: list[tuple[float, float]], cap: float) -> list[float]:
    """Logistic regression of acceptance on the capped margin: [intercept, slope], lightly regularised."""
    if len(pairs) < 16:
        return [0.0, 0.5]
    data = torch.tensor(pairs, dtype=torch.float64)
    x, y = data[:, 0].clamp(max=cap), data[:, 1]
    weights = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([weights], max_iter=100, line_search_fn="strong_wolfe")

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = torch.nn.functional.binary_cross_entropy_with_logits(weights[0] + weights[1] * x, y)
        loss = loss + 1e-3 * weights.square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    return [float(w) for w in weights.detach()]


@dataclass
class PromptTrace:
    """Decisions of one prompt (`acceptance` float32 [A, HORIZON] each) and its (margin, label) pairs."""

    number: int
    rows: list[dict[str, Any]]
    pairs: list[tuple[float, float]]


def trace_prompts(recipe: Recipe, target: Target, runner: Runner, draft: DraftRunner, prompts: dict[int, list[int]],
                  progress: Callable[[], object]) -> list[PromptTrace]:
    """Decode prompts, given by number, with one of the variants each, in rotation; log every decision.

    They share the target's passes; a number's noise is its own, so that it does not matter which do.
    """
    t, variants = recipe.trace, draft.shape.variants()
    params = SamplingParams(max_tokens=t.max_tokens, temperature=t.temperature, seed=recipe.seed)
    batch = Batch(runner, target.tokenizer, min(t.batch, max(1, len(prompts))),
                  max(map(len, prompts.values()), default=0) + t.max_tokens)
    traced: list[PromptTrace] = []

    def start(number: int, cache: Any, slot: int) -> Generation:
        which = number % len(variants)
        return Generation(prompts[number], params, Logged(t.k, variants[which], which), runner, draft,
                          GumbelNoise(recipe.seed, runner.vocab_size, number), target.eos_ids, cache=cache, slot=slot)

    numbers = {Request(partial(start, number)): number for number in prompts}
    for request in numbers:
        batch.submit(request)
    while batch.busy:
        for request, chunk in batch.step():
            if request.error is not None:
                raise request.error
            if chunk is not None and chunk.done and request.answer is not None:
                policy = request.answer.generation.policy
                assert isinstance(policy, Logged)
                number = numbers[request]
                add_acceptance(policy.rows, runner, draft, prompts[number], chunk.output.token_ids, params)
                traced.append(PromptTrace(number, policy.rows, policy.pairs))
                progress()
    return traced


def add_acceptance(rows: list[dict[str, Any]], runner: Runner, draft: DraftRunner, prompt: list[int],
                   answer: list[int], params: SamplingParams) -> None:
    """Give the decisions of one answer the acceptance of every variant over the tokens that follow."""
    if rows:
        accepted = teacher_forced_acceptance(runner, draft, [*prompt, *answer], len(prompt), params)
        accepted = np.pad(accepted, ((0, 0), (0, HORIZON)), constant_values=np.nan)
        for row in rows:
            row["acceptance"] = accepted[:, row["position"] : row["position"] + HORIZON]


def collect(recipe: Recipe, target: Target, runner: Runner, draft: DraftRunner, costs: Costs,
            samples: list[Sample]) -> Traces:
    """Trace this rank's share of the samples and gather those of all ranks, in the samples' order."""
    from draftsmith.decode.goodput import MARGIN_CAP

    limit = min(runner.context, draft.context) - recipe.trace.max_tokens
    samples, prompts = encode_prompts(target.tokenizer, samples, limit)
    mine = range(rank(), len(prompts), world_size())
    with tqdm(total=len(mine), desc="trace", unit="prompt", disable=rank() != 0) as bar:
        traced = trace_prompts(recipe, target, runner, draft, {n: prompts[n] for n in mine}, bar.update)
    traced = sorted(gather(traced), key=lambda t: t.number)
    rows = [{"prompt": samples[t.number].id, **row} for t in traced for row in t.rows]
    if not rows:
        raise DraftsmithError("every trace prompt ended with its first token: there is no decision to learn from")
    pairs, variants = [pair for t in traced for pair in t.pairs], draft.shape.variants()
    meta = {
        "variants": [v.name for v in variants], "step_seconds": [costs.step[v.name] for v in variants],
        "verify_rows": list(range(1, len(costs.verify) + 1)), "verify_seconds": costs.verify,
        "catch_up_seconds": costs.catch_up, "temperature": recipe.trace.temperature,
        "margin": fit_margin(pairs, MARGIN_CAP), "costs": {cost_key(runner, draft): costs.to_json()},
    }

    def column(name: str) -> np.ndarray:
        return np.stack([row[name] for row in rows])

    return Traces([row["prompt"] for row in rows], column("position"), column("features"), column("acceptance"),
                  column("variant"), column("drafted"), column("accepted"), column("confidence"), meta)


def load_draft(recipe: Recipe, target: Target, precision: str) -> DraftRunner:
    """The distilled draft, ready to run."""
    from transformers import AutoConfig

    facts = read_json(recipe.draft_dir / "draft.json")
    tensors = load_tensors(recipe.draft_dir / "draft.safetensors")
    config, shape = AutoConfig.for_model(**facts["config"]), DraftShape.from_json(facts["shape"])
    return DraftRunner(config, shape, tensors, target.embedding, target.head, precision)


def main() -> None:
    args = parse_args(__doc__.splitlines()[0])
    recipe: Recipe = args.recipe
    samples = load_trace_prompts(recipe)
    drafted = read_json(recipe.draft_dir / "stage.json")["inputs"]
    inputs = inputs_hash(recipe, ["trace"], ["batch"], draft=drafted, columns="confidence",
                         prompts=[s.content for s in samples])
    if recipe.trace_file.is_file() and read_meta(recipe.trace_file).get("inputs") == inputs:
        say(f"trace: {recipe.trace_file} is up to date, nothing to do")
        return
    with ranks_together():
        own_folder(recipe)
        run(recipe, samples, inputs)


def run(recipe: Recipe, samples: list[Sample], inputs: str) -> None:
    target = shared_target(recipe)
    runner, draft, costs = load_runner(target), None, None
    if rank() == 0:
        # At the precision that a decoder would choose here, since a trace is of what will run; timed while the
        # other ranks wait.
        draft = load_draft(recipe, target, "auto")
        costs = measure_costs(runner, draft)
    precision, costs = from_first((draft.precision, costs) if draft else None)
    draft = draft or load_draft(recipe, target, precision)
    traces = collect(recipe, target, runner, draft, costs, samples)
    if rank() != 0:
        return
    traces.meta["inputs"] = inputs
    write_traces(recipe.trace_file, traces)
    mean = np.nanmean(traces.acceptance_NAH, axis=(0, 2))
    table = ", ".join(f"{n} {a:.2f}" for n, a in zip(traces.meta["variants"], mean, strict=True))
    say(f"trace: {len(traces)} decisions in {recipe.trace_file}; acceptance by variant: {table}")


if __name__ == "__main__":
    run_job(main, "trace")
