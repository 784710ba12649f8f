"""The report of a comparison: Markdown, JSON, one self-contained HTML page, and TensorBoard."""

from __future__ import annotations

import html
from pathlib import Path
from typing import Any

from draftsmith.data.io import write_json, write_text

from ..benchtables import markdown
from . import figures
from .methods import OUTSIDE
from .protocol import PLAIN
from .results import FAILING, REFERENCES, Results, finite
from .statistics import correct, faster

# The source paper's figures (A100, 128 tokens), which people compare with.
PAPER = {"speed-up over AR": "3.2", "acceptance": "0.92", "quality within": "1 %", "compute relative to DSD": "0.60",
         "failure mode": "8.2 %", "latency": "0.85 s"}


def number(value: float | None, digits: int = 2, percent: bool = False) -> str:
    if value is None:
        return ""
    return f"{100 * value:.{digits}f} %" if percent else f"{value:.{digits}f}"


def in_short(results: Results) -> list[str]:
    """What the comparison says, in sentences."""
    lines = []
    main = next((m for m in ("goodput", "paper") if m in results.methods), results.methods[-1])
    outside = [m for m in results.methods if m in OUTSIDE]
    others = [m for m in (*(r for r in REFERENCES if r in results.methods), *outside) if m != main]
    # All tasks together, corrected over the opponents.
    whole = correct({other: found for other in others if (found := results.speed(None, main, other)) is not None})
    for other, found in whole.items():
        by_task = results.speed_by_task(main, other)
        better = sum(f.significant and f.ratio > 1 for f in by_task.values())
        worse = sum(f.significant and f.ratio < 1 for f in by_task.values())
        tail = f", slower on {worse}" if worse else ""
        lines.append(f"{faster(main, other, found).sentence}. Task by task, corrected: faster on {better} of "
                     f"{len(by_task)}{tail}.")
    lines.append(quality_line(results))
    for name, mine in (("", [m for m in results.methods if m != PLAIN and m not in OUTSIDE]),
                       (" of the outside references", outside)):
        rows = [r for r in results.rows if r["method"] in mine]
        if rows:
            apart = sum(bool(r["apart"]) for r in rows)
            within = sum(r["divergence"] is not None for r in rows) - apart
            lines.append(f"Of {len(rows)} texts{name} {apart} are not plain decoding's own; {within} more part from it "
                         "at a near-tie, within the rounding between passes of different sizes.")
    if (failing := results.failing()) is not None:
        lines.append(f"Failure mode (the draft's perplexity over {FAILING} times the target's): {failing:.1%} of "
                     "prompts.")
    if (n := min((len(results.of(t, main)) for t in results.tasks), default=0)) < 30:
        lines.append(f"With {n} prompts a task only large differences can be found; the tables say how large.")
    if results.split > 0.02:
        lines.append(f"{results.split:.0%} of the prompts were measured in more than one session: where the machine "
                     "was not as fast in one as in the other, ratios carry that.")
    return lines


def quality_line(results: Results) -> str:
    changes = [(abs(found.ratio), task, method) for task in results.tasks for method in results.methods
               if method != PLAIN and (found := results.quality(task, method)) is not None]
    if not changes:
        return "No task with a score was run."
    largest, task, method = max(changes)
    if largest == 0:
        return "Quality: every method has plain decoding's score on every task."
    return f"Quality: the largest change of a task's mean score is {largest:.3f} ({method} on {task})."


def task_table(results: Results, task: str | None) -> tuple[list[str], list[list[str]]]:
    """Header and rows: the methods on one task, or on all."""
    header = ["method", "tokens/s", "over ar (95 %)", "p", "found from", "first token, s", "acceptance", "tokens/step",
              "compute/dsd", "score", "same text"]
    lines = []
    for method in results.methods:
        s, up = results.summary(task, method), results.speed(task, method)
        by_task = results.speed_by_task(method, PLAIN) if method != PLAIN else {}
        p = by_task[task].t_holm if task in by_task else up.t if up else None
        shown = results.tuned_name(task, method) if task else method
        lines.append([
            shown, number(s["tokens_per_second"], 1),
            "1" if method == PLAIN or up is None else f"{up.ratio:.2f} ({up.low:.2f} to {up.high:.2f})",
            "" if method == PLAIN else p_value(p),
            "" if method == PLAIN or up is None else number(up.detectable),
            number(s["ttft"]), number(s.get("acceptance"), 3) if method != PLAIN else "",
            number(s.get("tokens_per_step")), number(results.compute(task, method)), number(s["score"], 3),
            f"{s['same_text']} of {s['prompts']}" + (f", {s['apart']} wrong" if s["apart"] else "")])
    return header, lines


