"""The Prefect server that a command starts for itself."""

import json
import os
import socket
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings

from infra.home import Home
from infra.prefect_tasks import prefect_at_hand, prefect_url
from infra.servers import ServerError, own_prefect
from tests.faults import Answers, proxy_to


def test_flows_have_one_as_long_as_it_is_at_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path / "prefect"))
    home, seen = Home(tmp_path), list[str | None]()
    home.prepare()
    with temporary_settings(restore_defaults={PREFECT_API_URL}):  # other tests have set one for this whole process
        with prefect_at_hand(home, lambda: seen.append(prefect_url())):
            url = prefect_url()
            with urllib.request.urlopen(f"{url}/health") as asked:
                assert json.load(asked) is True
        assert seen == [None] and prefect_url() is None
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(f"{url}/health", timeout=5)


def test_one_that_is_set_is_used(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as behind, proxy_to(behind.getsockname()[1]) as proxy:
        url = f"{proxy.url}/api"
        with (
            temporary_settings({PREFECT_API_URL: url}),
            proxy.breaking(Answers("GET", "/api/health", status=200)) as asked,
            prefect_at_hand(Home(tmp_path), lambda: None),
        ):
            assert prefect_url() == url and asked.count == 1
    assert not list(tmp_path.iterdir())  # nothing was started


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
