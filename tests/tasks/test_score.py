"""score: whatever a scorer does, its trajectory is marked and the run goes on."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from data.config import RewardConfig
from data.tables import read_table
from data.user_code import load
from tasks.score import _score

BAD = """
import time
def score(response, metadata):
    if response == "raises": raise KeyError("no such thing")
    if response == "hangs": time.sleep(60)
    if response == "text": return "0.7"
    if response == "nan": return float("nan")
    if response == "dies": __import__("os")._exit(3)
    if response == "none": return None
    if response == "huge": return 4e38
    if response == "parts": return {"reward": 0.5, "format": 1.0, "length": -0.5}
    return response == metadata["answer"]
"""


def test_c22_bad_scorer_marks_its_samples_never_the_run(
    bench: Any, pool: Any, scorer_file: Callable[[str], str]
) -> None:
    """Three bad of 64: one raises, one hangs, one returns a str. 61 scored: 60 of them good (1), one a miss (0)."""
    answers = ["good"] * 64
    answers[5], answers[17], answers[40], answers[63] = "raises", "hangs", "text", "bad"
    config = RewardConfig(scorer=scorer_file(BAD), timeout_s=1.0)
    job = bench.job("score", "rewards", {"rollouts": bench.rollouts(answers)})
    manifest = _score(pool, job, config, 8, load(config.scorer))
    rows = read_table(bench.ledger.store, manifest).to_pylist()
    failed = {i: rows[i] for i in (5, 17, 40)}
    assert [i for i, row in enumerate(rows) if math.isnan(row["reward"])] == [5, 17, 40]
    assert {row["status"] for row in failed.values()} == {"failed"}
    assert "no such thing" in failed[5]["error"]
    assert "no answer within 1.0 s" in failed[17]["error"]
    assert "'0.7'" in failed[40]["error"] and "finite number" in failed[40]["error"]
    assert rows[63]["reward"] == 0.0 and rows[63]["status"] == "ok"
    assert manifest.metrics["reward/failed"] == 3
    assert manifest.metrics["reward/mean"] == pytest.approx(60 / 61)


@pytest.mark.parametrize(
    ("answer", "words"), [("nan", "nan"), ("dies", "exit code 3"), ("none", "None"), ("huge", "4e+38")]
)
def test_other_junk_is_a_failure_too(
    bench: Any, pool: Any, scorer_file: Callable[[str], str], answer: str, words: str
) -> None:
    config = RewardConfig(scorer=scorer_file(BAD))
    job = bench.job("score", "rewards", {"rollouts": bench.rollouts([answer, "good"])})
    rows = read_table(bench.ledger.store, _score(pool, job, config, 8, load(config.scorer))).to_pylist()
    assert math.isnan(rows[0]["reward"]) and words in rows[0]["error"]
    assert rows[1]["reward"] == 1.0


def test_components_and_builtin(bench: Any, pool: Any, scorer_file: Callable[[str], str]) -> None:
    config = RewardConfig(scorer=scorer_file(BAD))
    rollouts = bench.rollouts(["parts", "good"])
    manifest = _score(pool, bench.job("score", "rewards", {"rollouts": rollouts}), config, 8, load(config.scorer))
    rows = read_table(bench.ledger.store, manifest).to_pylist()
    assert dict(rows[0]["components"]) == {"format": 1.0, "length": -0.5}
    assert manifest.metrics["reward/format/mean"] == 1.0
    built_in = _score(pool, bench.job("score_exact", "rewards", {"rollouts": rollouts}), RewardConfig(), 8, None)
    exact = read_table(bench.ledger.store, built_in)
    assert exact["reward"].to_pylist() == [0.0, 1.0]
    assert exact["extracted_answer"].to_pylist() == ["parts", "good"]


def test_retries_until_attempts_are_spent(
    bench: Any, pool: Any, scorer_file: Callable[[str], str], tmp_path: Any
) -> None:
    """The first call fails, the second scores: with two attempts the reward counts, and says it took two."""
    source = f"""
from pathlib import Path
def score(response, metadata):
    mark = Path({str(tmp_path)!r}) / response
    if not mark.exists():
        mark.touch()
        raise ConnectionError("judge is down")
    return 1.0
"""
    config = RewardConfig(scorer=scorer_file(source), attempts=2)
    job = bench.job("score", "rewards", {"rollouts": bench.rollouts(["a", "b"])})
    rows = read_table(bench.ledger.store, _score(pool, job, config, 8, load(config.scorer))).to_pylist()
    assert [(row["reward"], row["attempts"]) for row in rows] == [(1.0, 2), (1.0, 2)]


def test_truncated_answers_take_the_soft_penalty(bench: Any, pool: Any) -> None:
    """'good' and its end are 5 tokens, M = 8, buffer 4: -(5 - 4)/4 = -0.25, so 1 - 0.25."""
    config = RewardConfig(truncated="soft", overlong_buffer=4)
    job = bench.job("score", "rewards", {"rollouts": bench.rollouts(["good"])})
    row = read_table(bench.ledger.store, _score(pool, job, config, 8, None)).to_pylist()[0]
    assert (row["reward"], row["raw_reward"], row["length_penalty"]) == (0.75, 1.0, -0.25)


def test_missing_reference_is_a_failure_that_says_so(bench: Any, pool: Any) -> None:
    from tasks.scoring import Response, call_scorer

    with pytest.raises(ValueError, match=r"needs metadata\.answer, and prompt q7 has none"):
        call_scorer("exact", Response("x", "?", {"prompt_id": "q7"}))


def test_examples_are_best_and_worst(bench: Any, pool: Any) -> None:
    job = bench.job("score", "rewards", {"rollouts": bench.rollouts(["bad", "good"])})
    examples = _score(pool, job, RewardConfig(), 8, None).facts["examples"]
    assert examples["best"]["trajectory_id"] == "q1@1/0" and examples["worst"]["trajectory_id"] == "q0@0/0"
    assert np.isclose(examples["best"]["reward"], 1.0)
