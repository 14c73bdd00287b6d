"""Engine against trainer, on rollouts whose log-probs are known; and what must not be compared."""

import math
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from data.columns import ADVANTAGES, REPLAYS, ROLLOUTS
from data.config import CorrectionConfig, CriticConfig, OptimizerConfig, TrainConfig
from models.engines.contract import GREEDY, SAMPLED, SCALED
from models.megatron.contract import Setup, TrainOptions
from ops.mismatch import EDGES
from ops.ragged import Ragged, from_arrow, from_rows
from tasks.mismatch import incomparable, measure
from tasks.replay import _replay
from tasks.updates import Lessons
from tests.tasks.conftest import rollout, tokens

SETUP = Setup(CriticConfig(kind="none"), OptimizerConfig())
TRUNCATE = TrainConfig(correction=CorrectionConfig(kind="truncate", cap=1.5))
ROLLOUT = TrainConfig(old_logp_source="rollout")


def rollouts(**sampling: Any) -> pa.Table:
    """Prompt of 3 tokens, then 2 and 1 sampled ones, all of log-prob -.5."""
    return pa.Table.from_pylist([rollout(0, 0, "a", **sampling), rollout(1, 0, "", **sampling)], schema=ROLLOUTS)


def actions(table: pa.Table) -> Ragged:
    return from_arrow(table["action_mask"], "action_mask")


# Ratios trainer / engine 2, 1/4 and 1.
TRAINER = [[9, 9, 9, -0.5 + math.log(2), -0.5 - math.log(4)], [9, 9, 9, -0.5]]


def lessons(table: pa.Table) -> Lessons:
    def filled(schema: pa.Schema, **columns: Any) -> pa.Table:
        given = {"trajectory_id": table["trajectory_id"].combine_chunks(), **columns}
        return pa.table({f.name: given.get(f.name, pa.nulls(len(table), f.type)) for f in schema})

    zeros = pa.array([0] * len(table), pa.int32())
    replays = filled(REPLAYS, old_logprobs=tokens(*TRAINER), mini_batch=zeros, micro_batch=zeros)
    mask, excluded = table["action_mask"].combine_chunks(), pa.array([False] * len(table))
    advantages = filled(ADVANTAGES, loss_mask=mask, token_advantages=tokens([1] * 5, [1] * 4), excluded=excluded)
    return Lessons(table, replays, advantages)


@pytest.mark.parametrize(
    "sampling",
    [
        {"logprob_semantics": SAMPLED},
        {"logprob_semantics": SCALED},
        {"logprob_semantics": SCALED, "top_p": 0.8, "top_k": 5},
    ],
)
def test_what_is_of_the_full_softmax_is_measured(sampling: dict[str, Any]) -> None:
    """d = ln 2, -ln 4, 0: |d| mean ln 8 / 3 = .693147; k3 .306853, .25 - 1 + 1.386294 = .636294, 0: mean .314382.

    ln 2 = .69 lies in .5 to 1, the 12th bin from the middle, ln 4 = 1.39 in 1 to 2, the 13th.
    """
    table = rollouts(**sampling)
    metrics, fact = measure(table, from_rows(TRAINER, np.float32), actions(table))
    assert metrics["engine_logprob_gap/mean"] == pytest.approx(0.693147, abs=1e-6)
    assert metrics["engine_kl/k3"] == pytest.approx(0.314382, abs=1e-6)
    assert (metrics["engine_ratio/min"], metrics["engine_ratio/max"]) == pytest.approx((0.25, 2))
    counts = [0] * (2 * len(EDGES) + 1)
    for place in (16, 16 + 12, 16 - 13):
        counts[place] = 1
    assert fact == {"measured": True, "edges": list(EDGES), "counts": counts}


@pytest.mark.parametrize(
    "sampling",
    [
        {"top_p": 0.8},
        {"top_k": 5},
        {"logprob_semantics": GREEDY},
        {"logprob_semantics": "of an engine to come"},
    ],
)
def test_c24_what_is_of_another_distribution_is_never_measured(sampling: dict[str, Any]) -> None:
    table = rollouts(**sampling)
    metrics, fact = measure(table, from_rows(TRAINER, np.float32), actions(table))
    assert metrics == {} and fact == {"measured": False, "reason": incomparable(table)}
    assert "trajectory q0@0/0: its engine's log-probs" in fact["reason"]


def test_one_trajectory_of_another_distribution_is_named() -> None:
    rows = [rollout(i, 0, "a", top_p=0.8 if i == 2 else 1.0) for i in range(4)]
    reason = incomparable(pa.Table.from_pylist(rows, schema=ROLLOUTS))
    assert reason is not None and reason.startswith("trajectory q2@2/0:")
    assert "'sampled' with top_p 0.8 and top_k 0" in reason
    assert incomparable(pa.Table.from_pylist(rows, schema=ROLLOUTS).slice(3)) is None


@pytest.mark.parametrize(("train", "named"), [(ROLLOUT, "'rollout'"), (TRUNCATE, "'truncate'")])
@pytest.mark.parametrize("sampling", [{"top_p": 0.8}, {"top_k": 5}])
def test_c24_training_on_log_probs_of_the_cut_distribution_is_refused(
    bench: Any, train: TrainConfig, named: str, sampling: dict[str, Any]
) -> None:
    """In replay and in train, each before its trainer is touched; a fork may begin at either."""
    fix = rf"trajectory q0@0/0: .* = {named} compares the two: set train\.old_logp_source = 'replay' and .* 'none'"
    job = bench.job("replay", "replays", {"rollouts": bench.rollouts(["a", ""], **sampling)})
    with pytest.raises(ValueError, match=fix):
        _replay(None, job, 1.0, train, SETUP)
    with pytest.raises(ValueError, match=fix):
        lessons(rollouts(**sampling)).learn(None, TrainOptions(train, 1.0), SETUP, 0)


def test_training_gets_the_corrected_weights_only_when_asked() -> None:
    """Ratios 2 1/4 1, truncated at 1.5."""
    for train, wanted in ((TRUNCATE, [0, 0, 0, 1.5, 0.25, 0, 0, 0, 1]), (TrainConfig(), None), (ROLLOUT, None)):
        taught = lessons(rollouts())
        batch = taught._batch(SETUP, TrainOptions(train, 1.0), taught._corrected(train.correction))
        found = None if batch.weights is None else batch.weights.values.tolist()
        assert found == (wanted if wanted is None else pytest.approx(wanted))
