"""What people see of a run: its curves, histograms; as PNG for MLflow, and in characters."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib
import numpy as np
import plotext
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from data.ledger import STEPS
from data.summary import ERROR, IterationSummary, RunSummary, leading
from ops.mismatch import decades

WIDTH, HEIGHT = 72, 14  # characters
WATCHED = {  # panel -> the metrics that it adds up
    "KL of an update (k3), nats": ["kl/k3"],
    "entropy, nats": ["entropy/mean"],
    "length, sampled tokens": ["response_length/mean"],
    "clip fraction": ["clip_fraction/low", "clip_fraction/high"],
    "explained variance": ["value/explained_variance"],
    "gradient norm": ["grad_norm"],
}
DOT_ALONE = ("o", "-")
MARKERS = {"sampled": "o:g", "greedy": "^:r"}


def curves_png(path: Path, summary: RunSummary) -> None:
    """A run at a glance: reward with held-out figures, what else is watched of training, and where the time goes."""
    done = [s for s in summary.iterations if s.complete]
    at = [s.iteration for s in done]
    with matplotlib.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(11, 5), layout="constrained")
        first, *between, last = figure.subplots(2, 4).flat
        _reward(first, at, done, {k: found.figures for k, found in sorted(summary.evaluations.items())})
        for panel, (label, names) in zip(between, WATCHED.items(), strict=True):
            values = [[s.metrics.get(name, math.nan) for s in done] for name in names]
            panel.plot(at, np.sum(values, axis=0), DOT_ALONE[len(at) > 1], color="tab:blue")
            panel.set_title(label)
        steps = {step: [s.seconds.get(step, 0.0) for s in done] for step in STEPS}
        last.stackplot(at, *steps.values(), labels=steps, step="mid" if len(at) > 1 else None)
        last.set_title("seconds by step")
        last.legend(frameon=False, fontsize=7, reverse=True, loc="upper left", bbox_to_anchor=(1, 1))
        for panel in figure.axes:
            panel.grid(alpha=0.3)
            panel.xaxis.set_major_locator(MaxNLocator(4, integer=True))
        figure.suptitle(f"{summary.run}, over iterations")
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=110)


def _reward(
    panel: Axes, at: Sequence[int], done: Sequence[IterationSummary], held_out: Mapping[int, Mapping[str, float]]
) -> None:
    """held_out: iteration -> figures of an evaluation (data.summary)."""
    rewards = [s.metrics.get("reward/mean", math.nan) for s in done]
    panel.plot(at, rewards, DOT_ALONE[len(at) > 1], color="tab:blue", label="training")
    for name in leading(*held_out.values()):
        points = {k: figures for k, figures in held_out.items() if name in figures}
        values, errors = ([f.get(key, 0.0) for f in points.values()] for key in (name, f"{name}{ERROR}"))
        style = MARKERS.get(name, "s:m")
        panel.errorbar(list(points), values, errors, fmt=style, markersize=4, capsize=2, label=f"held-out, {name}")
    panel.set_title("mean reward")
    panel.legend(frameon=False, fontsize=7)


def dots_png(path: Path, title: str, rows: Sequence[str], columns: Mapping[str, Sequence[float]]) -> None:
    """A dot for each row, one panel a column, so that small differences show; NaN leaves a gap."""
    with matplotlib.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(2.2 + 2.2 * len(columns), 1.2 + 0.32 * len(rows)), layout="constrained")
        panels = figure.subplots(1, len(columns), sharey=True, squeeze=False)[0]
        for panel, (name, values) in zip(panels, columns.items(), strict=True):
            panel.plot(values, range(len(rows)), "o", color="tab:blue")
            panel.set(xlabel=name, yticks=range(len(rows)), yticklabels=rows)
            panel.grid(alpha=0.3)
            panel.margins(x=0.15)
        panels[0].invert_yaxis()
        figure.suptitle(title)
        figure.savefig(path, dpi=130)


def lines_png(path: Path, title: str, iterations: Sequence[int], lines: Mapping[str, Sequence[float]]) -> None:
    """Lines over iterations."""
    with matplotlib.rc_context({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(7, 3.6), layout="constrained")
        axes = figure.subplots()
        for name, values in lines.items():
            axes.plot(iterations, values, "o-", markersize=3, label=name)
        axes.set(xlabel="iteration", title=title)
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
        figure.savefig(path, dpi=130)


def histogram_png(path: Path, title: str, label: str, edges: Sequence[float], counts: Sequence[int]) -> None:
    """Bins that are alike on both sides of 0, as `ops.mismatch.histogram` counts them: one bar each, on a log scale.

    Drawn in a background thread beside others, so it leaves matplotlib's settings as they are.
    """
    figure = Figure(figsize=(7, 3))
    axes = figure.subplots()
    axes.stairs(counts, range(len(counts) + 1), fill=True, color="tab:blue")
    marks = decades(edges)
    axes.set_xticks(list(marks), [f"{value:g}" for value in marks.values()], fontsize=8)
    axes.set(xlabel=label, ylabel="tokens", title=title, yscale="symlog", ylim=(0, None))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.grid(alpha=0.3)
    figure.subplots_adjust(left=0.1, right=0.97, bottom=0.17, top=0.9)
    figure.savefig(path, dpi=100)


def reward_text(title: str, rewards: Sequence[float]) -> str:
    """The same curve in characters, with ANSI codes."""
    plotext.clear_figure()
    plotext.plot_size(WIDTH, HEIGHT)
    plotext.theme("clear")
    plotext.plot(list(range(len(rewards))), list(rewards), marker="braille")
    plotext.title(title)
    plotext.xticks(sorted({round(i * (len(rewards) - 1) / 4) for i in range(5)}))
    plotext.xlabel("iteration")
    return plotext.build()
