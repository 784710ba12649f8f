"""USE.md, written beside an export: how each engine is given the draft, and what it will not take."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from draftsmith.data import DraftsmithError
from draftsmith.distill.variants import FULL_ALPHA, Variant

from ..bundle import Bundle, Manifest
from ..costs import Costs
from ..flops import parameters_read
from ..payoff import FLAT, LENGTHS, best_length
from ..target import Target, resolve

USUAL_LENGTH = 4  # where a bundle has no figures


@dataclass(frozen=True)
class Settings:
    """What USE.md tells of one export. length: drafted tokens a round; why: where it comes from."""

    engine: str
    target: str
    folder: Path
    variant: str
    parameters: int
    vocab_size: int
    context: int
    target_context: int
    heads: int
    width: int
    hidden: int
    target_hidden: int
    acceptance: float | None
    length: int
    why: str
    file: str = ""  # of a GGUF export
    target_gguf: str = ""


def known_acceptance(manifest: Manifest, variant: Variant) -> float | None:
    """Acceptance of a variant by the bundle's own figures; None where it has none.

    Measured on held-out prompts at full width. A narrower variant gets that times the ratio of the two by the traces,
    whose own figures are of another text and position and would not compare.
    """
    held = manifest.evaluation.get("heldout", {}).get(f"heldout/acceptance_{variant.depth}L")
    traced = manifest.policy.get("goodput", {}).get("acceptance", {})
    own, full = traced.get(variant.name), traced.get(Variant(variant.depth).name)
    if held is None or variant.alpha == FULL_ALPHA:
        return own if held is None else float(held)
    return float(held) * own / full if own and full else None


def measured_verify(manifest: Manifest) -> np.ndarray | None:
    """Seconds of a target pass of 1, 2, ... rows by a cost table of the bundle; None where it has none."""
    for table in manifest.costs.values():
        try:
            verify = np.array(Costs.from_json(table).verify)
        except DraftsmithError:  # of another release
            continue
        if len(verify) > max(LENGTHS):
            return verify
    return None


def choose_length(manifest: Manifest, variant: Variant, ratio: float, on_gpu: bool) -> tuple[int, str]:
    """Drafted tokens a round for a stock engine, and a sentence on where the number comes from.

    `ratio`: what a step of the exported model, with its whole head, reads of what a target pass reads.
    """
    acceptance = known_acceptance(manifest, variant)
    if acceptance is None:
        return USUAL_LENGTH, f"The bundle has no acceptance figure; {USUAL_LENGTH} is a usual start."
    measured = None if on_gpu else measured_verify(manifest)
    verify = FLAT if measured is None else measured / measured[0]
    assumed = "a target pass that costs the same for any few rows" if measured is None else "the bundle's cost table"
    length, gain = best_length(acceptance, ratio, verify)
    why = (f"At that acceptance, with a step that reads {ratio:.2f} of what a target pass reads (all {variant.depth} "
           f"layers and the whole vocabulary, both models held alike), and with {assumed}, {length} is predicted best: "
           f"{gain:.2f} times plain decoding.")
    return length, why + ("" if gain > 1.02 else " **That is no gain**: this draft pays in Draftsmith's own runner, "
                          "whose head is trimmed, or beside a larger target.")


def settings_for(bundle: Bundle, target: Target, variant: Variant, model: Any, folder: Path, engine: str,
                 **more: str) -> Settings:
    """`model`: the stock model that is exported to `folder`."""
    config, own = model.config, target.config
    parameters = sum(p.numel() for p in model.parameters())
    ratio = parameters_read(parameters, config) / parameters_read(target.weights().parameters, own)
    length, why = choose_length(bundle.manifest, variant, ratio, engine in ("vllm", "sglang"))
    context = int(config.max_position_embeddings)
    return Settings(engine, resolve(target.name), folder, variant.name, parameters, int(config.vocab_size), context,
                    int(getattr(own, "max_position_embeddings", None) or context), int(config.num_attention_heads),
                    int(config.intermediate_size), int(config.hidden_size), int(own.hidden_size),
                    known_acceptance(bundle.manifest, variant), length, why, **more)


def usage(s: Settings, checked: str) -> str:
    """The text of USE.md."""
    acceptance = (f"Acceptance by the bundle's figures: {s.acceptance:.2f} of the judged tokens, on text like that it "
                  "was trained for." if s.acceptance is not None else "The bundle has no acceptance figure.")
    return "\n".join([
        f"# Draft {s.variant} for `{s.target}`", "",
        f"{s.parameters / 1e6:,.1f} million parameters, vocabulary {s.vocab_size:,}, context {s.context:,}.",
        acceptance, "",
        f"Checked: {checked}.", "", f"Drafted tokens a round: {s.length}. {s.why}", "",
        *SECTIONS[s.engine](s), ""])


def context_line(s: Settings, what: str) -> list[str]:
    if s.context >= s.target_context:
        return []
    return [f"- The draft's context ({s.context:,}) is shorter than the target's ({s.target_context:,}): {what}"]


def huggingface(s: Settings) -> list[str]:
    return [
        "## transformers", "", "```python",
        "from transformers import AutoModelForCausalLM, AutoTokenizer", "",
        f"tokenizer = AutoTokenizer.from_pretrained({s.target!r})",
        f'target = AutoModelForCausalLM.from_pretrained({s.target!r}, dtype="auto")',
        f'draft = AutoModelForCausalLM.from_pretrained({str(s.folder)!r}, dtype="auto")',
        f"draft.generation_config.num_assistant_tokens = {s.length}",
        'draft.generation_config.num_assistant_tokens_schedule = "constant"',
        'inputs = tokenizer("Hello", return_tensors="pt")',
        "print(tokenizer.decode(target.generate(**inputs, assistant_model=draft, max_new_tokens=64)[0]))", "```", "",
        f"- Both vocabularies have {s.vocab_size:,} rows, so no `assistant_tokenizer` is needed (nor accepted).",
        "- One prompt at a time: assisted generation refuses batches.",
        *context_line(s, "keep prompt and answer below it.")]


def vllm(s: Settings) -> list[str]:
    config = {"method": "draft_model", "model": str(s.folder), "num_speculative_tokens": s.length}
    return [
        "## vLLM", "", "```bash", f"vllm serve {s.target} \\",
        f"    --speculative-config '{json.dumps(config)}'", "```", "",
        "```python", "from vllm import LLM", "", f"llm = LLM(model={s.target!r}, speculative_config={config!r})",
        "```", "",
        "- Releases from 0.10 to 0.13 refuse draft models (`NotImplementedError`): take a later one.",
        f"- vLLM refuses vocabularies of different size; both have {s.vocab_size:,} rows here (checked).",
        "- With tensor parallelism the draft must have the target's: add `\"draft_tensor_parallel_size\"` with the "
        f"same number, which must divide the draft's {s.heads} heads and feed-forward width of {s.width}.",
        "- `\"max_model_len\"` in the same settings limits the draft's context.",
        *context_line(s, "give `--max-model-len`, or expect no speculation past it.")]


def sglang(s: Settings) -> list[str]:
    return [
        "## SGLang", "", "```bash", f"python3 -m sglang.launch_server --model-path {s.target} \\",
        "    --speculative-algorithm STANDALONE \\", f"    --speculative-draft-model-path {s.folder} \\",
        f"    --speculative-num-steps {s.length} --speculative-eagle-topk 1 \\",
        f"    --speculative-num-draft-tokens {s.length + 1}", "```", "",
        "- A draft with another vocabulary is refused, by older releases silently used: both have "
        f"{s.vocab_size:,} rows here (checked).",
        "- Not together with `--enable-dp-attention`; the draft runs with the target's tensor parallelism, which must "
        f"divide its {s.heads} heads and feed-forward width of {s.width}.",
        "- About 6 GB are set aside for STANDALONE when `--mem-fraction-static` is left out; where memory is short, "
        "give it yourself.",
        *([f"- The draft's hidden size is {s.hidden}, the target's {s.target_hidden}: some releases cannot take that."]
          if s.hidden != s.target_hidden else []),
        *context_line(s, "give `--context-length`.")]


def gguf(s: Settings) -> list[str]:
    file = s.folder / s.file
    return [
        "## llama.cpp", "", "```bash", f"llama-server -m {s.target_gguf} -md {file} \\",
        f"    --spec-type draft-simple --spec-draft-n-max {s.length} --spec-draft-p-min 0", "```", "",
        "- Builds before May 2026 call these `--draft-max` and `--draft-p-min`, and have no `draft-simple`; newer ones "
        "do not speculate without it.",
        "- `llama-cli` takes the same options; in older builds `llama-speculative-simple -m ... -md ...` is the one.",
        "- On a GPU add `-ngl 99 -ngld 99`. The server's log ends each answer with the draft's acceptance rate.",
        "- llama.cpp compares vocabularies (kind, tokens from id 5 on, beginning and end of text, sizes at most 128 "
        f"apart): the tokenizer here is the one of `{Path(s.target_gguf).name}`, unchanged, so use that target or "
        "another quantisation of it.",
        *context_line(s, "give `-c` at most that."), "",
        "## LM Studio", "",
        f"1. `lms import {file}`, or copy it to `~/.lmstudio/models/draftsmith/{file.stem}/` (0.3.10 or newer).",
        "2. In Power User mode load the target's GGUF.",
        "3. In the chat's sidebar, under Speculative Decoding, choose it as Draft Model. It is listed only where the "
        "vocabularies fit.", "",
        "## Ollama", "",
        "Ollama cannot use a GGUF draft (its issue 5800 is open; `DRAFT` in a Modelfile is for Gemma 4's own draft "
        "models in its MLX engine). Run `llama-server` instead: it speaks the same OpenAI interface."]


SECTIONS: dict[str, Callable[[Settings], list[str]]] = {"hf": huggingface, "vllm": vllm, "sglang": sglang,
                                                        "gguf": gguf}
