"""Trajectories as people look at them: rollouts, rewards and advantages joined, a share of an iteration's groups."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa

from data.ledger import Ledger
from data.manifest import Manifest
from data.store import Store
from data.summary import IterationSummary
from data.tables import read_table
from ops.choice import chosen_rows
from ops.groups import group_numbers

SHOWN = ["trajectory_id", "root_id", "purpose", "turns", "messages", "status", "truncation", "error", "metadata"]
CLOCK = ["started_at", "latency_ms"]
JUDGED = ["trajectory_id", "reward", "components", "scorer", "scorer_digest", "error", "extracted_answer"]


@dataclass(frozen=True)
class Turn:
    """A span of the stream, as the rollouts table has it."""

    role: str
    is_generated: bool
    start: int  # token
    length: int  # tokens
    text: str
    finish_reason: str | None
    policy_version: int | None
    policy_digest: str | None
    env_reward: float | None
    tool_calls: str | None  # JSON


@dataclass(frozen=True)
class Score:
    """A row of the rewards table."""

    reward: float | None  # None: not scored, NaN: the scorer failed
    components: Mapping[str, float]
    scorer: str
    scorer_digest: str
    error: str | None
    extracted_answer: str | None


UNSCORED = Score(None, {}, "", "", None, None)


@dataclass(frozen=True)
class Trajectory:
    """One row of rollouts, with what was made of it."""

    trajectory_id: str
    root_id: str
    purpose: str
    turns: tuple[Turn, ...]
    messages: list[dict[str, Any]]
    status: str
    truncation: str | None
    error: str | None
    metadata: Mapping[str, Any]
    started_at: datetime | None
    latency_ms: float | None
    score: Score
    advantage: float | None  # None where none was computed: evaluation

    @property
    def policy_versions(self) -> list[int]:
        """Of the policies that wrote it, ascending."""
        return sorted({turn.policy_version for turn in self.turns if turn.policy_version is not None})

    @property
    def failure(self) -> str | None:
        """Why it could not be generated or scored."""
        return self.error or self.score.error


@dataclass(frozen=True)
class Chosen:
    """Whole groups, and how many trajectories are not among them."""

    trajectories: list[Trajectory]
    left_out: int


@dataclass(frozen=True)
class Scored:
    """The recorded tables that trajectories are joined from."""

    store: Store
    rollouts: Manifest
    rewards: Manifest
    advantages: Manifest | None = None

    def choose(self, share: float) -> Chosen:
        """Whole groups, the best and the worst trajectory among them; see `ops.choice.chosen_rows`.

        Only the columns that people look at are read. Raises ManifestError for a file that is missing or altered.
        """
        table = read_table(self.store, self.rollouts, [*SHOWN, *CLOCK], verify=False)
        ids, scores = table["trajectory_id"].to_pylist(), self._scores
        rewards = np.array([scores[i].reward if i in scores else None for i in ids], np.float64)
        mask = chosen_rows(group_numbers(table["root_id"]), rewards, share)
        rows = table.filter(pa.array(mask)).to_pylist()
        return Chosen([_trajectory(row, scores, self._advantages) for row in rows], int((~mask).sum()))

    @cached_property
    def _scores(self) -> dict[str, Score]:
        rows = read_table(self.store, self.rewards, JUDGED, verify=False).to_pylist()
        return {row.pop("trajectory_id"): Score(**row | {"components": dict(row["components"] or [])}) for row in rows}

    @cached_property
    def _advantages(self) -> dict[str, float]:
        if self.advantages is None:
            return {}
        table = read_table(self.store, self.advantages, ["trajectory_id", "advantage"], verify=False)
        return dict(zip(table["trajectory_id"].to_pylist(), table["advantage"].to_pylist(), strict=True))


def of_iteration(ledger: Ledger, summary: IterationSummary) -> Scored:
    """What an iteration was trained on."""
    made = summary.manifests
    return Scored(ledger.store, made["generate"], made["score"], made["advantages"])


def of_evaluation(ledger: Ledger, rewards: Manifest) -> Scored:
    """The answers to held-out problems that got these rewards."""
    return Scored(ledger.store, ledger.open(rewards.input_uris["rollouts"]), rewards)


def _trajectory(row: dict[str, Any], scores: Mapping[str, Score], advantages: Mapping[str, float]) -> Trajectory:
    name = row.pop("trajectory_id")
    return Trajectory(
        trajectory_id=name,
        turns=tuple(Turn(**turn) for turn in row.pop("turns")),
        messages=json.loads(row.pop("messages")),
        metadata=json.loads(row.pop("metadata")),
        score=scores.get(name, UNSCORED),
        advantage=advantages.get(name),
        **row,
    )
