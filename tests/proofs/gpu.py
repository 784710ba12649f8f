"""The GPU side on one card: correct against the CPU, and how fast, with graphs and FlashAttention on and off."""

from __future__ import annotations

import gc
import math
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from _verdict import conclude
from draftsmith.data.io import DraftsmithError
from draftsmith.decode import Decoder, SamplingParams, draft, loop
from draftsmith.decode.costs import Prober
from draftsmith.decode.device import Engine, choose_engine, device_name, draft_engine, has_flash
from draftsmith.decode.policies import Ar, Fixed
from draftsmith.decode.runner import LeanRunner
from draftsmith.decode.sampling import Noise
from draftsmith.decode.target import Target
from draftsmith.distill.init import build_draft
from draftsmith.distill.variants import Variant
from draftsmith.train.stage import run_job

BUDGET = 330.0  # seconds; what is left out for want of time is said
CHECK = dict(vocab_size=4096, hidden_size=512, intermediate_size=1536, num_hidden_layers=6, num_attention_heads=8,
             num_key_value_heads=4, max_position_embeddings=2048)
SHAPES = {
    "1B": dict(vocab_size=128256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16,
               num_attention_heads=32, num_key_value_heads=8, head_dim=64, max_position_embeddings=8192),
    "7B": dict(vocab_size=32000, hidden_size=4096, intermediate_size=11008, num_hidden_layers=32,
               num_attention_heads=32, num_key_value_heads=32, max_position_embeddings=4096),
}
LAYERS, HEAD, TOKENS, CONTEXT = 4, 8192, 128, 512


def random_model(shape: dict[str, Any], dtype: torch.dtype, device: str) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(**shape, bos_token_id=None, eos_token_id=None, tie_word_embeddings=False)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            return LlamaForCausalLM(config).eval().requires_grad_(False)
    finally:
        torch.set_default_dtype(before)


def engines(dtype: torch.dtype, head_dim: int) -> dict[str, Engine]:
    """The engine chosen here, and it with one thing off at a time."""
    best = choose_engine("cuda", dtype=dtype, head_dim=head_dim)
    found = {"sdpa, no graphs": replace(best, attention="sdpa", graphs=False), "sdpa, graphs": replace(
        best, attention="sdpa", graphs=True)}
    if best.attention == "flash":
        found |= {"flash, no graphs": replace(best, graphs=False), "flash, graphs": best}
    return found


def target_of(model: Any, engine: Engine) -> Target:
    return Target("random", model, None, engine)


def random_ids(count: int, vocab: int, device: str = "cpu") -> torch.Tensor:
    return torch.randint(0, vocab, (1, count), generator=torch.Generator().manual_seed(1)).to(device)


@torch.no_grad()
def correctness() -> list[tuple[str, float, float]]:
    """(engine, largest logit difference relative to CPU fp32's largest logit, bar) over a prefill, chains and steps."""
    model = random_model(CHECK, torch.float32, "cpu")
    ids = random_ids(400, CHECK["vocab_size"])
    expected = model(input_ids=ids).logits
    out = []
    for dtype, bar in ((torch.float32, 1e-3), (torch.bfloat16, 0.05)):
        gpu = random_model(CHECK, dtype, "cpu")
        gpu.load_state_dict(model.state_dict())
        gpu = gpu.to("cuda", dtype)
        for name, engine in engines(dtype, 64).items():
            runner = LeanRunner(target_of(gpu, engine))
            cache, at, worst = runner.new_cache(1, 400), 300, 0.0
            there = ids.to("cuda")
            _, logits = runner.forward(there[:, :at], cache)
            pieces = [(0, at, logits)]
            for n in (1, 5, 17, 3, 1, 9):
                runner.forward(random_ids(n, 4096, "cuda"), cache)  # rejected
                cache.crop(at)
                pieces.append((at, at + n, runner.forward(there[:, at : at + n], cache)[1]))
                at += n
            for start, end, logits in pieces:
                error = float((logits.cpu() - expected[:, start:end]).abs().max())
                worst = max(worst, error if math.isfinite(error) else 1e9)
            out.append((f"{str(dtype).removeprefix('torch.')}, {name}", worst / float(expected.abs().max()), bar))
    return out


@torch.no_grad()
def same_text() -> list[tuple[str, float, float]]:
    """(engine, share of drafted greedy tokens that differ from plain decoding, bar): drafts, graphs and rollback."""
    model = random_model(CHECK, torch.float32, "cuda")
    made = build_draft(model, [0, 1, 4, 5], 2, (0.75, 1.0, 1.25, 1.5), torch.arange(2048),
                       [random_ids(64, CHECK["vocab_size"], "cuda")])
    prompt, out = random_ids(100, CHECK["vocab_size"])[0].tolist(), []
    params = SamplingParams(max_tokens=64, ignore_eos=True)
    for name, engine in engines(torch.float32, 64).items():
        target = target_of(model, engine)
        runner = LeanRunner(target)
        small = draft.DraftRunner(made.config, made.shape, made.portable_state(), target.embedding, target.head)
        texts = []
        for policy in (Ar(), Fixed(4, Variant(4)), Fixed(3, Variant(2))):
            generation = loop.Generation(prompt, params, policy, runner, small, Noise(), frozenset())
            generation.prefill()
            while generation.emitted < generation.max_tokens:
                generation.round()
            texts.append(generation.tokens[len(prompt) : len(prompt) + 64])
        for policy_name, text in (("fixed(4)", texts[1]), ("fixed(3,2L)", texts[2])):
            wrong = sum(a != b for a, b in zip(text, texts[0], strict=True)) / 64
            out.append((f"text of {policy_name}, {name}", wrong, 0.0))
    return out


