"""A store with hand-made rollouts, and the means to run a step's body in this process, without Ray."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from data.columns import ROLLOUTS
from data.ledger import Ledger
from data.manifest import Manifest
from data.request import Request
from data.store import Store
from infra.timed_pool import TimedPool
from tasks.step import Job
from tests.hand_made import BY_HAND, SAMPLING


@dataclass(frozen=True)
class Bench:
    """One run's ledger; `job` is what a body gets, `rollouts` records a table of given answers."""

    ledger: Ledger
    cache: Path

    def job(self, step: str, kind: str, inputs: Mapping[str, Manifest], seed: int = 0, **more: Any) -> Job:
        """more: config and execution of the request."""
        request = Request(step=step, step_version=1, kind=kind, inputs=dict(inputs), seed=seed, **more)
        return Job(self.ledger, self.ledger.at(0, step), request, self.cache)

    def record(self, step: str, kind: str, table: pa.Table, inputs: Mapping[str, Manifest] | None = None) -> Manifest:
        attempt = self.job(step, kind, inputs or {}).attempt()
        attempt.add_table(kind, table)
        return attempt.commit(facts={"policy_version": 0})

    def rollouts(self, answers: list[str], samples: int = 1, **changes: Any) -> Manifest:
        """Prompt tokens 1 2 3, answer tokens 10 11 ... (one a character), 2 at the end; metadata.answer is 'good'."""
        rows = [rollout(i // samples, i % samples, answer, **changes) for i, answer in enumerate(answers)]
        return self.record("generate", "rollouts", pa.Table.from_pylist(rows, schema=ROLLOUTS))


def rollout(
    root: int, branch: int, answer: str, truncated: bool = False, logprob: float = -0.5, **sampling: Any
) -> dict[str, Any]:
    asked, said = 3, len(answer) + 1
    turn = {"env_reward": None, "tool_calls": None}
    silent = {"finish_reason": None, "policy_version": None, "policy_digest": None}
    spoken = {"finish_reason": "length" if truncated else "stop", "policy_version": 0, "policy_digest": "p"}
    return BY_HAND | {
        "trajectory_id": f"q{root}@{root}/{branch}",
        "root_id": f"q{root}@{root}",
        "parent_id": f"q{root}@{root}",
        "token_ids": [1, 2, 3, *range(10, 10 + len(answer)), 2],
        "action_mask": [False] * asked + [True] * said,
        "rollout_logprobs": [0.0] * asked + [logprob] * said,
        "turns": [
            {"role": "user", "is_generated": False, "start": 0, "length": asked, "text": "?", **silent, **turn},
            {
                "role": "assistant",
                "is_generated": True,
                "start": asked,
                "length": said,
                "text": answer,
                **spoken,
                **turn,
            },
        ],
        "messages": json.dumps([{"role": "user", "content": "?"}, {"role": "assistant", "content": answer}]),
        "status": "truncated" if truncated else "ok",
        "truncation": "length" if truncated else None,
        "sampling": SAMPLING | sampling,
        "metadata": json.dumps({"answer": "good", "prompt_id": f"q{root}"}),
    }


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(Ledger(Store(str(tmp_path / "store")), "hand"), tmp_path / "cache")


@pytest.fixture(scope="session")
def pool() -> Any:
    made = TimedPool(2)
    yield made
    made.close()


@pytest.fixture
def scorer_file(tmp_path: Path) -> Callable[[str], str]:
    def write(source: str) -> str:
        (tmp_path / "mine.py").write_text(source)
        return f"{tmp_path / 'mine.py'}:score"

    return write


def tokens(*rows: list[float]) -> pa.Array:
    return pa.array([np.array(row, np.float32) for row in rows], pa.list_(pa.float32()))
