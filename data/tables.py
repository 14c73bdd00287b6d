"""Tables as Parquet: row groups cut at group boundaries, one dictionary per category column, checked when read back."""

import difflib
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from data.arrow import pc
from data.columns import SCHEMAS
from data.digest import sha256
from data.files import Written, check_sha256, check_size, missing
from data.ids import lineage
from data.manifest import FileEntry, Manifest, ManifestError
from data.ranges import RangedFile
from data.store import Store, StoreError

ROW_GROUP_BYTES = 4 * 2**20
ROW_OVERHEAD_BYTES = 256


def write_table(store: Store, path: str, table: pa.Table) -> Written:
    """Write a conformed table to a new file of the store."""
    table = table.unify_dictionaries()
    numbers = [f"{field.name}.list.element" for field in table.schema if _holds_tokens(field.type)]
    others = [path for field in table.schema for path in _leaves(field.name, field.type) if path not in numbers]
    with (
        store.open_new(path) as file,
        pq.ParquetWriter(
            file,
            table.schema,
            compression="zstd",
            use_dictionary=others,
            use_byte_stream_split=numbers,  # tokens and log-probs: smaller, and three times as fast to read
            write_statistics=["trajectory_id"],
            write_page_checksum=True,  # so that a part of a file can be checked without the rest
        ) as writer,
    ):
        for start, stop in row_groups(table, ROW_GROUP_BYTES):
            writer.write_table(table.slice(start, stop - start))
    return file.written


def read_table(
    store: Store,
    manifest: Manifest,
    columns: Sequence[str] | None = None,
    verify: bool = True,
    *,
    name: str | None = None,
) -> pa.Table:
    """The table of a manifest, or some of its columns; `name` picks one if it is not that of the manifest's kind.

    With `verify` each file is read whole and must have the manifest's size and SHA-256. Without, only its footer and
    the columns asked for are read: each of their pages is checked against its CRC-32, which finds damage, but not a
    file that was replaced by another sound one of its size. Raises ManifestError for a file that is missing or altered
    as far as that is checked; ValueError for an unknown name or column.
    """
    name = name or manifest.kind
    entries = [entry for entry in manifest.files if entry.table == name]
    if not entries:
        there = sorted({entry.table for entry in manifest.files if entry.table})
        raise ValueError(f"{manifest.uri}: no table {name!r}; it has {', '.join(there) or 'none'}")
    schema = _selected(name, columns)
    parts = [_read_file(store, entry, schema.names, verify) for entry in entries]
    return pa.concat_tables(parts).unify_dictionaries().cast(schema)


def row_groups(table: pa.Table, target_bytes: int) -> list[tuple[int, int]]:
    """Row ranges of about `target_bytes` each that never cut a root's rows apart; one range for an empty table."""
    if not table.num_rows:
        return [(0, 0)]
    starts = np.append(root_starts(table.column("trajectory_id")), table.num_rows)
    size_before = np.concatenate([[0], np.cumsum(_row_bytes(table))])[starts]
    ranges, first = [], 0
    while first < len(starts) - 1:
        last = int(np.searchsorted(size_before, size_before[first] + target_bytes, "right")) - 1
        last = min(max(last, first + 1), len(starts) - 1)
        ranges.append((int(starts[first]), int(starts[last])))
        first = last
    return ranges


def root_starts(ids: pa.ChunkedArray) -> np.ndarray:
    """[runs] int64: rows at which another root begins."""
    roots = lineage(ids).root
    changes = pc.not_equal(roots[1:], roots[:-1]).to_numpy(zero_copy_only=False)
    return np.concatenate([[0], np.flatnonzero(changes) + 1]).astype(np.int64)


def _holds_tokens(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) and kind.value_type in (pa.int32(), pa.float32())


def _leaves(path: str, kind: pa.DataType) -> list[str]:
    """Parquet's names of the columns that a column is stored as."""
    if pa.types.is_list(kind):
        return _leaves(f"{path}.list.element", kind.value_type)
    if pa.types.is_map(kind):
        return [f"{path}.key_value.key", *_leaves(f"{path}.key_value.value", kind.item_type)]
    if pa.types.is_struct(kind):
        fields = [kind.field(i) for i in range(kind.num_fields)]
        return [leaf for field in fields for leaf in _leaves(f"{path}.{field.name}", field.type)]
    return [path]


def _row_bytes(table: pa.Table) -> np.ndarray:
    """[rows] int64, about: tokens and long text, which are nearly all of it."""
    total = np.full(table.num_rows, ROW_OVERHEAD_BYTES, np.int64)
    for column in table.columns:
        kind = column.type
        if pa.types.is_list(kind) and pa.types.is_primitive(kind.value_type):
            total += _filled(pc.list_value_length(column)) * max(kind.value_type.bit_width, 8) // 8
        elif pa.types.is_large_string(kind):
            total += _filled(pc.binary_length(column))
    return total


def _filled(lengths: pa.ChunkedArray) -> np.ndarray:
    return lengths.fill_null(0).to_numpy().astype(np.int64)


def _selected(name: str, columns: Sequence[str] | None) -> pa.Schema:
    schema = SCHEMAS[name]
    for column in columns or ():
        if column not in schema.names:
            near = difflib.get_close_matches(column, schema.names, 1, 0.0)
            raise ValueError(f"table {name!r} has no column {column!r}; did you mean {near[0]!r}?")
    return schema if columns is None else pa.schema([schema.field(column) for column in columns])


def _read_file(store: Store, entry: FileEntry, columns: list[str], verify: bool) -> pa.Table:
    path = store.path_of(entry.uri)
    try:
        if not verify and not store.local:
            return _read_columns(pa.PythonFile(RangedFile(store, path, entry)), entry, columns)
        data = store.open_buffer(path, entry.version_id)
    except FileNotFoundError:
        raise missing(entry) from None
    check_size(data.size, entry)
    if verify:
        check_sha256(sha256(data), entry)
    return _read_columns(pa.BufferReader(data), entry, columns)


def _read_columns(source: pa.NativeFile, entry: FileEntry, columns: list[str]) -> pa.Table:
    try:
        file = pq.ParquetFile(source, page_checksum_verification=True, pre_buffer=True)
        return file.read(columns=columns).select(columns)
    except (pa.ArrowException, OSError) as error:
        if isinstance(error, StoreError | FileNotFoundError):
            raise
        raise ManifestError(
            f"{entry.uri}: altered: not readable as the Parquet that was written ({' '.join(str(error).split())}); "
            "restore the file, or rerun as a new run"
        ) from None
