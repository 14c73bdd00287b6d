"""An advantages-only rerun of 100,000 trajectories against reading and writing its tables.

    python tests/benchmarks/advantages.py

The step's own body, in this process: read the columns it needs, GAE, write the table with every check, commit. Against
that read alone, and that write alone.
"""

import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from data.columns import REPLAYS, REWARDS, ROLLOUTS
from data.config import AdvantageConfig
from data.ledger import Ledger
from data.manifest import Manifest
from data.request import Request
from data.store import Store
from data.tables import read_table
from tasks.advantages import READ, _advantages
from tasks.step import Job
from tests.benchmarks.tables import row

ROOTS, SIBLINGS, PROMPT, ANSWER = 12_500, 8, 32, 96
KINDS = {"rollouts": ROLLOUTS, "rewards": REWARDS, "replays": REPLAYS}


def rollouts() -> pa.Table:
    """One root's rows, many times, with ids of their own."""
    ids, logprobs = np.arange(PROMPT + ANSWER), np.full(ANSWER, -0.5, np.float32)
    one = pa.Table.from_pylist([row(i, ids, logprobs, ("?", "!")) for i in range(SIBLINGS)], schema=ROLLOUTS)
    table = pa.concat_tables([one] * ROOTS).combine_chunks()
    names = {
        "trajectory_id": [f"q{i}@{i}/{b}" for i in range(ROOTS) for b in range(SIBLINGS)],
        "root_id": [f"q{i}@{i}" for i in range(ROOTS) for _ in range(SIBLINGS)],
    }
    for name in ("trajectory_id", "root_id", "parent_id"):
        place = table.schema.get_field_index(name)
        table = table.set_column(place, table.schema.field(name), pa.array(names.get(name, names["root_id"])))
    return table


def beside(rollouts: pa.Table, rng: np.random.Generator) -> dict[str, pa.Table]:
    rows, tokens = rollouts.num_rows, PROMPT + ANSWER
    offsets = pa.array(np.arange(rows + 1, dtype=np.int32) * tokens)
    acting = np.tile(np.arange(tokens) >= PROMPT, rows)

    def per_token(values: np.ndarray) -> pa.ListArray:
        return pa.ListArray.from_arrays(offsets, pa.array(np.where(acting, values, 0.0).astype(np.float32)))

    reward = rng.integers(0, 2, rows).astype(np.float32)
    words = {"scorer": "hand", "scorer_digest": "h", "status": "ok", "value_digest": "v", "policy_digest": "p"}
    columns: dict[str, Any] = {
        "trajectory_id": rollouts["trajectory_id"].combine_chunks(),
        "reward": pa.array(reward),
        "raw_reward": pa.array(reward),
        "old_logprobs": per_token(rng.normal(-1, 0.1, rows * tokens)),
        "entropy": per_token(np.ones(rows * tokens)),
        "values": per_token(rng.normal(size=rows * tokens)),
        "bootstrap_value": pa.array(np.zeros(rows, np.float32)),
        "mini_batch": pa.array(np.arange(rows, dtype=np.int32) // 512),
        "micro_batch": pa.array(np.zeros(rows, np.int32)),
    } | {name: pa.array([word] * rows) for name, word in words.items()}
    return {
        kind: pa.table(
            [columns[f.name].cast(f.type) if f.name in columns else pa.nulls(rows, f.type) for f in KINDS[kind]],
            schema=KINDS[kind],
        )
        for kind in ("rewards", "replays")
    }


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        ledger = Ledger(Store(f"{folder}/store"), "bench")
        made: dict[str, Manifest] = {}
        table = rollouts()
        for kind, content in {"rollouts": table, **beside(table, np.random.default_rng(0))}.items():
            attempt = ledger.writer(ledger.at(0, kind), Request(kind, 1, kind))
            attempt.add_table(kind, content)
            made[kind] = attempt.commit(facts={"policy_version": 0})
        del table

        def rerun(number: int) -> None:
            request = Request("advantages", 1, "advantages", dict(made), seed=number)
            _advantages(None, Job(ledger, ledger.at(number, "advantages"), request, Path(folder)), AdvantageConfig())

        def read() -> None:
            for kind, columns in READ.items():
                read_table(ledger.store, made[kind], columns)

        def write() -> None:
            attempt = ledger.writer(ledger.at(time.time_ns(), "written"), Request("written", 1, "advantages"))
            attempt.add_table("advantages", result)
            attempt.commit()

        rerun(0)  # compiles
        result = read_table(ledger.store, ledger.steps(0)[-1])
        read_s, write_s, rerun_s = _best(read), _best(write), _best(lambda: rerun(time.time_ns()))
    print(f"{ROOTS * SIBLINGS:,} trajectories of {PROMPT + ANSWER} tokens: advantages again in {rerun_s:.2f} s")
    print(f"reading its inputs alone {read_s:.2f} s, writing its table alone {write_s:.2f} s;", end=" ")
    print(f"{rerun_s / read_s:.1f} x reading, {rerun_s / (read_s + write_s):.2f} x reading and writing")


def _best(call: Any) -> float:
    spent = []
    for _ in range(3):
        started = time.perf_counter()
        call()
        spent.append(time.perf_counter() - started)
    return min(spent)


if __name__ == "__main__":
    main()
