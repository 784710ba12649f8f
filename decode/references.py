"""What else decodes this target here: `transformers` in its three ways, and llama.cpp where it is installed."""

from __future__ import annotations

import contextlib
import importlib.util
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from draftsmith.data import DraftsmithError

from .decoder import Decoder
from .evaluation.interleave import interleave, rate, rates
from .evaluation.methods import OUTSIDE, Answer, Method, ours, outside
from .evaluation.statistics import paired_ratio
from .sampling import SamplingParams
from .target import PRESETS, preset_gguf


def llama_cpp(gguf: Path, eos_ids: frozenset[int]) -> Method:
    """llama.cpp through its Python binding, by token ids, greedy."""
    from llama_cpp import Llama

    model = Llama(str(gguf), n_ctx=4096, n_threads=torch.get_num_threads(), verbose=False)

    def run(prompt: list[int], params: SamplingParams) -> Answer:
        started, first, out = time.perf_counter(), 0.0, list[int]()
        for token in model.generate(prompt, temp=0.0, top_k=1, repeat_penalty=1.0):
            first = first or time.perf_counter()
            out.append(int(token))
            if token in eos_ids or len(out) >= params.max_tokens:
                break
        return Answer(out, model.detokenize(out).decode(errors="replace"), time.perf_counter() - started,
                      first - started)

    return run


def references(decoder: Decoder, trust_remote_code: bool = False) -> dict[str, Method]:
    """Everything that can run here for a bundle's target; the draft goes to `transformers` as its stock export."""
    assert decoder.draft is not None  # a bundle has one
    name, made = decoder.target.name, outside(decoder, list(OUTSIDE), trust_remote_code)
    labels = {"transformers": "transformers generate", "transformers-lookup": "transformers prompt lookup",
              "transformers-assisted": f"transformers assisted, our {decoder.draft.shape.layers}-layer draft"}
    found = {label: made[method] for method, label in labels.items()}
    if name.lower() in PRESETS and importlib.util.find_spec("llama_cpp") is not None:
        with contextlib.suppress(DraftsmithError):  # its package may have gone since it was converted
            file = preset_gguf(name)
            found[f"llama.cpp {file.stem.rsplit('.', 1)[-1]}"] = llama_cpp(file, decoder.eos_ids)
    return found


def run_references(
    decoder: Decoder, others: Mapping[str, Method], prompts: Sequence[list[int]], policies: Sequence[str],
    max_tokens: int, progress: Callable[[Any], Any] = lambda x: x,
) -> dict[str, dict[str, Any]]:
    """Policies and outside engines on the same prompts, interleaved: tokens/s, ratio to the first policy, and how
    many texts equal that policy's."""
    engines = {**{policy: ours(decoder, policy) for policy in policies}, **others}
    answers = interleave(engines, prompts, SamplingParams(max_tokens=max_tokens), progress)
    first = answers[policies[0]]
    return {name: {
        "tokens_per_second": rate(mine), "ratio": vars(paired_ratio(rates(mine), rates(first))),
        "identical": sum(a.ids == b.ids for a, b in zip(mine, first, strict=True)), "prompts": len(prompts),
    } for name, mine in answers.items()}
