"""score of trajectories of many turns: what environments gave, what failed before, and what a judge says."""

import itertools
import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from data.columns import REPLAYS, ROLLOUTS
from data.config import AdvantageConfig, JudgeConfig, RewardConfig
from data.digest import json_digest
from data.manifest import Manifest
from data.tables import read_table
from data.user_code import load
from flows.config import load as load_config
from infra.home import Home
from ops.verdicts import PROMPT, ask
from tasks.advantages import _advantages
from tasks.outcomes import identity, outcomes_of, responses
from tasks.score import Attempts, _score, score
from tests.judges import JudgeServer, judge_server
from tests.recorder import SORT, record_run
from tests.tasks.conftest import rollout

NAN = math.nan
Row = dict[str, Any]


def played(number: int, rewards: list[float | None], **changes: Any) -> Row:
    """Prompt of 3 tokens; a turn of 2 for each reward, with an observation of one token between two turns."""
    base = rollout(0, number, "")
    prompt, spoken = base["turns"]
    turns, start = [prompt], 3
    for reward in rewards:
        if start > 3:
            turns.append({**prompt, "role": "tool", "start": start, "length": 1})
            start += 1
        turns.append({**spoken, "start": start, "length": 2, "env_reward": reward})
        start += 2
    mask = [turn["is_generated"] for turn in turns for _ in range(turn["length"])]
    messages = [{"role": "user", "content": "?"}]
    for i in range(len(rewards)):
        messages += [{"role": "tool", "content": "seen"}] * (i > 0) + [{"role": "assistant", "content": "good"}]
    return base | {
        "token_ids": list(range(1, start + 1)),
        "action_mask": mask,
        "rollout_logprobs": [-0.5 if sampled else 0.0 for sampled in mask],
        "turns": turns,
        "messages": json.dumps(messages),
        **changes,
    }


CUT = {"status": "truncated", "truncation": "max_turns"}
DEAD = {"status": "failed", "error": "RuntimeError: the game is gone"}
GAMES = [
    played(0, [0.5, None, 0.25]),
    played(1, [-1.0]),
    played(2, [1.0, 2.0], **DEAD),
    played(3, [1.0, NAN]),
    played(4, [None, None]),
    played(5, [None, None], **CUT),
    played(6, [1.0, 1.0], **CUT),
    played(7, [], **DEAD),
    played(8, [3e38, 3e38]),
]
ENVIRONMENT = RewardConfig(scorer="environment")


@pytest.fixture
def record(bench: Any) -> Callable[[list[Row]], Manifest]:
    """Each call has a place of its own: a second result at one place would be the first."""
    numbers = itertools.count()
    return lambda rows: bench.record(
        f"generate_{next(numbers)}", "rollouts", pa.Table.from_pylist(rows, schema=ROLLOUTS)
    )


@pytest.fixture
def scored(bench: Any, pool: Any, record: Callable[[list[Row]], Manifest]) -> Callable[..., list[Row]]:
    def call(rows: list[Row], config: RewardConfig, code: Any = None, attempts: Attempts | None = None) -> list[Row]:
        job = bench.job(f"score_{next(numbers)}", "rewards", {"rollouts": record(rows)})
        return read_table(bench.ledger.store, _score(pool, job, config, 8, code, attempts)).to_pylist()

    numbers = itertools.count()
    return call


def test_the_environment_s_reward_is_the_sum_over_the_turns(scored: Callable[..., list[Row]]) -> None:
    """.5 + .25; a NaN fails, and a sum beyond float32; none at all fails where it ended, and is 0 where it was cut."""
    rows = scored(GAMES, ENVIRONMENT)
    assert np.array_equal([row["reward"] for row in rows], [0.75, -1, NAN, NAN, NAN, 0, 2, NAN, NAN], equal_nan=True)
    assert [row["status"] for row in rows] == [
        *("ok", "ok", "failed", "failed", "failed", "ok", "ok"),
        *("failed", "failed"),
    ]
    assert rows[2]["error"] == rows[7]["error"] == "RuntimeError: the game is gone"
    assert "add up to nan, which is no finite number; mend the environment" in rows[3]["error"]
    assert "add up to 6e+38" in rows[8]["error"]
    assert "gave no turn a reward; set reward.scorer to" in rows[4]["error"]
    assert {row["token_rewards"] for row in rows} == {None}
    assert {row["scorer_digest"] for row in rows} == {"builtin:environment"}


