"""The worked example of the specification, with everything that a rollouts table needs around it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from data.columns import ROLLOUTS
from data.ledger import Ledger, Request
from data.schema import conform
from data.store import Store

Row = dict[str, Any]

# id, stream, spans as (generated, length), truncation
STREAMS = [
    ("A/0", [1, 2, 3, 7, 8, 2], [(False, 3), (True, 3)], None),
    ("A/1", [1, 2, 3, 7, 9], [(False, 3), (True, 2)], "length"),
    ("B/0", [5, 6, 20, 21, 2, 30, 31, 32, 40, 2], [(False, 2), (True, 3), (False, 3), (True, 2)], None),
    ("B/1", [5, 6, 41, 2], [(False, 2), (True, 2)], None),
]


def _turns(spans: list[tuple[bool, int]]) -> list[Row]:
    turns, start = [], 0
    for generated, length in spans:
        turn: Row = {"role": "assistant" if generated else "user", "is_generated": generated}
        turn |= {"start": start, "length": length, "text": "..."}
        if generated:
            turn |= {"finish_reason": "stop", "policy_version": 3, "policy_digest": "p3"}
        turns.append(turn)
        start += length
    return turns


def rollout_row(name: str, stream: list[int], spans: list[tuple[bool, int]], truncation: str | None) -> Row:
    root = name.partition("/")[0]
    mask = [generated for generated, length in spans for _ in range(length)]
    return {
        "trajectory_id": name,
        "root_id": root,
        "parent_id": root,
        "depth": 1,
        "stage": "policy",
        "purpose": "train",
        "token_ids": stream,
        "action_mask": mask,
        "rollout_logprobs": [-0.5 if sampled else 0.0 for sampled in mask],
        "turns": _turns(spans),
        "messages": '[{"role":"user","content":"?"}]',
        "media": [],
        "status": "truncated" if truncation else "ok",
        "truncation": truncation,
        "error": None,
        "sampling": {
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": 0,
            "max_new_tokens": 8,
            "seed": 2**63 + 1,
            "stop": [],
            "logprob_semantics": "sampled",
        },
        "engine": "toy",
        "engine_version": "1",
        "tokenizer_digest": "t",
        "template_digest": "t",
        "metadata": "{}",
        "started_at": None,
        "latency_ms": 1.5,
    }


@pytest.fixture
def rollout_rows() -> list[Row]:
    return [rollout_row(*stream) for stream in STREAMS]


@pytest.fixture
def rollouts(rollout_rows: list[Row]) -> pa.Table:
    return conform("rollouts", pa.Table.from_pylist(rollout_rows, schema=ROLLOUTS))


@pytest.fixture
def many_rollouts() -> Callable[[int], pa.Table]:
    """`roots` roots of two siblings each."""

    def build(roots: int) -> pa.Table:
        rows = [rollout_row(f"R{i}/{b}", *STREAMS[b][1:]) for i in range(roots) for b in range(2)]
        return conform("rollouts", pa.Table.from_pylist(rows, schema=ROLLOUTS))

    return build


@pytest.fixture
def place(request: pytest.FixtureRequest) -> str:
    """Kind of store; the marks of tests.data.places ask for several."""
    return getattr(request, "param", "file")


@pytest.fixture
def store(place: str, tmp_path: Path, request: pytest.FixtureRequest) -> Store:
    if place == "file":
        return Store(str(tmp_path / "store"))
    if place == "memory":
        return Store(f"memory://{tmp_path.name}")
    server = request.getfixturevalue("s3")
    return Store(server.place(versioned="versions" in place))


@pytest.fixture
def ledger(store: Store) -> Ledger:
    return Ledger(store, "sort")


@pytest.fixture
def request_of() -> Callable[..., Request]:
    """A generate request; keyword arguments replace its parts."""

    def build(**parts: Any) -> Request:
        base: dict[str, Any] = {"step": "generate", "step_version": 1, "kind": "rollouts"}
        base |= {"inputs": {"policy": "d0"}, "config": {"sampling": {"temperature": 1.0, "top_k": 0}}, "seed": 7}
        return Request(**(base | parts))

    return build
