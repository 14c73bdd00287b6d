"""One real Ray, and one real S3 server, for the whole session of tests."""

import os
import tempfile
from collections.abc import Iterator

import pytest
from s3fs import S3FileSystem

from infra.home import Home
from tests.seaweed import ObjectStore, seaweed

# Before Prefect is imported, and away from the home of whoever runs the tests.
os.environ["ROLLBOOK_HOME"] = tempfile.mkdtemp(prefix="rollbook-tests-")
Home.find().set_environment()
Home.find().prepare()

from infra.ray_session import Fleet  # noqa: E402


@pytest.fixture(scope="session")
def fleet() -> Iterator[Fleet]:
    made = Fleet("local")
    yield made
    made.close()


@pytest.fixture(scope="session")
def object_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectStore]:
    """SeaweedFS. A test that uses it in its own process asks for `s3` too, or sets the environment itself."""
    with seaweed(tmp_path_factory.mktemp("weed")) as running:
        yield running


@pytest.fixture
def s3(object_store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectStore]:
    """The server, with its credentials in this process's environment for the length of a test."""
    S3FileSystem.clear_instance_cache()  # connections live on by their arguments, and the environment is none
    for name, value in object_store.environment.items():
        monkeypatch.setenv(name, value)
    yield object_store
    S3FileSystem.clear_instance_cache()
