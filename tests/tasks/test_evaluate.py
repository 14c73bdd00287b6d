"""evaluate: each problem has its k answers, whatever the engine's batches; and the figures are of all of them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from data.config import EngineConfig, EvaluateConfig, Generation, PromptsConfig, RewardConfig, SamplingConfig
from data.manifest import Manifest
from data.summary import Evaluation, leading, with_error
from data.tables import read_table
from data.user_code import load
from flows.config import RunConfig
from flows.config import load as load_config
from flows.training import Head, evaluate_policy
from infra.home import Home
from tasks.generate import Draw, _generate
from tasks.score import Attempts, _score
from tasks.step import Run
from tests.recorder import SORT, record_run

SCORER = """
def score(response, metadata):
    if response == "fails": raise ValueError("no")
    return {"good": 1.0, "half": 0.5}.get(response, 0.0)
"""


@pytest.fixture
def held_out(tmp_path: Path) -> PromptsConfig:
    """Seven problems."""
    for name, count in (("train", 1), ("held_out", 7)):
        rows = [{"prompt": f"{name} {i}" * (i + 1), "metadata": {"answer": str(i)}} for i in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return PromptsConfig(source=str(tmp_path / "train.jsonl"), held_out=str(tmp_path / "held_out.jsonl"))


@pytest.fixture
def policy(bench: Any, tmp_path: Path) -> Manifest:
    from models.toy import write_toy
    from models.weights import read_tensors, tensors_digest

    write_toy(tmp_path / "toy")
    attempt = bench.job("import", "policy", {}).attempt()
    attempt.add_folder(tmp_path / "toy")
    digest = tensors_digest(read_tensors(tmp_path / "toy"))
    return attempt.commit(content_digest=digest, facts={"policy_version": 0})


def test_c35_a_ragged_last_batch_is_exact(bench: Any, pool: Any, policy: Manifest, held_out: PromptsConfig) -> None:
    """7 problems, 3 answers each, 4 decoded at a time: 21 different answers in 6 batches, the last of one.

    The whole file is asked for by a number that is too large. The scorer below gives i to problem i: 21/7 = 3, while
    three further answers to the last problem, padding, would make it 3.375. Problems 1 to 6 pass.
    """
    from models.engines.transformers import TransformersEngine

    sampling, draw = SamplingConfig(max_new_tokens=2), Draw("eval", 0, 384, samples=3)
    job = bench.job("evaluate_sampled", "rollouts", {"policy": policy})
    generation = Generation(held_out, sampling, EngineConfig())
    rollouts = _generate(TransformersEngine(4, threads=2), job, draw, generation, None, 0, False)
    rows = read_table(bench.ledger.store, rollouts).to_pylist()
    assert len({row["trajectory_id"] for row in rows}) == len({row["sampling"]["seed"] for row in rows}) == 21
    asked = [json.loads(row["messages"])[0]["content"] for row in rows]
    assert asked == [f"held_out {i}" * (i + 1) for i in range(7) for _ in range(3)]
    assert [row["root_id"].rpartition("@")[2] for row in rows] == [str(i) for i in range(7) for _ in range(3)]
    assert {row["purpose"] for row in rows} == {"eval"}

    path = Path(bench.cache.parent / "number.py")
    path.write_text("def score(response, metadata):\n    return float(metadata['answer'])\n")
    code = load(f"{path}:score")
    job = bench.job("score_sampled", "rewards", {"rollouts": rollouts})
    metrics = _score(pool, job, RewardConfig(scorer=f"{path}:score"), 2, code, Attempts(3, 1.0)).metrics
    assert (metrics["problems"], metrics["avg@3"]) == (7, 3.0)
    assert [metrics[f"pass@{j}"] for j in (1, 2, 3)] == [pytest.approx(6 / 7)] * 3


def test_figures_of_what_was_scored(bench: Any, pool: Any, scorer_file: Callable[[str], str]) -> None:
    """Two problems: (1, .5, failed, 0) and (0, 0, 0, .5). avg@4 = (.5 + .125)/2, and .1875 apart from either.

    At .5: pass@1 = (2/3 + 1/4)/2. pass@4 is of the second problem alone, since the first has three that were scored.
    """
    answers = ["good", "half", "fails", "bad", "bad", "bad", "bad", "half"]
    config = RewardConfig(scorer=scorer_file(SCORER))
    job = bench.job("score_sampled", "rewards", {"rollouts": bench.rollouts(answers, samples=4)})
    sampled = _score(pool, job, config, 8, load(config.scorer), Attempts(4, 0.5))
    figures = Evaluation({"sampled": sampled}).figures
    assert figures["sampled"] == figures["avg@4"] == 0.3125
    assert figures["sampled/se"] == figures["avg@4/se"] == pytest.approx(0.1875)
    assert figures["pass@1"] == pytest.approx((2 / 3 + 1 / 4) / 2)
    assert figures["pass@4"] == 1.0 and "pass@4/se" not in figures
    assert figures["failed"] == 1
    assert leading(figures) == ["sampled", "pass@4"]
    assert leading(figures, {"pass@1": 0.5, "pass@2": 0.5, "greedy": 1.0}, {}) == [
        "sampled",
        "pass@2",
        "pass@4",
        "greedy",
    ]
    told = {"sampled": 0.3141, "sampled/se": 0.1234, "pass@4": 1.0}
    assert [with_error(told, name) for name in ("sampled", "pass@4", "greedy")] == ["0.314 ± 0.123", "1.000", "-"]


@pytest.fixture
def evaluated(tmp_path: Path) -> Callable[..., Evaluation]:
    """The first policy of a run evaluated, with some settings changed; keys are real, rewards are not."""
    config = load_config(SORT, [f"resources.store=file://{tmp_path}/store", "prompts.samples_per_prompt=2"])
    run, head = record_run(config, Home(tmp_path), 0)

    def call(run: Run = run, head: Head = head, config: RunConfig = config, **changes: Any) -> Evaluation:
        other = config.model_copy(update={"evaluate": EvaluateConfig(**changes)})
        found = evaluate_policy(other, run, 0, head)
        assert isinstance(found, Evaluation)
        return found

    return call


def rollouts_of(evaluation: Evaluation, decoding: str = "sampled") -> Any:
    score = evaluation.rewards[decoding]
    path = Path(score.input_uris["rollouts"].removeprefix("file://"))
    return json.loads(path.read_text())


def test_the_keys_of_evaluations_recorded_before_stay(evaluated: Callable[..., Evaluation]) -> None:
    """As their manifests had it, field by field."""
    found = evaluated(problems=24)
    for decoding, temperature in (("sampled", 1.0), ("greedy", 0.0)):
        assert rollouts_of(found, decoding)["config"] == {
            "prompts": {"system": None, "samples_per_prompt": 2},
            "draw": {"purpose": "eval", "cursor": 0, "count": 24},
            "sampling": {"temperature": temperature, "top_p": 1.0, "top_k": 0, "max_new_tokens": 9},
            "engine": {"kind": "transformers"},
        }
        assert set(found.rewards[decoding].config) == {"reward", "max_new_tokens"}
    # What has no avg@k was recorded before there was one.
    assert found.figures == {"sampled": 0.5, "greedy": 0.5, "failed": 0.0}


def test_other_settings_lie_beside_and_each_is_made_once(evaluated: Callable[..., Evaluation]) -> None:
    first = evaluated(problems=24)
    more = evaluated(problems=24, samples=4)
    warm = evaluated(problems=24, samples=4, temperature=0.5, greedy=False)
    lenient = evaluated(problems=24, pass_reward=0.5)
    assert rollouts_of(more)["config"]["draw"]["samples"] == 4
    assert rollouts_of(warm)["config"]["sampling"]["temperature"] == 0.5
    assert lenient.rewards["sampled"].config["pass_reward"] == 0.5
    assert more.rewards["greedy"] == first.rewards["greedy"]  # nothing that it reads has changed
    assert set(warm.rewards) == {"sampled"}
    uris = [e.rewards["sampled"].uri for e in (first, more, warm, lenient)]
    assert len(set(uris)) == 4 and uris[0].endswith("/000000/score_sampled/manifest.json")
    assert evaluated(problems=24, samples=4) == more and evaluated(problems=24) == first


def test_a_whole_file_is_so_many_problems(evaluated: Callable[..., Evaluation], held_out: PromptsConfig) -> None:
    """-1 and 7 are the same evaluation of a file of seven."""
    config = load_config(SORT, ["prompts.per_iteration=1"])
    prompts = {"config": config.model_copy(update={"prompts": held_out})}
    assert rollouts_of(evaluated(problems=-1, **prompts))["config"]["draw"]["count"] == 7
    assert evaluated(problems=7, **prompts) == evaluated(problems=-1, **prompts)
