"""Every manifest of a store in one SQLite file, for questions that go along lineage.

A cache: it is brought up to date when it is opened, and made again from the manifests alone when it is deleted.
"""

import hashlib
import json
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from data.attempt import read_manifest
from data.checkpoints import FOLDER
from data.ledger import ITERATION, SHARED, STEPS, THREADS, Ledger, list_runs
from data.manifest import Manifest, ManifestError
from data.store import Store

LAYOUT = 1  # of the tables below; a file of another one is made again
WAIT_S = 60.0  # for another process that brings it up to date
TABLES = """
CREATE TABLE run (name TEXT PRIMARY KEY, created_at TEXT);
CREATE TABLE config (digest TEXT PRIMARY KEY, body TEXT);
CREATE TABLE node (
  path TEXT PRIMARY KEY, shelf TEXT, name TEXT, run TEXT, iteration INTEGER, key TEXT, digest TEXT,
  created_at TEXT, body TEXT
);
CREATE TABLE edge (made TEXT, source TEXT);
CREATE INDEX node_shelf ON node (shelf, name);
CREATE INDEX node_run ON node (run);
CREATE INDEX node_key ON node (key);
CREATE INDEX node_digest ON node (digest);
CREATE INDEX edge_made ON edge (made);
CREATE INDEX edge_source ON edge (source);
"""
UP = "SELECT edge.source FROM edge JOIN near ON edge.made = near.path"
DOWN = "SELECT edge.made FROM edge JOIN near ON edge.source = near.path"


@dataclass(frozen=True)
class Input:
    """What a step read: its content, and the manifest of it if it has one."""

    digest: str
    path: str | None


@dataclass(frozen=True)
class Node:
    """One manifest, as far as lineage is concerned. Paths are relative to the store's root."""

    path: str
    run: str | None
    iteration: int | None
    step: str
    step_version: int
    kind: str
    key: str
    content_digest: str
    config_digest: str
    seed: int
    user_code: dict[str, str]
    inputs: dict[str, Input]
    policy_version: int | None
    cursor: tuple[int, int] | None  # first position in the order of prompts, and the one after the last
    files: int
    bytes: int
    created_at: str

    @property
    def name(self) -> str:
        """As people write it: RUN/ITERATION/STEP, or its folder."""
        folder = self.path.removesuffix("/manifest.json")
        in_a_run = self.run is not None and folder.endswith(f"/{self.step}")
        return f"{self.run}/{self.iteration}/{self.step}" if in_a_run else folder


