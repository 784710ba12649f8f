"""The validation report: Markdown, JSON and plots."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from draftsmith.data.io import atomic_path, write_json, write_text

from .validate import REFERENCE, Result

SOURCE_COLOURS = {"accepted": "#2e8b57", "correction": "#c0504d", "bonus": "#8fbc8f", "ar": "#7f7f7f"}


def table(result: Result) -> str:
    """The figures of every method as a Markdown table, the default method marked."""
    lines = ["| method | tokens/s | speed-up over AR (95 %) | acceptance | tokens/step | the target's own text |",
             "|---|---|---|---|---|---|"]
    for name, s in result.summary.items():
        shown = f"**{name}** (default)" if name == result.default else name
        up = s["speedup"]
        speed = "1" if name == "ar" else f"{up['mean']:.2f} ({up['low']:.2f} to {up['high']:.2f}, n = {up['n']})"
        rate = "" if s["acceptance"] is None else f"{s['acceptance']:.3f}"
        steps = "" if s["tokens_per_step"] is None or name == "ar" else f"{s['tokens_per_step']:.2f}"
        note = f" ({s['rounding_mismatches']} apart within rounding)" if s["rounding_mismatches"] else ""
        lines.append(f"| {shown} | {s['tokens_per_second']:.1f} | {speed} | {rate} | {steps} | {s['identical']} of "
                     f"{s['prompts']}{note} |")
    return "\n".join(lines)


def write_report(folder: Path, result: Result, thresholds: dict[str, float], misses: list[str], title: str) -> Path:
    """Write report.md, report.json and report.png; returns the path of report.md."""
    folder.mkdir(parents=True, exist_ok=True)
    plot(folder / "report.png", result, title)
    verdict = "PASS: every threshold is met." if not misses else "FAIL:\n\n" + "\n".join(f"- {m}" for m in misses)
    limits = ", ".join(f"{k} {v:g}" for k, v in thresholds.items())
    text = f"""# {title}

{verdict}

{table(result)}

Greedy decoding, methods interleaved on the same prompts in one process, first runs discarded, on {result.machine}.
Speed-ups are paired geometric means with Student intervals. "The target's own text" compares token ids with plain
decoding; a difference counts as the target's own only where both tokens lie within 4 times the rounding between
passes of different sizes of the best one. Thresholds: {limits}.

![plots](report.png)
"""
    write_text(folder / "report.md", text)
    write_json(folder / "report.json", {
        "default": result.default, "machine": result.machine, "summary": result.summary, "misses": misses,
        "thresholds": thresholds, "rows": [asdict(r) for r in result.rows]})
    return folder / "report.md"


def plot(path: Path, result: Result, title: str) -> None:
    """Four panels: speed by method, acceptance by position, speed-up by prompt, one text by source."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 2, figsize=(11, 7.2), constrained_layout=True)
    figure.suptitle(title)
    _speed(axes[0, 0], result)
    _positions(axes[0, 1], result)
    _prompts(axes[1, 0], result)
    _sources(axes[1, 1], result)
    with atomic_path(path) as aside:
        figure.savefig(aside, format="png", dpi=110)
    plt.close(figure)


def _speed(axis: Any, result: Result) -> None:
    names = list(result.summary)
    means = [result.summary[n]["speedup"]["mean"] for n in names]
    errors = [[m - result.summary[n]["speedup"]["low"] for n, m in zip(names, means, strict=True)],
              [result.summary[n]["speedup"]["high"] - m for n, m in zip(names, means, strict=True)]]
    colours = ["#1f77b4" if n == result.default else "#bbbbbb" if n == REFERENCE else "#9ecae1" for n in names]
    axis.barh(names, means, xerr=errors, color=colours, ecolor="#444444", capsize=3)
    axis.axvline(1, color="black", linewidth=0.8)
    axis.invert_yaxis()
    axis.set(title="How much faster than plain decoding?", xlabel="speed-up over AR, 95 % interval")
    for i, name in enumerate(names):
        axis.text(0.02, i, f"{result.summary[name]['tokens_per_second']:.1f} tokens/s", va="center", fontsize=8)


def _positions(axis: Any, result: Result) -> None:
    for name, s in result.summary.items():
        if s["by_position"]:
            axis.plot(range(1, len(s["by_position"]) + 1), s["by_position"], marker="o", label=name)
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.set(title="How often is the i-th drafted token kept?", xlabel="place in the draft",
             ylabel="acceptance among judged", ylim=(0, 1.02))
    if axis.get_legend_handles_labels()[0]:
        axis.legend(fontsize=8)


def _prompts(axis: Any, result: Result) -> None:
    ar = {r.prompt: r.seconds / max(1, r.tokens) for r in result.rows if r.method == "ar"}
    mine = [r for r in result.rows if r.method == result.default]
    for kind in sorted({r.kind for r in mine}):
        some = [r for r in mine if r.kind == kind]
        axis.scatter([r.accepted / max(1, r.accepted + r.rejected) for r in some],
                     [ar[r.prompt] / (r.seconds / max(1, r.tokens)) for r in some], label=kind)
    axis.axhline(1, color="black", linewidth=0.8)
    axis.set(title=f"Which prompts gain? ({result.default})", xlabel="acceptance on the prompt",
             ylabel="speed-up over AR")
    if mine:
        axis.legend(fontsize=8)


def _sources(axis: Any, result: Result) -> None:
    """Some answers, each token coloured by where it came from."""
    axis.set_axis_off()
    axis.set_title(f"Where do the tokens come from? ({result.default})")
    step, character, gap = 0.07, 0.0158, 0.014
    y = 0.93 + 2 * step
    for answer in result.examples:
        x, y = 0.0, y - 2 * step
        for text, source in answer:
            shown = text.replace("\n", "⏎").replace("$", r"\$")
            width = character * len(shown) + gap
            if x + width > 1.02:
                x, y = 0.0, y - step
            if y < 0.12:
                break
            colour = {"facecolor": SOURCE_COLOURS[source], "edgecolor": "white", "pad": 1.2}
            axis.text(x, y, shown, fontsize=8.5, family="monospace", color="black" if source == "bonus" else "white",
                      bbox=colour, transform=axis.transAxes)
            x += width
    for i, (source, shade) in enumerate(SOURCE_COLOURS.items()):
        axis.text(0.24 * i, 0.0, source, fontsize=8.5, color="black" if source == "bonus" else "white",
                  bbox={"facecolor": shade, "edgecolor": "white"}, transform=axis.transAxes)
