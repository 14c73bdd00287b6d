"""A real S3 server for tests: SeaweedFS on free loopback ports, signatures enforced, gone when the tests are."""

import json
import os
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from s3fs import S3FileSystem

START_S = 60.0
ACCESS_KEY, SECRET_KEY = "rollbook-tests", "planted-SECRET-4f1c9e77a2"  # searched for wherever a run writes
PLAIN, VERSIONED = "plain", "versioned"
ADMIN = {"key": "rollbook-admin", "secret": "admin-SECRET-90ab"}
RIGHTS = ["Read", "Write", "List", "Tagging"]  # an Admin's PUT would make a missing bucket here


@dataclass(frozen=True)
class ObjectStore:
    """A running server."""

    endpoint: str
    process: subprocess.Popen[bytes]

    @property
    def environment(self) -> dict[str, str]:
        """What a user sets."""
        keys = {"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY}
        return keys | {"AWS_DEFAULT_REGION": "us-east-1", "AWS_ENDPOINT_URL": self.endpoint}

    def admin(self) -> S3FileSystem:
        return S3FileSystem(endpoint_url=self.endpoint, client_kwargs={"region_name": "us-east-1"}, **ADMIN)

    def place(self, versioned: bool = False) -> str:
        """URL of a fresh prefix; a fresh bucket would cost the server seven volumes."""
        return f"s3://{VERSIONED if versioned else PLAIN}/{uuid.uuid4().hex}"

    def objects(self, url: str) -> dict[str, bytes]:
        """Every object below a URL by its path there."""
        admin, root = self.admin(), url.removeprefix("s3://")
        admin.invalidate_cache()
        return {path.removeprefix(f"{root}/"): admin.cat_file(path) for path in admin.find(root)}


@contextmanager
def seaweed(folder: Path) -> Iterator[ObjectStore]:
    """Start the server, wait until it answers, and end it by its process id. Raises RuntimeError with its log's end."""
    identities = [
        {"name": "tests", "credentials": [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}], "actions": RIGHTS},
        {
            "name": "admin",
            "credentials": [{"accessKey": ADMIN["key"], "secretKey": ADMIN["secret"]}],
            "actions": ["Admin", *RIGHTS],
        },
    ]
    (folder / "s3.json").write_text(json.dumps({"identities": identities}))
    (folder / "data").mkdir()
    port, *others = free_ports(8)
    with (folder / "weed.log").open("wb") as log:
        process = subprocess.Popen(_command(folder, port, others), stdout=log, stderr=log, cwd=folder)
    try:
        _await(port, process, folder / "weed.log")
        running = ObjectStore(f"http://127.0.0.1:{port}", process)
        for bucket in (PLAIN, VERSIONED):
            running.admin().call_s3("create_bucket", Bucket=bucket)
        kept = {"Status": "Enabled"}
        running.admin().call_s3("put_bucket_versioning", Bucket=VERSIONED, VersioningConfiguration=kept)
        yield running
    finally:
        process.kill()  # asked politely it takes 20 s, for clients that there are none of
        process.wait()


def free_ports(count: int) -> list[int]:
    """Free at the same time, so all different."""
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


def _command(folder: Path, port: int, others: list[int]) -> list[str]:
    """Each port is given: the default of a gRPC port is its HTTP port + 10,000, which another may hold."""
    names = ["s3.port.grpc", "filer.port", "filer.port.grpc", "master.port", "master.port.grpc", "volume.port"]
    ports = [f"-{name}={number}" for name, number in zip([*names, "volume.port.grpc"], others, strict=True)]
    weed = str(Path(sys.executable).parent / ("weed.exe" if os.name == "nt" else "weed"))
    return [
        weed, "-logtostderr=true", "server", f"-dir={folder / 'data'}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1",
        "-s3", f"-s3.port={port}", f"-s3.config={folder / 's3.json'}", "-s3.port.iceberg=0", "-s3.port.lance=0",
        f"-s3.localSocket={folder / 's3.sock'}", "-filer", f"-filer.localSocket={folder / 'filer.sock'}",
        "-volume.max=50", "-master.volumeSizeLimitMB=256", "-master.telemetry=false", *ports,
    ]  # fmt: skip


def _await(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_S
    while True:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"SeaweedFS did not come up: {log.read_text(errors='replace')[-2000:]}")
        time.sleep(0.1)
