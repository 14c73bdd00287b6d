"""The content digest: the same for the same content however it is laid out, another for any change of it."""

import hashlib
import math
import struct
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.digest import TableDigest, file_digest, json_digest, table_digest

TOKENS = pa.list_(pa.float32())
NAN = float("nan")


def digest(rows: list, kind: pa.DataType) -> str:
    return table_digest(pa.table({"c": pa.array(rows, kind)}))


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def test_the_format_worked_by_hand():
    # Column a: two slots, null at position 1, one valid int32. Column b: lists of lengths 2 and 0 over two bools.
    table = pa.table({"b": pa.array([[True, False], []], pa.list_(pa.bool_())), "a": pa.array([5, None], pa.int32())})
    a = [2, sha(struct.pack("<q", 1)), sha(b""), sha(struct.pack("<i", 5)), []]
    items = [2, sha(b""), sha(b""), sha(b"\x01\x00"), []]
    b = [2, sha(b""), sha(struct.pack("<qq", 2, 0)), sha(b""), [items]]
    assert table_digest(table) == json_digest(["rollbook-table-1", {"a": ["int32", a], "b": ["list<bool>", b]}])


def test_layout_does_not_matter(rollouts: pa.Table, tmp_path: Path):
    expected = table_digest(rollouts)
    padded = pa.concat_tables([rollouts, rollouts, rollouts]).combine_chunks()
    assert table_digest(padded.slice(4, 4)) == expected  # sliced lists: offsets do not start at 0
    assert table_digest(pa.concat_tables([rollouts.slice(i, 1) for i in range(4)])) == expected
    assert table_digest(pa.concat_tables([rollouts, rollouts.slice(0, 0)])) == expected
    assert table_digest(rollouts.select(rollouts.column_names[::-1])) == expected
    for options in ({"row_group_size": 1}, {"use_dictionary": False, "compression": "none"}):
        pq.write_table(rollouts, tmp_path / "t.parquet", **options)
        assert table_digest(pq.read_table(tmp_path / "t.parquet")) == expected


def test_dictionary_encoding_and_wide_offsets_do_not_matter():
    words = pa.array(["x", None, "y", "x"])
    expected = table_digest(pa.table({"c": words}))
    other_order = pa.DictionaryArray.from_arrays(pa.array([1, None, 0, 1]), pa.array(["y", "x", "unused"]))
    for same in (words.dictionary_encode(), other_order, words.cast(pa.large_string())):
        assert table_digest(pa.table({"c": same})) == expected
    assert digest([[1.0], []], TOKENS) == digest([[1.0], []], pa.large_list(pa.float32()))


def test_what_lies_under_a_null_does_not_matter():
    # Slot 1 is null, but its offsets still span two values.
    values, mask = pa.array([1, 2, 3, 4], pa.float32()), pa.array([False, True, False])
    garbage = pa.ListArray.from_arrays(pa.array([0, 1, 3, 4], pa.int32()), values, mask=mask)
    assert garbage.values.to_pylist() == [1, 2, 3, 4]
    assert table_digest(pa.table({"c": garbage})) == digest([[1], None, [4]], TOKENS)
    numbers = pa.Array.from_buffers(pa.int32(), 2, [pa.py_buffer(b"\x01"), pa.py_buffer(struct.pack("<ii", 7, 99))])
    assert table_digest(pa.table({"c": numbers})) == digest([7, None], pa.int32())


def test_every_nan_is_one_nan():
    other = np.array([0xFFC00001], np.uint32).view(np.float32)
    assert math.isnan(other[0])
    assert table_digest(pa.table({"c": pa.array(other)})) == digest([NAN], pa.float32())


def test_the_order_of_a_maps_entries_does_not_matter():
    kind = pa.map_(pa.string(), pa.float32())
    assert digest([[("a", 1), ("b", 2)], [("c", 3)]], kind) == digest([[("b", 2), ("a", 1)], [("c", 3)]], kind)
    assert digest([[("a", 1), ("b", 2)], [("c", 3)]], kind) != digest([[("a", 1)], [("b", 2), ("c", 3)]], kind)
    assert digest([[("a", 1), ("b", 2)]], kind) != digest([[("a", 2), ("b", 1)]], kind)


