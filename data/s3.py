"""S3: conditional create, parts for what is large, versions, and errors in plain words.

Requests go through s3fs, which signs and reconnects, and `Patience`, which waits for a server that does not answer.
Credentials are found by botocore (variables, profile, instance role) in each process and never travel.
"""

import contextlib
import errno
import os
import random
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    CredentialRetrievalError,
    FlexibleChecksumError,
    NoCredentialsError,
    PartialCredentialsError,
    ProfileNotFound,
    SSLError,
)
from botocore.exceptions import ConnectionError as ConnectionFailed
from fsspec import AbstractFileSystem
from s3fs.core import S3_RETRYABLE_ERRORS

from data.backends import Backend, StoredFile
from data.files import Sink
from data.patience import Patience

PART_BYTES = 16 * 2**20
PARTS_A_SIZE = 1_000  # then parts are twice as large: 10,000 of them, S3's most, hold S3's largest object
MAX_PART_BYTES = 5 * 2**30
PARTS_AT_ONCE = 4
CONFLICTS = 8  # tries, over half a minute

CONFLICT, PRECONDITION_FAILED = 409, 412
TOO_MANY, SERVER_ERROR, UNKNOWN_METHOD, FULL = 429, 500, 501, 507
UNANSWERED = (ConnectionFailed, FlexibleChecksumError, *S3_RETRYABLE_ERRORS)  # or not whole
UNKNOWN = (NoCredentialsError, PartialCredentialsError, ProfileNotFound, CredentialRetrievalError)
REFUSED = ("AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "InvalidToken", "403")
Call = Callable[..., dict[str, Any]]


class S3Backend(Backend):
    """A bucket, or a prefix in one."""

    failures = (OSError, BotoCoreError, ClientError, *S3_RETRYABLE_ERRORS)

    def __init__(self, filesystem: AbstractFileSystem, root: str, url: str, patience_s: float) -> None:
        super().__init__(filesystem, root)
        self._bucket, _, self._prefix = self.root.partition("/")
        self._s3: Any = filesystem
        self._patiently = Patience(url, patience_s, passing, lambda error: self.explain(error)[0])

    def _call(self, method: str, **arguments: Any) -> dict[str, Any]:
        return self._patiently(lambda: self._s3.call_s3(method, **arguments))

    def size(self, path: str) -> int:
        return int(self._call("head_object", Bucket=self._bucket, Key=self._key(path))["ContentLength"])

    def exists(self, path: str) -> bool:
        try:
            self._call("head_object", Bucket=self._bucket, Key=self._key(path))
        except FileNotFoundError:
            return False
        return True

    def read(self, path: str, version: str | None = None, span: tuple[int, int] | None = None) -> bytes:
        start, stop = span or (None, None)
        single = {"start": start, "end": stop, "max_concurrency": 1}  # one request; more would ask for the size first

        def get(version: str | None) -> bytes:
            return self._patiently(lambda: self._s3.cat_file(self.at(path), version_id=version, **single))

        return self._newest_if_gone(get, version)

    def list_dirs(self, path: str) -> list[str]:
        prefix = f"{self._key(path)}/".lstrip("/")
        found = (entry for page in self._pages(prefix, Delimiter="/") for entry in page.get("CommonPrefixes", []))
        return [entry["Prefix"].removeprefix(prefix).rstrip("/") for entry in found]

    def list_files(self, path: str) -> list[StoredFile]:
        own = f"{self._prefix}/".lstrip("/")
        found = (entry for page in self._pages(f"{self._key(path)}/".lstrip("/")) for entry in page.get("Contents", []))
        return [StoredFile(e["Key"].removeprefix(own), e["Size"], e["LastModified"].timestamp()) for e in found]

    def _pages(self, prefix: str, **more: Any) -> Iterator[dict[str, Any]]:
        while True:
            page = self._call("list_objects_v2", Bucket=self._bucket, Prefix=prefix, **more)
            yield page
            if not page.get("IsTruncated"):
                return
            more["ContinuationToken"] = page["NextContinuationToken"]

    def create(self, path: str, data: bytes) -> bool:
        try:
            with self.writing(path) as file:
                file.write(memoryview(data))
        except FileExistsError:
            return False
        return True

    @contextlib.contextmanager
    def writing(self, path: str) -> Generator[Sink]:
        upload = Upload(self._call, self._bucket, self._key(path))
        try:
            yield upload
            upload.finish()
        finally:
            upload.close()

    def version_of(self, file: Sink) -> str | None:
        return file.version if isinstance(file, Upload) else None

    def fetch(self, path: str, version: str | None, target: Path) -> None:
        def get(version: str | None) -> None:
            self._patiently(lambda: self._s3.get_file(self.at(path), str(target), version_id=version))

        self._newest_if_gone(get, version)

    def check(self) -> None:
        """A server may make a missing bucket by itself when something is put there: a typing error would go unseen."""
        try:
            self._call("head_bucket", Bucket=self._bucket)
        except FileNotFoundError as error:
            raise OSError(errno.ENODEV, NO_BUCKET) from error

    def explain(self, error: BaseException) -> tuple[str, str]:
        """Never a server's own words on credentials: some repeat the key."""
        code = _code(error)
        if isinstance(error, UNKNOWN):
            return f"no credentials on this machine: {type(error).__name__}", CREDENTIALS
        if code in REFUSED:
            return f"the server refuses these credentials: {code}", CREDENTIALS
        if code == "NoSuchBucket" or getattr(error, "strerror", "") == NO_BUCKET:
            return f"no bucket {self._bucket!r}", "make it, or set resources.store to one that is there"
        if (unwell := self._unwell(error)) is not None:
            return unwell
        if isinstance(error, BotoCoreError):
            return " ".join(str(error).split()), "set resources.store to an S3 URL, s3://bucket/prefix"
        return super().explain(error)

    def _unwell(self, error: BaseException) -> tuple[str, str] | None:
        """What is wrong with the server, or with the way to it, if anything is."""
        at, status, code = self._s3.endpoint_url or "AWS", _status(error), _code(error)
        if status == FULL or code == "QuotaExceeded":
            return f"no room left: {at} answers {status} {code}", "give it more room; the same command then goes on"
        if status is not None and passing(error):
            own = f" {code}" if code != str(status) else ""
            return f"{at} answers {status}{own}", "wait until it is well; the same command then goes on"
        if isinstance(error, FlexibleChecksumError):
            return f"what {at} sent was damaged on its way", "run the same command again, and check the network"
        if isinstance(error, UNANSWERED):
            fix = "check resources.store_endpoint and the network; the same command goes on when it answers"
            return f"{at} does not answer: {type(error).__name__}", fix
        return None

    def _key(self, path: str) -> str:
        return "/".join(part for part in (self._prefix, path) if part)

    def _newest_if_gone[T](self, get: Callable[[str | None], T], version: str | None) -> T:
        """A store that was copied has other version ids; what is read is checked by its SHA-256 in any case."""
        try:
            return get(version)
        except OSError as error:
            if _code(error) == "NoSuchBucket":
                raise OSError(errno.ENODEV, NO_BUCKET) from error
            if version is None or _code(error) not in ("NoSuchVersion", "InvalidArgument"):
                raise
            return get(None)


NO_BUCKET = "no such bucket"
CREDENTIALS = (
    "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, wherever Rollbook and its Ray workers run, with "
    "the right to list, read and write there"
)


class Upload:
    """A new object, written from start to end: one PUT if it is small, else parts, sent while more is written.

    The condition that nothing is there is checked by the server when the object appears, which is in `finish`.
    """

    def __init__(self, call: Call, bucket: str, key: str) -> None:
        self._call, self._where = call, {"Bucket": bucket, "Key": key}
        self._rest = bytearray()
        self._id: str | None = None  # of the multipart upload, if there is one
        self._parts = 0
        self._pool: ThreadPoolExecutor | None = None
        self._sent: deque[Future[str]] = deque()  # at most PARTS_AT_ONCE of them wait
        self._tags: list[str] = []
        self.version: str | None = None

    def write(self, data: memoryview, /) -> int:
        self._rest += data
        while len(self._rest) > (size := part_bytes(self._parts)):
            with memoryview(self._rest) as view:
                part = bytes(view[:size])
            del self._rest[:size]
            self._send(part)
        return len(data)

    def flush(self) -> None:
        """Nothing to do: parts go when they are full."""

    def finish(self) -> None:
        """Make the object appear. Raises FileExistsError if something is there."""
        if self._id is None:
            made = self._conditionally("put_object", Body=bytes(self._rest))
        else:
            self._send(bytes(self._rest))
            while self._sent:
                self._tags.append(self._sent.popleft().result())
            parts = [{"PartNumber": number, "ETag": tag} for number, tag in enumerate(self._tags, 1)]
            made = self._conditionally("complete_multipart_upload", UploadId=self._id, MultipartUpload={"Parts": parts})
            self._id = None
        version = made.get("VersionId")
        self.version = version if version != "null" else None  # what a bucket says that keeps versions no more

    def close(self) -> None:
        """Let go of parts that did not become an object: they would be paid for, unseen."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
        if self._id is not None:
            with contextlib.suppress(*S3Backend.failures):  # the error on its way out says more
                self._call("abort_multipart_upload", UploadId=self._id, **self._where)

    def _send(self, part: bytes) -> None:
        if self._pool is None:
            self._id = self._call("create_multipart_upload", **self._where)["UploadId"]
            self._pool = ThreadPoolExecutor(PARTS_AT_ONCE, "s3-parts")
        if len(self._sent) == PARTS_AT_ONCE:
            self._tags.append(self._sent.popleft().result())
        self._parts += 1
        self._sent.append(self._pool.submit(self._upload_part, self._parts, part))

    def _upload_part(self, number: int, part: bytes) -> str:
        return self._call("upload_part", UploadId=self._id, PartNumber=number, Body=part, **self._where)["ETag"]

    def _conditionally(self, method: str, **rest: Any) -> dict[str, Any]:
        """If-None-Match, tried again while AWS answers 409: another conditional write to the key was under way."""
        for attempt in range(CONFLICTS):
            try:
                return self._call(method, IfNoneMatch="*", **self._where, **rest)
            except OSError as error:
                if _status(error) == CONFLICT and attempt < CONFLICTS - 1:
                    time.sleep(random.uniform(0.5, 1.0) * 0.2 * 2**attempt)
                    continue
                # An upload that is gone was completed by a request whose answer was lost, and sent again.
                if _status(error) == PRECONDITION_FAILED or _code(error) == "NoSuchUpload":
                    raise FileExistsError(errno.EEXIST, "exists") from error
                raise
        raise AssertionError("unreachable")


def part_bytes(number: int) -> int:
    """Size of part `number`, counted from 0, bytes."""
    return min(PART_BYTES << (number // PARTS_A_SIZE), MAX_PART_BYTES)


def passing(error: BaseException) -> bool:
    """Whether it may be gone if one waits: no answer, half an answer, an overloaded or failing server."""
    status = _status(error)
    if status is None:
        return isinstance(error, UNANSWERED) and not isinstance(error, SSLError)
    return status == TOO_MANY or (status >= SERVER_ERROR and status not in (UNKNOWN_METHOD, FULL))


def endpoint_of_environment() -> str | None:
    return os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or None


def _response(error: BaseException) -> dict[str, Any]:
    """botocore's, from the error or the one that s3fs made an OSError of; SeaweedFS's 412 is an EINVAL by itself."""
    for one in (error, error.__cause__):
        response = getattr(one, "response", None)
        if isinstance(response, dict):
            return response
    return {}


def _status(error: BaseException) -> int | None:
    return _response(error).get("ResponseMetadata", {}).get("HTTPStatusCode")


def _code(error: BaseException) -> str:
    return str(_response(error).get("Error", {}).get("Code", ""))
