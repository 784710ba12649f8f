"""Job `trace`: decode prompts the draft was not trained on and log acceptance for every variant.

    deepspeed train/trace.py --recipe recipes/quickstart.yaml
"""

from __future__ import annotations

from dataclasses import dataclass
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
from draftsmith.decode.policies import Fixed, Round
from draftsmith.decode.runner import Runner, load_runner
from draftsmith.decode.sampling import GumbelNoise, SamplingParams, process
from draftsmith.decode.target import Target
from draftsmith.distill.variants import DraftShape
from draftsmith.train.recipe import Recipe, parse_args
from draftsmith.train.stage import (
    from_first,
    gather,
    inputs_hash,
    load_trace_prompts,
    rank,
    ranks_together,
    run_job,
    say,
    shared_target,
    world_size,
)
from tqdm import tqdm


class Logged(Fixed):
    """Fixed-length speculation that also looks at margins, to calibrate `goodput`."""

    wants_margin = True


class Recorder:
    """Collects one row per gating decision, and (margin, label) pairs, from a running generation."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.pairs: list[tuple[float, float]] = []
        self.due = 0

    def decide(self, generation: Generation, variant: int) -> None:
        """Called before a round: a decision every 8 emitted tokens."""
        if generation.emitted < self.due:
            return
        self.rows.append({"position": generation.emitted, "features": generation.features().numpy(), "variant": variant,
                          "drafted": 0, "accepted": 0})
        self.due = generation.emitted + FEATURE_TOKENS

    def on_round(self, _generation: Generation, finished: Round) -> None:
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


def trace_prompt(recipe: Recipe, runner: Runner, draft: DraftRunner, eos_ids: frozenset[int], prompt: list[int],
                 number: int) -> PromptTrace:
    """Decode a prompt with one of the variants, in rotation, and log every decision."""
    t, variants = recipe.trace, draft.shape.variants()
    params = SamplingParams(max_tokens=t.max_tokens, temperature=t.temperature, seed=recipe.seed)
    recorder, variant = Recorder(), variants[number % len(variants)]
    generation = Generation(prompt, params, Logged(t.k, variant), runner, draft,
                            GumbelNoise(recipe.seed, runner.vocab_size, number), eos_ids)
    generation.on_round = recorder.on_round
    fresh = generation.prefill()
    while generation.emitted < generation.max_tokens and not eos_ids & {x.id for x in fresh}:
        recorder.decide(generation, number % len(variants))
        fresh = generation.round()
    ids = generation.tokens
    ends = [i for i in range(generation.prompt_length, len(ids)) if ids[i] in eos_ids]
    ids = ids[: ends[0] + 1] if ends else ids
    if recorder.rows:
        accepted = teacher_forced_acceptance(runner, draft, ids, generation.prompt_length, params)
        accepted = np.pad(accepted, ((0, 0), (0, HORIZON)), constant_values=np.nan)
        for row in recorder.rows:
            row["acceptance"] = accepted[:, row["position"] : row["position"] + HORIZON]
    return PromptTrace(number, recorder.rows, recorder.pairs)


def collect(recipe: Recipe, target: Target, runner: Runner, draft: DraftRunner, costs: Costs,
            samples: list[Sample]) -> Traces:
    """Trace this rank's share of the samples and gather those of all ranks, in the samples' order."""
    from draftsmith.decode.goodput import MARGIN_CAP

    limit = min(runner.context, draft.context) - recipe.trace.max_tokens
    samples, prompts = encode_prompts(target.tokenizer, samples, limit)
    mine = range(rank(), len(prompts), world_size())
    traced = [trace_prompt(recipe, runner, draft, target.eos_ids, prompts[number], number)
              for number in tqdm(mine, desc="trace", unit="prompt", disable=rank() != 0)]
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
                  column("variant"), column("drafted"), column("accepted"), meta)


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
    inputs = inputs_hash(recipe, ["trace"], draft=drafted, prompts=[str(s.messages or s.text) for s in samples])
    if recipe.trace_file.is_file() and read_meta(recipe.trace_file).get("inputs") == inputs:
        say(f"trace: {recipe.trace_file} is up to date, nothing to do")
        return
    with ranks_together():
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
