"""What `draftsmith bench` prints: tables of figures from `bench`, each with the numbers behind it."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from draftsmith.data import DraftsmithError
from tqdm import tqdm

from . import bench
from .decoder import Decoder
from .device import device_name
from .stack import is_lean

ROWS = (1, 2, 4, 8, 16)
CONTEXTS = (128, 512, 2048, 8000)
BATCHES = (1, 4, 16)

Figures = tuple[dict[str, Any], str]


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [header, ["---"] * len(header), *rows])


def policy_names(text: str) -> list[str]:
    """Names split at commas outside brackets: "ar,fixed(4,2L),goodput"."""
    names = [n.strip() for n in re.findall(r"[^,(]+(?:\([^)]*\))?", text)]
    if not names:
        raise DraftsmithError("no policy named")
    return names


def prompts_for(decoder: Decoder, file: str | None, count: int, max_tokens: int) -> list[list[int]]:
    from draftsmith.data.chat import encode_prompts
    from draftsmith.data.quickstart_prompts import available, build
    from draftsmith.data.text import Sample, read_samples

    if max_tokens < 1:
        raise DraftsmithError(f"--max-tokens must be 1 or more, not {max_tokens}")
    if file:
        samples = read_samples(file)[:count]
    else:
        built = build("heldout", min(count, available("heldout")), 0)
        samples = [Sample(r["id"], r["kind"], messages=r["messages"]) for r in built]
    _, prompts = encode_prompts(decoder.tokenizer, samples, decoder.runner.context - max_tokens)
    if len(prompts) < 2:
        raise DraftsmithError(f"{len(prompts)} prompts are left that fit the target's context; 2 are needed")
    return prompts


def policies(decoder: Decoder, names: str, file: str | None, count: int, max_tokens: int, profile: bool) -> Figures:
    """Policies on prompts, interleaved; `profile` adds where their time goes."""
    chosen = policy_names(names)
    prompts = prompts_for(decoder, file, count, max_tokens)
    progress: Callable[[Any], Any] = lambda x: tqdm(x, desc="bench", unit="prompt")  # noqa: E731
    found = bench.run_policies(decoder, prompts, chosen, max_tokens, progress)
    lines = []
    for name, f in found.items():
        ratio = f["ratio"]
        rate = f"{f['acceptance']:.3f}" if f["acceptance"] is not None else ""
        per_step = f"{f['tokens_per_step']:.2f}" if f["tokens_per_step"] is not None else ""
        lines.append([name, f"{f['tokens_per_second']:.1f}",
                      f"{ratio['mean']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f})", rate, per_step])
    text = markdown(["policy", "tokens/s", f"against {chosen[0]} (95 %)", "acceptance", "tokens/step"], lines)
    if profile:
        parts = list(next(iter(found.values()))["parts"])
        shares = [[name, *(f"{100 * f['parts'][p]:.1f}" for p in parts)] for name, f in found.items()]
        text += "\n\nShare of the time, %:\n\n" + markdown(["policy", *parts], shares)
    return {"machine": device_name(), "prompts": len(prompts), "max_tokens": max_tokens, "policies": found}, text


def others(decoder: Decoder, names: str, file: str | None, count: int, max_tokens: int,
           trust_remote_code: bool) -> Figures:
    """Policies beside outside engines; prefill included."""
    from .references import references, run_references

    prompts = prompts_for(decoder, file, count, max_tokens)
    engines = references(decoder, trust_remote_code)
    found = run_references(decoder, engines, prompts, policy_names(names), max_tokens,
                           lambda x: tqdm(x, desc="bench", unit="prompt"))
    lines = [[name, f"{f['tokens_per_second']:.1f}",
              f"{f['ratio']['mean']:.2f} ({f['ratio']['low']:.2f} to {f['ratio']['high']:.2f})",
              f"{f['identical']} of {f['prompts']}"] for name, f in found.items()]
    first = policy_names(names)[0]
    text = markdown(["engine", "tokens/s", f"against {first} (95 %)", f"same text as {first}"], lines)
    return {"machine": device_name(), "max_tokens": max_tokens, "engines": found}, text


def passes(decoder: Decoder) -> Figures:
    """Target passes and draft steps against the floor that memory bandwidth sets."""
    speed = bench.bandwidth(decoder.runner.device)
    floor = decoder.runner.weight_bytes / speed
    table = bench.pass_table(decoder, ROWS, CONTEXTS, BATCHES)
    drafts = bench.draft_table(decoder, [c for c in CONTEXTS if c <= 2048])
    places = list(dict.fromkeys((e["batch"], e["context"]) for e in table))
    by = {(e["batch"], e["context"], e["rows"]): e["seconds"] for e in table}
    lines = [[str(b), str(c), *(f"{1e3 * by[b, c, n]:.1f}" for n in ROWS)] for b, c in places]
    text = (f"Memory bandwidth {speed / 1e9:.1f} GB/s; floor of one pass {1e3 * floor:.1f} ms "
            f"({decoder.runner.weight_bytes / 1e6:.0f} MB of weights in {decoder.runner.precision}).\n\n"
            "Target pass, ms, by rows of each request:\n\n"
            + markdown(["batch", "context", *(f"{n} rows" for n in ROWS)], lines))
    if drafts and decoder.draft:
        contexts = list(dict.fromkeys(e["context"] for e in drafts))
        step = {(e["variant"], e["context"]): e["seconds"] for e in drafts}
        names = list(dict.fromkeys(e["variant"] for e in drafts))
        text += (f"\n\nDraft step ({decoder.draft.precision}), ms, by context:\n\n" + markdown(
            ["variant", *map(str, contexts)], [[v, *(f"{1e3 * step[v, c]:.2f}" for c in contexts)] for v in names]))
    return {"machine": device_name(), "bandwidth": speed, "floor": floor, "passes": table, "drafts": drafts}, text


def linears(decoder: Decoder) -> Figures:
    """The target's products by how their weights are held. Raises `DraftsmithError` for other than Llama shapes."""
    if not is_lean(decoder.target.config):
        raise DraftsmithError(f"--linears knows Llama-shaped targets, not {decoder.target.config.model_type}")
    table = bench.linear_table(bench.target_shapes(decoder.target.config), (1, 3, 5, 9, 17))
    kinds = [k for k in ("plain", "blocked", "packed", "int8") if k in table[0]]
    lines = [[e["product"], str(e["rows"]), *(f"{1e3 * e[k]:.3f}" for k in kinds)] for e in table]
    text = "Products, ms:\n\n" + markdown(["product", "rows", *kinds], lines)
    return {"machine": device_name(), "products": table}, text