def test_table(results: Results) -> tuple[list[str], list[list[str]]]:
    """Every test: each method against plain decoding, the best fixed length and the best tree, task by task."""
    header, lines = ["task", "method", "against", "ratio (95 %)", "bootstrap", "p, t-test (Holm)", "p, Wilcoxon",
                     "Cohen's d", "n"], []
    for method in (m for m in results.methods if m != PLAIN):
        for other in (o for o in REFERENCES if o in results.methods and o != method):
            for task, f in results.speed_by_task(method, other).items():
                lines.append([task, method, other, f"{f.ratio:.2f} ({f.low:.2f} to {f.high:.2f})",
                              f"{f.boot_low:.2f} to {f.boot_high:.2f}", p_value(f.t_holm), p_value(f.wilcoxon),
                              f"{f.effect:.2f}", str(f.n)])
    return header, sorted(lines, key=lambda line: results.tasks.index(line[0]))


def controller_table(results: Results) -> tuple[list[str], list[list[str]]]:
    """What the controllers did, and what it cost."""
    header, lines = ["task", "method", "terminated early", "a larger variant, extra ms", "GFLOP/token", "J/token",
                     "failure mode"], []
    for task in results.tasks:
        for method in results.methods:
            s = results.summary(task, method)
            if "terminated" in s:
                lines.append([task, method, number(s["terminated"], 0, True), number(s["upgrade_extra_ms"], 1),
                              number(s["gflop_per_token"]), number(s["joules_per_token"]),
                              number(results.failing(task), 0, True)])
    return header, lines


def p_value(p: float | None) -> str:
    return "" if p is None else f"{p:.1g}" if p >= 1e-4 else "< 0.0001"


def all_figures(results: Results, alphas: list[float], costs: dict[str, float]) -> list[tuple[str, str, Any]]:
    """(name, question, figure), where there is one."""
    plt = figures.begin()
    found: list[tuple[str, str, Any]] = [
        ("speed", "How much faster than plain decoding, task by task?", figures.speed_by_task(results, plt)),
        ("parts", "Where does the time go?", figures.time_by_part(results, plt)),
        ("places", "How often is the i-th drafted token kept?", figures.acceptance_by_place(results, plt)),
        ("theory", "Does acceptance explain the gain?", figures.speed_by_acceptance(results, costs, plt)),
        ("latency", "How long does an answer take?", figures.latencies(results, plt))]
    for method in ("paper", "goodput"):
        if method in results.methods:
            found.append((f"one-{method}", f"How did {method} move during one answer?",
                          figures.one_generation(results, method, alphas, plt)))
    return [(name, question, figure) for name, question, figure in found if figure is not None]


def write_report(folder: Path, results: Results, facts: dict[str, Any], alphas: list[float], costs: dict[str, float]
                 ) -> Path:
    """Write report.md, report.json, report.html and TensorBoard's events; returns the path of report.html."""
    import matplotlib.pyplot as plt

    drawn = all_figures(results, alphas, costs)
    sentences = in_short(results)
    tables = {task or "all tasks": task_table(results, task) for task in [None, *results.tasks]}
    tables |= {"every test": test_table(results), "controllers, compute, energy": controller_table(results)}
    write_text(folder / "report.md", as_markdown(facts, sentences, tables))
    write_json(folder / "report.json", finite({
        "facts": facts, "in_short": sentences, "tuned": results.tuned, "failing": results.failing(),
        "summary": {task or "all": {m: {**results.summary(task, m), **versus(results, task, m)}
                                    for m in results.methods} for task in [None, *results.tasks]}}))
    write_text(folder / "report.html", as_html(facts, sentences, tables,
                                               [(q, figures.svg(figure, name)) for name, q, figure in drawn], results))
    to_tensorboard(folder, results, drawn)
    for _, _, figure in drawn:
        plt.close(figure)
    return folder / "report.html"


def versus(results: Results, task: str | None, method: str) -> dict[str, Any]:
    """Speed over each reference and the change in score over plain decoding, with their tests."""
    found: dict[str, Any] = {}
    for other in (o for o in REFERENCES if o in results.methods and o != method):
        p = results.speed(None, method, other) if task is None else results.speed_by_task(method, other).get(task)
        if p is not None:
            found[f"over_{other}"] = vars(p)
    if task is not None and (q := results.quality(task, method)) is not None:
        found["score_change"] = vars(q)
    return found


def to_tensorboard(folder: Path, results: Results, drawn: list[tuple[str, str, Any]]) -> None:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:  # an extra
        return
    board = SummaryWriter(str(folder / "tb"))
    for task in [None, *results.tasks]:
        for method in results.methods:
            for name, value in results.summary(task, method).items():
                if isinstance(value, (int, float)):
                    board.add_scalar(f"{task or 'all'}/{method}/{name}", value, 0)
    for name, _, figure in drawn:
        board.add_image(name, figures.pixels(figure), 0, dataformats="HWC")
    board.close()


def as_markdown(facts: dict[str, Any], sentences: list[str], tables: dict[str, tuple[list[str], list[list[str]]]]
                ) -> str:
    parts = [f"# {facts['title']}", "\n".join(f"- {s}" for s in sentences)]
    parts += [f"## {task}\n\n{markdown(header, rows)}" for task, (header, rows) in tables.items()]
    parts += [NOTES, "\n".join(f"- {key}: {value}" for key, value in facts.items() if key != "title")]
    return "\n\n".join(parts) + "\n"


