"""Plots: files that a person opens."""

from pathlib import Path

from infra.plots import histogram_png, reward_png


def test_histogram_as_a_file(tmp_path: Path) -> None:
    histogram_png(tmp_path / "h.png", "run, iteration 3", "Δ", (0.01, 0.05, 0.1, 0.5), [1, 0, 0, 0, 63, 0, 0, 0, 1])
    assert (tmp_path / "h.png").read_bytes().startswith(b"\x89PNG")


def test_a_curve_with_evaluations_of_several_kinds(tmp_path: Path) -> None:
    """The second asked for four answers a problem; the third has no greedy one, and no error, with its one problem."""
    held_out = {
        0: {"sampled": 0.1, "sampled/se": 0.02, "greedy": 0.2, "greedy/se": 0.03},
        2: {"sampled": 0.4, "sampled/se": 0.02, "pass@2": 0.6, "pass@4": 0.8, "pass@4/se": 0.02, "greedy": 0.5},
        3: {"sampled": 0.5, "pass@4": 1.0},
    }
    reward_png(tmp_path / "r.png", "run", [0.1, 0.3, 0.5], held_out)
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")
