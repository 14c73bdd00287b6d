"""What people call a recorded thing by, and the manifest that is meant.

RUN/ITERATION/STEP · RUN/ITERATION and RUN (the last policy) · RUN@VERSION (of a policy) · RUN:TRAJECTORY_ID · the URI
of a manifest, or its folder in the store · the beginning of a content digest or key.
"""

import re

from data.index import Index, Node
from data.ledger import STEPS, Ledger, require_record
from data.tables import read_table

DIGEST = re.compile(r"[0-9a-f]{6,64}")
MANIFEST = "/manifest.json"


def resolve(index: Index, ref: str, run: str | None = None) -> Node:
    """The node that a reference means; with `run`, it is the id of a trajectory there.

    Raises LookupError, with what is there, for a thing that is not on record or a digest of several.
    """
    if run is not None:
        return _trajectory(index, run, ref)
    if "://" in ref:
        return _at(index, index.store.path_of(ref))
    name, colon, trajectory = ref.partition(":")
    if colon:
        return _trajectory(index, name, trajectory)
    name, at, version = ref.partition("@")
    if at and version.isdigit():
        return _version(index, name, int(version))
    if "/" in ref and not ref.split("/")[1].isdigit():
        return _at(index, ref)
    if DIGEST.fullmatch(ref) and (found := index.with_digest(ref)):
        return _only(ref, found)
    return _step(index, *ref.split("/"))


def _at(index: Index, path: str) -> Node:
    found = index.find(f"{path.removesuffix(MANIFEST)}{MANIFEST}")
    if found is None:
        raise LookupError(
            f"{path}: no manifest on record in {index.store.url}; `rollbook show RUN` lists what is there"
        )
    return found


def _only(ref: str, found: list[Node]) -> Node:
    """Of the things with one digest the first: equal content is one thing, wherever it is on record."""
    if len({node.content_digest for node in found}) > 1:
        names = ", ".join(f"{node.content_digest[:16]} ({node.name})" for node in found[:5])
        raise LookupError(f"{ref}: the beginning of several digests: {names}; give more of it")
    return found[0]


def _entries(index: Index, run: str) -> dict[tuple[int, str], Node]:
    ledger = Ledger(index.store, run)
    require_record(ledger)
    return index.of_run(ledger)


def _step(index: Index, run: str, iteration: str | None = None, step: str = "publish", *more: str) -> Node:
    if iteration is not None and not more:
        ledger = Ledger(index.store, run)
        require_record(ledger)
        if (found := index.find(ledger.at(int(iteration), step).manifest)) is not None:
            return found
    entries = _entries(index, run)
    number = max((k for k, name in entries if name == step), default=0) if iteration is None else int(iteration)
    if more or (number, step) not in entries:
        there = [name for k, name in entries if k == number]
        here = f"its iteration {number} has {', '.join(there)}" if there else f"it has no iteration {number}"
        raise LookupError(f"{'/'.join([run, str(number), step, *more])}: not on record in run {run!r}; {here}")
    return entries[number, step]


def _version(index: Index, run: str, version: int) -> Node:
    """A published policy; the one that the first iteration sampled with is a version, too."""
    entries = _entries(index, run)
    policies = {node.policy_version: node for (_, step), node in entries.items() if step == "publish"}
    first = entries.get((0, "generate"))
    base = index.find(first.inputs["policy"].path or "") if first is not None else None
    if base is not None:
        policies.setdefault(base.policy_version, base)
    if version not in policies:
        there = ", ".join(str(v) for v in sorted(v for v in policies if v is not None))
        raise LookupError(f"{run}@{version}: run {run!r} has published no such version; it has {there or 'none'}")
    return policies[version]


def _trajectory(index: Index, run: str, trajectory: str) -> Node:
    """The rollouts that have it. Its root ends in its position in the order of prompts, which says where to look."""
    entries = _entries(index, run)
    position = trajectory.partition("/")[0].rpartition("@")[2]
    rollouts = [node for node in entries.values() if node.kind == "rollouts" and node.cursor is not None]
    if position.isdigit():
        for node in sorted(rollouts, key=lambda node: (node.step != STEPS[0], node.iteration)):
            start, stop = node.cursor or (0, 0)
            if start <= int(position) < stop and _holds(index, node, trajectory):
                return node
    raise LookupError(
        f"trajectory {trajectory!r}: not in run {run!r}; `rollbook show {run} --iteration K` lists the ids of one"
    )


def _holds(index: Index, node: Node, trajectory: str) -> bool:
    ids = read_table(index.store, index.manifest(node), ["trajectory_id"], verify=False)["trajectory_id"]
    return ids.index(trajectory).as_py() >= 0