NOTES = ("Methods are interleaved prompt by prompt in one process, the order rotated, first runs left out. \"over ar\" "
         "is the geometric mean of paired ratios of tokens a second with its Student interval; p is of a paired "
         "t-test on their logarithms, task by task after Holm's correction. \"found from\": the ratio that a test of "
         "this size finds four times in five. Compute is FLOPs a token of target and draft, attention left out. A "
         "method with another in brackets was tuned to it on other prompts of the task.")

STYLE = """
:root { color-scheme: light dark; --ink: #1b1d21; --soft: #5c626b; --paper: #ffffff; --line: #e2e5ea; --mark: #eef4fc }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e8eaee; --soft: #a2a9b4; --paper: #14161a; --line: #2c3038; --mark: #1c2633 } }
body { margin: 0 auto; max-width: 62rem; padding: 1.5rem 1rem 4rem; font: 16px/1.55 system-ui, sans-serif;
  color: var(--ink); background: var(--paper) }
h1 { font-size: 1.6rem; line-height: 1.25 } h2 { font-size: 1.15rem; margin: 2.2rem 0 .6rem }
.short { background: var(--mark); border-radius: .6rem; padding: .4rem 1.2rem }
.short li { margin: .5rem 0 } .wide, figure { overflow-x: auto } figure { margin: 0 }
svg { max-width: max(100%, 32rem); height: auto }
svg text { font-family: system-ui, sans-serif !important }
table { border-collapse: collapse; font-size: .86rem; font-variant-numeric: tabular-nums; white-space: nowrap }
th, td { padding: .35rem .7rem; text-align: right; border-bottom: 1px solid var(--line) }
th:first-child, td:first-child { text-align: left; position: sticky; left: 0; background: var(--paper) }
th { font-weight: 600; color: var(--soft) } details { margin: .5rem 0 } summary { cursor: pointer; padding: .3rem 0 }
.soft { color: var(--soft); font-size: .9rem } dl { display: grid; grid-template-columns: auto 1fr; gap: .2rem 1rem }
dt { color: var(--soft) } dd { margin: 0; overflow-wrap: anywhere }
"""


def as_html(facts: dict[str, Any], sentences: list[str], tables: dict[str, tuple[list[str], list[list[str]]]],
            pictures: list[tuple[str, str]], results: Results) -> str:
    """One page that needs nothing else."""
    escape = html.escape
    out = ["<!doctype html><html lang=en><meta charset=utf-8>",
           '<meta name=viewport content="width=device-width, initial-scale=1">',
           f"<title>{escape(facts['title'])}</title><style>{STYLE}</style>", f"<h1>{escape(facts['title'])}</h1>",
           "<p class=soft>Draftsmith makes a language model answer faster without changing what it says: a small draft "
           "proposes, the model verifies. Every method here decodes the same prompts with the same model.</p>",
           "<div class=short><ul>", *(f"<li>{escape(s)}</li>" for s in sentences), "</ul></div>"]
    (first, drawing), *others = pictures
    out += [f"<h2>{escape(first)}</h2><figure>{drawing}</figure>"]
    out += ["<h2>All tasks</h2>", _table(*tables["all tasks"]), f"<p class=soft>{escape(NOTES)}</p>"]
    out += [f"<details><summary>{escape(task)}</summary>{_table(header, rows)}</details>"
            for task, (header, rows) in tables.items() if task != "all tasks"]
    out += [f"<h2>{escape(question)}</h2><figure>{drawing}</figure>" for question, drawing in others]
    out += ["<h2>The source paper's figures</h2>", "<p class=soft>On an A100, 128 tokens; the machine here is named "
            "below.</p>", _table(*beside_paper(results))]
    out += ["<h2>What was run</h2><dl>", *(f"<dt>{escape(str(k))}</dt><dd>{escape(str(v))}</dd>"
                                           for k, v in facts.items() if k != "title"), "</dl></html>"]
    return "\n".join(out) + "\n"


def beside_paper(results: Results) -> tuple[list[str], list[list[str]]]:
    """The paper's claims, and what its policy does here."""
    method = "paper" if "paper" in results.methods else results.methods[-1]
    s, up = results.summary(None, method), results.speed(None, method)
    here = {"speed-up over AR": number(up.ratio if up else None), "acceptance": number(s.get("acceptance")),
            "quality within": _quality_change(results, method), "failure mode": number(results.failing(), 1, True),
            "compute relative to DSD": number(results.compute(None, method)), "latency": f"{number(s['seconds'])} s"}
    return ["", "paper", f"{method} here"], [[claim, told, here[claim]] for claim, told in PAPER.items()]


def _quality_change(results: Results, method: str) -> str:
    """The largest change of a task's mean score, relative to it."""
    shares = [abs(q.ratio) / mean for task in results.tasks if (q := results.quality(task, method)) is not None
              and (mean := results.summary(task, PLAIN)["score"])]
    return f"{100 * max(shares):.1f} %" if shares else ""


def _table(header: list[str], rows: list[list[str]]) -> str:
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in header)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<div class=wide><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
