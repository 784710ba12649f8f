"""Measuring the engine: bandwidth, passes by rows, context and batch, linear layers, and where a run's time goes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from draftsmith.distill.variants import Variant

from .costs import Prober
from .decoder import Decoder
from .device import synchronise
from .evaluation.interleave import acceptance, interleave, rate, rates, rotated
from .evaluation.methods import ours
from .evaluation.statistics import paired_ratio
from .linear import BlockedLinear, Int8Linear, PackedLinear, PlainLinear, can_pack, can_quantise
from .profile import PARTS
from .runner import Runner
from .sampling import SamplingParams

MIN_READ = 1 << 28  # bytes read to measure bandwidth: beyond any processor cache


def bandwidth(device: torch.device, repeats: int = 3) -> float:
    """Bytes a second that this device reads from memory, the best of some sums over a large array."""
    block = torch.ones(MIN_READ // 4, dtype=torch.float32, device=device)
    best = 0.0
    for _ in range(repeats + 1):
        start = time.perf_counter()
        block.sum()
        synchronise(device)
        best = max(best, MIN_READ / (time.perf_counter() - start))
    return best


def interleaved(jobs: dict[str, Callable[[], float]], rounds: int,
                progress: Callable[[Any], Any] = lambda x: x) -> dict[str, list[float]]:
    """Run every job once a round, the order rotated: a machine that slows down does so for all of them."""
    names = list(jobs)
    out: dict[str, list[float]] = {name: [] for name in names}
    for i in progress(range(rounds)):
        for name in rotated(names, i):
            out[name].append(jobs[name]())
    return out


def bare_loop(runner: Runner, prompt: list[int], tokens: int) -> float:
    """Tokens a second, prefill left out, of greedy decoding by the runner alone: what a policy can at best do."""
    cache = runner.new_cache(1, len(prompt) + tokens)
    with torch.no_grad():
        _, logits = runner.forward(torch.tensor([prompt], device=runner.device), cache, 1)
        start = time.perf_counter()
        for _ in range(tokens - 1):
            ids = logits[:, -1].argmax(-1, keepdim=True)
            int(ids)  # a loop hands every token out
            _, logits = runner.forward(ids, cache)
        int(logits[:, -1].argmax(-1))
    return (tokens - 1) / (time.perf_counter() - start)


def policy_loop(decoder: Decoder, prompt: list[int], tokens: int, policy: str) -> float:
    """Tokens a second, time to the first token left out, of a policy."""
    stats = decoder.generate(prompt, SamplingParams(max_tokens=tokens, ignore_eos=True), policy).stats
    return (stats.emitted - 1) / (stats.seconds - stats.ttft)


def run_policies(decoder: Decoder, prompts: Sequence[list[int]], policies: Sequence[str], max_tokens: int,
                 progress: Callable[[Any], Any] = lambda x: x) -> dict[str, dict[str, Any]]:
    """Every policy on every prompt, interleaved, greedy: tokens/s, paired ratio to the first policy, acceptance,
    and the share of the time that each part took."""
    named = {policy: ours(decoder, policy) for policy in policies}
    answers = interleave(named, prompts, SamplingParams(max_tokens=max_tokens), progress)
    out = {}
    for policy, mine in answers.items():
        accepted, per_step = acceptance(mine)
        seconds = sum(answer.seconds for answer in mine)
        parts = {part: sum(a.stats.parts[part] for a in mine if a.stats) / seconds for part in PARTS}
        out[policy] = {
            "tokens_per_second": rate(mine), "ratio": vars(paired_ratio(rates(mine), rates(answers[policies[0]]))),
            "acceptance": accepted, "tokens_per_step": per_step,
            "parts": {**parts, "other": 1.0 - sum(parts.values())},
        }
    return out


def pass_table(decoder: Decoder, rows: Sequence[int], contexts: Sequence[int], batches: Sequence[int]
               ) -> list[dict[str, float]]:
    """Seconds of target passes over rows x contexts at batch 1, and rows x batches at the first context."""
    probe, out = Prober(decoder.runner, None, repeats=3), []
    with torch.no_grad():
        for batch, context in [(1, c) for c in contexts] + [(b, contexts[0]) for b in batches if b > 1]:
            if context + max(rows) > decoder.runner.context or batch > (decoder.runner.max_batch or batch):
                continue
            for n in rows:
                out.append({"rows": n, "context": context, "batch": batch,
                            "seconds": probe.target_pass(n, context, batch)})
    return out


def draft_table(decoder: Decoder, contexts: Sequence[int]) -> list[dict[str, Any]]:
    """Seconds of one draft step of every variant at each context."""
    if decoder.draft is None:
        return []
    probe = Prober(decoder.runner, decoder.draft, repeats=3)
    variants: list[Variant] = decoder.draft.shape.variants()
    with torch.no_grad():
        return [{"variant": v.name, "context": c, "seconds": probe.draft_step(v, c)}
                for v in variants for c in contexts if c + 2 <= decoder.draft.context]


def linear_table(shapes: dict[str, tuple[int, int]], rows: Sequence[int], repeats: int = 15) -> list[dict[str, Any]]:
    """Seconds of a product held plain, in blocks, packed and in int8; shapes are name -> (inputs, outputs).

    Each kind gets copies of its weights beyond the processor's caches, and kinds take turns.
    """
    out = []
    for name, (inputs, outputs) in shapes.items():
        copies = min(64, max(2, (1 << 26) // (4 * inputs * outputs)))
        weights = [torch.randn(outputs, inputs) / inputs**0.5 for _ in range(copies)]
        kinds: dict[str, list[torch.nn.Module]] = {"plain": [PlainLinear(w) for w in weights],
                                                   "blocked": [BlockedLinear(w) for w in weights]}
        if can_pack(weights[0]):
            kinds["packed"] = [PackedLinear(w) for w in weights]
        if can_quantise(weights[0]):
            kinds["int8"] = [Int8Linear(w) for w in weights]
        for n in rows:
            x, times = torch.randn(n, inputs), {kind: [] for kind in kinds}  # type: ignore[var-annotated]
            for i in range(repeats):
                for kind, layers in kinds.items():
                    start = time.perf_counter()
                    layers[i % copies](x)
                    times[kind].append(time.perf_counter() - start)
            out.append({"product": name, "rows": n, **{k: statistics.median(t) for k, t in times.items()}})
    return out


def target_shapes(config: Any) -> dict[str, tuple[int, int]]:
    """The products of a Llama-shaped model: name -> (inputs, outputs)."""
    from .stack import head_shape

    q, k, d = head_shape(config)
    hidden, neurons = config.hidden_size, config.intermediate_size
    return {"qkv": (hidden, (q + 2 * k) * d), "out": (q * d, hidden), "gate_up": (hidden, 2 * neurons),
            "down": (neurons, hidden), "head": (hidden, config.vocab_size)}
