"""What else decodes this target here: `transformers` in its three ways, and llama.cpp where it is installed."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from .decoder import Decoder
from .evaluation.methods import OUTSIDE, Method, outside
from .sampling import SamplingParams
from .target import PRESETS
from .validate import paired_ratio, rotated

# (prompt ids, max_tokens) -> (new ids, seconds), greedy
Reference = Callable[[list[int], int], tuple[list[int], float]]


def plain(method: Method) -> Reference:
    """A method as a reference: ids and seconds, greedy."""

    def run(prompt: list[int], max_tokens: int) -> tuple[list[int], float]:
        answer = method(prompt, SamplingParams(max_tokens=max_tokens))
        return answer.ids, answer.seconds

    return run


def llama_cpp(gguf: Path, eos_ids: frozenset[int]) -> Reference:
    """llama.cpp through its Python binding, by token ids."""
    from llama_cpp import Llama

    model = Llama(str(gguf), n_ctx=4096, n_threads=torch.get_num_threads(), verbose=False)

    def run(prompt: list[int], max_tokens: int) -> tuple[list[int], float]:
        started, out = time.perf_counter(), []
        for token in model.generate(prompt, temp=0.0, top_k=1, repeat_penalty=1.0):
            out.append(int(token))
            if token in eos_ids or len(out) >= max_tokens:
                break
        return out, time.perf_counter() - started

    return run


def references(decoder: Decoder, trust_remote_code: bool = False) -> dict[str, Reference]:
    """Everything that can run here for a bundle's target; the draft goes to `transformers` as its stock export."""
    assert decoder.draft is not None  # a bundle has one
    name, made = decoder.target.name, outside(decoder, list(OUTSIDE), trust_remote_code)
    labels = {"transformers": "transformers generate", "transformers-lookup": "transformers prompt lookup",
              "transformers-assisted": f"transformers assisted, our {decoder.draft.shape.layers}-layer draft"}
    found = {label: plain(made[method]) for method, label in labels.items()}
    if name.lower() in PRESETS and importlib.util.find_spec("llama_cpp") is not None:
        spec = importlib.util.find_spec(PRESETS[name.lower()][0])
        if spec is not None and spec.origin is not None:
            file = next(Path(spec.origin).parent.glob("*.gguf"))
            found[f"llama.cpp {file.stem.rsplit('.', 1)[-1]}"] = llama_cpp(file, decoder.eos_ids)
    return found


def run_references(
    decoder: Decoder, others: dict[str, Reference], prompts: Sequence[list[int]], policies: Sequence[str],
    max_tokens: int, progress: Callable[[Any], Any] = lambda x: x,
) -> dict[str, dict[str, Any]]:
    """Policies and outside engines on the same prompts, interleaved: tokens/s, ratio to the first policy, and how
    many texts equal that policy's."""
    params = SamplingParams(max_tokens=max_tokens)

    def ours(policy: str) -> Reference:
        def run(prompt: list[int], limit: int) -> tuple[list[int], float]:
            output = decoder.generate(prompt, params, policy)
            return output.token_ids, output.stats.seconds
        return run

    engines = {**{policy: ours(policy) for policy in policies}, **others}
    names = list(engines)
    for run in engines.values():
        run(prompts[0], 8)
    texts: dict[str, list[list[int]]] = {name: [] for name in names}
    times: dict[str, list[float]] = {name: [] for name in names}
    for i, prompt in enumerate(progress(prompts)):
        for name in rotated(names, i):
            ids, seconds = engines[name](prompt, max_tokens)
            texts[name].append(ids)
            times[name].append(seconds)
    rates = {name: [len(ids) / s for ids, s in zip(texts[name], times[name], strict=True)] for name in names}
    first = policies[0]
    return {name: {
        "tokens_per_second": sum(len(ids) for ids in texts[name]) / sum(times[name]),
        "ratio": vars(paired_ratio(rates[name], rates[first])),
        "identical": sum(a == b for a, b in zip(texts[name], texts[first], strict=True)), "prompts": len(prompts),
    } for name in names}
