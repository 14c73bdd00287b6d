"""What may be cleared away: training states beyond what a run keeps, files that no manifest names, old copies, a run.

No table, policy or manifest of a step is ever among it unless its whole run goes.
"""

import os
import re
import shutil
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from data.attempt import read_manifest
from data.checkpoints import FOLDER, Checkpoints
from data.config import CheckpointConfig
from data.ledger import ITERATION, SHARED, STEPS, THREADS, Ledger, list_runs
from data.store import Store, StoredFile

DAY_S = 86_400.0
SCRATCH = "scratch-"  # folders of results that were made to be compared and thrown away
ATTEMPT = re.compile(r"((?:[^/]+/){3}[0-9a-f]{32})/.+")  # files of one lie in a folder of the entry
HALF = re.compile(r"(.*/)?(\..+\.|\.probe-)[0-9a-f]{32}")  # what a kill leaves of a file that was to appear whole
COPY = re.compile(r"[0-9a-f]{64}(\.[0-9a-f]{32}\.part)?")


@dataclass(frozen=True)
class Removal:
    """Files of a store that would go together, in this order."""

    what: str
    name: str
    paths: tuple[str, ...]
    bytes: int


def surplus_states(ledger: Ledger) -> list[Removal]:
    """Training states that neither the newest config on record nor a tag keeps. Each manifest goes before its files."""
    checkpoints, found = Checkpoints(ledger), []
    for iteration in checkpoints.surplus(newest_config(ledger)):
        if (manifest := checkpoints.manifest(iteration)) is not None:
            paths = [ledger.store.path_of(uri) for uri in (manifest.uri, *(entry.uri for entry in manifest.files))]
            size = sum(entry.bytes for entry in manifest.files)
            found.append(Removal("training state", f"{ledger.run}, iteration {iteration}", tuple(paths), size))
    return found


def newest_config(ledger: Ledger) -> CheckpointConfig:
    """What the newest train step says, else the run's own record: `checkpoint` may be changed within a run."""
    for iteration in reversed(ledger.iterations()):
        made = ledger.find(ledger.at(iteration, "train"))
        if made is not None and "checkpoint" in made.execution:
            return CheckpointConfig.model_validate(made.execution["checkpoint"])
    record = ledger.record
    return CheckpointConfig.model_validate(record.config["checkpoint"] if record else {})


def strays(store: Store, run: str | None, now: float) -> list[Removal]:
    """Files that no manifest names, of a run or of the whole store, and folders of scratch results; a day old."""
    files = store.list_files(run or "")  # before the manifests: what is committed meanwhile is then seen as named
    scratch = set() if run else _scratch(store)
    groups: dict[tuple[str, str], list[StoredFile]] = {}
    for file in files:
        top, attempt = file.path.split("/")[0], ATTEMPT.fullmatch(file.path)
        if top in scratch:
            groups.setdefault(("scratch results", top), []).append(file)
        elif HALF.fullmatch(file.path):
            groups.setdefault(("half a file", file.path), []).append(file)
        elif attempt:
            groups.setdefault(("unfinished attempt", attempt[1]), []).append(file)
    old = {place: group for place, group in groups.items() if max(f.modified for f in group) < now - DAY_S}
    named = _named(store, {name.rpartition("/")[0] for what, name in old if what == "unfinished attempt"})
    return [
        Removal(what, name, tuple(file.path for file in group), sum(file.bytes for file in group))
        for (what, name), group in sorted(old.items())
        if name not in named
    ]


def old_copies(cache: Path, before: float) -> list[Path]:
    """Local copies of policies and states that nothing has asked for since `before`, seconds since the epoch."""
    folders = cache.iterdir() if cache.is_dir() else iter(())
    return sorted(f for f in folders if COPY.fullmatch(f.name) and f.is_dir() and f.stat().st_mtime < before)


def clear(store: Store, removals: Sequence[Removal]) -> None:
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(store.remove, [removal.paths for removal in removals]))


def clear_copies(folders: Sequence[Path], before: float) -> None:
    """Each takes another name first: whoever looks for it meanwhile finds all of it or none."""
    for folder in folders:
        if folder.stat().st_mtime < before:
            beside = folder.with_name(f"{folder.name[:64]}.{uuid.uuid4().hex}.part")
            os.rename(folder, beside)
            shutil.rmtree(beside)


def forks_of(store: Store, run: str) -> list[str]:
    """Runs whose entries are partly this one's."""
    return sorted(record.run for record in list_runs(store) if record.fork is not None and record.fork.run == run)


def whole_run(store: Store, run: str) -> Removal:
    """All of a run. What was made last goes first, each manifest before what it names, and run.json at the end.

    So a kill leaves a shorter run that is whole, which may be resumed, or removed by the same command.
    """
    files = store.list_files(run)
    paths = {file.path for file in files}
    order = [path for path in _manifests(store, run) if path in paths]
    last = f"{run}/run.json"
    rest = sorted(paths.difference(order, [last]))
    end = [last] if last in paths else []
    return Removal("run", run, (*order, *rest, *end), sum(file.bytes for file in files))


def _manifests(store: Store, run: str) -> Iterator[str]:
    """Paths of a run's manifests, the newest first: states, then iterations, each backwards."""
    folders = [name for name in store.list_dirs(run) if ITERATION.fullmatch(name)]
    yield from (f"{run}/{FOLDER}/{name}/manifest.json" for name in reversed(store.list_dirs(f"{run}/{FOLDER}")))
    for folder in reversed(folders):
        steps = store.list_dirs(f"{run}/{folder}")
        others = [step for step in reversed(steps) if step not in STEPS]
        for step in (*others, *reversed(STEPS)):
            yield f"{run}/{folder}/{step}/manifest.json"


def _scratch(store: Store) -> set[str]:
    """A run may be called so, too: it has a record."""
    names = [name for name in store.list_dirs() if name.startswith(SCRATCH) and name != SHARED]
    return {name for name in names if not store.exists(f"{name}/run.json")}


def _named(store: Store, entries: set[str]) -> set[str]:
    """Folders of the attempts that are on record. Raises ManifestError for an entry that cannot be read."""
    with ThreadPoolExecutor(THREADS) as pool:
        found = pool.map(lambda entry: read_manifest(store, f"{entry}/manifest.json"), sorted(entries))
        uris = [entry.uri.removesuffix(f"/{entry.name}") for manifest in found if manifest for entry in manifest.files]
    return {store.path_of(uri) for uri in uris}
