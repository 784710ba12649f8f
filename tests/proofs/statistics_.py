"""The benchmark's own test: a slow method, a biased one and a worse draft, all planted, are found; the same method
twice is not told apart. Through the production comparison, on a tiny target."""

from __future__ import annotations

import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch
from _verdict import ROOT, conclude

sys.path.insert(0, str(ROOT / "tests"))  # the tiny target is the tests' own
from conftest import make_bundle, make_draft, save_model
from draftsmith.decode import Decoder, SamplingParams
from draftsmith.decode.evaluation.against import compare_drafts
from draftsmith.decode.evaluation.journal import Journal
from draftsmith.decode.evaluation.methods import Answer, Method, ours
from draftsmith.decode.evaluation.protocol import Comparison, Settings
from draftsmith.decode.evaluation.results import Results
from draftsmith.decode.evaluation.tasks import Chosen, Item, Task
from draftsmith.decode.target import load_target

TASKS, PROMPTS, TOKENS = 3, 48, 40
SLOWER = 0.15  # of an answer's time, added to the slow method's
WRONG_EVERY = 8  # answers of which the biased method changes one


def slow(plain: Method) -> Method:
    def run(prompt: list[int], params: SamplingParams) -> Answer:
        started = time.perf_counter()
        answer = plain(prompt, params)
        time.sleep(SLOWER * answer.seconds)
        return replace(answer, seconds=time.perf_counter() - started)

    return run


def biased(plain: Method) -> Method:
    """Changes one token, which lowers the score of the answer, in every eighth answer."""
    calls = 0

    def run(prompt: list[int], params: SamplingParams) -> Answer:
        nonlocal calls
        calls += 1
        answer = plain(prompt, params)
        if calls % WRONG_EVERY:
            return answer
        ids = [*answer.ids[:5], (answer.ids[5] + 1) % 200, *answer.ids[6:]]
        return replace(answer, ids=ids, text=answer.text[:5] + "\0" + answer.text[6:])

    return run


def worse_bundle(folder: Path, target: str) -> Path:
    """A draft whose weights are shaken."""
    loaded = load_target(target)
    draft = make_draft(loaded)
    torch.manual_seed(3)
    with torch.no_grad():
        for weight in draft.parameters():
            weight += 0.5 * weight.std() * torch.randn_like(weight) if weight.dim() > 1 else 0.0
    return make_bundle(folder, loaded, draft, target)


def main() -> None:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        target = str(save_model(folder / "target"))
        loaded = load_target(target)
        decoder = Decoder.load(make_bundle(folder / "bundle", loaded, make_draft(loaded), target))
        plain = ours(decoder, "ar")
        added = {"again": ours(decoder, "ar"), "slow": slow(plain), "biased": biased(plain)}
        journal = Journal(folder / "rows.jsonl", {"what": "run"})
        comparison = Comparison(decoder, Settings(["ar", *added, "fixed(3)"], TOKENS), journal, methods=added)
        for t in range(TASKS):
            task = Task(f"task {t}", lambda source: [], lambda item, answer: float("\0" not in answer), "whole", TOKENS)
            comparison.run(Chosen(task, [Item(f"{t}/{i}", "text", text=f"text {t} {i}") for i in range(PROMPTS)]))
        results = Results(journal.records)
        twice, slower = (results.speed_by_task(name, "ar") for name in ("again", "slow"))
        all_slower, all_twice = (results.speed(None, name, "ar") for name in ("slow", "again"))
        changed = [sum(bool(r["apart"]) for r in results.of(None, name)) for name in ("biased", "again", "fixed(3)")]
        quality = results.quality("task 0", "biased")
        other = decoder.beside(worse_bundle(folder / "worse", target))
        prompts = [decoder.prompt_ids(f"text {i}") for i in range(PROMPTS)]
        worse = compare_drafts(other, decoder, prompts, 3, TOKENS)
        same = compare_drafts(decoder, decoder.beside(folder / "bundle"), prompts, 3, TOKENS)
    checks = {
        # On all tasks together: an answer takes milliseconds here, and one task's timings are noisy.
        "slow found": all_slower is not None and all_slower.significant and all_slower.ratio < 1,
        "same method not flagged": not any(f.significant for f in [*twice.values(), all_twice] if f is not None),
        "bias found": changed[0] == TASKS * PROMPTS // WRONG_EVERY and changed[1:] == [0, 0],
        "lower score seen": quality is not None and quality.ratio < 0,
        "worse draft found": worse.worse and not worse.better,
        "same draft not flagged": not same.acceptance.significant and abs(same.acceptance.ratio) < 1e-9,
    }
    figures = (f"planted {SLOWER:.0%} slowdown: " + ", ".join(f"{f.ratio:.3f}" for f in slower.values())
               + (f" by task, together {all_slower.ratio:.3f} (p {all_slower.t:.1g})" if all_slower else "")
               + "; the same method twice: " + ", ".join(f"{f.ratio:.3f} (p {f.t_holm:.2g})" for f in twice.values())
               + f"; {changed[0]} changed texts of {TASKS * PROMPTS} found, {changed[1] + changed[2]} false alarms; "
               f"worse draft: acceptance {worse.acceptance.ratio:+.3f} (p {worse.acceptance.t:.1g})"
               + "".join(f"; MISSED: {name}" for name, fine in checks.items() if not fine))
    conclude("statistics", all(checks.values()), figures, checks=checks)


if __name__ == "__main__":
    main()