def tokens_per_second(generation: loop.Generation) -> float:
    generation.prefill()
    torch.cuda.synchronize()
    started, first = time.perf_counter(), generation.emitted
    while generation.emitted < generation.max_tokens:
        generation.round()
    torch.cuda.synchronize()
    return (generation.emitted - first) / (time.perf_counter() - started)


@torch.no_grad()
def shape_figures(name: str) -> list[dict[str, Any]]:
    """Tokens/s of plain decoding, pass and draft-step times of a random-weight model, for each engine."""
    shape = SHAPES[name]
    model = random_model(shape, torch.bfloat16, "cuda")
    ids, out = random_ids(CONTEXT, shape["vocab_size"])[0].tolist(), []
    params = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
    chosen = torch.arange(HEAD)
    made = build_draft(model, [0, 1, -2 % shape["num_hidden_layers"], -1 % shape["num_hidden_layers"]], 2,
                       (0.75, 1.0, 1.25, 1.5), chosen, [random_ids(64, shape["vocab_size"], "cuda")])
    for engine_name, engine in engines(torch.bfloat16, 128 if name == "7B" else 64).items():
        target = target_of(model, engine)
        runner = LeanRunner(target)
        small = draft.DraftRunner(made.config, made.shape, made.portable_state(), target.embedding, target.head)
        small.engine = replace(draft_engine(runner.device, engine.dtype, False, 64), graphs=engine.graphs,
                               attention=engine.attention)
        small.stack.engine = small.engine

        def generation(policy: Any, runner: Any = runner, small: Any = small) -> loop.Generation:
            return loop.Generation(ids, params, policy, runner, small, Noise(), frozenset())

        runs: dict[str, Callable[[], float]] = {
            "AR": lambda g=generation: tokens_per_second(g(Ar())),  # type: ignore[misc]
            "fixed(4), undistilled draft": lambda g=generation: tokens_per_second(g(Fixed(4, Variant(4)))),  # type: ignore[misc]
        }
        for run in runs.values():
            run()  # captures graphs
        probe = Prober(runner, small, 5)
        out.append({
            "shape": name, "engine": engine_name,
            **{k: statistics.median(run() for _ in range(3)) for k, run in runs.items()},
            "t(1) ms": 1e3 * probe.target_pass(1, CONTEXT), "t(5) ms": 1e3 * probe.target_pass(5, CONTEXT),
            "draft step ms": 1e3 * probe.draft_step(Variant(4), CONTEXT),
        })
        del runner, small, target, generation, runs, run, probe
        gc.collect()
        torch.cuda.empty_cache()
    return out


def bundle_figures(folder: str) -> list[dict[str, Any]]:
    """AR and adaptive tokens/s of a real bundle."""
    from draftsmith.decode.bench import run_policies
    from draftsmith.decode.benchtables import prompts_for

    decoder = Decoder.load(folder, quiet=False)
    prompts = prompts_for(decoder, None, 6, 64)
    run_policies(decoder, prompts[:2], ["ar", "fixed(4)", "goodput"], 64)  # captures graphs
    found = run_policies(decoder, prompts, ["ar", "fixed(4)", "goodput"], 64)
    return [{"policy": k, "tokens/s": v["tokens_per_second"], "against ar": v["ratio"]["mean"],
             "acceptance": v["acceptance"]} for k, v in found.items()]


def table(rows: list[dict[str, Any]]) -> str:
    header = list(rows[0])
    cells = [[f"{v:.2f}" if isinstance(v, float) else str(v) for v in row.values()] for row in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in [header, ["---"] * len(header), *cells])


def main() -> None:
    if not torch.cuda.is_available():
        raise DraftsmithError("no CUDA device here: there is nothing to check")
    started = time.perf_counter()
    checks = correctness() + same_text()
    figures: dict[str, list[dict[str, Any]]] = {}
    if len(sys.argv) > 1:
        figures["bundle"] = bundle_figures(sys.argv[1])
    left_out = []
    for name in SHAPES:
        if time.perf_counter() - started > BUDGET / 2:
            left_out.append(name)
            continue
        figures[name] = shape_figures(name)
    wrong = [f"{name}: {error:.1e}" for name, error, bar in checks if not error <= bar]
    print(f"\n{device_name()}; flash-attn {'installed' if has_flash() else 'not installed'}; "
          f"{time.perf_counter() - started:.0f} s\n")
    print(table([{"check": n, "error": f"{e:.1e}", "bar": f"{b:.0e}"} for n, e, b in checks]))
    for rows in figures.values():
        print("\n" + table(rows))
    conclude("gpu", not wrong, f"{len(checks) - len(wrong)} of {len(checks)} checks hold"
             + (f"; wrong: {', '.join(wrong)}" if wrong else "")
             + (f"; left out for time: {', '.join(left_out)}" if left_out else ""),
             checks=checks, measured=figures, machine=device_name())


if __name__ == "__main__":
    run_job(main, "gpu_check")
