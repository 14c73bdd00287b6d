"""Plots: files that a person opens."""

from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from data.ledger import STEPS
from data.manifest import Manifest
from data.summary import Evaluation, IterationSummary, RunSummary
from infra.plots import curves_png, histogram_png

SAVE = Figure.savefig


def manifest(step: str, metrics: dict[str, float]) -> Manifest:
    fields = dict.fromkeys(("uri", "kind", "key", "content_digest", "config_digest", "code_digest", "run"), "")
    return Manifest.model_construct(**fields, step=step, metrics=metrics, facts={"policy_version": 0}, seconds=0.5)


def iteration(k: int, metrics: dict[str, float]) -> IterationSummary:
    return IterationSummary(k, {step: manifest(step, metrics) for step in STEPS}, None)


def evaluation(**rewards: tuple[str, float]) -> Evaluation:
    return Evaluation({decoding: manifest("score", {name: value}) for decoding, (name, value) in rewards.items()})


def test_histogram_as_a_file(tmp_path: Path) -> None:
    histogram_png(tmp_path / "h.png", "run, iteration 3", "Δ", (0.01, 0.05, 0.1, 0.5), [1, 0, 0, 0, 63, 0, 0, 0, 1])
    assert (tmp_path / "h.png").read_bytes().startswith(b"\x89PNG")


def test_curves_of_runs_long_short_and_without_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Evaluations of several kinds; then one iteration alone, without a critic; the clip fraction is that of both."""
    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda self, path, **how: drawn.append(self) or SAVE(self, path, **how))
    metrics = {"reward/mean": 0.5, "clip_fraction/low": 0.02, "clip_fraction/high": 0.05}
    evaluations = {
        0: evaluation(sampled=("avg@1", 0.1), greedy=("avg@1", 0.2)),
        2: evaluation(sampled=("avg@4", 0.4), greedy=("avg@1", 0.5)),
        3: evaluation(sampled=("reward/mean", 0.5)),
    }
    for count, held_out in ((3, evaluations), (1, {})):
        iterations = tuple(iteration(k, metrics) for k in range(count))
        curves_png(tmp_path / f"{count}.png", RunSummary("run", iterations, held_out))
        assert (tmp_path / f"{count}.png").read_bytes().startswith(b"\x89PNG")
        titles = {panel.get_title(): panel for panel in drawn[-1].axes}
        assert list(titles["clip fraction"].lines[0].get_ydata()) == pytest.approx([0.07] * count)
        assert np.isnan(titles["explained variance"].lines[0].get_ydata()).all()
        assert len(titles["seconds by step"].collections) == 6
    assert len(drawn[0].axes[0].containers) == 2 and not drawn[1].axes[0].containers
