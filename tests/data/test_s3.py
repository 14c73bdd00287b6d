"""S3 as it is: refused credentials, races, lost answers, parts, versions; on a real server with signatures enforced."""

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from botocore.exceptions import ClientError
from s3fs import S3FileSystem

from data import s3 as s3_module
from data.ledger import Ledger, Request, read_table
from data.manifest import FileEntry, ManifestError
from data.s3 import MAX_PART_BYTES, PART_BYTES, part_bytes
from data.store import Store, StoreError
from tests.data.places import everywhere, files_of, on_s3, on_s3_with_versions, vandalise
from tests.seaweed import ACCESS_KEY, SECRET_KEY, ObjectStore, free_ports

BLOCK = bytes(range(256)) * 4096  # 1 MiB


def put(store: Store, path: str, *blocks: bytes) -> FileEntry:
    with store.open_new(path) as file:
        for block in blocks:
            file.write(block)
    done = file.written
    return FileEntry(
        name=path, uri=store.url_of(path), sha256=done.sha256, bytes=done.bytes, version_id=done.version_id
    )


def uploads(server: ObjectStore, store: Store) -> list[str]:
    """Keys of multipart uploads that were begun and neither completed nor aborted."""
    bucket, _, prefix = store.url.removeprefix("s3://").partition("/")
    found = server.admin().call_s3("list_multipart_uploads", Bucket=bucket, Prefix=prefix)
    return [upload["Key"] for upload in found.get("Uploads", [])]


# What is wrong, in one line


def complaint(store: Store) -> str:
    """What each way in says; all give a StoreError of one line, without the secret."""
    said = []
    for act in (store.check_writable, lambda: store.create("m", b"x"), lambda: put(store, "f", b"x")):
        with pytest.raises(StoreError) as raised:
            act()
        said.append(str(raised.value))
    for text in said:
        assert "\n" not in text and SECRET_KEY not in text and ACCESS_KEY not in text
        assert text.startswith(f"store {store.url}: ") and "cannot be written (" in text
    return said[0]


def test_refused_credentials(s3: ObjectStore, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    store = Store(s3.place())
    assert "refuses these credentials" in complaint(store)
    assert "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE" in complaint(store)
    for read in (lambda: store.read_bytes("m"), lambda: store.exists("m"), store.list_dirs):
        with pytest.raises(StoreError, match="refuses these credentials"):
            read()
    with pytest.raises(StoreError, match="refuses these credentials: SignatureDoesNotMatch"):
        store.create("m", b"x")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "nobody")
    S3FileSystem.clear_instance_cache()
    with pytest.raises(StoreError, match="refuses these credentials: InvalidAccessKeyId"):
        Store(s3.place()).create("m", b"x")


@pytest.mark.parametrize("profile", [None, "nowhere"])
def test_no_credentials(s3: ObjectStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, profile: str | None):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    if profile:
        monkeypatch.setenv("AWS_PROFILE", profile)
    assert "no credentials on this machine" in complaint(Store(s3.place()))


