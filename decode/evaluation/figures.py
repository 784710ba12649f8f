"""The plots of a comparison, each the answer to a question, as SVG that takes the page's own text colour."""

from __future__ import annotations

import io
import re
from typing import Any

import numpy as np
from draftsmith.distill.variants import EXIT_ALPHA

from .protocol import PLAIN
from .results import Results, predicted_speedup

SCALE = 1.45  # pixels of the page a point of the drawing
INK = "#010203"  # stands for the page's text colour, and is replaced by it
COLOURS = {"ar": "#8c8c8c", "dsd": "#c98b2b", "mtv": "#b2568f", "paper": "#3a8f6d", "goodput": "#3274c8",
           "transformers": "#a8a8a8", "transformers-assisted": "#c0a0a0", "transformers-lookup": "#a0b0c0"}
MORE = ("#7a68c9", "#5ba3a3", "#b0652d", "#6b8e3a", "#c94f5b")
PART_COLOURS = ("#3274c8", "#c98b2b", "#3a8f6d", "#b2568f", "#7a68c9", "#5ba3a3", "#8c8c8c")


def colour(name: str, methods: list[str]) -> str:
    if name in COLOURS:
        return COLOURS[name]
    return MORE[[m for m in methods if m not in COLOURS].index(name) % len(MORE)]


