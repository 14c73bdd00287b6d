"""Tables in Parquet: what was written comes back, row groups follow roots, an altered file is found out."""

from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.columns import ROLLOUTS
from data.digest import table_digest
from data.ledger import Ledger, Request, read_table
from data.manifest import Manifest, ManifestError
from data.store import Store
from data.tables import row_groups
from tests.data.places import everywhere, vandalise


@pytest.fixture
def recorded(ledger: Ledger, rollouts: pa.Table, request_of: Callable[..., Request]) -> Manifest:
    request = request_of()
    attempt = ledger.writer(ledger.at(0, "generate"), request)
    attempt.add_table("rollouts", rollouts.slice(0, 2))
    attempt.add_table("rollouts", rollouts.slice(2))
    return attempt.commit()


in_one_version = pytest.mark.parametrize("place", ["file", "memory", "s3"], indirect=True)


def bytes_of(store: Store, manifest: Manifest, number: int) -> bytes:
    return store.read_bytes(store.path_of(manifest.files[number].uri))


@everywhere
def test_a_table_comes_back(store: Store, recorded: Manifest, rollouts: pa.Table):
    table = read_table(store, recorded)
    assert table.schema == ROLLOUTS
    assert table.equals(rollouts)
    assert table_digest(table) == table_digest(rollouts)
    assert [entry.rows for entry in recorded.files] == [2, 2]


@everywhere
def test_category_columns_have_one_dictionary_over_the_files(store: Store, recorded: Manifest):
    # Shard 0 has status ok and truncated, shard 1 only ok.
    chunks = read_table(store, recorded).column("status").chunks
    assert len({tuple(chunk.dictionary.to_pylist()) for chunk in chunks}) == 1


@everywhere
def test_columns_are_read_alone_and_in_the_order_asked_for(store: Store, recorded: Manifest):
    table = read_table(store, recorded, ["action_mask", "trajectory_id"])
    assert table.column_names == ["action_mask", "trajectory_id"]
    assert table.column("action_mask").to_pylist()[3] == [False, False, True, True]


@in_one_version
def test_an_unknown_column_or_table_is_named(store: Store, recorded: Manifest):
    with pytest.raises(ValueError, match="table 'rollouts' has no column 'token_id'; did you mean 'token_ids'"):
        read_table(store, recorded, ["token_id"])
    with pytest.raises(ValueError, match=r"manifest.json: no table 'rewards'; it has rollouts"):
        read_table(store, recorded, name="rewards")


@in_one_version
def test_a_missing_file_is_named(store: Store, recorded: Manifest):
    vandalise(store, recorded.files[1].uri, None)
    with pytest.raises(ManifestError, match=r"rollouts-001.parquet: missing, but a manifest lists it"):
        read_table(store, recorded)


@in_one_version
def test_an_altered_file_is_named_with_what_differs(store: Store, recorded: Manifest):
    data, uri = bytes_of(store, recorded, 1), recorded.files[1].uri
    vandalise(store, uri, data[:-1])
    with pytest.raises(ManifestError, match=f"altered: {len(data) - 1} bytes, the manifest says {len(data)}"):
        read_table(store, recorded)
    vandalise(store, uri, data[:100] + bytes([data[100] ^ 1]) + data[101:])
    with pytest.raises(ManifestError, match=f"altered: sha256 .*, the manifest says {recorded.files[1].sha256}"):
        read_table(store, recorded)


def damaged(data: bytes, column: str) -> bytes:
    """A bit is flipped in the middle of what a column's first row group is stored as."""
    group = pq.ParquetFile(pa.BufferReader(data)).metadata.row_group(0)
    chunk = next(c for c in map(group.column, range(group.num_columns)) if c.path_in_schema == column)
    place = (chunk.dictionary_page_offset or chunk.data_page_offset) + chunk.total_compressed_size // 2
    return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]


@in_one_version
def test_without_verify_only_what_is_read_is_checked(store: Store, recorded: Manifest):
    vandalise(store, recorded.files[1].uri, damaged(bytes_of(store, recorded, 1), "messages"))
    ids = read_table(store, recorded, ["trajectory_id"], verify=False)["trajectory_id"]
    assert ids.to_pylist() == ["A/0", "A/1", "B/0", "B/1"]
    with pytest.raises(ManifestError, match=r"rollouts-001.parquet: altered: not readable as the Parquet"):
        read_table(store, recorded, ["messages"], verify=False)
    with pytest.raises(ManifestError, match="altered: sha256"):
        read_table(store, recorded, ["trajectory_id"])


@in_one_version
def test_without_verify_a_missing_file_is_named(store: Store, recorded: Manifest):
    vandalise(store, recorded.files[0].uri, None)
    with pytest.raises(ManifestError, match=r"rollouts-000.parquet: missing"):
        read_table(store, recorded, verify=False)


def ids(sizes: list[int]) -> list[str]:
    return [f"R{root}/{branch}" for root, size in enumerate(sizes) for branch in range(size)]


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 300)), max_size=12), st.integers(1, 2000))
def test_row_groups_tile_the_rows_and_never_cut_a_root(roots: list[tuple[int, int]], target: int):
    sizes, lengths = [s for s, _ in roots], [n for size, n in roots for _ in range(size)]
    tokens = pa.array([[0] * n for n in lengths], pa.list_(pa.int32()))
    table = pa.table({"trajectory_id": pa.array(ids(sizes), pa.string()), "token_ids": tokens})
    groups = row_groups(table, target)
    assert groups[0][0] == 0
    assert groups[-1][1] == table.num_rows
    assert [stop for _, stop in groups[:-1]] == [start for start, _ in groups[1:]]
    assert {start for start, _ in groups} <= {0, *np.cumsum(sizes).tolist()}
    # 256 bytes of overhead and 4 for each token; a group is over the target only if it is a single root.
    for start, stop in groups:
        over = sum(256 + 4 * n for n in lengths[start:stop]) > target
        assert not over or len({name.partition("/")[0] for name in ids(sizes)[start:stop]}) == 1


def test_row_groups_worked_by_hand():
    # Rows of 100 tokens: 656 bytes each, so the roots have 1312, 656 and 656. Within 1400: the first; the two others.
    table = pa.table({"trajectory_id": ids([2, 1, 1]), "token_ids": pa.array([[0] * 100] * 4, pa.list_(pa.int32()))})
    assert row_groups(table, 1400) == [(0, 2), (2, 4)]
    assert row_groups(table, 1) == [(0, 2), (2, 3), (3, 4)]
    assert row_groups(table, 10**6) == [(0, 4)]
    assert row_groups(table.slice(0, 0), 1400) == [(0, 0)]


def test_the_file_has_the_row_groups(store: Store, many_rollouts, monkeypatch: pytest.MonkeyPatch, ledger, request_of):
    monkeypatch.setattr("data.tables.ROW_GROUP_BYTES", 1)
    attempt = ledger.writer(ledger.at(0, "generate"), request_of())
    attempt.add_table("rollouts", many_rollouts(5))
    metadata = pq.ParquetFile(pa.BufferReader(bytes_of(store, attempt.commit(), 0))).metadata
    assert [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)] == [2] * 5
