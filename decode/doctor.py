"""`draftsmith doctor`: whether a draft fits a target, what it would cost, and from which acceptance it would pay."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from draftsmith.data import DraftsmithError
from draftsmith.data.vocabulary import first_difference
from draftsmith.distill.calibrate import break_even

from .bundle import check_compatible
from .describe import Description, describe_bundle, describe_model, is_bundle
from .device import choose_engine, default_device, device_name
from .exports.use import known_acceptance
from .payoff import FLAT, LENGTHS, best_length, lowest_break_even
from .target import load_description

ACCEPTANCES = (0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
OK, REMARK, STOP = "ok", "remark", "stop"
# llama.cpp's own limits: common/speculative.cpp
LLAMA_SIZES, LLAMA_FIRST = 128, 5


@dataclass(frozen=True)
class Finding:
    """level: "ok", "remark" or "stop"; what was found, and what to do about it."""

    level: str
    subject: str
    what: str
    todo: str = ""

    def describe(self) -> str:
        return f"[{self.level}] {self.subject}: {self.what}" + (f" -> {self.todo}" if self.todo else "")


@dataclass(frozen=True)
class Payoff:
    """ratio: seconds of a draft step over those of a target pass of one row. break_even: the lowest acceptance that
    pays, at length break_even_k; break_evens: of each length. best: by acceptance the best length and the speed-up
    predicted of it."""

    variant: str
    ratio: float
    break_even: float
    break_even_k: int
    break_evens: list[float]
    best: dict[str, tuple[int, float]]


@dataclass
class Diagnosis:
    target: Description
    draft: Description
    findings: list[Finding] = field(default_factory=list)
    costs: str = ""  # where the figures come from
    payoffs: list[Payoff] = field(default_factory=list)

    @property
    def works(self) -> bool:
        return all(f.level != STOP for f in self.findings)

    @property
    def verdict(self) -> str:
        if not self.works:
            return "does not work"
        return "works, with remarks" if any(f.level == REMARK for f in self.findings) else "works"

    def to_json(self) -> dict[str, Any]:
        return {"verdict": self.verdict, "works": self.works, "target": self.target.to_json(),
                "draft": self.draft.to_json(), "findings": [asdict(f) for f in self.findings], "costs": self.costs,
                "payoffs": [asdict(p) for p in self.payoffs]}

    def describe(self) -> str:
        """A page of text, the verdict first."""
        lines = [f"{self.draft.name} as a draft for {self.target.name}: {self.verdict}", "", *facts(self), ""]
        order = {STOP: 0, REMARK: 1, OK: 2}
        lines += [f.describe() for f in sorted(self.findings, key=lambda f: order[f.level])]
        if self.payoffs:
            lines += ["", self.costs, *payoff_table(self.payoffs)]
        return "\n".join(lines)


def facts(found: Diagnosis) -> list[str]:
    """Both models side by side."""
    itemsize, target, draft = choose_engine().dtype.itemsize, found.target, found.draft

    def size(d: Description) -> str:
        return f"{d.parameters / 1e6:,.1f} million, {d.parameters * itemsize / 2**20:,.0f} MiB as loaded here"

    rows = [("", target.name, draft.name), ("type", target.model_type, draft.model_type),
            ("parameters", size(target), size(draft)),
            ("vocabulary", *(f"{len(d.tokens):,} tokens, {d.vocab_size:,} rows" for d in (target, draft))),
            ("context", *("no limit" if d.context is None else f"{d.context:,}" for d in (target, draft))),
            ("cache", target.cache, draft.cache), ("runner", target.runner, draft.runner)]
    first, second = (max(len(row[i]) for row in rows) for i in (0, 1))
    return [f"{a:<{first}}  {b:<{second}}  {c}".rstrip() for a, b, c in rows]


def payoff_table(payoffs: list[Payoff]) -> list[str]:
    width = max(7, *(len(p.variant) for p in payoffs))
    head = f"{'variant':<{width}}  step/pass  break-even (k)" + "".join(f"  at {a:.1f} (k)" for a in ACCEPTANCES)
    rows = [f"{p.variant:<{width}}  {p.ratio:>9.3f}  {break_even_text(p):>14}" + "".join(
        f"  {p.best[f'{a:.1f}'][1]:>5.2f}x ({p.best[f'{a:.1f}'][0]})" for a in ACCEPTANCES) for p in payoffs]
    return [head, *rows]


def break_even_text(p: Payoff) -> str:
    return "never" if p.break_even >= 1 else f"{p.break_even:.2f} ({p.break_even_k})"


def diagnose(target: str, draft: str, measure: bool = False, trust_remote_code: bool = False) -> Diagnosis:
    """Look at a target (folder or hub name) and a draft (the same, or a bundle folder) without loading weights.

    `measure` loads both and times them. Raises `DraftsmithError` for what cannot be read at all.
    """
    own = describe_model(target, "target", trust_remote_code)
    other = describe_bundle(draft) if is_bundle(draft) else describe_model(draft, "draft", trust_remote_code)
    found = Diagnosis(own, other)
    found.findings += tokenizer_findings(own, other) + (
        bundle_findings(other, target, trust_remote_code) if other.bundle else [])
    found.findings += [f for d, role in ((own, "target"), (other, "draft")) for f in model_findings(d, role)]
    found.findings += pair_findings(own, other)
    found.findings += engine_findings(own, other)
    if not found.works:
        return found
    if measure:
        found.costs, prices = measured(target, draft, other, trust_remote_code)
    else:
        found.costs, prices = estimated(own, other)
    found.payoffs = [payoff(name, step, verify) for name, (step, verify) in prices.items()]
    found.findings += acceptance_findings(other, prices)
    if all(p.best[f"{ACCEPTANCES[-1]:.1f}"][1] <= 1 for p in found.payoffs):
        found.findings.append(Finding(REMARK, "gain", "even at an acceptance of 0.9 no speed-up is predicted",
                                      "take a smaller draft, or prompt lookup alone (--draft none)"))
    return found


def differences(own: Description, other: Description) -> int:
    """Shared ids whose token is another."""
    return sum(x is not None and y is not None and x != y
               for x, y in zip(own.tokens, other.tokens, strict=False))


def tokenizer_findings(own: Description, other: Description) -> list[Finding]:
    if difference := first_difference(own.tokens, other.tokens):
        shared = min(len(own.tokens), len(other.tokens))
        return [Finding(STOP, "tokenizer", f"{differences(own, other):,} of {shared:,} shared ids mean another token; "
                        f"the first: {difference}", "take a draft of the same tokenizer, or distil one "
                        "(train/respond.py, train/distill.py)")]
    if own.tokens != other.tokens:
        return [Finding(REMARK, "tokenizer", f"the same tokens, but the target has {len(own.tokens):,} and the draft "
                        f"{len(other.tokens):,}", "tokens that the draft lacks are never proposed, at the cost of "
                        "acceptance")]
    return [Finding(OK, "tokenizer", f"the same {len(own.tokens):,} tokens")]


def bundle_findings(other: Description, target: str, trust_remote_code: bool) -> list[Finding]:
    """What loading the bundle would refuse."""
    assert other.bundle is not None
    try:
        check_compatible(other.bundle, *load_description(target, trust_remote_code))
    except DraftsmithError as error:
        return [Finding(STOP, "bundle", str(error), "use the bundle's own target, or train a bundle for this one")]
    return []


def model_findings(d: Description, role: str) -> list[Finding]:
    """What concerns one model alone."""
    found = []
    if d.recurrent:
        found.append(Finding(STOP, role, f"{d.model_type} keeps a recurrent state, which cannot be rolled back after a "
                             "rejected draft", f"take a {role} with attention only"))
    if not d.weights:
        found.append(Finding(STOP, role, "its folder holds no safetensors, and nothing else is read",
                             "save it again with save_pretrained of transformers"))
    if d.quantised:
        found.append(Finding(REMARK, role, "its weights are quantised: it runs as a module where transformers can load "
                             "them, and the size above is that of unquantised ones", "check with --measure"))
    if d.experts:
        found.append(Finding(REMARK, role, "is a mixture of experts, of which a pass reads a part: its cost is "
                             "overstated below", "use --measure"))
    if role == "target" and not d.eos_ids:
        found.append(Finding(REMARK, role, "states no end of sequence", "answers end at max_tokens or a stop string"))
    if role == "target" and not d.chat_template:
        found.append(Finding(REMARK, role, "has no chat template", "prompts are continued as they are"))
    return found


def pair_findings(own: Description, other: Description) -> list[Finding]:
    """What our own decoder makes of the two together."""
    found = [Finding(OK, "runner", f"target {own.runner}")]
    if other.context is not None and other.context < (own.context or 2**30):
        found.append(Finding(REMARK, "context", f"the draft's is {other.context:,}: past it the target decodes alone",
                             "nothing, if prompt and answer stay below it"))
    if other.bundle is None and other.eos_ids != own.eos_ids:
        found.append(Finding(REMARK, "end of sequence", f"ids {own.eos_ids} of the target, {other.eos_ids} of the "
                             "draft", "nothing here, where the target's count; llama.cpp refuses such a pair"))
    if other.bundle is None and other.parameters >= own.parameters:
        found.append(Finding(REMARK, "size", "the draft is no smaller than the target", "take a smaller one"))
    return found


def engine_findings(own: Description, other: Description) -> list[Finding]:
    """Whether other engines would take the pair."""
    same = first_difference(own.tokens, other.tokens) is None
    if other.bundle is not None:  # an export has the target's vocabulary
        how = "take an export of it: scripts/export.py --format hf, vllm, sglang or gguf"
        return [Finding(OK, "other engines", how)] if same else []
    equal, state = own.vocab_size == other.vocab_size, own.recurrent or other.recurrent
    sizes = f"rows of the vocabularies differ ({own.vocab_size:,} and {other.vocab_size:,})"
    alike = all(x == y for x, y in zip(own.tokens[LLAMA_FIRST:], other.tokens[LLAMA_FIRST:], strict=False))
    close = abs(own.vocab_size - other.vocab_size) <= LLAMA_SIZES
    reasons = {
        "transformers (assistant_model)": [(not same, "other tokens"), (not equal, f"{sizes}: it wants tokenizers too"),
                                           (state, "recurrent state")],
        "vLLM (draft_model) and SGLang (STANDALONE)": [(not same, "other tokens"), (not equal, sizes)],
        "llama.cpp": [(not alike, "other tokens"), (not close, f"{sizes} by more than {LLAMA_SIZES}"),
                      (own.eos_ids != other.eos_ids, "other end of sequence")],
    }
    found = []
    for engine, tests in reasons.items():
        why = [text for applies, text in tests if applies]
        found.append(Finding(REMARK, engine, f"would not take the pair: {'; '.join(why)}") if why
                     else Finding(OK, engine, "would take the pair"))
    return found


Prices = dict[str, tuple[float, np.ndarray]]


def estimated(own: Description, other: Description) -> tuple[str, Prices]:
    """Costs by what a step and a pass read, in target passes."""
    text = "Estimated by memory traffic (parameters that a draft step reads over those a target pass reads). "
    if default_device().type == "cpu":
        text += ("Verification is taken as free, which it is not on a CPU: use --measure to know.")
    else:
        text += "A pass is taken to cost the same for any few rows, as where memory is the limit; --measure times both."
    return text, {name: (read / own.read["whole"], FLAT) for name, read in other.read.items()}


def measured(target: str, draft: str, other: Description, trust_remote_code: bool) -> tuple[str, Prices]:
    """Costs timed here."""
    from .decoder import Decoder

    decoder = (Decoder.load(draft, target, trust_remote_code=trust_remote_code) if other.bundle
               else Decoder.pair(target, draft, trust_remote_code))
    costs = decoder.costs
    assert costs is not None
    assert decoder.draft is not None
    verify = np.array(costs.verify)
    verify = np.pad(verify, (0, max(0, len(FLAT) - len(verify))), mode="edge")  # of a target with a tiny context
    text = (f"Measured on {device_name()}, target in {decoder.runner.precision}, draft in {decoder.draft.precision}: a "
            f"target pass {1e3 * verify[0]:.1f} ms, of 5 rows {1e3 * verify[4]:.1f} ms.")
    return text, {name: (step, verify) for name, step in costs.step.items()}


def acceptance_findings(other: Description, prices: Prices) -> list[Finding]:
    """What a bundle's own acceptance figures promise at these costs."""
    if other.bundle is None:
        return []
    known = {v.name: known_acceptance(other.bundle.manifest, v) for v in other.bundle.shape.variants()}
    gains = {name: (a, *best_length(a, *prices[name])) for name, a in known.items() if a is not None}
    if not gains:
        return [Finding(OK, "acceptance", "the bundle has no figure", "scripts/validate_acceptance.py measures it")]
    name, (acceptance, k, gain) = max(gains.items(), key=lambda item: item[1][2])
    return [Finding(OK if gain > 1 else REMARK, "acceptance", f"{acceptance:.2f} by the bundle's figures for {name}: "
                    f"{gain:.2f} times plain decoding at {k} drafted tokens a round")]


def payoff(variant: str, step: float, verify: np.ndarray) -> Payoff:
    acceptance, k = lowest_break_even(step, verify)
    return Payoff(variant, float(step / verify[0]), acceptance, k, [break_even(step, verify, k) for k in LENGTHS],
                  {f"{a:.1f}": best_length(a, step, verify) for a in ACCEPTANCES})


def run_doctor(args: argparse.Namespace) -> None:
    """The command: prints the diagnosis, and fails where the pair does not work."""
    found = diagnose(args.target, args.draft, args.measure, args.trust_remote_code)
    print(json.dumps(found.to_json(), indent=2) if args.json else found.describe())
    if not found.works:
        first = next(f for f in found.findings if f.level == STOP)
        raise DraftsmithError(f"'{args.draft}' does not work as a draft for '{args.target}': {first.what}")
