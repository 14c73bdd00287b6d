"""What `show` and `ls` tell, as plain JSON-ready values read from ledger and tables."""

import json
import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from data.checkpoints import Checkpoints
from data.ids import root_of
from data.ledger import Ledger, RunRecord, require_record
from data.manifest import Manifest
from data.summary import IterationSummary, RunSummary, summarize
from data.tables import read_table
from data.trajectories import Trajectories, read_trajectories
from data.vocabulary import vocabulary
from infra.driver import holder_of
from infra.home import Home

Json = dict[str, Any]
KINDS = ("rollouts", "rewards", "replays", "advantages")


def require_run(ledger: Ledger) -> RunSummary:
    """The run's summary. Raises LookupError, with the nearest name, if nothing of it is on record."""
    require_record(ledger)
    return summarize(ledger)


def row(ledger: Ledger, record: RunRecord, home: Home) -> Json:
    """One line of `ls`."""
    summary = summarize(ledger)
    done = [s for s in summary.iterations if s.complete]
    holder = holder_of(home.run_folder(record.run))
    return {
        "run": record.run,
        "created_at": record.created_at.isoformat(),
        "iterations": len(done),
        "status": "running" if holder else "complete" if _complete(summary, record, len(done)) else "stopped",
        "reward": _finite(done[-1].metrics.get("reward/mean")) if done else None,
        "held_out": summary.held_out,
    }


def _complete(summary: RunSummary, record: RunRecord, done: int) -> bool:
    """A run's last act is its evaluation, unless that is one between; else it has the iterations it was begun with."""
    evaluate: Any = record.config["evaluate"]
    begun_with: Any = record.config["iterations"]
    if evaluate["problems"] == 0:
        return done == begun_with
    every = evaluate.get("every")
    between = every is not None and done % every == 0 and done < begun_with
    return done in summary.evaluations and done > 0 and not between


def run(summary: RunSummary, ledger: Ledger) -> Json:
    checkpoints = Checkpoints(ledger)
    return {
        "run": summary.run,
        "held_out": summary.held_out,
        "evaluations": [{"iteration": k, **found.figures} for k, found in sorted(summary.evaluations.items())],
        "states": checkpoints.live(),
        "tags": checkpoints.tags(),
        "iterations": [_iteration(s) for s in summary.iterations],
    }


def _iteration(summary: IterationSummary) -> Json:
    wall = summary.timing.seconds if summary.timing else None
    return {
        "iteration": summary.iteration,
        "complete": summary.complete,
        "metrics": {name: _finite(value) for name, value in summary.metrics.items()},
        "seconds": {**summary.seconds, "iteration": wall, "orchestration": summary.orchestration},
    }


def iteration(summary: RunSummary, ledger: Ledger, number: int) -> Json:
    """Steps and trajectories of one iteration. Raises LookupError if it is not on record."""
    found = find(summary, number)
    steps = [
        {
            "step": step,
            "seconds": m.seconds,
            "content_digest": m.content_digest,
            "key": m.key,
            "rows": sum(f.rows or 0 for f in m.files),
            "bytes": sum(f.bytes for f in m.files),
            "uri": m.uri,
        }
        for step, m in found.manifests.items()
    ]
    return {
        "run": summary.run,
        **_iteration(found),
        "held_out": found.evaluation.figures if found.evaluation else None,
        "mismatch": found.mismatch,
        "steps": steps,
        "trajectories": _trajectories(found, ledger),
    }


def _trajectories(found: IterationSummary, ledger: Ledger) -> list[Json]:
    """One short row per trajectory, in stored order."""
    if "generate" not in found.manifests:
        return []
    rollouts = read_table(ledger.store, found.manifests["generate"], ["trajectory_id", "status", "messages"])
    scored, judged = _optional(found, ledger, "score"), _optional(found, ledger, "advantages")
    rows = rollouts.to_pylist()
    return [
        {
            "trajectory_id": r["trajectory_id"],
            "status": r["status"],
            "reward": _finite(scored[i]["reward"]) if scored else None,
            "error": scored[i]["error"] if scored else None,
            "advantage": _finite(judged[i]["advantage"]) if judged else None,
            "answer": json.loads(r["messages"])[-1]["content"],
        }
        for i, r in enumerate(rows)
    ]


def _optional(found: IterationSummary, ledger: Ledger, step: str) -> list[Json] | None:
    columns = {"score": ["trajectory_id", "reward", "error"], "advantages": ["trajectory_id", "advantage"]}
    manifest = found.manifests.get(step)
    return read_table(ledger.store, manifest, columns[step]).to_pylist() if manifest else None


@dataclass(frozen=True)
class Choice:
    """Which trajectories of an iteration somebody asks for: one of these."""

    worst: int | None = None
    best: int | None = None
    failed: bool = False
    group: str | None = None  # a root, or the id of one of its trajectories

    @property
    def made(self) -> bool:
        """Raises ValueError for two at once."""
        given = [f"--{name}" for name, value in vars(self).items() if value not in (None, False)]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)}: choose one of them")
        return bool(given)

    def rows(self, found: Trajectories) -> list[int]:
        if self.group is not None:
            return found.group(root_of(self.group))
        if self.failed:
            return found.failed()
        return found.worst(self.worst) if self.worst is not None else found.best(self.best or 0)