def begin() -> Any:
    """pyplot, drawing on nothing and in the page's ink."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({
        "svg.fonttype": "none", "svg.hashsalt": "draftsmith", "font.size": 10, "font.family": "sans-serif",
        "text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": INK, "xtick.color": INK, "ytick.color": INK,
        "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False, "figure.facecolor": "none",
        "axes.facecolor": "none", "savefig.facecolor": "none", "legend.labelcolor": INK})
    return plt


def svg(figure: Any, name: str) -> str:
    """A figure as an SVG element as wide as it was drawn; ids in it begin with its name, for a page has several."""
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None}, bbox_inches="tight")
    text = out.getvalue()
    head, rest = text[text.index("<svg") :].split(">", 1)
    wide = float(re.search(r'viewBox="\S+ \S+ (\S+)', head)[1])  # type: ignore[index]
    text = re.sub(r'\s(width|height)="[^"]*"', "", head) + f' width="{SCALE * wide:.0f}">' + rest
    text = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", text)
    return text.replace(INK, "currentColor")


def pixels(figure: Any) -> Any:
    """A figure as an array [height, width, 4], on white."""
    import matplotlib.pyplot as plt

    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=110, bbox_inches="tight", facecolor="white")
    out.seek(0)
    return plt.imread(out)


def speed_by_task(results: Results, plt: Any) -> Any:
    """How much faster than plain decoding, task by task?"""
    methods = [m for m in results.methods if m != PLAIN]
    figure, axis = plt.subplots(figsize=(7.5, 0.5 + len(results.tasks) * (0.25 + 0.17 * len(methods))))
    step = 1.0 / (len(methods) + 1.5)
    for i, method in enumerate(methods):
        found = results.speed_by_task(method, PLAIN)
        at = [results.tasks.index(task) + (i - (len(methods) - 1) / 2) * step for task in found]
        ratio = np.array([f.ratio for f in found.values()])
        ends = np.array([[f.ratio - f.low, f.high - f.ratio] for f in found.values()]).T if found else None
        axis.errorbar(ratio, at, xerr=ends, fmt="o", markersize=4.5, capsize=2, linewidth=1.2, label=method,
                      color=colour(method, results.methods))
    axis.axvline(1, color=INK, linewidth=0.8)
    axis.set_yticks(range(len(results.tasks)), results.tasks)
    axis.invert_yaxis()
    axis.set_xlabel("times as fast as plain decoding (95 % interval)")
    axis.grid(axis="x", alpha=0.25)
    axis.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def acceptance_by_place(results: Results, plt: Any) -> Any:
    """How often is the i-th drafted token kept?"""
    figure, axis = plt.subplots(figsize=(5.4, 3.4))
    for method in results.methods:
        if values := results.by_position(None, method):
            axis.plot(range(1, len(values) + 1), values, marker="o", markersize=4, label=method,
                      color=colour(method, results.methods))
    axis.set(xlabel="place in the draft", ylabel="kept, of those judged", ylim=(0, 1.02))
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.grid(alpha=0.25)
    axis.legend(fontsize=8)
    return figure


def time_by_part(results: Results, plt: Any) -> Any:
    """Where does the time go?"""
    shares = {m: parts for m in results.methods if (parts := results.parts(None, m))}
    figure, axis = plt.subplots(figsize=(7.0, 0.9 + 0.38 * len(shares)))
    left = np.zeros(len(shares))
    for i, part in enumerate(next(iter(shares.values()), {})):
        values = np.array([100 * s[part] for s in shares.values()])
        axis.barh(list(shares), values, left=left, label=part, color=PART_COLOURS[i % len(PART_COLOURS)], height=0.65)
        left += values
    axis.invert_yaxis()
    axis.set(xlabel="% of the time", xlim=(0, 100))
    axis.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def one_generation(results: Results, method: str, alphas: list[float], plt: Any) -> Any | None:
    """How did the controller move during one answer? None where it never drafted."""
    rows = [r for r in results.of(None, method) if any(x[1] for x in r.get("rounds", ()))]
    if not rows:
        return None
    row = max(rows, key=lambda r: len({x[3] for x in r["rounds"]}) * 1000 + r["tokens"])
    rounds = row["rounds"]
    at = np.concatenate([[0], np.cumsum([x[0] for x in rounds])])[:-1]
    figure, (upper, lower) = plt.subplots(2, 1, figsize=(7.0, 3.6), sharex=True)
    upper.step(at, [alphas[x[3]] if x[3] >= 0 else np.nan for x in rounds], where="post",
               color=colour(method, results.methods))
    upper.set(ylabel="alpha", ylim=(0.45, 1.6))
    upper.axhline(EXIT_ALPHA, color=INK, linewidth=0.6, linestyle=":")
    lower.bar(at, [x[1] for x in rounds], width=0.8, color="#b9b9b9", label="drafted")
    lower.bar(at, [x[2] for x in rounds], width=0.8, color=colour(method, results.methods), label="kept")
    lower.set(xlabel=f"token of the answer to {row['item']}", ylabel="tokens")
    lower.legend(fontsize=8, ncols=2)
    for axis in (upper, lower):
        axis.grid(alpha=0.25)
    return figure


def speed_by_acceptance(results: Results, costs: dict[str, float], plt: Any) -> Any | None:
    """Does acceptance explain the gain? Prompts of the fixed length against theory. None without any.

    `costs`: seconds of a draft step ("step") and of target passes ("1", "2", ... rows).
    """
    rows = [r for r in results.of(None, "dsd") if r["accepted"] + r["rejected"]]
    if not rows:
        return None
    figure, axis = plt.subplots(figsize=(5.6, 3.8))
    lengths = sorted({int(r["policy"].split("(")[1].split(",")[0].rstrip(")")) for r in rows})
    for k, shade in zip(lengths, (*MORE, *MORE), strict=False):
        mine = [r for r in rows if r["policy"] == f"fixed({k})"]
        a = [r["accepted"] / (r["accepted"] + r["rejected"]) for r in mine]
        gains = [(r["tokens"] / r["seconds"]) / (p["tokens"] / p["seconds"])
                 for r in mine if (p := results.by.get((r["task"], r["item"], PLAIN)))]
        if len(gains) != len(a):
            continue
        axis.scatter(a, gains, s=10, alpha=0.55, color=shade)
        x = np.linspace(0, 1, 60)
        verify = costs[str(min(k + 1, len(costs) - 1))] / costs["1"]
        axis.plot(x, [predicted_speedup(v, k, costs["step"] / costs["1"], verify) for v in x], color=shade,
                  label=f"{k} drafted: theory")
    axis.axhline(1, color=INK, linewidth=0.8)
    axis.set(xlabel="acceptance on the prompt", ylabel="times as fast as plain decoding")
    axis.grid(alpha=0.25)
    axis.legend(fontsize=8)
    return figure


def latencies(results: Results, plt: Any) -> Any:
    """How long does an answer take?"""
    figure, axis = plt.subplots(figsize=(6.4, 3.4))
    values = {m: [1e3 * r["seconds"] / r["tokens"] for r in results.of(None, m) if r["tokens"]]
              for m in results.methods}
    top = float(np.quantile(np.concatenate([v for v in values.values() if v]), 0.99))
    bins = np.linspace(0, top, 36)
    for method, mine in values.items():
        axis.hist(np.minimum(mine, top), bins=bins, histtype="step", linewidth=1.5, label=method,
                  color=colour(method, results.methods))
    axis.set(xlabel="milliseconds a token, end to end, of one answer", ylabel="answers")
    axis.legend(fontsize=8)
    return figure
