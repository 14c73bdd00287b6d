"""Which step reads a setting first: the table of flows.replaying against the keys of a recorded run."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from data.config import CorrectionConfig, JudgeConfig
from data.request import StepConflict
from flows.config import ConfigError, RunConfig, load
from flows.replaying import first_reader
from flows.training import one_iteration
from infra.home import Home
from tasks.step import Run
from tests.recorder import record_run

SORT = Path(__file__).parents[2] / "flows/configs/sort.toml"
# Of what is no number and no switch, another value that the setting can have.
OTHERS: dict[str, Any] = {
    "prompts.source": "addition",
    "prompts.system": "Sort.",
    "reward.scorer": "number",
    "reward.truncated": "zero",
    "reward.judge.model": "other",
    "advantage.estimator": "global",
    "advantage.lam_critic": 0.5,
    "advantage.length_alpha": 0.5,
    "advantage.std": "unbiased",
    "advantage.step_unit": "turn",
    "critic.kind": "separate",
    "critic.clip": 0.1,
    "train.loss": "reinforce",
    "train.dual_clip": 3.0,
    "train.aggregation": "seq_mean_token_sum",
    "train.old_logp_source": "rollout",
    "train.correction.kind": "truncate",
    "train.correction.level": "sequence",
    "train.optimizer.betas": [0.8, 0.9],
    "train.optimizer.schedule": "linear",
}
# Read by no step of an iteration; or one value only; or nothing alone (the temperature is compared with another).
APART = (
    "run",
    "iterations",
    "evaluate",
    "model",
    "warm_start",
    "prompts.held_out",
    "engine.kind",
    "replay.temperature",
)


def leaves(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{name}.")
        elif not f"{prefix}{name}".startswith(APART):
            yield f"{prefix}{name}", value


# With what came later, and is in no key by default.
DEFAULTS = {
    "train": {"correction": CorrectionConfig().semantic()},
    "advantage": {"step_unit": "token"},
    "reward": {"per_turn": False, "judge": JudgeConfig().semantic()},
}
SETTINGS = dict(leaves(load(SORT).semantic())) | dict(leaves(DEFAULTS))


def other(name: str, value: Any) -> Any:
    if name in OTHERS:
        return OTHERS[name]
    return not value if isinstance(value, bool) else value + 1 if isinstance(value, int) else value / 2 + 0.01


def with_setting(config: Any, path: list[str], value: Any) -> Any:
    """Unchecked, so that a setting can be changed alone."""
    name, *rest = path
    new = with_setting(getattr(config, name), rest, value) if rest else value
    return config.model_copy(update={name: new})


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunConfig, Run, Any]:
    home = Home(tmp_path_factory.mktemp("readers"))
    config = load(SORT)
    run, _ = record_run(config, home, 1)
    from flows.training import begin

    return config, run, begin(config, run)


@pytest.mark.parametrize("name", SETTINGS)
def test_the_first_step_whose_key_differs(recorded: tuple[RunConfig, Run, Any], name: str) -> None:
    config, run, head = recorded
    changed = with_setting(config, name.split("."), other(name, SETTINGS[name]))
    run.seed = changed.seed
    with pytest.raises(StepConflict) as conflict:
        one_iteration(changed, run, 0, head)
    assert str(conflict.value).startswith(f"step {first_reader(name)!r} at "), conflict.value


def test_what_training_begins_with_is_no_steps() -> None:
    for name in ("model.path", "warm_start.steps"):
        with pytest.raises(ConfigError, match=f"{name}: training begins with it"):
            first_reader(name)