def chosen(summary: RunSummary, ledger: Ledger, choice: Choice, number: int | None) -> Json:
    """Some trajectories whole, by default of the last iteration that was scored. Raises LookupError if none was."""
    found = find(summary, number)
    trajectories = read_trajectories(ledger, found)
    rows = choice.rows(trajectories)
    return {
        "run": summary.run,
        "iteration": found.iteration,
        "trajectories": _whole(found, ledger, trajectories, rows),
    }


def trajectory(summary: RunSummary, ledger: Ledger, wanted: str, number: int | None) -> Json:
    """One trajectory whole: turns with roles and text, tokens with log-prob, value, advantage; reward and its parts.

    Raises LookupError if no (or not this) iteration has it.
    """
    iterations = [find(summary, number)] if number is not None else list(summary.iterations)
    for found in iterations:
        manifest = found.manifests.get("generate")
        table = read_table(ledger.store, manifest, ["trajectory_id"], verify=False) if manifest else None
        place = table["trajectory_id"].index(wanted).as_py() if table else -1
        if place >= 0:
            return _whole(found, ledger, read_trajectories(ledger, found), [place])[0]
    where = f"iteration {number}" if number is not None else "any iteration"
    raise LookupError(
        f"trajectory {wanted!r}: not in {where} of {summary.run!r}; "
        f"`rollbook show {summary.run} --iteration K` lists the ids of an iteration"
    )


def _whole(found: IterationSummary, ledger: Ledger, trajectories: Trajectories, rows: Sequence[int]) -> list[Json]:
    taken = {kind: table.take(pa.array(rows, pa.int64())).to_pylist() for kind, table in trajectories.tables.items()}
    words = vocabulary(ledger, found.manifests["generate"])
    texts = [words.spelled(rollout["token_ids"]) for rollout in taken["rollouts"]]
    each = ({kind: table[i] for kind, table in taken.items()} for i in range(len(rows)))
    return [_one(found, tables, spelled) for tables, spelled in zip(each, texts, strict=True)]


def _one(found: IterationSummary, tables: Mapping[str, Json], texts: Sequence[str | None]) -> Json:
    rollout, reward, replay, advantage = (tables.get(kind, {}) for kind in KINDS)
    return {
        "iteration": found.iteration,
        "trajectory_id": rollout["trajectory_id"],
        "status": rollout["status"],
        "metadata": json.loads(rollout["metadata"]),
        "reward": _finite(reward.get("reward")),
        "components": dict(reward.get("components") or []),
        "extracted_answer": reward.get("extracted_answer"),
        "error": reward.get("error") or rollout["error"],
        "advantage": _finite(advantage.get("advantage")),
        "turns": rollout["turns"],
        "token_ids": rollout["token_ids"],
        "token_texts": texts,
        "action_mask": rollout["action_mask"],
        "loss_mask": advantage.get("loss_mask"),
        "rollout_logprobs": rollout["rollout_logprobs"],
        "old_logprobs": replay.get("old_logprobs"),
        "gap_refused": found.gap_refused,
        "values": replay.get("values"),
        "token_advantages": advantage.get("token_advantages"),
    }


def tag(ledger: Ledger, name: str, number: int) -> bool:
    """Name the state after an iteration; whether it is kept. Raises LookupError if no train step made it."""
    found = find(require_run(ledger), number)
    if "train" not in found.manifests:
        raise LookupError(f"iteration {number} of {ledger.run!r}: has not been trained on yet; tag one that was")
    Checkpoints(ledger).tag(name, number)
    return Checkpoints(ledger).find(found.manifests["train"]) is not None


def export(ledger: Ledger, number: int | None, folder: Path, cache: Path) -> Manifest:
    """Copy the policy published by an iteration, by default the last one, into a new folder; each file is verified.

    Raises FileExistsError for a folder that is there, LookupError for an iteration that published nothing.
    """
    summary = require_run(ledger)
    published = [s for s in summary.iterations if "publish" in s.manifests]
    if number is None and not published:
        raise LookupError(f"run {summary.run!r}: no iteration has published a policy yet")
    found = published[-1] if number is None else find(summary, number)
    if "publish" not in found.manifests:
        raise LookupError(f"iteration {found.iteration} of {summary.run!r}: has not published a policy yet")
    policy = found.manifests["publish"]
    if folder.exists():
        raise FileExistsError(f"{folder}: exists; give a folder that does not, so that nothing is overwritten")
    shutil.copytree(ledger.store.local_copy(policy.files, cache), folder)
    return policy


def find(summary: RunSummary, number: int | None) -> IterationSummary:
    """An iteration, by default the last that was scored. Raises LookupError, with what is there."""
    if number is None:
        scored = [s for s in summary.iterations if "score" in s.manifests]
        if not scored:
            raise LookupError(f"run {summary.run!r}: no iteration has been scored yet")
        return scored[-1]
    known = {s.iteration: s for s in summary.iterations}
    if number not in known:
        there = f"{min(known)} to {max(known)}" if known else "none"
        raise LookupError(f"iteration {number} of {summary.run!r}: not on record; on record: {there}")
    return known[number]


def _finite(value: float | None) -> float | None:
    """JSON has no NaN: a failed reward is null there, and the status says failed."""
    return value if value is not None and math.isfinite(value) else None
