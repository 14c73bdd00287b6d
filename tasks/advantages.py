"""advantages: rollouts + rewards + replays -> advantages. All arithmetic is in ops."""

from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from data.config import AdvantageConfig
from data.manifest import Manifest
from infra.timed_pool import TimedPool
from ops.metrics import advantage_metrics, group_metrics
from ops.ragged import from_arrow
from ops.rewards import scored
from ops.turns import value_mask
from tasks.step import Job, Pending, Run, Step, perform, require_same_rows, unless_given

if TYPE_CHECKING:
    from ops.advantages import AdvantageBatch, AdvantageColumns

STEP = Step("advantages", version=1, kind="advantages")
READ = {
    "rollouts": ["trajectory_id", "parent_id", "purpose", "status", "token_ids", "action_mask"],
    "rewards": ["trajectory_id", "reward", "token_rewards"],
    "replays": ["trajectory_id", "values", "bootstrap_value"],
}


@unless_given(STEP)
def estimate_advantages(
    run: Run,
    iteration: int,
    rollouts: Manifest | Pending,
    rewards: Manifest | Pending,
    replays: Manifest | Pending,
    config: AdvantageConfig,
) -> Manifest | Pending:
    """Token advantages, returns and the loss mask of every trajectory, by `config.estimator`."""
    return perform(
        run,
        STEP,
        iteration,
        {"rollouts": rollouts, "rewards": rewards, "replays": replays},
        {"advantage": config.semantic()},
        0,
        run.worker,
        _advantages,
        (config,),
    )


def _advantages(worker: TimedPool, job: Job, config: AdvantageConfig) -> Manifest:
    from ops.advantages import AdvantageBatch, AdvantageOptions, estimate

    del worker  # only its process is needed: it has the compiled GAE loaded
    rollouts, rewards, replays = (job.table(name, columns) for name, columns in READ.items())
    require_same_rows(rollouts, rewards, replays)
    batch = AdvantageBatch(
        trajectory_id=rollouts["trajectory_id"],
        group_id=rollouts["parent_id"],
        purpose=rollouts["purpose"],
        rewards=scored(rewards["reward"]),
        truncated=pc.equal(rollouts["status"].cast(pa.string()), "truncated").to_numpy(),
        action_mask=rollouts["action_mask"],
        token_rewards=_present(rewards, "token_rewards"),
        values=_present(replays, "values"),
        bootstrap_values=None if (v := _present(replays, "bootstrap_value")) is None else v.to_numpy(),
    )
    options = AdvantageOptions(**config.model_dump(exclude={"estimator"}))
    columns = estimate(config.estimator, batch, options)
    attempt = job.attempt()
    attempt.add_table("advantages", columns.table(), rollouts=rollouts)
    return attempt.commit(metrics=_metrics(columns, batch, config.step_unit))


def _metrics(columns: "AdvantageColumns", batch: "AdvantageBatch", step_unit: str) -> dict[str, float]:
    values = None if batch.values is None else from_arrow(batch.values, "values")
    returns = None if columns.returns is None else from_arrow(columns.returns, "returns")
    advantages = from_arrow(columns.token_advantages, "token_advantages")
    valued = value_mask(from_arrow(batch.action_mask, "action_mask"), step_unit)
    rewards = np.where(columns.excluded, np.nan, batch.rewards)
    return {
        "advantages/excluded": float(columns.excluded.sum()),
        "advantages/unplaced_rewards": float(columns.unplaced),
        **group_metrics(rewards, batch.groups()),
        **advantage_metrics(advantages, from_arrow(columns.loss_mask, "loss_mask"), values, returns, valued),
    }


def _present(table: pa.Table, column: str) -> pa.ChunkedArray | None:
    """An optional column: None where the step before it had nothing to write."""
    return None if table[column].null_count == len(table) else table[column]
