"""What people see of a run: reward over iterations, histograms; as PNG for MLflow, and in characters."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib
import plotext
from matplotlib.figure import Figure

from data.summary import ERROR, leading
from ops.mismatch import decades

WIDTH, HEIGHT = 72, 14  # characters
MARKERS = {"sampled": "o:g", "greedy": "^:r"}


def reward_png(path: Path, title: str, rewards: Sequence[float], held_out: Mapping[int, Mapping[str, float]]) -> None:
    """rewards: mean training reward by iteration; held_out: iteration -> figures of an evaluation (data.summary)."""
    with matplotlib.rc_context({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(7, 3.6), layout="constrained")
        axes = figure.subplots()
        axes.plot(range(len(rewards)), rewards, color="tab:blue", label="training reward (mean)")
        for name in leading(*held_out.values()):
            points = {k: figures for k, figures in sorted(held_out.items()) if name in figures}
            values, errors = ([f.get(key, 0.0) for f in points.values()] for key in (name, f"{name}{ERROR}"))
            style = MARKERS.get(name, "s:m")
            axes.errorbar(list(points), values, errors, fmt=style, capsize=2, label=f"held-out, {name}")
        axes.set(xlabel="iteration", ylabel="mean reward", title=title)
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=130)


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