def test_a_profile_is_enough(s3: ObjectStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    lines = ["[mine]", f"aws_access_key_id = {ACCESS_KEY}", f"aws_secret_access_key = {SECRET_KEY}"]
    (tmp_path / "credentials").write_text("\n".join(lines))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_PROFILE", "mine")
    Store(s3.place()).check_writable()


def test_a_missing_bucket(s3: ObjectStore):
    store = Store("s3://not-there/runs")
    with pytest.raises(StoreError, match=r"\(no bucket 'not-there'\); make it, or set resources.store to one"):
        store.check_writable()
    with pytest.raises(StoreError, match="no bucket 'not-there'"):
        store.read_bytes("m")
    with pytest.raises(StoreError, match=r"s3://No_Bucket!: .*Invalid bucket name .*s3://bucket/prefix"):
        Store("s3://No_Bucket!").check_writable()
    with pytest.raises(StoreError, match="names no bucket"):
        Store("s3://")


def test_an_endpoint_that_does_not_answer(s3: ObjectStore):
    endpoint = f"http://127.0.0.1:{free_ports(1)[0]}"
    store = Store(s3.place(), endpoint, patience_s=0)
    with pytest.raises(StoreError, match=f"{endpoint} does not answer: EndpointConnectionError.*store_endpoint"):
        store.check_writable()


@pytest.mark.parametrize("endpoint", ["localhost:9000", "ftp://x", "http://"])
def test_an_endpoint_that_is_none(endpoint: str):
    with pytest.raises(StoreError, match="must begin with http:// or https://"):
        Store("s3://bucket", endpoint)


def test_only_s3_has_an_endpoint(tmp_path: Path):
    with pytest.raises(StoreError, match="only S3 has one; leave it out"):
        Store(str(tmp_path), "http://127.0.0.1:9000")


def test_the_endpoint_travels_and_credentials_do_not(s3: ObjectStore, monkeypatch: pytest.MonkeyPatch):
    store = Store(s3.place())
    assert store.endpoint == s3.endpoint
    frozen = pickle.dumps(store)
    assert SECRET_KEY.encode() not in frozen and ACCESS_KEY.encode() not in frozen
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    pickle.loads(frozen).check_writable()
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    assert Store(s3.place(), s3.endpoint).endpoint == s3.endpoint


HOLDING = {
    "s3://AK:hidden-1@bucket/x": "s3://***@bucket/x",
    "s3://AK:hid/den-1@bucket/x": "s3://***@bucket/x",
    "s3://AK:hidden-1": "s3://***",
    "s3://bucket/x?X-Amz-Signature=hidden-1": "s3://bucket/x?***",
    "ftp://me:hidden-1@host/x": "ftp://***@host/x",
}


@pytest.mark.parametrize("url", HOLDING)
def test_a_url_with_a_secret_is_refused_without_repeating_it(url: str):
    with pytest.raises(StoreError) as raised:
        Store(url)
    assert HOLDING[url] in str(raised.value)
    assert "den-1" not in str(raised.value) and "AWS_PROFILE" in str(raised.value)


def test_an_endpoint_with_a_secret_is_refused_without_repeating_it():
    with pytest.raises(StoreError, match=r"http://\*\*\*@host:9000'.*holds credentials") as raised:
        Store("s3://bucket", "http://me:hidden@host:9000")
    assert "hidden" not in str(raised.value)


# Parts


@on_s3
def test_a_large_file_goes_in_parts_and_appears_whole(store: Store, s3: ObjectStore, tmp_path: Path):
    with store.open_new("big") as file:
        for _ in range(40):  # 40 MiB: parts of 16, 16 and 8
            file.write(BLOCK)
        assert uploads(s3, store) and not store.exists("big")
    assert uploads(s3, store) == []
    entry = FileEntry(name="big", uri=store.url_of("big"), sha256=file.written.sha256, bytes=40 * 2**20)
    assert store.open_buffer("big").to_pybytes() == BLOCK * 40
    assert store.read_span("big", 2**20 - 2, 2**20 + 2) == b"\xfe\xff\x00\x01"
    assert (store.local_copy([entry], tmp_path) / "big").stat().st_size == 40 * 2**20
    bucket, _, key = store.url_of("big").removeprefix("s3://").partition("/")
    assert s3.admin().call_s3("head_object", Bucket=bucket, Key=key)["ETag"].strip('"').endswith("-3")  # S3: of 3 parts


@on_s3
def test_a_large_file_never_replaces_another(store: Store, s3: ObjectStore):
    put(store, "big", b"first")
    with pytest.raises(StoreError, match=r"big cannot be written .other bytes are there already"):
        put(store, "big", *[BLOCK] * 20)
    assert store.read_bytes("big") == b"first"
    assert uploads(s3, store) == []


@everywhere
def test_a_file_that_ends_in_an_error_is_not_there(store: Store, s3: ObjectStore, place: str):
    if place == "memory":
        pytest.skip("fsspec's memory file system keeps what was written; nothing is kept there for long")
    for blocks in (1, 40):
        with pytest.raises(ZeroDivisionError), store.open_new(f"f{blocks}") as file:
            for _ in range(blocks):
                file.write(BLOCK)
            raise ZeroDivisionError
    assert files_of(store) == []
    if place != "file":
        assert uploads(s3, store) == []


def test_parts_hold_the_largest_object():
    # 1,000 parts each of 16, 32, ... MiB, at most 5 GiB, S3's largest part.
    assert [part_bytes(n) // 2**20 for n in (0, 999, 1000, 2000, 9999)] == [16, 16, 32, 64, 5120]
    assert part_bytes(0) == PART_BYTES >= 5 * 2**20  # S3's smallest
    assert max(map(part_bytes, range(10_000))) == MAX_PART_BYTES
    assert sum(map(part_bytes, range(10_000))) >= 5 * 2**40


# Races and lost answers


class Meddler:
    """Stands between the store and the real server: `before` and `after` see each request."""

    def __init__(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        self.before: Callable[[str], None] = lambda method: None
        self.after: Callable[[str, Callable[[], Any]], None] = lambda method, again: None
        real = store._backend._call

        def call(method: str, **arguments: Any) -> Any:
            self.calls.append(method)
            self.before(method)
            made = real(method, **arguments)
            self.after(method, lambda: real(method, **arguments))
            return made

        monkeypatch.setattr(store._backend, "_call", call)


def answer(status: int, code: str) -> OSError:
    """As s3fs raises it."""
    response = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}
    error = OSError(16, code)
    error.__cause__ = ClientError(response, "PutObject")
    return error


@on_s3
def test_http_409_is_tried_again(store: Store, monkeypatch: pytest.MonkeyPatch):
    """AWS's answer while another conditional write to the same key is under way."""
    monkeypatch.setattr(s3_module.time, "sleep", lambda seconds: None)
    meddler, left = Meddler(store, monkeypatch), [2]

    def conflict(method: str) -> None:
        if method == "put_object" and left[0]:
            left[0] -= 1
            raise answer(409, "ConditionalRequestConflict")

    meddler.before = conflict
    assert store.create("m", b"x")
    assert meddler.calls == ["put_object"] * 3
    left[0] = 100
    with pytest.raises(StoreError, match="n cannot be written"):
        store.create("n", b"x")
    assert 100 - left[0] == 8


@on_s3
@pytest.mark.parametrize("blocks", [1, 20])
def test_a_request_sent_again_after_its_answer_was_lost(store: Store, blocks: int, monkeypatch: pytest.MonkeyPatch):
    """The first came through; the second finds the file there (412), or its upload gone (NoSuchUpload). It is ours."""
    meddler = Meddler(store, monkeypatch)

    def send_again(method: str, again: Callable[[], Any]) -> None:
        if method in ("put_object", "complete_multipart_upload"):
            again()

    meddler.after = send_again
    entry = put(store, "f", *[BLOCK] * blocks)
    assert entry.bytes == blocks * 2**20
    assert store.open_buffer("f").size == entry.bytes


@on_s3
def test_a_lost_answer_at_the_commit_adopts_itself(
    store: Store, rollouts: pa.Table, request_of: Callable[..., Request], monkeypatch: pytest.MonkeyPatch
):
    ledger = Ledger(store, "sort")
    attempt = ledger.writer(ledger.at(0, "generate"), request_of())
    attempt.add_table("rollouts", rollouts)
    Meddler(store, monkeypatch).after = lambda method, again: again() if method == "put_object" else None
    assert attempt.commit() == ledger.find(ledger.at(0, "generate"))


# Versions


@on_s3_with_versions
def test_what_was_recorded_is_read_even_when_replaced_behind_the_stores_back(
    store: Store, rollouts: pa.Table, request_of: Callable[..., Request], tmp_path: Path
):
    ledger = Ledger(store, "sort")
    attempt = ledger.writer(ledger.at(0, "generate"), request_of())
    attempt.add_table("rollouts", rollouts)
    (tmp_path / "notes").write_text("mine")
    attempt.add_file("notes", tmp_path / "notes")
    attempt.commit()
    made = ledger.find(ledger.at(0, "generate"))
    assert made is not None and all(entry.version_id for entry in made.files)
    for entry, data in zip(made.files, (b"other", None), strict=True):
        vandalise(store, entry.uri, data)
    assert read_table(store, made).equals(rollouts)
    assert read_table(store, made, ["trajectory_id"], verify=False).num_rows == 4
    assert (store.local_copy(made.files[1:], tmp_path / "cache") / "notes").read_text() == "mine"


@on_s3_with_versions
def test_a_copied_store_has_other_versions_and_is_read_all_the_same(
    store: Store, rollouts: pa.Table, request_of: Callable[..., Request], s3: ObjectStore
):
    ledger = Ledger(store, "sort")
    attempt = ledger.writer(ledger.at(0, "generate"), request_of())
    attempt.add_table("rollouts", rollouts)
    attempt.commit()
    for versioned in (False, True):
        moved = Ledger(Store(s3.place(versioned)), "sort")
        for path, data in s3.objects(store.url).items():
            moved.store.create(path, data)
        found = moved.find(moved.at(0, "generate"))
        assert found is not None and found.files[0].version_id
        assert read_table(moved.store, found).equals(rollouts)
        vandalise(moved.store, found.files[0].uri, b"other")
        with pytest.raises(ManifestError, match="altered"):
            read_table(moved.store, found)


@on_s3
def test_a_bucket_without_versions_has_none(store: Store):
    assert put(store, "f", b"x").version_id is None


# Parts of tables


@on_s3
def test_columns_are_fetched_alone(
    store: Store, many_rollouts: Callable[[int], pa.Table], request_of: Callable[..., Request],
    monkeypatch: pytest.MonkeyPatch,
):  # fmt: skip
    """Of a file that is nearly all text, two small columns: a few requests, a part of the bytes."""
    table, ledger = many_rollouts(1000), Ledger(store, "sort")
    texts = pa.array([os.urandom(500).hex() for _ in range(2000)], pa.large_string())
    table = table.set_column(table.schema.get_field_index("messages"), "messages", texts)
    attempt = ledger.writer(ledger.at(0, "generate"), request_of())
    attempt.add_table("rollouts", table)
    made = attempt.commit()
    fetched, read = [], store._backend.read

    def counted(path: str, version: str | None = None, span: tuple[int, int] | None = None) -> bytes:
        fetched.append(span)
        return read(path, version, span)

    monkeypatch.setattr(store._backend, "read", counted)
    found = read_table(store, made, ["trajectory_id", "status"], verify=False)
    assert found["trajectory_id"][1999].as_py() == "R999/1"
    sizes = [stop - start for start, stop in filter(None, fetched)]
    assert len(sizes) == len(fetched) <= 6, sizes
    assert sum(sizes) < made.files[0].bytes / 8, (sizes, made.files[0].bytes)
