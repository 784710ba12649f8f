"""A whole comparison from a recipe: measured, resumed, reported; and the ablations of both controllers."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from draftsmith.data import DraftsmithError
from draftsmith.data.io import atomic_path, sha256_file, write_text
from tqdm import tqdm

from ..benchtables import markdown
from ..decoder import Decoder
from ..device import device_name
from ..policies import make_policy
from .journal import Journal
from .methods import OUTSIDE
from .protocol import PLAIN, TUNED, Comparison, Settings
from .recipe import EvalRecipe
from .report import number, write_report
from .results import Results
from .statistics import correct
from .tasks import choose, find_task

ABLATIONS: dict[str, dict[str, str]] = {
    "paper": {
        "without the perplexity analyser": "paper(tau=0)", "without the gate": "paper(gate=0)",
        "without upgrades": "paper(upgrade_ratio=inf)", "without the failure mode": "paper(failure_ratio=inf)",
        "without early rejection": "paper(min_confidence=0)",
        "with a fixed window": "paper(window_grow=0,window_shrink=0)",
        "without early termination": "paper(stop_acceptance=0)",
        **{f"tau = {tau}": f"paper(tau={tau})" for tau in (0.2, 0.4, 0.6, 0.7, 0.8)},
    },
    "goodput": {
        "without the lookup": "goodput(lookup=0)", "without branches": "goodput(branches=0)",
        "without the margin rule": "goodput(margin=0)", "without learning from the text": "goodput(learn=0)",
        "always drafting": "goodput(stop=0)", "without the gate": "goodput(gate=0)",
    },
}


def bars(items: Iterable[Any], total: int, name: str) -> Iterable[Any]:
    return tqdm(items, total=total, desc=name, unit="prompt")


def versions() -> dict[str, str]:
    import transformers

    return {"python": platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__}


def run(recipe: EvalRecipe, ablate: bool = False) -> Path:
    """Measure what is missing and write the report; returns the path of its page, or of the ablations' table."""
    folder = recipe.folder / "ablations" if ablate else recipe.folder
    methods = list(recipe.methods)
    if ablate:
        methods = [PLAIN, *(m for policy, parts in ABLATIONS.items() for m in (policy, *parts.values()))]
    for name in recipe.tasks:
        find_task(name).check()
    # What was chosen by the clock when the run began holds for all of it.
    begun = Journal.header_of(folder / "rows.jsonl").get("draft_precision", "auto")
    decoder = Decoder.load(recipe.bundle, recipe.target, quiet=False, trust_remote_code=recipe.trust_remote_code,
                           draft_precision=begun)
    assert decoder.draft is not None  # a bundle has one
    for name in methods:
        if name not in TUNED and name not in OUTSIDE:
            make_policy(name, decoder.context)  # a misspelt one is better found before an hour's work
    chosen = [choose(find_task(name), section.source, section.count, recipe.tuning, recipe.seed)
              for name, section in recipe.tasks.items()]
    settings = Settings(methods, recipe.max_tokens, recipe.tuning_tokens, recipe.temperature, recipe.seed)
    journal = Journal(folder / "rows.jsonl", header(recipe, decoder))
    try:
        comparison = Comparison(decoder, settings, journal, recipe.trust_remote_code)
        for some in chosen:
            comparison.run(some, bars)
    finally:
        journal.close()
    results = Results(journal.records, methods)
    write_parquet(folder / "rows.parquet", results)
    if ablate:
        return write_ablations(folder / "ablations.md", results)
    facts = {"title": f"Benchmark: {recipe.name}", "bundle": recipe.bundle, "target": decoder.target.name,
             "prompts": ", ".join(f"{task} {len(results.of(task, PLAIN))}" for task in results.tasks),
             "tokens of an answer, at most": recipe.max_tokens or ", ".join(
                 f"{c.task.name} {c.task.max_tokens}" for c in chosen),
             "prompts measured in more than one session": f"{results.split:.0%}",
             "temperature": recipe.temperature, "seed": recipe.seed, "machine": device_name(),
             "precision": f"target {decoder.runner.precision}, draft {decoder.draft.precision}",
             "versions": ", ".join(f"{k} {v}" for k, v in versions().items())}
    return write_report(folder, results, facts, decoder.draft.shape.alphas(), costs_of(decoder))


def header(recipe: EvalRecipe, decoder: Decoder) -> dict[str, Any]:
    """What makes rows comparable. More prompts, tasks or methods may be added to a run."""
    assert decoder.bundle is not None
    weights = {file.name: sha256_file(file) for file in sorted(Path(recipe.bundle).glob("*.safetensors"))}
    return {"what": "run", "bundle": weights, "policy": decoder.bundle.manifest.policy,
            "target": {**decoder.target.fingerprint(), "weights": decoder.target.signature},
            "target_precision": decoder.runner.precision,
            "draft_precision": decoder.draft.precision if decoder.draft else "", "machine": device_name(),
            "versions": versions(), "max_tokens": recipe.max_tokens, "temperature": recipe.temperature,
            "seed": recipe.seed, "threads": torch.get_num_threads()}


def costs_of(decoder: Decoder) -> dict[str, float]:
    """Seconds of a step of the default variant, and of target passes by rows."""
    costs = decoder.costs
    if costs is None or decoder.context.variant is None:
        raise DraftsmithError("a comparison needs a draft and measured costs")
    return {"step": costs.draft_step(decoder.context.variant.name),
            **{str(n): costs.rows(n) for n in range(1, len(costs.verify) + 1)}}


def write_parquet(path: Path, results: Results) -> None:
    """The rows as a table, the texts with them; nested figures as JSON."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    names = list(dict.fromkeys(key for row in results.rows for key in row if key != "what"))

    def plain(value: Any) -> Any:
        return json.dumps(value) if isinstance(value, (dict, list)) else value

    table = pa.table({name: [plain(row.get(name)) for row in results.rows] for name in names})
    with atomic_path(path) as aside:
        pq.write_table(table, str(aside))


def write_ablations(path: Path, results: Results) -> Path:
    """One table: each controller whole, then without one of its parts."""
    rows = []
    for policy, parts in ABLATIONS.items():
        parts_of = correct({name: found for name in parts.values()
                            if (found := results.speed(None, name, policy)) is not None})
        for what, name in {"whole": policy, **parts}.items():
            s, up, against = results.summary(None, name), results.speed(None, name), parts_of.get(name)
            if up is None:
                continue
            rows.append([policy if name == policy else "", what,
                         f"{up.ratio:.2f} ({up.low:.2f} to {up.high:.2f})",
                         "1" if against is None else f"{against.ratio:.3f} ({against.low:.3f} to {against.high:.3f})",
                         "" if against is None else f"{against.t_holm:.2g}", number(s.get("acceptance"), 3),
                         number(s.get("tokens_per_step")), f"{s['same_text']} of {s['prompts']}"])
    write_text(path, markdown(["controller", "", "over ar (95 %)", "over the whole (95 %)", "p (Holm)", "acceptance",
                               "tokens/step", "same text"], rows) + "\n")
    return path
