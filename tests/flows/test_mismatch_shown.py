"""What people are shown of the distance between engine and trainer, from what replay has on record."""

from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from data.ledger import Ledger
from data.request import Request
from data.store import Store
from data.summary import summarize
from flows import reading, views
from flows.pages import iteration_files
from ops.mismatch import EDGES, histogram, mismatch_metrics

APART = np.array([0.0, 0.004, -0.004, 2.7])
MEASURED = {"measured": True, "edges": list(EDGES), "counts": histogram(APART).tolist()}
REFUSED = {"measured": False, "reason": "trajectory q: its engine's log-probs are [cut]"}


@pytest.fixture
def show(tmp_path: Path) -> Any:
    """show(facts, metrics of replay) -> (the JSON of `show --iteration 0`, its text, paths of artifacts)."""

    def call(facts: dict[str, Any], metrics: dict[str, float]) -> tuple[dict[str, Any], str, list[str]]:
        ledger = Ledger(Store(str(tmp_path / "store")), "r")
        attempt = ledger.writer(ledger.at(0, "replay"), Request("replay", 1, "replays"))
        attempt.commit(metrics=metrics, facts={"policy_version": 0, **facts}, content_digest="d")
        summary = summarize(ledger)
        found = reading.iteration(summary, ledger, 0)
        out = StringIO()
        views.iteration(Console(file=out, width=200), found)
        return found, out.getvalue(), list(iteration_files(ledger, summary.iterations[0]))

    return call


def test_measured(show: Any) -> None:
    """|d| mean 2.708 / 4 = .677, one of four beyond 1; e^2.7 = 14.9; k3 (14.88 - 3.7 + 2 x 8e-6) / 4 = 2.79."""
    found, text, files = show({"mismatch": MEASURED}, mismatch_metrics(APART))
    assert found["mismatch"] == MEASURED and files == ["plots/mismatch.png"]
    assert "engine against trainer, 4 sampled tokens" in text
    assert "mean 0.68, max 2.7, 25.00% beyond 0.1, 25.00% beyond 1" in text
    assert "KL(engine ‖ trainer) 2.8 nats a token (k3), ratios 0.996 to 14.9" in text
    lines = text.splitlines()
    bars, scale = lines[lines.index(next(line for line in lines if "██" in line)) :][:2]
    # -.004, 0, .004 and 2.7 in bins -5, 0, 5 and 14 of 16, two characters each.
    assert [i // 2 - 16 for i in range(0, len(bars), 2) if bars[i] == "█"] == [-5, 0, 5, 14]
    assert scale.split() == ["-10", "-1", "-.1", "-.01", "-.001", ".001", ".01", ".1", "1", "10"]


def test_not_measured_is_said(show: Any) -> None:
    found, text, files = show({"mismatch": REFUSED}, {})
    assert found["mismatch"] == REFUSED and files == []
    assert "engine against trainer: not measured; trajectory q: its engine's log-probs are [cut]" in text


def test_a_record_from_before_it_was_measured(show: Any) -> None:
    found, text, files = show({}, {"engine_logprob_gap/mean": 0.1, "engine_logprob_gap/max": 0.2})
    assert found["mismatch"] is None and files == [] and "engine against" not in text


def test_no_tokens(show: Any) -> None:
    text = show({"mismatch": {**MEASURED, "counts": [0] * len(MEASURED["counts"])}}, {})[1]
    assert "engine against" not in text


def test_histogram_in_characters() -> None:
    """Nine bins of two characters: below -.5, -.5 to -.1, -.1 to -.05, -.05 to -.01, the middle, and so on.

    The highest has all eight eighths; log(1 + 1) / log(1 + 63) = 1/6 of eight is 1.33, so two; nothing is blank.
    -.1 stands at the end of the 2nd bin, .1 of the 7th; .01 would crowd around 0.
    """
    edges = (0.01, 0.05, 0.1, 0.5)
    bars, scale = views.histogram(edges, [1, 0, 0, 0, 63, 0, 0, 0, 1])
    assert bars == "▂▂      ██      ▂▂"
    assert scale == "   -.1        .1"
    assert views.histogram(edges, [0] * 9)[0] == " " * 18