class Index:
    """Of one store, in a folder of this machine. Opening it reads what was recorded since it was last open."""

    def __init__(self, store: Store, folder: Path) -> None:
        self.store = store
        name = hashlib.sha256(f"{store.url} {store.endpoint or ''}".encode()).hexdigest()
        self.file = folder / f"index-{name[:16]}.sqlite"
        folder.mkdir(parents=True, exist_ok=True)
        self._database = self._open()
        self._update()

    def find(self, path: str) -> Node | None:
        """The node of a manifest, by its path in the store."""
        return next(self._nodes("path = ?", path), None)

    def manifest(self, node: Node) -> Manifest:
        """The manifest itself. Raises ManifestError if it is gone, or is another one than the index has seen."""
        found = read_manifest(self.store, node.path)
        if found is None or (found.key, found.content_digest) != (node.key, node.content_digest):
            what = "missing" if found is None else "another one"
            raise ManifestError(
                f"{self.store.url_of(node.path)}: {what}, since it was indexed; restore it, or if that is meant delete "
                f"{self.file}, which is then made again"
            )
        return found

    def with_digest(self, prefix: str) -> list[Node]:
        """Those whose content digest or key begins so, oldest first."""
        bounds = (prefix, f"{prefix}g")  # hex digits end before g
        return list(self._nodes("digest BETWEEN ? AND ? OR key BETWEEN ? AND ?", *bounds, *bounds))

    def of_run(self, ledger: Ledger) -> dict[tuple[int, str], Node]:
        """What is on record of a run's iterations, by iteration and step; before a fork, its parent's."""
        found: dict[tuple[int, str], Node] = {}
        if ledger.parent is not None and ledger.fork is not None:
            theirs = self.of_run(ledger.parent)
            found = {place: node for place, node in theirs.items() if ledger.fork.has(*place)}
        own = self._nodes("run = ? AND shelf != ?", ledger.run, f"{ledger.run}/{FOLDER}")
        return found | {(node.iteration, node.step): node for node in own if node.iteration is not None}

    def ancestors(self, node: Node) -> list[Node]:
        """Everything that it was made of, oldest first."""
        return self._along(UP, node)

    def descendants(self, node: Node) -> list[Node]:
        """Everything that was made of it, oldest first."""
        return self._along(DOWN, node)

    def made_elsewhere(self, run: str) -> list[Node]:
        """What was made directly of a run's results, but is no entry of it."""
        made = "SELECT made FROM edge JOIN node AS n ON n.path = edge.source WHERE n.run = ?"
        return list(self._nodes(f"run != ? AND path IN ({made})", run, run))

    def configs(self, nodes: Iterable[Node]) -> dict[str, Any]:
        """The settings that steps read, by digest."""
        wanted = {node.config_digest for node in nodes}
        return {digest: json.loads(body) for digest, body in self._ask("SELECT * FROM config") if digest in wanted}

    def close(self) -> None:
        self._database.close()

    def _along(self, way: str, node: Node) -> list[Node]:
        near = f"WITH RECURSIVE near(path) AS (VALUES (?) UNION {way}) SELECT path FROM near"
        return [found for found in self._nodes(f"path IN ({near})", node.path) if found.path != node.path]

    def _nodes(self, where: str, *values: object) -> Iterator[Node]:
        for (body,) in self._ask(f"SELECT body FROM node WHERE {where} ORDER BY created_at, path", *values):
            yield _node(json.loads(body))

    def _ask(self, sql: str, *values: object) -> sqlite3.Cursor:
        return self._database.execute(sql, values)

    def _open(self) -> sqlite3.Connection:
        """Raises sqlite3.OperationalError if another process holds it for a minute."""
        database = sqlite3.connect(self.file, timeout=WAIT_S, isolation_level=None)
        try:
            if database.execute("PRAGMA user_version").fetchone()[0] == LAYOUT:
                return database
            whole = database.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] == 0
        except sqlite3.OperationalError:
            raise
        except sqlite3.DatabaseError:  # not a database
            whole = False
        if not whole:
            database.close()
            self.file.unlink()
            database = sqlite3.connect(self.file, timeout=WAIT_S, isolation_level=None)
        database.executescript(f"BEGIN; {TABLES} PRAGMA user_version = {LAYOUT}; COMMIT")
        return database

    def _update(self) -> None:
        self._ask("BEGIN IMMEDIATE")
        try:
            self._forget_runs()
            known: dict[str, set[str]] = {}
            for shelf, name in self._ask("SELECT shelf, name FROM node"):
                known.setdefault(shelf, set()).add(name)
            with ThreadPoolExecutor(THREADS) as pool:
                shelves = {s: grows for found in pool.map(self._shelves, self._runs(known)) for s, grows in found}
                growing = [shelf for shelf, grows in shelves.items() if grows]
                there = {s: set(names) for s, names in zip(growing, pool.map(self._list, growing), strict=True)}
                for shelf, names in known.items():
                    for name in names - there.get(shelf, names if shelf in shelves else set()):
                        self._remove("shelf = ? AND name = ?", shelf, name)
                fresh = sorted((s, name) for s, names in there.items() for name in names - known.get(s, set()))
                for place, manifest in zip(fresh, pool.map(self._read, fresh), strict=True):
                    if manifest is not None:
                        self._enter(*place, manifest)
            self._ask("COMMIT")
        except BaseException:
            self._ask("ROLLBACK")
            raise

    def _forget_runs(self) -> None:
        """Those that are gone, or were begun again under their name."""
        there = {record.run: record.created_at.isoformat() for record in list_runs(self.store)}
        for name, created_at in self._ask("SELECT name, created_at FROM run").fetchall():
            if there.get(name) != created_at:
                self._remove("run = ?", name)
                self._ask("DELETE FROM run WHERE name = ?", name)
        for place in there.items():
            self._ask("INSERT OR IGNORE INTO run VALUES (?, ?)", *place)

    def _runs(self, known: dict[str, set[str]]) -> list[tuple[str, set[str]]]:
        """Runs, and what they share, with their iterations that are known whole."""
        whole = {shelf for shelf, names in known.items() if names.issuperset(STEPS)}
        return [(SHARED, whole), *((name, whole) for (name,) in self._ask("SELECT name FROM run").fetchall())]

    def _shelves(self, run_and_whole: tuple[str, set[str]]) -> list[tuple[str, bool]]:
        """Folders whose folders are entries, and whether there may be new ones.

        Where a listing takes a round trip, an iteration that is whole, with another after it, is taken to grow no more.
        """
        run, whole = run_and_whole
        names = self.store.list_dirs(run)
        if run == SHARED:
            return [(f"{run}/{kind}", True) for kind in names]
        iterations = [f"{run}/{name}" for name in names if ITERATION.fullmatch(name)]
        settled = set() if self.store.local else whole.intersection(iterations[:-1])
        return [*((shelf, shelf not in settled) for shelf in iterations), (f"{run}/{FOLDER}", True)]

    def _list(self, shelf: str) -> list[str]:
        """Names of a shelf's entries. States alone are ever removed, and their manifest goes before their folder."""
        names = self.store.list_dirs(shelf)
        if not shelf.endswith(f"/{FOLDER}"):
            return names
        return [name for name in names if self.store.exists(f"{shelf}/{name}/manifest.json")]

    def _read(self, place: tuple[str, str]) -> Manifest | None:
        return read_manifest(self.store, f"{place[0]}/{place[1]}/manifest.json")

    def _enter(self, shelf: str, name: str, manifest: Manifest) -> None:
        node = self._describe(f"{shelf}/{name}/manifest.json", manifest)
        run = shelf.split("/")[0]
        indexed = (node.path, shelf, name, run, node.iteration, node.key, node.content_digest, node.created_at)
        self._ask("INSERT INTO node VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", *indexed, json.dumps(asdict(node)))
        for source in {value.path for value in node.inputs.values() if value.path is not None}:
            self._ask("INSERT INTO edge VALUES (?, ?)", node.path, source)
        self._ask("INSERT OR IGNORE INTO config VALUES (?, ?)", node.config_digest, json.dumps(manifest.config))

    def _describe(self, path: str, manifest: Manifest) -> Node:
        sources = {name: self.store.path_of(uri) for name, uri in manifest.input_uris.items()}
        version, cursor = manifest.facts.get("policy_version"), manifest.facts.get("cursor")
        return Node(
            path=path,
            run=manifest.run,
            iteration=manifest.iteration,
            step=manifest.step,
            step_version=manifest.step_version,
            kind=manifest.kind,
            key=manifest.key,
            content_digest=manifest.content_digest,
            config_digest=manifest.config_digest,
            seed=manifest.seed,
            user_code=manifest.user_code,
            inputs={name: Input(digest, sources.get(name)) for name, digest in manifest.inputs.items()},
            policy_version=version if isinstance(version, int) else None,
            cursor=_span(cursor) if isinstance(cursor, dict) else None,
            files=len(manifest.files),
            bytes=sum(entry.bytes for entry in manifest.files),
            created_at=manifest.created_at.isoformat(),
        )

    def _remove(self, where: str, *values: str) -> None:
        self._ask(f"DELETE FROM edge WHERE made IN (SELECT path FROM node WHERE {where})", *values)
        self._ask(f"DELETE FROM node WHERE {where}", *values)


def _span(cursor: Mapping[str, object]) -> tuple[int, int]:
    return int(str(cursor["start"])), int(str(cursor["end"]))


def _node(body: Any) -> Node:
    body["inputs"] = {name: Input(**value) for name, value in body["inputs"].items()}
    body["cursor"] = body["cursor"] and tuple(body["cursor"])
    return Node(**body)
