"""Rollouts as recorded tables against `torch.save` of the same rows and JSONL, in one run.

    python tests/benchmarks/tables.py

512 trajectories of about 2,250 tokens with ids, mask, log-probs and text. Ids and words follow Zipf's law, as those of
text do; log-probs are log-normal noise, the worst case for any compression. Write is all that a step does: conform,
check every invariant, digest, compress, hash, fsync, commit. Read is of two token columns, with and without the check
of the file's bytes.
"""

import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from data.columns import ROLLOUTS
from data.ledger import Ledger
from data.request import Request
from data.store import Store
from data.tables import read_table

TRAJECTORIES, MEAN_TOKENS, PROMPT, VOCAB = 512, 2250, 200, 50_000
REPEATS = 5


def rows(rng: np.random.Generator) -> list[dict[str, Any]]:
    words = np.array(["".join(rng.choice(list("etaoinshrdlucm"), rng.integers(1, 8))) for _ in range(VOCAB)])
    return [_row(i, rng, words) for i in range(TRAJECTORIES)]


def _row(i: int, rng: np.random.Generator, words: np.ndarray) -> dict[str, Any]:
    length = int(rng.integers(MEAN_TOKENS // 2, MEAN_TOKENS * 3 // 2))
    ids = np.minimum(rng.zipf(1.3, length), VOCAB) - 1
    logprobs = -rng.lognormal(-2, 1.5, length - PROMPT).astype(np.float32)
    return row(i, ids, logprobs, (" ".join(words[ids[:PROMPT]]), " ".join(words[ids[PROMPT:]])))


def short_row(i: int) -> dict[str, Any]:
    """A trajectory of 8 tokens."""
    return row(i, np.arange(8), np.full(5, -0.5, np.float32), ("1 2 3", "4 5 6 7 8"))


def row(i: int, ids: np.ndarray, logprobs: np.ndarray, texts: tuple[str, str]) -> dict[str, Any]:
    """A rollout of one turn, valid in every column; the last len(logprobs) of the ids are the answer."""
    said, prompt = len(logprobs), len(ids) - len(logprobs)
    quiet = {
        "finish_reason": None,
        "policy_version": None,
        "policy_digest": None,
        "env_reward": None,
        "tool_calls": None,
    }
    spoken = quiet | {"finish_reason": "stop", "policy_version": 0, "policy_digest": "p"}
    return {
        "trajectory_id": f"q{i // 8}@{i // 8}/{i % 8}",
        "root_id": f"q{i // 8}@{i // 8}",
        "parent_id": f"q{i // 8}@{i // 8}",
        "depth": 1,
        "stage": "policy",
        "purpose": "train",
        "token_ids": ids.astype(np.int32),
        "action_mask": np.arange(len(ids)) >= prompt,
        "rollout_logprobs": np.concatenate([np.zeros(prompt, np.float32), logprobs]),
        "turns": [
            {"role": "user", "is_generated": False, "start": 0, "length": prompt, "text": texts[0]} | quiet,
            {"role": "assistant", "is_generated": True, "start": prompt, "length": said, "text": texts[1]} | spoken,
        ],
        "messages": json.dumps([{"role": "user", "content": texts[0]}, {"role": "assistant", "content": texts[1]}]),
        "media": [],
        "status": "ok",
        "truncation": None,
        "error": None,
        "sampling": {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "max_new_tokens": 8192, "seed": i, "stop": [],
                     "logprob_semantics": "sampled"},
        "engine": "none",
        "engine_version": "1",
        "tokenizer_digest": "t",
        "template_digest": "t",
        "metadata": json.dumps({"answer": "42"}),
        "started_at": None,
        "latency_ms": None,
    }  # fmt: skip


def best(call: Callable[[], object]) -> float:
    """Shortest of some calls, s."""
    times = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return min(times)


def main() -> None:
    made = rows(np.random.default_rng(0))
    table = pa.Table.from_pylist(made, schema=ROLLOUTS)
    tokens = sum(len(row["token_ids"]) for row in made)
    as_lists = [{k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in row.items()} for row in made]
    as_tensors = [{k: torch.from_numpy(v) if isinstance(v, np.ndarray) else v for k, v in row.items()} for row in made]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ledger = Ledger(Store(str(folder / "store")), "bench")
        count = iter(range(10**6))

        def record() -> Any:
            attempt = ledger.writer(ledger.at(next(count), "generate"), Request("generate", 1, "rollouts"))
            attempt.add_table("rollouts", table)
            return attempt.commit()

        def save(write: Callable[[], None]) -> None:
            write()
            os.sync()

        def jsonl() -> None:
            (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, as_lists)))

        def read_jsonl() -> list[Any]:
            with (folder / "rows.jsonl").open() as lines:
                return [(row["token_ids"], row["rollout_logprobs"]) for row in map(json.loads, lines)]

        manifest = record()
        columns = ["token_ids", "rollout_logprobs"]
        torch_file = folder / "rows.pt"
        figures = {
            "Rollbook table": (
                best(record),
                best(lambda: read_table(ledger.store, manifest, columns)),
                sum(file.bytes for file in manifest.files),
            ),
            "torch.save": (
                best(lambda: save(lambda: torch.save(as_tensors, torch_file))),
                best(lambda: torch.load(torch_file, weights_only=False)),
                torch_file.stat().st_size,
            ),
            "JSONL": (best(lambda: save(jsonl)), best(read_jsonl), (folder / "rows.jsonl").stat().st_size),
        }
        unchecked = best(lambda: read_table(ledger.store, manifest, columns, verify=False))
    print(f"{TRAJECTORIES} trajectories, {tokens:,} tokens")
    print(f"{'':16}{'write Mtok/s':>14}{'read 2 columns Mtok/s':>24}{'bytes/token':>14}")
    for kind, (write_s, read_s, size) in figures.items():
        print(f"{kind:16}{tokens / write_s / 1e6:14.1f}{tokens / read_s / 1e6:24.1f}{size / tokens:14.2f}")
    print(f"the table's two columns without the check of the file's bytes: {tokens / unchecked / 1e6:.1f} Mtok/s")
    ours = figures.pop("Rollbook table")
    for kind, theirs in figures.items():
        write, read, smaller = theirs[0] / ours[0], theirs[1] / ours[1], theirs[2] / ours[2]
        print(f"against {kind}: write {write:.2f} x as fast, read {read:.1f} x as fast, {smaller:.1f} x smaller")


if __name__ == "__main__":
    main()
