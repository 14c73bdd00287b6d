"""Partial rollout: more groups are in play than are wanted, and what is unfinished when enough are whole waits."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal

from data.config import Generation
from data.ids import cursor_of, root_of
from data.prompts import Prompt, PromptSource
from data.tables import read_table
from models.agents.loop import Trajectory
from models.agents.stream import Stream
from tasks.episodes import episode_of, played_in
from tasks.rollout_rows import Producer, row
from tasks.step import Job

type Groups = dict[str, list[Trajectory]]  # by root, in the order in which they were begun


@dataclass(frozen=True)
class Settled:
    """Where every trajectory in play went: each is in exactly one of them, with all its siblings."""

    committed: list[Trajectory]
    carried: list[Trajectory]
    dropped: list[Trajectory]

    def metrics(self, submitted: int, stale: int, version: int) -> dict[str, float]:
        """completed + failed + carried + dropped = submitted, in trajectories. stale: how many of the dropped.

        staleness_max: of what is committed, optimizer updates between its first turn and `version`.
        """
        failed = sum(trajectory.status == "failed" for trajectory in self.committed)
        counts = {
            "submitted": submitted,
            "completed": len(self.committed) - failed,
            "failed": failed,
            "carried": len(self.carried),
            "dropped": len(self.dropped) + stale,
            "stale": stale,
            "staleness_max": version - _oldest(self.committed, version),
        }
        return {f"partial/{name}": float(count) for name, count in counts.items()}


def require_resumable(generation: Generation) -> None:
    """Raises ValueError for an environment whose trajectories would be carried, and which cannot go on with them."""
    partial, played = generation.partial, played_in(generation.environment)
    if partial.groups is None or partial.tail != "carry" or played is None or played.spec.resumable:
        return
    kind = generation.environment.kind
    if kind == "tools":
        rule = "one of the tools keeps state of its own trajectory"
        fix = "or leave out tools that are classes without `shared = True`"
    else:
        rule = "its class does not say that it can go on at any turn after a reset"
        fix = "or say `resumable = True` in the class if it can"
    raise ValueError(
        f"partial.tail = 'carry' with environment.kind = {kind!r}: {rule}, and unfinished trajectories are carried to "
        f"the next iteration; set partial.tail = 'drop', {fix}"
    )


def settle(trajectories: Sequence[Trajectory], wanted: int, tail: Literal["carry", "drop"]) -> Settled:
    """The first `wanted` groups that were whole, those of one round in the order in which they were begun.

    Further whole groups wait for the next iteration. The others are carried to it, or dropped with their siblings.
    """
    groups = groups_of(trajectories)
    whole = sorted((root for root in groups if _is_whole(groups[root])), key=lambda root: _round(groups[root]))
    committed, spare = set(whole[:wanted]), set(whole[wanted:])

    def of(roots: set[str]) -> list[Trajectory]:
        return [trajectory for root in groups if root in roots for trajectory in groups[root]]

    unfinished = set(groups) - committed - spare
    if tail == "drop":
        return Settled(of(committed), of(spare), of(unfinished))
    return Settled(of(committed), of(spare | unfinished), [])


@dataclass(frozen=True)
class Carried:
    """What the iteration before left unfinished, or whole and unused."""

    trajectories: list[Trajectory] = field(default_factory=list)
    origins: dict[str, int] = field(default_factory=dict)  # by trajectory: the iteration that began it

    @classmethod
    def of(cls, job: Job, source: PromptSource, order_seed: int) -> "Carried":
        """Raises ValueError if the prompts are no longer those that the trajectories began from."""
        if "carry" not in job.request.inputs:
            return cls()
        _require_same_prompts(job, source)
        rows = read_table(job.ledger.store, job.input("carry"), name="carry").to_pylist()
        trajectories = []
        for found in rows:
            (prompt,) = source.take(cursor_of(found["root_id"]), 1, order_seed)
            trajectories.append(_resumed(found, prompt))
        return cls(trajectories, {found["trajectory_id"]: found["origin_iteration"] for found in rows})

    def within(self, version: int, most: int) -> list[Trajectory]:
        """Those of groups whose first turn was sampled at most so many optimizer updates before `version`."""
        groups = groups_of(self.trajectories).values()
        return [t for group in groups if version - _oldest(group, version) <= most for t in group]

    def row(self, trajectory: Trajectory, producer: Producer, started: datetime, iteration: int) -> dict[str, Any]:
        """One row of data.columns.CARRY. One that was never begun has its prompt only."""
        turns = trajectory.stream.turns
        if not trajectory.stream:
            messages = trajectory.episode.messages
            trajectory.stream.show(producer.tokenizer.encode_prompt(messages), messages, "user")
        origin = self.origins.get(trajectory.name, iteration)
        found = row(trajectory, "train", producer, started)
        return found | {"resume_turn": turns, "origin_iteration": origin}


def _resumed(found: Mapping[str, Any], prompt: Prompt) -> Trajectory:
    episode = episode_of(found["trajectory_id"], prompt, found["sampling"]["seed"])
    if found["status"] == "carried":
        return Trajectory(episode, Stream.of_row(found) if found["resume_turn"] else Stream())
    return Trajectory(episode, Stream.of_row(found), found["status"], found["truncation"], found["error"])


def _require_same_prompts(job: Job, source: PromptSource) -> None:
    before = job.input("carry").inputs["prompts"]
    if before != source.digest:
        raise ValueError(
            f"prompts: iteration {job.iteration} has others (digest {source.digest[:12]}) than the one before "
            f"({before[:12]}), whose unfinished trajectories it goes on with; put them back, or start another run"
        )


def groups_of(trajectories: Sequence[Trajectory]) -> Groups:
    groups: Groups = {}
    for trajectory in trajectories:
        groups.setdefault(root_of(trajectory.name), []).append(trajectory)
    return groups


def _is_whole(group: Sequence[Trajectory]) -> bool:
    return all(trajectory.status != "carried" for trajectory in group)


def _round(group: Sequence[Trajectory]) -> int:
    return max(trajectory.round for trajectory in group)


def _oldest(group: Sequence[Trajectory], version: int) -> int:
    versions = [s.policy_version for t in group for s in t.stream.spans if s.policy_version is not None]
    return min(versions, default=version)
