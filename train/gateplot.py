"""What the traces and the gate say, as one picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from draftsmith.data.io import atomic_path
from draftsmith.data.traces import Traces
from draftsmith.distill.calibrate import Calibration, decisions, tau_costs
from draftsmith.distill.gate import GateReport
from draftsmith.distill.variants import EXIT_ALPHA, DraftShape


def by_prompt(values_N: np.ndarray, prompts: list[str]) -> tuple[float, float]:
    """The mean of values and its standard error over prompts, whose rows are not independent."""
    names = np.array(prompts)
    means = np.array([np.nanmean(values_N[names == name]) for name in sorted(set(prompts))
                      if not np.isnan(values_N[names == name]).all()])
    error = float(means.std(ddof=1) / np.sqrt(len(means))) if len(means) > 1 else float("nan")
    return float(np.nanmean(values_N)), error


def plot(path: Path, traces: Traces, shape: DraftShape, report: GateReport, fitted: Calibration, k: int) -> None:
    """Four panels: acceptance by alpha; tokens a second of gate, oracle and fixed variants; calibration; tau."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 2, figsize=(11, 7.2), constrained_layout=True)
    _acceptance(axes[0, 0], traces, shape)
    _rates(axes[0, 1], report)
    _calibration(axes[1, 0], report)
    _tau(axes[1, 1], traces, report.best_fixed, fitted, k)
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(path) as aside:
        figure.savefig(aside, format="png", dpi=110)
    plt.close(figure)


def _acceptance(axis: Any, traces: Traces, shape: DraftShape) -> None:
    alphas = shape.alphas()
    values = [by_prompt(np.nanmean(traces.acceptance_NAH[:, i], axis=-1), traces.prompt_N) for i in range(len(alphas))]
    means, errors = np.array(values).T
    axis.errorbar(alphas[1:], means[1:], 1.96 * errors[1:], marker="o", capsize=3, label=f"{shape.layers} layers")
    axis.errorbar(alphas[:1], means[:1], 1.96 * errors[:1], marker="s", capsize=3, label=f"{shape.exit}-layer exit")
    axis.axvline(EXIT_ALPHA, color="#aaaaaa", linewidth=0.8, linestyle=":")
    axis.set(title="Is every width useful?", xlabel="alpha (1.5 is the full width)",
             ylabel="expected acceptance, 95 % over prompts", ylim=(0, 1))
    axis.legend(fontsize=8)


def _rates(axis: Any, report: GateReport) -> None:
    bars = {**report.fixed, "gate": report.gate, "oracle": report.oracle}
    colours = ["#1f77b4" if name == "gate" else "#bbbbbb" if name == "oracle" else "#9ecae1" for name in bars]
    axis.barh(list(bars), list(bars.values()), color=colours)
    axis.invert_yaxis()
    for i, value in enumerate(bars.values()):
        axis.text(value, i, f" {value:.1f}", va="center", fontsize=8)
    verdict = "beats" if report.beats_fixed else "does not beat"
    axis.set(title=f"The gate {verdict} the best fixed variant", xlabel=f"tokens/s on {report.rows} held-out decisions",
             xlim=(0, 1.12 * max(bars.values())))


def _calibration(axis: Any, report: GateReport) -> None:
    alphas = [row["alpha"] for row in report.calibration]
    for which, label in (("largest", "full draft"), ("smallest", "2-layer exit")):
        axis.plot(alphas, [row[f"acceptance_{which}"] for row in report.calibration], marker="o", label=label)
    axis.set(title="Does a larger alpha go where width pays?", xlabel="the gate's alpha (mean of a fifth of the rows)",
             ylabel="expected acceptance", ylim=(0, 1))
    axis.legend(fontsize=8)


def _tau(axis: Any, traces: Traces, variant: str, fitted: Calibration, k: int) -> None:
    taus, seconds = tau_costs(*decisions(traces, variant, k))
    axis.step(taus, 1 / np.array(seconds), where="post")
    axis.axvline(fitted.tau, color="#c0504d", label=f"tau = {fitted.tau:.2f}")
    axis.axhline(1 / fitted.seconds_never, color="#aaaaaa", linewidth=0.8, linestyle=":", label="never speculating")
    axis.set(title="From which confidence does speculating pay?", xlabel="tau", ylabel="tokens/s in the traces")
    axis.legend(fontsize=8)
