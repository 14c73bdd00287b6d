"""The README is true as far as a program can tell: its tree names every file, its examples run."""

import re
import subprocess
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from data.user_code import load
from ops import advantages
from ops.groups import statistics

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
FOLDERS = ("flows", "tasks", "models", "infra", "data", "ops")


VENDORED = "infra/report/vendor/"  # as others made it; its README names every file


def test_tree_names_every_file() -> None:
    tracked = subprocess.run(["git", "ls-files", *FOLDERS], cwd=ROOT, capture_output=True, text=True, check=True)
    files = {
        line
        for line in tracked.stdout.splitlines()
        if not line.endswith("__init__.py") and not line.startswith(VENDORED)
    }
    tree = README.split("## The tree")[1]
    listed = set(re.findall(r"^    ((?:flows|tasks|models|infra|data|ops)/\S+)", tree, re.M))
    assert listed == files


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / target).is_file(), target


def example(first_words: str) -> str:
    return next(block for block in re.findall(r"```python\n(.*?)```", README, re.S) if first_words in block)


def test_scorer_example_scores(tmp_path: Path) -> None:
    """'42' against 42: 1 - .01 x 2 characters; '7' against 42: 0 - .01."""
    source = example("def score(")
    assert len(source.splitlines()) <= 20
    (tmp_path / "brevity.py").write_text(source)
    score = load(f"{tmp_path / 'brevity.py'}:score").function
    assert score("42", {"answer": "42"}) == {"reward": pytest.approx(0.98), "right": 1.0}
    assert score("7", {"answer": "42"})["reward"] == pytest.approx(-0.01)


def test_estimator_example_estimates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rewards 1 0 0 0: 1 - 0 and 0 - 1/3; a failed sibling leaves 1 0: 1 - 0 and 0 - 1; a group of one gives 0."""
    source = example("def _estimate_rloo")
    assert len(source.splitlines()) <= 20
    names = {**vars(advantages), "np": np, "statistics": statistics}
    exec(source, names)
    monkeypatch.setitem(advantages.ESTIMATORS, "rloo", names["_estimate_rloo"])
    rewards = [1.0, 0.0, 0.0, 0.0, 1.0, 0.0, float("nan"), 5.0]
    batch = advantages.AdvantageBatch(
        trajectory_id=pa.array([f"t{i}" for i in range(8)]),
        group_id=pa.array(["a"] * 4 + ["b"] * 3 + ["c"]),
        purpose=pa.array(["train"] * 8),
        rewards=np.array(rewards),
        truncated=np.zeros(8, bool),
        action_mask=pa.array([[False, True]] * 8),
    )
    found = advantages.estimate("rloo", batch, advantages.AdvantageOptions()).advantage
    assert found == pytest.approx([1, -1 / 3, -1 / 3, -1 / 3, 1, -1, 0, 0])
