"""Plots: what their characters and files say."""

from pathlib import Path

from infra.plots import histogram_png, histogram_text

EDGES = (0.01, 0.05, 0.1, 0.5)


def test_histogram_in_characters() -> None:
    """Nine bins of two characters: below -.5, -.5 to -.1, -.1 to -.05, -.05 to -.01, the middle, and so on.

    The highest has all eight eighths; log(1 + 1) / log(1 + 63) = 1/6 of eight is 1.33, so two; nothing is blank.
    -.1 stands at the end of the 2nd bin, .1 of the 7th; .01 would crowd around 0.
    """
    bars, scale = histogram_text(EDGES, [1, 0, 0, 0, 63, 0, 0, 0, 1])
    assert bars == "▂▂      ██      ▂▂"
    assert scale == "   -.1        .1"
    assert histogram_text(EDGES, [0] * 9)[0] == " " * 18


def test_histogram_as_a_file(tmp_path: Path) -> None:
    histogram_png(tmp_path / "h.png", "run, iteration 3", "Δ", EDGES, [1, 0, 0, 0, 63, 0, 0, 0, 1])
    assert (tmp_path / "h.png").read_bytes().startswith(b"\x89PNG")