def test_c31_what_failed_before_is_failed_by_every_scorer(
    scored: Callable[..., list[Row]], scorer_file: Callable[[str], str], tmp_path: Any
) -> None:
    """NaN with the rollout's own error, in training and in evaluation; the scorer does not see it."""
    seen = tmp_path / "seen"
    source = f"def score(response, metadata):\n    open({str(seen)!r}, 'a').write('x')\n    return 1.0\n"
    own = RewardConfig(scorer=scorer_file(source))
    judge = RewardConfig(scorer="judge", judge=JudgeConfig(url="http://127.0.0.1:1/v1", model="m"))
    dead = [GAMES[2], GAMES[7]]
    for config, code in ((ENVIRONMENT, None), (RewardConfig(), None), (judge, None), (own, load(own.scorer))):
        for attempts in (None, Attempts(2, 1.0)):
            for row in scored(dead, config, code=code, attempts=attempts):
                assert math.isnan(row["reward"]) and math.isnan(row["raw_reward"])
                assert (row["status"], row["error"]) == ("failed", "RuntimeError: the game is gone")
                assert (row["attempts"], row["length_penalty"]) == (0, 0.0)
    assert not seen.exists()
    assert [row["reward"] for row in scored(GAMES[:2], own, code=load(own.scorer))] == [1, 1]
    assert seen.read_text() == "xx"


def test_an_unfinished_trajectory_is_refused(pool: Any) -> None:
    rows = pa.Table.from_pylist([GAMES[0], played(1, [1.0], status="carried")], schema=ROLLOUTS)
    with pytest.raises(ValueError, match="trajectory q0@0/1: carried, so it is not finished"):
        outcomes_of(pool, rows, ENVIRONMENT)


def test_each_turn_s_reward_lies_at_its_end(scored: Callable[..., list[Row]]) -> None:
    rows = scored(GAMES, RewardConfig(scorer="environment", per_turn=True))
    assert rows[0]["token_rewards"] == [0, 0, 0, 0, 0.5, 0, 0, 0, 0, 0, 0.25] and rows[0]["reward"] == 0.75
    assert rows[1]["token_rewards"] == [0, 0, 0, 0, -1]
    assert rows[5]["token_rewards"] == [0] * 8
    assert rows[6]["token_rewards"] == [0, 0, 0, 0, 1, 0, 0, 1]
    for failed in (2, 3, 4, 7, 8):
        assert not any(rows[failed]["token_rewards"])


def test_a_zeroed_trajectory_keeps_no_turn_s_reward(scored: Callable[..., list[Row]]) -> None:
    rows = scored(GAMES[5:7], RewardConfig(scorer="environment", per_turn=True, truncated="zero"))
    assert [(row["reward"], row["raw_reward"], row["length_penalty"]) for row in rows] == [(0, 0, 0), (0, 2, -2)]
    assert rows[1]["token_rewards"] == [0] * 8


@pytest.mark.parametrize("per_turn", [False, True])
def test_from_turns_to_advantages(bench: Any, pool: Any, record: Any, per_turn: bool) -> None:
    """Games 0 (.5 and .25), 1 (-1) and 2 (failed), values 0, gamma .5, lam 1, a turn a step.

    Per turn: A_3 = .25, A_2 = 0 + .5 * .25 = .125, A_1 = .5 + .5 * .125 = .5625. All at the end: .75, .375, .1875.
    Either way rewards add up to .75 and -1, and the critic learns three values of game 0 and one of game 1.
    """
    inputs = {"rollouts": record(GAMES[:3])}
    reward = RewardConfig(scorer="environment", per_turn=per_turn)
    rewards = _score(pool, bench.job("score", "rewards", inputs), reward, 8, None)
    replays = [
        {"trajectory_id": row["trajectory_id"], "values": [0.0] * len(row["token_ids"]), "policy_digest": "p"}
        | {"mini_batch": 0, "micro_batch": 0}
        for row in GAMES[:3]
    ]
    replayed = bench.record("replay", "replays", pa.Table.from_pylist(replays, schema=REPLAYS))
    inputs |= {"rewards": rewards, "replays": replayed}
    config = AdvantageConfig(gamma=0.5, lam=1.0, step_unit="turn")
    manifest = _advantages(None, bench.job("advantages", "advantages", inputs), config)
    rows = read_table(bench.ledger.store, manifest).to_pylist()
    first, second, third = (0.5625, 0.125, 0.25) if per_turn else (0.1875, 0.375, 0.75)
    assert rows[0]["token_advantages"] == [0, 0, 0, first, first, 0, second, second, 0, third, third]
    assert rows[0]["returns"] == [0, 0, 0, first, 0, 0, second, 0, 0, third, 0]
    assert [sum(row["token_rewards"]) for row in rows] == [0.75, -1, 0]
    assert [row["excluded"] for row in rows] == [False, False, True]
    assert [row["group_mean"] for row in rows[:2]] == [-0.125, -0.125]
    assert manifest.metrics["return/mean"] == pytest.approx((first + second + third - 1) / 4)


