"""Which prompts a generate step takes, and what their trajectories are called."""

import json
from pathlib import Path

from data.config import PromptsConfig
from data.prompts import load_source
from tasks.generate import Draw, _roots


def test_c32_no_two_draws_share_a_root(tmp_path: Path) -> None:
    """Three prompts, drawn 4, 4 and 2 at a time: each comes round again and again, under a root of its own."""
    file = tmp_path / "p.jsonl"
    file.write_text(
        "".join(json.dumps({"prompt": f"say {i}", "metadata": {"answer": str(i)}}) + "\n" for i in range(3))
    )
    held_out = tmp_path / "h.jsonl"
    held_out.write_text(json.dumps({"prompt": "say 9", "metadata": {"answer": "9"}}) + "\n")
    source = load_source(PromptsConfig(source=str(file), held_out=str(held_out)))
    drawn = [
        pair for start, count in ((0, 4), (4, 4), (8, 2)) for pair in _roots(source, Draw("train", start, count), 7)
    ]
    roots, prompts = [root for root, _ in drawn], [prompt.prompt_id for _, prompt in drawn]
    assert len(set(roots)) == 10 and len(set(prompts)) == 3
    assert [root.partition("@")[0] for root in roots] == prompts  # a root says whose it is
    assert sorted(prompts.count(p) for p in set(prompts)) == [3, 3, 4]  # whole rounds, then a part of one
    again = _roots(source, Draw("train", 4, 4), 7)
    assert again == drawn[4:8]  # the same draw, whoever asks, is the same


def test_evaluation_roots_are_positions_in_the_held_out_set(tmp_path: Path) -> None:
    source = load_source(PromptsConfig(source="sort"))
    roots = [root for root, _ in _roots(source, Draw("eval", 0, 5), 0)]
    assert [root.rpartition("@")[2] for root in roots] == ["0", "1", "2", "3", "4"]
