"""The Prefect server that a command starts for itself."""

import json
import os
import urllib.request
from pathlib import Path

import pytest

from infra.home import Home
from infra.prefect_tasks import prefect_at_hand, prefect_url
from infra.servers import ServerError, own_prefect


def test_flows_have_one_as_long_as_it_is_at_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path / "prefect"))
    home, before, seen = Home(tmp_path), prefect_url(), list[str | None]()
    home.prepare()
    with prefect_at_hand(home, lambda: seen.append(prefect_url())):
        url = prefect_url()
        if before is None:
            assert seen == [None] and url is not None
        else:  # another test's, for this whole process
            assert seen == [before] and url == before
        with urllib.request.urlopen(f"{url}/health") as asked:
            assert json.load(asked) is True
    assert prefect_url() == before


def test_one_that_does_not_come_up_is_told_with_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT_SERVER_DATABASE_CONNECTION_URL", "sqlite+aiosqlite:////nowhere/at/all.db")
    with (
        own_prefect(Home(tmp_path)) as server,
        pytest.raises(ServerError, match=f"Prefect did not come up: .*; the whole story is in {tmp_path}/prefect.log"),
    ):
        server.await_ready()
    assert not server.lives
    assert "unable to open database file" in server.log.read_text()
    with pytest.raises(ProcessLookupError):
        os.kill(server.process.pid, 0)
