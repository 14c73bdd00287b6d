"""What came of each trajectory under a scorer, whichever it is: the one place where a reward, or why there is none, is
decided.
"""

import functools
import json
from typing import Any

import numpy as np
import pyarrow as pa

from data.config import RewardConfig
from data.digest import json_digest
from data.user_code import UserCode
from infra.judge import longest_s
from infra.timed_pool import Outcome, TimedPool
from models.environments.contract import LARGEST
from ops.ragged import from_arrow
from ops.rewards import EnvironmentRewards
from ops.turns import Turns
from ops.verdicts import PROMPT
from tasks.scoring import Response, Scored, Scorer, call_scorer, load_scorer

COLUMNS = ["trajectory_id", "action_mask", "messages", "metadata", "status", "error"]
NO_REWARD = "the environment gave no turn a reward; set reward.scorer to what grades the answer, or have it give some"
NO_NUMBER = "the rewards of its turns add up to {:g}, which is no finite number; mend the environment"


def columns_of(reward: RewardConfig) -> list[str]:
    """Of rollouts, what `outcomes_of` reads."""
    return [*COLUMNS, "turns"] if reward.scorer == "environment" else COLUMNS


def identity(reward: RewardConfig, code: UserCode | None) -> str:
    """The scorer's digest. Of a judge: its model and what it is asked, not where it is served."""
    if reward.scorer == "judge":
        return json_digest(["judge", reward.judge.model, PROMPT])
    return code.digest if code else f"builtin:{reward.scorer}"


def outcomes_of(
    pool: TimedPool, rollouts: pa.Table, reward: RewardConfig, code: UserCode | None = None
) -> list[Outcome]:
    """One a row; rollouts has `columns_of(reward)`, `code` is the scorer if it is a user's.

    A trajectory that failed has its own error, and no scorer sees it. Raises ValueError for one that is not finished.
    """
    status = rollouts["status"].to_pylist()
    if "carried" in status:
        raise ValueError(
            f"trajectory {rollouts['trajectory_id'][status.index('carried')]}: carried, so it is not finished and "
            "belongs to a later iteration; leave it out of the rollouts that are scored"
        )
    failed = np.array([s == "failed" for s in status], bool)
    finished = rollouts.filter(pa.array(~failed))
    given = _rewarded(finished) if reward.scorer == "environment" else _asked(pool, finished, reward, code)
    rest = iter(given)
    errors = rollouts["error"].to_pylist()
    return [Outcome(None, errors[row], 0) if failed[row] else next(rest) for row in range(len(status))]


def _asked(pool: TimedPool, rollouts: pa.Table, reward: RewardConfig, code: UserCode | None) -> list[Outcome]:
    judged = reward.scorer == "judge"
    scorer: Scorer = reward.judge if judged else code or reward.scorer
    limit, attempts = (longest_s(reward.judge), 1) if judged else (reward.timeout_s, reward.attempts)
    rows = [(scorer, response) for response in responses(rollouts)]
    return pool.map(call_scorer, rows, limit, attempts, functools.partial(load_scorer, scorer))


def _rewarded(rollouts: pa.Table) -> list[Outcome]:
    """A trajectory that was cut off before any reward has earned 0; one that ended without any says nothing."""
    found = EnvironmentRewards.of(rollouts["turns"])
    cut = [status == "truncated" for status in rollouts["status"].to_pylist()]
    rows = zip(found.totals.tolist(), found.counts.tolist(), cut, strict=True)
    return [_summed(total) if count or truncated else Outcome(None, NO_REWARD, 0) for total, count, truncated in rows]


def _summed(total: float) -> Outcome:
    if not abs(total) <= LARGEST:  # NaN neither
        return Outcome(None, NO_NUMBER.format(total), 0)
    return Outcome(Scored(total, {}), None, 1)


def responses(rollouts: pa.Table) -> list[Response]:
    """What the policy said last in each trajectory, and the last that a user had said before its first turn."""
    turns = np.diff(Turns(from_arrow(rollouts["action_mask"], "action_mask")).offsets).tolist()
    rows = zip(rollouts["messages"].to_pylist(), rollouts["metadata"].to_pylist(), turns, strict=True)
    return [_response(json.loads(messages), json.loads(metadata), own) for messages, metadata, own in rows]


def _response(messages: list[dict[str, Any]], metadata: dict[str, Any], turns: int) -> Response:
    """turns: so many of the assistant's messages, the last ones, are the policy's; those before are examples."""
    said = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    own = said[len(said) - turns :]
    before = messages[: own[0]] if own else messages
    asked = [message for message in before if message["role"] == "user"]
    text = str(messages[own[-1]]["content"]) if own else ""
    return Response(text, str(asked[-1]["content"]) if asked else "", metadata)
