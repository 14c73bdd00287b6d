"""train: which rows make which optimizer step, and what a sick loss says."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from data.columns import ROLLOUTS
from data.config import CriticConfig, OptimizerConfig, TrainConfig
from flows.config import load
from infra.home import Home
from models.megatron.contract import Setup, TrainOptions
from tasks.state import _options_of
from tasks.train import _over_updates
from tasks.updates import Lessons, _plan
from tests.recorder import SORT, record_run
from tests.tasks.conftest import rollout, tokens

REPLAYS = pa.table({"mini_batch": [0, 1, 0, 1, 0], "micro_batch": [0, 0, 1, 0, 0]})
LENGTHS = np.array([5, 5, 5, 5, 5])


def options(epochs: int, mini_batch: int = 3, micro_tokens: int = 10) -> TrainOptions:
    return TrainOptions(TrainConfig(epochs=epochs, mini_batch=mini_batch, micro_tokens=micro_tokens), 1.0)


def as_lists(plan: list[list[np.ndarray]]) -> list[list[list[int]]]:
    return [[rows.tolist() for rows in step] for step in plan]


def test_first_pass_is_replays_grouping() -> None:
    """Mini-batch 0 holds rows 0 2 4, of which 0 and 4 share micro-batch 0; mini-batch 1 holds rows 1 and 3."""
    plan = _plan(REPLAYS, np.zeros(5, bool), LENGTHS, options(1), seed=7)
    assert as_lists(plan) == [[[0, 4], [2]], [[1, 3]]]


def test_later_epochs_are_reshuffled_and_whole() -> None:
    """Every epoch trains on each row once, 3 + 2 of them a step, at most two rows of 5 tokens in a micro-batch."""
    plan = _plan(REPLAYS, np.zeros(5, bool), LENGTHS, options(3), seed=7)
    assert len(plan) == 2 + 2 + 2
    for epoch in (plan[2:4], plan[4:6]):
        assert [sum(len(rows) for rows in step) for step in epoch] == [3, 2]
        assert sorted(row for step in epoch for rows in step for row in rows) == [0, 1, 2, 3, 4]
        assert max(len(rows) for step in epoch for rows in step) == 2
    assert as_lists(plan) == as_lists(_plan(REPLAYS, np.zeros(5, bool), LENGTHS, options(3), seed=7))
    assert as_lists(plan) != as_lists(_plan(REPLAYS, np.zeros(5, bool), LENGTHS, options(3), seed=8))


def test_excluded_rows_leave_every_epoch() -> None:
    """C12: without rows 1 and 3 the second mini-batch is empty, and goes."""
    excluded = np.array([False, True, False, True, False])
    plan = _plan(REPLAYS, excluded, LENGTHS, options(2), seed=7)
    assert as_lists(plan[:1]) == [[[0, 4], [2]]]
    assert sorted(row for step in plan[1:] for rows in step for row in rows) == [0, 2, 4]


def test_nothing_left_is_an_error_that_says_where_to_look() -> None:
    with pytest.raises(ValueError, match="all 5 trajectories are excluded"):
        _plan(REPLAYS, np.ones(5, bool), LENGTHS, options(1), seed=7)


def test_metrics_over_updates() -> None:
    """Means 2 and 3 of losses and ratios; the lowest minimum, the highest maximum, the last lr."""
    updates = [
        {"loss/policy": 1.0, "ratio/min": 0.5, "ratio/max": 1.5, "ratio/mean": 2.0, "lr": 0.1},
        {"loss/policy": 3.0, "ratio/min": 0.9, "ratio/max": 1.1, "ratio/mean": 4.0, "lr": 0.2},
    ]
    merged = {"loss/policy": 2.0, "ratio/min": 0.5, "ratio/max": 1.5, "ratio/mean": 3.0, "lr": 0.2}
    assert _over_updates(updates) == merged


def lessons() -> Lessons:
    """Prompt of 3 tokens, 3 sampled ones; of the second row the middle one was not."""
    rows = [rollout(0, 0, "ab"), rollout(1, 0, "ab")]
    rows[1]["action_mask"][4] = False
    rollouts, flat = pa.Table.from_pylist(rows, schema=ROLLOUTS), tokens([0] * 6, [0] * 6)
    columns = {"old_logprobs": flat, "values": flat, "returns": flat, "token_advantages": flat}
    table = pa.table({**columns, "loss_mask": rollouts["action_mask"]})
    return Lessons(rollouts, table, table)


@pytest.mark.parametrize(("unit", "valued"), [("token", [3, 4, 5, 9, 11]), ("turn", [3, 9, 11])])
def test_the_value_of_each_step_is_learned(unit: str, valued: list[int]) -> None:
    setup = Setup(CriticConfig(kind="shared"), OptimizerConfig())
    batch = lessons()._batch(setup, TrainOptions(TrainConfig(), 1.0, step_unit=unit), None)
    assert batch.value_mask is not None and np.flatnonzero(batch.value_mask.values).tolist() == valued
    setup = Setup(CriticConfig(kind="none"), OptimizerConfig())
    assert lessons()._batch(setup, TrainOptions(TrainConfig(), 1.0, step_unit=unit), None).value_mask is None


@pytest.mark.parametrize("unit", ["token", "turn"])
def test_the_unit_of_steps_is_in_the_key_and_read_from_it(tmp_path: Path, unit: str) -> None:
    """Keys from before there was one had no unit; a state that is made again is made with the recorded one."""
    config = load(SORT, [f"resources.store=file://{tmp_path}/store", f"advantage.step_unit={unit}"])
    run, _ = record_run(config, Home(tmp_path), 1)
    step = next(m for m in run.ledger.steps(0) if m.step == "train")
    assert step.config.get("step_unit") == (None if unit == "token" else "turn")
    assert _options_of(step).step_unit == unit
