"""SQL over all iterations of a run: DuckDB over its Parquet files, of which only the columns asked for are read.

Nothing is checked against manifests on the way; `rollbook verify` does that.
"""

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import duckdb
import pyarrow as pa

from data.columns import SCHEMAS
from data.ledger import STEPS, THREADS, Ledger
from data.manifest import Manifest
from data.store import Store

STEP_COLUMNS = pa.schema(
    [
        ("iteration", pa.int64()),
        ("step", pa.string()),
        ("kind", pa.string()),
        ("seconds", pa.float64()),
        ("created_at", pa.timestamp("us", "UTC")),
        ("policy_version", pa.int64()),
        ("rows", pa.int64()),
        ("bytes", pa.int64()),
        ("key", pa.string()),
        ("content_digest", pa.string()),
        ("metrics", pa.map_(pa.string(), pa.float64())),
    ]
)


def connect(ledger: Ledger) -> duckdb.DuckDBPyConnection:
    """A database in memory with the views rollouts, rewards, replays, advantages (of training) and steps (of all)."""
    with ThreadPoolExecutor(THREADS) as pool:
        manifests = [m for found in pool.map(ledger.steps, ledger.iterations()) for m in found]
    database = duckdb.connect()
    if not ledger.store.local:
        database.register_filesystem(ledger.store.filesystem)
    database.register("steps", pa.Table.from_pylist([_step(m) for m in manifests], schema=STEP_COLUMNS))
    for kind in SCHEMAS:
        files = [e.uri for m in manifests if m.step in STEPS for e in m.files if e.table == kind]
        database.execute(f"CREATE VIEW {kind} AS {_view(ledger.store, kind, files)}")
    _close(database, ledger.store)
    return database


def ask(database: duckdb.DuckDBPyConnection, sql: str) -> duckdb.DuckDBPyRelation:
    """The result of one question. Raises ValueError for anything else: what is on record is read, never written."""
    statements = duckdb.extract_statements(sql)
    if [statement.type for statement in statements] != [duckdb.StatementType.SELECT]:
        raise ValueError(f"query {sql!r}: asks not one question; give a single SELECT")
    return database.sql(sql)


def _close(database: duckdb.DuckDBPyConnection, store: Store) -> None:
    """Nothing beyond the store can be reached, and that cannot be changed any more."""
    database.execute(f"SET allowed_directories = [{_quoted(store.url.removeprefix('file://') + '/')}]")
    database.execute("SET enable_external_access = false")
    database.execute("SET lock_configuration = true")


def _view(store: Store, kind: str, uris: Iterable[str]) -> str:
    """The iteration is part of each file's path, so a condition on it spares the files of the others."""
    files = ", ".join(_quoted(uri.removeprefix("file://") if store.local else uri) for uri in uris)
    if not files:
        empty = ", ".join(f"NULL AS {column}" for column in ("iteration", *SCHEMAS[kind].names))
        return f"SELECT {empty} WHERE false"
    iteration = r"CAST(regexp_extract(filename, '/(\d{6,})/[a-z_]+/[0-9a-f]{32}/[^/]+$', 1) AS BIGINT)"
    return f"SELECT {iteration} AS iteration, * EXCLUDE filename FROM read_parquet([{files}], filename = true)"


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _step(manifest: Manifest) -> dict[str, object]:
    version = manifest.facts.get("policy_version")
    tables = [entry.rows for entry in manifest.files if entry.rows is not None]
    return {
        "iteration": manifest.iteration,
        "step": manifest.step,
        "kind": manifest.kind,
        "seconds": manifest.seconds,
        "created_at": manifest.created_at,
        "policy_version": version if isinstance(version, int) else None,
        "rows": sum(tables) if tables else None,
        "bytes": sum(entry.bytes for entry in manifest.files),
        "key": manifest.key,
        "content_digest": manifest.content_digest,
        "metrics": list(manifest.metrics.items()),
    }
