"""The worked example of the specification, with everything that a rollouts table needs around it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from data.columns import ROLLOUTS
from data.config import CheckpointConfig
from data.ledger import Fork, Ledger, Request
from data.manifest import Manifest
from data.schema import conform
from data.sections import Section, execution
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


class ChainConfig(Section):
    run: str
    seed: int = 5
    iterations: int = 3
    lr: float = 0.5
    checkpoint: CheckpointConfig = execution(CheckpointConfig())


class Chain:
    """A run on record, made by hand: whole iterations of two prompts each, over an imported and warm-started policy.

    Contents without files are called after their step and iteration, with `mark` behind if there is one. Rewards are
    the iteration's number for the first prompt and 1 for the second; a policy after iteration k has version 4 (k + 1).
    """

    def __init__(self, ledger: Ledger, folder: Path, mark: str = "", fork: Fork | None = None, **config: Any) -> None:
        self.ledger, self.mark, self._folder = ledger, mark, folder
        ledger.open_or_create(ChainConfig(run=ledger.run, **config), fork)
        self.model = self._shared("import_model", {}, {"toy": "xs"})
        self.base = self._shared("warm_start", {"state": self.model, "base": self.model, "prompts": "prompts"}, {})
        self.made: dict[tuple[int, str], Manifest] = {}

    def _shared(self, step: str, inputs: dict[str, Manifest | str], config: Row) -> Manifest:
        request = Request(step, 1, "policy", inputs, config)
        attempt = self.ledger.writer(self.ledger.shared(request), request)
        return attempt.commit(content_digest=step, facts={"policy_version": 0})

    def extend(self, iteration: int) -> None:
        """Enter all steps of an iteration; those before it are there."""
        before = self.made.get((iteration - 1, "publish"), self.base)
        state = self.made.get((iteration - 1, "train"), self.base)
        draw = {"draw": {"cursor": 2 * iteration, "count": 2}}
        generate = self._enter(iteration, "generate", "rollouts", {"policy": before, "prompts": "prompts"}, draw)
        score = self._enter(iteration, "score", "rewards", {"rollouts": generate}, {"scorer": "exact"})
        replay = self._enter(iteration, "replay", "replays", {"rollouts": generate, "state": state})
        inputs = {"rollouts": generate, "rewards": score, "replays": replay}
        advantages = self._enter(iteration, "advantages", "advantages", inputs)
        inputs = {"state": state, "rollouts": generate, "replays": replay, "advantages": advantages}
        train = self._enter(iteration, "train", "state", inputs, {"lr": 0.5})
        self._enter(iteration, "publish", "policy", {"state": train, "base": self.base})

    def _enter(self, k: int, step: str, kind: str, inputs: dict[str, Any], config: Row | None = None) -> Manifest:
        request = Request(step, 1, kind, inputs, config or {}, seed=100 * k, execution={"threads": 2})
        attempt = self.ledger.writer(self.ledger.at(k, step), request)
        names = [f"P{position}@{position}/0" for position in (2 * k, 2 * k + 1)]
        facts: Row = {"policy_version": 4 * (k + 1) if step == "publish" else 4 * k}
        if step == "generate":
            attempt.add_table(
                "rollouts", pa.Table.from_pylist([rollout_row(n, *STREAMS[0][1:]) for n in names], ROLLOUTS)
            )
            facts["cursor"] = {"start": 2 * k, "end": 2 * k + 2}
        elif step == "score":
            scored = {"scorer": ["exact"] * 2, "scorer_digest": ["builtin:exact"] * 2, "status": ["ok"] * 2}
            attempt.add_table("rewards", pa.table({"trajectory_id": names, "reward": [float(k), 1.0], **scored}))
        elif step == "publish":
            (self._folder / "weights").write_text(f"weights {k}{self.mark}")
            attempt.add_file("weights", self._folder / "weights")
        tables = kind in ("rollouts", "rewards")
        metrics = {"reward/mean": (k + 1) / 2} if step == "score" else {}
        made = attempt.commit(None if tables else f"{step} {k}{self.mark}", metrics, facts, seconds=0.25)
        self.made[k, step] = made
        return made


@pytest.fixture
def chain(ledger: Ledger, tmp_path: Path) -> Callable[..., Chain]:
    """Iterations on record of the run `sort`, or of another."""

    def build(iterations: int, run: Ledger = ledger, **how: Any) -> Chain:
        made = Chain(run, tmp_path, **how)
        for k in range(iterations):
            made.extend(k)
        return made

    return build
