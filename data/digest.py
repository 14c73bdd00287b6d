"""Content digests: of a table's values, of JSON, of a file's bytes. All are SHA-256 in hex.

A table's digest depends on the values, on row order and on column names and types. It does not depend on column order,
chunking, slicing, dictionary encoding, string or list offset width, what lies under a null, the payload of a NaN, the
order of a map's entries, or how a file was laid out. -0.0 and 0.0 differ; NaN, null and 0.0 differ.
"""

import hashlib
import json
from collections.abc import Collection
from pathlib import Path

import numpy as np
import pyarrow as pa
from pydantic import JsonValue

from data.arrow import pc

VERSION = "rollbook-table-1"


def json_digest(value: object) -> str:
    """SHA-256 of canonical JSON: sorted keys, no spaces, NaN and infinity refused (ValueError)."""
    return hashlib.sha256(canonical_json(value)).hexdigest()


def canonical_json(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def sha256(data: pa.Buffer) -> str:
    return hashlib.sha256(memoryview(data)).hexdigest()


def file_digest(path: Path) -> str:
    """SHA-256 of a local file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def table_digest(table: pa.Table, volatile: Collection[str] = ()) -> str:
    """Content digest of a table without its volatile columns."""
    return TableDigest(volatile).update(table).hexdigest()


class TableDigest:
    """Digest of a table given in parts, in row order: the same as that of the parts in one table."""

    def __init__(self, volatile: Collection[str] = ()) -> None:
        self._volatile = frozenset(volatile)
        self._columns: dict[str, tuple[str, _Node]] | None = None

    def update(self, table: pa.Table) -> "TableDigest":
        """Raises ValueError for other columns than before, TypeError for a type that has no canonical form."""
        names = sorted(set(table.column_names) - self._volatile)
        if self._columns is None:
            types = {name: table.schema.field(name).type for name in names}
            self._columns = {name: (_type_text(kind, name), _Node(kind)) for name, kind in types.items()}
        if names != list(self._columns):
            raise ValueError(f"columns {names} after {list(self._columns)}: all parts of a table have the same columns")
        for name, (type_text, node) in self._columns.items():
            column = table.column(name)
            if _type_text(column.type, name) != type_text:
                raise ValueError(f"column {name}: {column.type} after {type_text}: one type for all parts of a table")
            for chunk in column.chunks:
                _feed(chunk, node)
        return self

    def hexdigest(self) -> str:
        columns = {name: [text, node.summary()] for name, (text, node) in (self._columns or {}).items()}
        return json_digest([VERSION, columns])


class _Node:
    """One level of a nested column: positions of nulls, lengths of the valid slots, values, and the levels below."""

    def __init__(self, kind: pa.DataType) -> None:
        self.rows = 0
        self.nulls, self.lengths, self.values = hashlib.sha256(), hashlib.sha256(), hashlib.sha256()
        self.below = [_Node(child) for child in _children(kind)]

    def summary(self) -> list[JsonValue]:
        parts: list[JsonValue] = [h.hexdigest() for h in (self.nulls, self.lengths, self.values)]
        return [self.rows, *parts, [node.summary() for node in self.below]]


def _feed(array: pa.Array, node: _Node) -> None:
    """Add a chunk: everything that is hashed is a stream without chunk boundaries."""
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if array.null_count:
        positions = np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False)) + node.rows
        node.nulls.update(positions.astype("<i8"))
    node.rows += len(array)
    valid = array.drop_null() if array.null_count else array
    if _is_list(valid.type):
        _feed_list(valid, node)
    elif pa.types.is_struct(valid.type):
        for child, below in zip(valid.flatten(), node.below, strict=True):
            _feed(child, below)
    elif _is_text(valid.type):
        _feed_text(valid, node)
    elif not pa.types.is_null(valid.type):
        node.values.update(_number_bytes(valid))


def _feed_list(array: pa.Array, node: _Node) -> None:
    array, is_map = (array.cast(_as_list(array.type)), True) if pa.types.is_map(array.type) else (array, False)
    lengths = np.diff(array.offsets.to_numpy(zero_copy_only=False)).astype("<i8")
    node.lengths.update(lengths)
    items = array.flatten()
    _feed(_sorted_by_key(items, lengths) if is_map else items, node.below[0])


def _sorted_by_key(pairs: pa.StructArray, lengths: np.ndarray) -> pa.StructArray:
    row = np.repeat(np.arange(len(lengths)), lengths)
    keys = pa.table({"row": row, "key": pairs.flatten()[0]})
    return pairs.take(pc.sort_indices(keys, [("row", "ascending"), ("key", "ascending")]))


def _feed_text(array: pa.Array, node: _Node) -> None:
    """Without nulls the bytes of all slots lie side by side, from the first offset of the slice to its last."""
    _, offset_buffer, data = array.buffers()
    if not len(array):
        return
    wide = pa.types.is_large_string(array.type) or pa.types.is_large_binary(array.type)
    offsets = np.frombuffer(offset_buffer, np.int64 if wide else np.int32)[array.offset : array.offset + len(array) + 1]
    node.lengths.update(np.diff(offsets).astype("<i8"))
    if data is not None:
        node.values.update(memoryview(data)[offsets[0] : offsets[-1]])


def _number_bytes(array: pa.Array) -> np.ndarray:
    """[slots] numbers, bools (one byte each) or times (integers of their unit), little-endian, with one kind of NaN."""
    if pa.types.is_temporal(array.type):
        array = array.view(pa.int64() if array.type.bit_width == 64 else pa.int32())
    values = array.to_numpy(zero_copy_only=False)
    if values.dtype.kind == "f" and (nan := np.isnan(values)).any():
        values = np.where(nan, values.dtype.type(np.nan), values)
    return np.ascontiguousarray(values, values.dtype.newbyteorder("<")).view(np.uint8)


def _is_list(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_map(kind)


def _is_text(kind: pa.DataType) -> bool:
    return (
        pa.types.is_string(kind)
        or pa.types.is_large_string(kind)
        or pa.types.is_binary(kind)
        or pa.types.is_large_binary(kind)
    )


def _children(kind: pa.DataType) -> list[pa.DataType]:
    if pa.types.is_dictionary(kind):
        return _children(kind.value_type)
    if pa.types.is_map(kind):
        return [_as_list(kind).value_type]
    if _is_list(kind):
        return [kind.value_type]
    return [kind.field(i).type for i in range(kind.num_fields)] if pa.types.is_struct(kind) else []


def _as_list(kind: pa.MapType) -> pa.ListType:
    return pa.list_(pa.struct([pa.field("key", kind.key_type, nullable=False), pa.field("value", kind.item_type)]))


def _type_text(kind: pa.DataType, column: str) -> str:
    """The type as it counts: dictionaries are their values, wide offsets are plain ones, a map is a list of pairs."""
    if pa.types.is_dictionary(kind):
        return _type_text(kind.value_type, column)
    if pa.types.is_map(kind):
        return _type_text(_as_list(kind), column)
    if _is_list(kind):
        return f"list<{_type_text(kind.value_type, column)}>"
    if pa.types.is_struct(kind):
        fields = (kind.field(i) for i in range(kind.num_fields))
        return "struct<" + ",".join(f"{f.name}:{_type_text(f.type, column)}" for f in fields) + ">"
    if _is_text(kind):
        return str(kind).removeprefix("large_")
    if pa.types.is_temporal(kind) or pa.types.is_boolean(kind) or pa.types.is_null(kind):
        return str(kind)
    if pa.types.is_integer(kind) or pa.types.is_floating(kind):
        return str(kind)
    raise TypeError(f"column {column}: {kind} has no content digest; use numbers, bools, times, text, lists, structs")
