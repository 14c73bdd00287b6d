"""One real Ray for the whole session of tests."""

import os
import tempfile
from collections.abc import Iterator

import pytest

from infra.home import Home

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
