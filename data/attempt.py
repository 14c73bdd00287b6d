"""One attempt at a step: files under a fresh folder, then the manifest at its place by conditional create."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
from pydantic import JsonValue

from data.arrow import pc
from data.columns import SCHEMA_VERSION, VOLATILE
from data.digest import TableDigest, json_digest
from data.files import Written
from data.ids import lineage
from data.manifest import FileEntry, Manifest, ManifestError, from_bytes
from data.provenance import code_digest, packages
from data.request import Address, Request, conflict
from data.schema import SchemaError, conform, validate
from data.store import Store
from data.tables import write_table

COPY_BYTES = 8 * 2**20


@dataclass
class _Shards:
    """What is known of the shards of one table so far."""

    digest: TableDigest
    roots: list[pa.Array] = field(default_factory=list)


@dataclass
class Attempt:
    """Writes the files of one result. It lives in one process; until its commit nothing is on record.

    Its clock starts when it is made: make it before the work, or give `commit` the seconds.
    """

    store: Store
    address: Address
    request: Request
    attempt: str  # unique
    entries: list[FileEntry] = field(default_factory=list)
    started: float = field(default_factory=time.time)
    _shards: dict[str, _Shards] = field(default_factory=dict)

    def add_table(
        self, name: str, table: pa.Table, *, rollouts: pa.Table | None = None, policy_version: int | None = None
    ) -> None:
        """Check and write a table, or its next shard. `name` is a kind of data.schema.

        With `rollouts` the token columns are checked against their streams, with `policy_version` the versions against
        the current one. Raises SchemaError, naming trajectory, rule and fix, before anything is written.
        """
        table = conform(name, table)
        validate(name, table, rollouts=rollouts, policy_version=policy_version)
        shards = self._shards.setdefault(name, _Shards(TableDigest(VOLATILE[name])))
        roots = lineage(table.column("trajectory_id")).root.unique()
        _require_whole_groups(name, roots, shards)
        file = f"{name}-{len(shards.roots):03d}.parquet"
        self._enter(file, write_table(self.store, self._path(file), table), rows=table.num_rows, table=name)
        shards.digest.update(table)
        shards.roots.append(roots)

    def add_file(self, name: str, local: Path) -> None:
        """Copy a local file to `name`, a path below the attempt's folder."""
        with local.open("rb") as source, self.store.open_new(self._path(name)) as target:
            while block := source.read(COPY_BYTES):
                target.write(block)
        self._enter(name, target.written)

    def add_folder(self, folder: Path) -> None:
        """Copy all files of a local folder, under their paths in it. Raises ValueError if there are none."""
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        if not files:
            raise ValueError(f"{folder}: no files to record; write them before add_folder")
        for path in files:
            self.add_file(path.relative_to(folder).as_posix(), path)

    def commit(
        self,
        content_digest: str | None = None,
        metrics: Mapping[str, float] | None = None,
        facts: Mapping[str, JsonValue] | None = None,
        *,
        seconds: float | None = None,
    ) -> Manifest:
        """Enter the result: the manifest on record, which is another attempt's if that was first with the same key.

        `content_digest` is that of the tables and files unless given. Raises StepConflict if another request was first.
        """
        mine = self._manifest(content_digest or self._content_digest(), metrics or {}, facts or {}, seconds)
        if self.store.create(self.address.manifest, mine.to_bytes(self.store.url)):
            return mine
        winner = read_manifest(self.store, self.address.manifest)
        if winner is None:
            raise ManifestError(f"{mine.uri}: vanished; nothing may delete from a store in use")
        if winner.key != mine.key:
            raise conflict(winner, self.request)
        return winner

    def _path(self, name: str) -> str:
        return f"{self.address.path}/{self.attempt}/{name}"

    def _enter(self, name: str, written: Written, rows: int | None = None, table: str | None = None) -> None:
        uri = self.store.url_of(self._path(name))
        self.entries.append(
            FileEntry(
                name=name,
                uri=uri,
                version_id=written.version_id,
                sha256=written.sha256,
                bytes=written.bytes,
                rows=rows,
                table=table,
            )
        )

    def _content_digest(self) -> str:
        tables = {name: shards.digest.hexdigest() for name, shards in self._shards.items()}
        return json_digest(tables | {entry.name: entry.sha256 for entry in self.entries if entry.table is None})

    def _manifest(
        self, content_digest: str, metrics: Mapping[str, float], facts: Mapping[str, JsonValue], seconds: float | None
    ) -> Manifest:
        request = self.request
        return Manifest(
            uri=self.store.url_of(self.address.manifest),
            kind=request.kind,
            schema_version=SCHEMA_VERSION,
            run=self.address.run,
            iteration=self.address.iteration,
            step=request.step,
            step_version=request.step_version,
            key=request.key,
            inputs=request.input_digests,
            config=dict(request.config),
            config_digest=json_digest(request.config),
            seed=request.seed,
            user_code=dict(request.user_code),
            code_digest=code_digest(),
            input_uris=request.input_uris,
            packages=packages(),
            execution=dict(request.execution),
            files=tuple(self.entries),
            content_digest=content_digest,
            metrics={name: float(value) for name, value in metrics.items()},
            facts=dict(facts),
            seconds=time.time() - self.started if seconds is None else seconds,
            created_at=datetime.now(UTC),
        )


def read_manifest(store: Store, path: str) -> Manifest | None:
    """The manifest at a path of the store, None if there is none. Raises ManifestError if it cannot be understood."""
    try:
        data = store.read_bytes(path)
    except FileNotFoundError:
        return None
    return from_bytes(data, store.url_of(path), store.url)


def _require_whole_groups(name: str, roots: pa.Array, shards: _Shards) -> None:
    for earlier in shards.roots:
        split = roots.filter(pc.is_in(roots, value_set=earlier))
        if len(split):
            raise SchemaError(
                f"{name}: root {split[0]} has rows in two shards; a shard holds whole groups: cut shards between roots"
            )
