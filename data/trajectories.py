"""The trajectories of one iteration, put together from its tables, and which of them somebody wants to look at."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa

from data.ledger import Ledger
from data.summary import IterationSummary
from data.tables import read_table
from ops.ragged import Ragged, from_arrow, row_sums

STEP_OF = {"rollouts": "generate", "rewards": "score", "replays": "replay", "advantages": "advantages"}
TOKENS = {
    "rollout_logprobs": "rollouts",
    "old_logprobs": "replays",
    "values": "replays",
    "token_advantages": "advantages",
    "loss_mask": "advantages",
}


@dataclass(frozen=True)
class Trajectories:
    """Tables of the same rows in the same order. Steps that are not on record have none."""

    tables: Mapping[str, pa.Table]  # by kind; rollouts is there

    def __len__(self) -> int:
        return self.tables["rollouts"].num_rows

    def column(self, kind: str, name: str) -> list[Any]:
        """[rows] of it, null where its step is not on record."""
        return self.tables[kind][name].to_pylist() if kind in self.tables else [None] * len(self)

    @cached_property
    def ids(self) -> list[str]:
        return self.column("rollouts", "trajectory_id")

    @cached_property
    def roots(self) -> list[str]:
        return self.column("rollouts", "root_id")

    @cached_property
    def rewards(self) -> np.ndarray:
        """[rows] float64, NaN where there is none."""
        return np.array([math.nan if r is None else r for r in self.column("rewards", "reward")], np.float64)

    def tokens(self, name: str) -> Ragged | None:
        """A token column of TOKENS; None if its step did not make it."""
        table = self.tables.get(TOKENS[name])
        return None if table is None or table[name].null_count else from_arrow(table[name], name)

    @cached_property
    def token_ids(self) -> Ragged:
        return from_arrow(self.tables["rollouts"]["token_ids"], "token_ids")

    @cached_property
    def action_mask(self) -> Ragged:
        return from_arrow(self.tables["rollouts"]["action_mask"], "action_mask")

    @cached_property
    def lengths(self) -> np.ndarray:
        """[rows] int64: sampled tokens."""
        return row_sums(self.action_mask)

    @cached_property
    def statuses(self) -> list[str]:
        """[rows] how it ended; of one that ended well, or of one that ran out of room, `not scored` if that failed."""
        scored = self.column("rewards", "status")
        ended = self.column("rollouts", "status")
        return ["not scored" if s == "failed" and e != "failed" else e for e, s in zip(ended, scored, strict=True)]

    @cached_property
    def errors(self) -> list[str | None]:
        """[rows] of generation, else of scoring."""
        both = zip(self.column("rollouts", "error"), self.column("rewards", "error"), strict=True)
        return [generated or scored for generated, scored in both]

    @cached_property
    def references(self) -> list[str | None]:
        """[rows] the answer that the prompt's metadata gives, if it is text or a number."""
        found = [json.loads(text).get("answer") for text in self.column("rollouts", "metadata")]
        return [str(answer) if isinstance(answer, str | int | float) else None for answer in found]

    def best(self, count: int) -> list[int]:
        """Rows of the highest rewards; of equal ones the first."""
        return self._scored(-self.rewards)[:count]

    def worst(self, count: int) -> list[int]:
        """Rows of the lowest rewards; of equal ones the first."""
        return self._scored(self.rewards)[:count]

    def failed(self) -> list[int]:
        """Rows that failed in generation or in scoring."""
        return [i for i, status in enumerate(self.statuses) if status in ("failed", "not scored")]

    def group(self, root: str) -> list[int]:
        """Rows of a root. Raises LookupError, naming some, if there are none."""
        rows = [i for i, own in enumerate(self.roots) if own == root]
        if not rows:
            some = ", ".join(list(dict.fromkeys(self.roots))[:3])
            raise LookupError(f"group {root!r}: not in this iteration; its groups are {some}, ...")
        return rows

    def _scored(self, order: np.ndarray) -> list[int]:
        return [int(i) for i in np.argsort(order, kind="stable") if np.isfinite(self.rewards[i])]


def read_trajectories(
    ledger: Ledger, summary: IterationSummary, columns: Mapping[str, Sequence[str]] | None = None
) -> Trajectories:
    """Everything that an iteration has on record of its trajectories, or some columns by kind of table.

    Raises LookupError for one that has generated nothing yet.
    """
    found: dict[str, pa.Table] = {}
    for kind, step in STEP_OF.items():
        if step in summary.manifests and (columns is None or kind in columns):
            wanted = None if columns is None else ["trajectory_id", *columns[kind]]
            found[kind] = read_table(ledger.store, summary.manifests[step], wanted)
    if "rollouts" not in found:
        raise LookupError(f"iteration {summary.iteration} of {ledger.run!r}: has no trajectories on record yet")
    return Trajectories(found)