def test_the_question_and_the_last_answer() -> None:
    """Examples in the prompt are not the policy's, and what a tool says last is no answer."""
    talk = [("system", "Be brief."), ("user", "1+1?"), ("assistant", "2"), ("user", "2+2?")]
    talk += [("assistant", "tool please"), ("tool", "4"), ("assistant", "It is 4."), ("tool", "done")]
    messages = json.dumps([{"role": role, "content": content} for role, content in talk])
    rows = [played(0, [None, None], messages=messages)]
    rows += [played(1, [], messages=json.dumps([{"role": "user", "content": "2+2?"}]))]
    found = responses(pa.Table.from_pylist(rows, schema=ROLLOUTS))
    assert [(r.text, r.question) for r in found] == [("It is 4.", "2+2?"), ("", "2+2?")]


WORDS = {"good": "Correct.", "bad": "That is not correct.", "odd": "Who knows?"}


def judged(server: JudgeServer, **changes: Any) -> RewardConfig:
    found = {"url": server.url, "model": "m", "attempts": 1, "timeout_s": 5.0} | changes
    return RewardConfig(scorer="judge", judge=JudgeConfig(**found))


def test_a_judge_in_the_scorer_processes(bench: Any, pool: Any) -> None:
    """Right 1, wrong 0, neither 0; an outage, and a prompt without a reference, fail their trajectory alone."""

    def say(body: Any) -> Any:
        prompt = body["messages"][0]["content"]
        given = prompt.partition("Given answer:\n")[2].partition("\n")[0]
        return (500, b"", 0.0) if given == "down" else (200, WORDS[given], 0.0)

    answers = ["good", "bad", "odd", "down", "3 <answer>bad</answer> no <answer>good</answer>", "good"]
    rows = [rollout(i, 0, answer) for i, answer in enumerate(answers)]
    rows[5]["metadata"] = json.dumps({"prompt_id": "q5"})
    rollouts = bench.record("generate", "rollouts", pa.Table.from_pylist(rows, schema=ROLLOUTS))
    with judge_server(say) as server:
        config = judged(server)
        manifest = _score(pool, bench.job("score", "rewards", {"rollouts": rollouts}), config, 8, None)
        assert len(server.asked) == 5  # nothing is asked without a reference
        prompts = [body["messages"][0]["content"] for body in server.asked]
        given = ("good", "bad", "odd", "down", "good")
        assert sorted(prompts) == sorted(ask("?", "good", answer) for answer in given)
    found = read_table(bench.ledger.store, manifest).to_pylist()
    assert np.array_equal([row["reward"] for row in found], [1, 0, 0, NAN, 1, NAN], equal_nan=True)
    assert "status 500, 1 times; start it, or set reward.judge.url" in found[3]["error"]
    assert "scorer 'judge' needs metadata.answer, and prompt q5 has none" in found[5]["error"]
    assert found[4]["extracted_answer"] == "good"
    assert manifest.metrics["reward/failed"] == 2
    elsewhere = judged(server, url="http://elsewhere:8000/v1")
    assert identity(elsewhere, None) == found[0]["scorer_digest"] != identity(judged(server, model="other"), None)


def test_what_a_judge_is_asked_is_in_the_key_and_where_it_is_served_is_not(tmp_path: Any) -> None:
    judge = ["reward.scorer=judge", "reward.judge.url=http://h:1/v1", "reward.judge.model=m"]
    config = load_config(SORT, [f"resources.store=file://{tmp_path}/store", *judge])
    run, _ = record_run(config, Home(tmp_path), 1)
    rollouts, step = (found for name in ("generate", "score") for found in run.ledger.steps(0) if found.step == name)
    assert step.config["judge_prompt"] == json_digest(PROMPT)
    assert step.config["reward"]["judge"] == {"model": "m", "attempts": 3, "timeout_s": 60.0}
    elsewhere = config.reward.model_copy(update={"judge": JudgeConfig(url="http://g:1/v1", model="m")})
    assert score(run, 0, rollouts, elsewhere, config.sampling) == step
