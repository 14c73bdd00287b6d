"""replay: rollouts + state -> replays. Log-probs, entropy and values under the weights before the update."""

from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from data.columns import REPLAYS
from data.config import CriticConfig, TrainConfig
from data.manifest import Manifest
from data.seeds import derive
from models.megatron.contract import Setup
from ops.metrics import describe
from ops.packing import mini_batches, pack
from ops.ragged import Ragged, from_arrow, to_arrow
from tasks.mismatch import measure, require_comparable
from tasks.state import bring
from tasks.step import Job, Pending, Run, Step, perform, unless_given

if TYPE_CHECKING:
    from models.megatron.trainer import Trainer

STEP = Step("replay", version=1, kind="replays")


@unless_given(STEP)
def replay(
    run: Run,
    iteration: int,
    rollouts: Manifest | Pending,
    state: Manifest | Pending,
    temperature: float,
    train: TrainConfig,
    critic: CriticConfig,
) -> Manifest | Pending:
    """What the weights of `state` say of the rollouts, in the micro-batches that training's first pass will use."""
    config = {
        "temperature": temperature,
        "mini_batch": train.mini_batch,
        "old_logp_source": train.old_logp_source,
        "critic": critic.semantic(),
    }
    return perform(
        run,
        STEP,
        iteration,
        {"rollouts": rollouts, "state": state},
        config,
        derive(run.seed, STEP.name, iteration),
        run.trainer,
        _replay,
        (temperature, train, Setup(critic, train.optimizer)),
    )


def _replay(trainer: "Trainer", job: Job, temperature: float, train: TrainConfig, setup: Setup) -> Manifest | None:
    rollouts = job.table("rollouts", ["trajectory_id", "token_ids", "action_mask", "rollout_logprobs", "sampling"])
    _same_temperature(rollouts, temperature)
    require_comparable(rollouts, train)
    bring(trainer, job, setup)
    streams = from_arrow(rollouts["token_ids"], "token_ids")
    actions = from_arrow(rollouts["action_mask"], "action_mask")
    plan = [
        pack(streams.lengths, rows, train.micro_tokens)
        for rows in mini_batches(len(streams), train.mini_batch, derive(job.seed, "epoch", 0))
    ]
    flat = [rows for mini in plan for rows in mini]
    replayed = trainer.replay(streams, actions, flat, temperature, setup.critic.kind != "none")
    if replayed is None:
        return None
    columns: dict[str, Any] = {
        "trajectory_id": rollouts["trajectory_id"].combine_chunks(),
        "entropy": _floats(replayed.entropy),
        "value_digest": job.input("state").content_digest,
        "policy_digest": job.input("state").content_digest,
        **_grouping(plan, len(streams)),
    }
    if train.old_logp_source == "replay":
        columns["old_logprobs"] = _floats(replayed.logprobs)
    if replayed.values is not None:
        columns["values"] = _floats(replayed.values)
        columns["bootstrap_value"] = pa.array(replayed.bootstrap_values, pa.float32())
    attempt = job.attempt()
    attempt.add_table("replays", _table(columns, len(streams)), rollouts=rollouts)
    metrics, mismatch = measure(rollouts, replayed.logprobs, actions)
    return attempt.commit(
        metrics=metrics | describe("entropy", replayed.entropy.values[actions.values], "mean"),
        facts={"policy_version": job.input("state").policy_version, "mismatch": mismatch},
    )


def _same_temperature(rollouts: pa.Table, temperature: float) -> None:
    """Raises ValueError if a trajectory was sampled at another temperature: every ratio would be wrong."""
    sampled = rollouts["sampling"].combine_chunks().field("temperature").to_numpy(zero_copy_only=False)
    wrong = np.flatnonzero(~np.isclose(sampled, temperature, rtol=0.0, atol=1e-6))
    if len(wrong):
        raise ValueError(
            f"trajectory {rollouts['trajectory_id'][int(wrong[0])]}: sampled at temperature {sampled[wrong[0]]}, "
            f"replayed at {temperature}; they must be equal: set replay.temperature to the rollouts'"
        )


def _grouping(plan: list[list[np.ndarray]], rows: int) -> dict[str, pa.Array]:
    """The batch plan as columns: each row's optimizer step, and its micro-batch within it."""
    mini, micro = np.zeros(rows, np.int32), np.zeros(rows, np.int32)
    for i, batches in enumerate(plan):
        for j, members in enumerate(batches):
            mini[members], micro[members] = i, j
    return {"mini_batch": pa.array(mini), "micro_batch": pa.array(micro)}


def _table(columns: dict[str, Any], rows: int) -> pa.Table:
    """Columns of the replays schema; those not given are null, a plain value fills its column."""
    arrays = []
    for field in REPLAYS:
        value = columns.get(field.name)
        if value is None:
            arrays.append(pa.nulls(rows, field.type))
        else:
            arrays.append(
                value.cast(field.type) if isinstance(value, pa.Array) else pa.array([value] * rows, field.type)
            )
    return pa.Table.from_arrays(arrays, schema=REPLAYS)


def _floats(column: Ragged) -> pa.ListArray:
    return to_arrow(column, pa.float32())
