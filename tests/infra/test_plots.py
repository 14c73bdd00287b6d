"""Plots: files that a person opens."""

from pathlib import Path

from infra.plots import histogram_png


def test_histogram_as_a_file(tmp_path: Path) -> None:
    histogram_png(tmp_path / "h.png", "run, iteration 3", "Δ", (0.01, 0.05, 0.1, 0.5), [1, 0, 0, 0, 63, 0, 0, 0, 1])
    assert (tmp_path / "h.png").read_bytes().startswith(b"\x89PNG")