def test_each_change_of_content_changes_the_digest():
    variants: list[list] = [
        [[1.0, 2.0], [3.0]],
        [[1.0, 2.5], [3.0]],  # a token
        [[1.0], [2.0, 3.0]],  # a boundary
        [[3.0], [1.0, 2.0]],  # the row order
        [[1.0, 2.0], [NAN]],
        [[1.0, 2.0], [None]],
        [[1.0, 2.0], [0.0]],
        [[1.0, 2.0], [-0.0]],
        [[1.0, 2.0], []],  # an empty list
        [[1.0, 2.0], None],  # no list
        [[1.0, 2.0]],
        [[1.0, 2.0], [3.0], []],
    ]
    assert len({digest(rows, TOKENS) for rows in variants}) == len(variants)


def test_names_and_types_count():
    column = pa.array([1, 0], pa.int32())
    tables = [{"c": column}, {"d": column}, {"c": column.cast(pa.int64())}, {"c": column.cast(pa.bool_())}]
    assert len({table_digest(pa.table(t)) for t in tables}) == 4
    assert digest(["ab", "c"], pa.string()) != digest(["a", "bc"], pa.string())
    assert digest([], pa.int32()) != digest([], pa.int64())


def test_structs_tell_a_null_struct_from_a_struct_of_nulls():
    kind = pa.struct([("x", pa.int32()), ("y", pa.string())])
    rows = [[None], [{"x": None, "y": None}], [{"x": 1, "y": None}], [{"x": None, "y": "1"}]]
    assert len({digest(r, kind) for r in rows}) == 4


def test_volatile_columns_are_left_out(rollouts: pa.Table):
    slower = rollouts.set_column(rollouts.schema.get_field_index("latency_ms"), "latency_ms", pa.array([9.0] * 4))
    assert table_digest(slower, {"latency_ms"}) == table_digest(rollouts, {"latency_ms"})
    assert table_digest(slower) != table_digest(rollouts)


def test_shards_digest_as_their_concatenation(rollouts: pa.Table):
    shards = TableDigest()
    for start, length in ((0, 3), (3, 0), (3, 1)):
        shards.update(rollouts.slice(start, length))
    assert shards.hexdigest() == table_digest(rollouts)


def test_shards_must_agree_in_columns():
    with pytest.raises(ValueError, match=r"columns \['b'\] after \['a'\]"):
        TableDigest().update(pa.table({"a": [1]})).update(pa.table({"b": [1]}))
    with pytest.raises(ValueError, match="column a: string after int64"):
        TableDigest().update(pa.table({"a": [1]})).update(pa.table({"a": ["1"]}))


def test_a_type_without_canonical_form_is_refused_by_name():
    with pytest.raises(TypeError, match=r"column c: decimal128\(3, 1\) has no content digest"):
        table_digest(pa.table({"c": pa.array([1], pa.decimal128(3, 1))}))


slots = st.one_of(st.none(), st.lists(st.one_of(st.none(), st.sampled_from([0.0, 1.0, NAN])), max_size=3))


@settings(deadline=None)
@given(st.lists(slots, max_size=6), st.lists(slots, max_size=6), st.lists(st.integers(0, 6), max_size=4))
def test_equal_digests_mean_equal_rows(left: list, right: list, cuts: list[int]):
    edges = [0, *sorted(min(cut, len(left)) for cut in cuts), len(left)]
    parts = [pa.array(left[a:b], TOKENS) for a, b in pairwise(edges)]
    assert table_digest(pa.table({"c": pa.chunked_array(parts)})) == digest(left, TOKENS)
    assert (digest(left, TOKENS) == digest(right, TOKENS)) == (repr(left) == repr(right))


def test_json_is_canonical():
    assert json_digest({"b": 1, "a": [1.5, None]}) == json_digest({"a": [1.5, None], "b": 1})
    assert json_digest({"a": 1}) == sha(b'{"a":1}')
    with pytest.raises(ValueError, match="not JSON compliant"):
        json_digest(NAN)


def test_file_digest(tmp_path: Path):
    (tmp_path / "f").write_bytes(b"abc")
    # The digest of "abc" from FIPS 180-2, appendix B.1.
    assert file_digest(tmp_path / "f") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
