"""The specification's worked example as an iteration on record, with a policy that carries a tokenizer."""

from pathlib import Path
from typing import Any

import pyarrow as pa
from tokenizers import Tokenizer, decoders, models

from data.columns import ADVANTAGES, REPLAYS, REWARDS, ROLLOUTS
from data.ledger import Ledger
from data.manifest import Manifest
from data.request import Request
from data.summary import IterationSummary, summarize_iteration
from tests.data.conftest import STREAMS, rollout_row

NAN = float("nan")
# By trajectory: reward, values and advantages of the sampled tokens.
NUMBERS = {
    "A/0": (1.0, [0.2, 0.5, 0.8], [0.7655, 0.49, 0.2]),
    "A/1": (0.0, [0.2, 0.4], [-0.18, -0.4]),
    "B/0": (1.0, [0.1, 0.2, 0.3, 0.4, 0.6], [0.7825, 0.7185, 0.651, 0.58, 0.4]),
    "B/1": (NAN, [0.1, 0.1], [0.0, 0.0]),
}
GAP = 0.25  # trainer less engine, of every sampled token
# Byte-level, so that é is two tokens.
VOCABULARY = {"!": 0, "a": 1, "b": 2, "c": 3, "x": 5, "y": 6, "s": 7, "t": 8, "u": 9, "Ã": 20, "©": 21, "Ġ": 30}
VOCABULARY |= {f"z{i}": i for i in (31, 32, 40, 41)}


def write_tokenizer(path: Path) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(VOCABULARY, []))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(path))
    return tokenizer


def record_example(ledger: Ledger, folder: Path, texts: dict[str, str] | None = None) -> IterationSummary:
    """Iteration 0; `texts` replaces what trajectories said last, by id. B/1 could not be scored."""
    write_tokenizer(folder / "tokenizer.json")
    request = Request("warm_start", 1, "policy")
    attempt = ledger.writer(ledger.shared(request), request)
    attempt.add_file("tokenizer.json", folder / "tokenizer.json")
    policy = attempt.commit(facts={"policy_version": 0})
    rows = [rollout_row(*stream) for stream in STREAMS]
    for row in rows:
        row["turns"][-1]["text"] = (texts or {}).get(row["trajectory_id"], "said last")
        row["metadata"] = '{"answer": 42}'
    generate = _enter(ledger, "generate", "rollouts", rows, ROLLOUTS, policy=policy)
    made = {"rollouts": generate}
    made["rewards"] = _enter(ledger, "score", "rewards", _rewards(), REWARDS, **made)
    facts = {"mismatch": {"measured": True, "edges": [0.1], "counts": [0, 12, 0]}}
    made["replays"] = _enter(ledger, "replay", "replays", _replays(rows), REPLAYS, facts=facts, **made)
    _enter(ledger, "advantages", "advantages", _advantages(rows), ADVANTAGES, **made)
    return summarize_iteration(ledger, 0)


def _enter(
    ledger: Ledger, step: str, kind: str, rows: list[Any], schema: pa.Schema, facts: Any = None, **inputs: Manifest
) -> Manifest:
    attempt = ledger.writer(ledger.at(0, step), Request(step, 1, kind, inputs))
    attempt.add_table(kind, pa.Table.from_pylist(rows, schema=schema))
    return attempt.commit(facts={"policy_version": 0, **(facts or {})})


def _rewards() -> list[Any]:
    common = {"scorer": "exact", "scorer_digest": "s", "components": [("match", 0.5)]}
    rows = [{"trajectory_id": i, "reward": r, "status": "ok", **common} for i, (r, _, _) in NUMBERS.items()]
    rows[3] |= {"status": "failed", "error": "timeout after 10 s"}
    return rows


def _spread(mask: list[bool], numbers: list[float]) -> list[float]:
    left = iter(numbers)
    return [next(left) if acted else 0.0 for acted in mask]


def _replays(rows: list[Any]) -> list[Any]:
    common = {"policy_digest": "p3", "mini_batch": 0, "micro_batch": 0}
    made = []
    for row in rows:
        mask, (_, values, _) = row["action_mask"], NUMBERS[row["trajectory_id"]]
        old = _spread(mask, [-0.5 + GAP] * len(values))
        made.append(
            {"trajectory_id": row["trajectory_id"], "old_logprobs": old, "values": _spread(mask, values), **common}
        )
    return made


def _advantages(rows: list[Any]) -> list[Any]:
    made = []
    for row in rows:
        name, mask = row["trajectory_id"], row["action_mask"]
        group, failed = name[0], name == "B/1"
        spread = _spread(mask, NUMBERS[name][2])
        made.append(
            {
                "trajectory_id": name,
                "token_rewards": [0.0] * len(mask),
                "token_advantages": spread,
                "returns": spread,
                "loss_mask": [False] * len(mask) if failed else mask,
                "advantage": {"A/0": 1.0, "A/1": -1.0}.get(name, 0.0),
                "group_id": group,
                "group_mean": {"A": 0.5, "B": 1.0}[group],
                "group_std": {"A": 0.5, "B": 0.0}[group],
                "group_finite": {"A": 2, "B": 1}[group],
                "excluded": failed,
                "reason": "not scored" if failed else None,
            }
        )
    return made
