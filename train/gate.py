"""Job `gate`: acceptance traces in; a trained gate, its report and the finished bundle out.

    deepspeed train/gate.py --recipe recipes/quickstart.yaml
"""

from __future__ import annotations

import platform
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from draftsmith.data import DraftsmithError
from draftsmith.data.io import load_tensors, read_json, sha256_json
from draftsmith.data.teacher_cache import CacheManifest
from draftsmith.data.traces import Traces, read_traces
from draftsmith.decode.bundle import Manifest, save_bundle
from draftsmith.decode.target import load_description
from draftsmith.distill.calibrate import Calibration, calibrate
from draftsmith.distill.gate import (
    Gate,
    GateReport,
    evaluate_gate,
    expected_tokens,
    round_seconds,
    soft_weights,
    variant_edges,
)
from draftsmith.distill.variants import DraftShape
from draftsmith.train.gateplot import plot
from draftsmith.train.loop import Settings, ensure_distributed, fit
from draftsmith.train.recipe import Recipe, parse_args
from draftsmith.train.stage import inputs_hash, own_folder, run_job, say
from torch import nn


class GateModule(nn.Module):
    """Minus (E[tokens] - lambda * E[time]), summed over rows; lambda follows the running tokens per second."""

    features: torch.Tensor
    tokens: torch.Tensor
    seconds: torch.Tensor
    edges: torch.Tensor

    def __init__(self, gate: Gate, traces: Traces, shape: DraftShape, k: int) -> None:
        super().__init__()
        self.gate = gate
        table = {
            "features": torch.from_numpy(traces.features_NF), "edges": variant_edges(shape),
            "tokens": torch.from_numpy(expected_tokens(traces.acceptance_NAH, k)).float(),
            "seconds": torch.from_numpy(round_seconds(traces, k)).float(),
        }
        for name, value in table.items():
            self.register_buffer(name, value, persistent=False)

    def forward(self, rows: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
        rows = rows.to(self.features.device)
        weights = soft_weights(self.gate(self.features[rows]), self.edges)
        tokens, seconds = (weights * self.tokens[rows]).sum(), (weights * self.seconds[rows]).sum()
        rate = (tokens / seconds.clamp_min(1e-9)).detach()  # of this batch: the running ratio of sums
        # Divided by lambda, so that the loss is in tokens however fast the machine is.
        return rate * seconds - tokens, {"tokens_per_round": (tokens.detach(), len(rows)),
                                         "tokens_per_second": (rate, 1)}


def split_rows(traces: Traces, share: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Boolean masks (train, held out) by prompt, so that no prompt is on both sides."""
    prompts = sorted(set(traces.prompt_N))
    if len(prompts) < 2:
        raise DraftsmithError("the gate needs traces of at least 2 prompts, one of them held out; raise trace.prompts")
    order = np.random.default_rng([seed, 17]).permutation(len(prompts))
    held = {prompts[i] for i in order[: min(len(prompts) - 1, max(1, round(share * len(prompts))))]}
    mask = np.array([p in held for p in traces.prompt_N])
    return ~mask, mask


def train_gate(recipe: Recipe, traces: Traces, shape: DraftShape, inputs: str) -> tuple[Gate, GateReport]:
    g = recipe.gate
    train_rows, held_rows = split_rows(traces, g.heldout, recipe.seed)
    train, held = traces.take(train_rows), traces.take(held_rows)
    torch.manual_seed(recipe.seed)
    gate = Gate(traces.features_NF.shape[1], g.hidden)
    gate.mean.copy_(torch.from_numpy(train.features_NF.mean(0)))
    gate.std.copy_(torch.from_numpy(train.features_NF.std(0)).clamp_min(1e-3))

    def batches(step: int) -> list[torch.Tensor]:
        generator = np.random.default_rng([recipe.seed, step])
        return [torch.from_numpy(generator.integers(0, len(train), min(g.batch, len(train))))]

    module = GateModule(gate, train, shape, g.k)
    fit(module, batches, len, Settings("gate", g.steps, g.lr, final_lr=0.1, weight_decay=0.01, save_every=g.steps),
        recipe.folder, inputs, discard_stale=True)
    gate.cpu().eval()
    return gate, evaluate_gate(gate, held, shape, g.k)


def acceptance_by_variant(traces: Traces) -> dict[str, float]:
    mean = np.nanmean(traces.acceptance_NAH, axis=(0, 2))
    return {name: float(a) for name, a in zip(traces.meta["variants"], mean, strict=True)}


def draft_facts(recipe: Recipe) -> dict[str, Any]:
    """What distill wrote beside the draft; a draft of an earlier release has its source in the teacher cache."""
    facts: dict[str, Any] = read_json(recipe.draft_dir / "draft.json")
    if "source" not in facts:
        cache = CacheManifest.load(recipe.cache_dir)
        facts["source"] = {"target": cache.target, "data": sha256_json(cache.shards)}
    return facts


def provenance(recipe: Recipe, trained_with: dict[str, Any], data: str) -> dict[str, Any]:
    import deepspeed
    import transformers

    return {
        # What was overridden for the draft was overridden there, not here.
        "recipe": {**recipe.model_dump(mode="json", by_alias=True), **trained_with}, "data": data, "versions": {
            "python": platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__,
            "deepspeed": deepspeed.__version__}, "commit": commit(),
    }


def commit() -> str | None:
    """The checkout's commit, where there is one."""
    import subprocess

    try:
        done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10, check=False)
    except OSError:
        return None
    return done.stdout.strip() or None


def write_bundle(recipe: Recipe, gate: Gate, report: GateReport, traces: Traces, fitted: Calibration,
                 inputs: str) -> None:
    facts, meta = draft_facts(recipe), traces.meta
    manifest = Manifest(
        target=facts["source"]["target"], draft={"config": facts["config"], "shape": facts["shape"]},
        policy={"default": recipe.bundle.policy, "variant": report.best_fixed, "use_gate": report.beats_fixed,
                # What the recipe says of a threshold stands.
                "paper": {"tau": fitted.tau, "stop_acceptance": fitted.stop_acceptance, **recipe.bundle.paper},
                "goodput": {"acceptance": acceptance_by_variant(traces), "margin": meta["margin"]}},
        gate={"features": gate.inner.in_features, "hidden": gate.inner.out_features, "report": asdict(report),
              "calibration": asdict(fitted)},
        costs=meta.get("costs", {}),
        provenance={**provenance(recipe, facts["recipe"], facts["source"]["data"]), "inputs": inputs},
        evaluation={"heldout": facts["heldout"]},
    )
    _, tokenizer = load_description(recipe.target.name, recipe.target.trust_remote_code)
    save_bundle(recipe.bundle_dir, manifest, load_tensors(recipe.draft_dir / "draft.safetensors"), gate, tokenizer)


def main() -> None:
    args = parse_args(__doc__.splitlines()[0])
    recipe: Recipe = args.recipe
    traces = read_traces(recipe.trace_file)
    inputs = inputs_hash(recipe, ["gate", "bundle", "validate_"], traces=traces.meta["inputs"])
    found = recipe.bundle_dir / "draftsmith.json"
    if found.is_file() and read_json(found)["provenance"].get("inputs") == inputs:
        say(f"gate: {recipe.bundle_dir} is up to date, nothing to do")
        return
    ensure_distributed()
    own_folder(recipe)
    shape = DraftShape.from_json(read_json(recipe.draft_dir / "draft.json")["shape"])
    # Another policy or threshold makes another bundle, not another gate.
    gate, report = train_gate(recipe, traces, shape, inputs_hash(recipe, ["gate"], traces=traces.meta["inputs"]))
    if torch.distributed.get_rank() == 0:
        fitted = calibrate(traces, report.best_fixed, recipe.gate.k)
        write_bundle(recipe, gate, report, traces, fitted, inputs)
        plot(recipe.folder / "report" / "gate.png", traces, shape, report, fitted, recipe.gate.k)
        say(f"gate: policy paper: tau = {fitted.tau:.2f}, stops below an acceptance of {fitted.stop_acceptance:.2f}; "
            f"{1 / fitted.seconds:.1f} tokens/s in the traces, {1 / fitted.seconds_always:.1f} speculating always, "
            f"{1 / fitted.seconds_never:.1f} never")
    say(f"gate: on {report.rows} held-out decisions {report.gate:.1f} tokens/s; best fixed variant {report.best_fixed} "
        f"{report.fixed[report.best_fixed]:.1f}; oracle {report.oracle:.1f} (regret {report.regret:.1%} against "
        f"{report.regret_best_fixed:.1%})")
    if not report.beats_fixed:
        say(f"gate: it does not beat the best fixed variant, so the bundle uses {report.best_fixed}")
    say(f"gate: bundle written to {recipe.bundle_dir}, a picture of traces and gate to {recipe.folder / 'report'}")


if __name__ == "__main__":
    run_job(main, "gate")
