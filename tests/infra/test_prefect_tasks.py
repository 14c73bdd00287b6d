"""What a run says when no Prefect answers at its start; what happens later is in tests/flows/test_faults.py."""

import socket

import pytest

from infra.prefect_tasks import Pages, require_prefect
from tests.faults import Answers, proxy_to
from tests.seaweed import free_ports


def test_a_prefect_that_is_not_there_is_named() -> None:
    url = f"http://127.0.0.1:{free_ports(1)[0]}/api"
    with pytest.raises(ConnectionError, match=f"Prefect at {url} does not answer .*`rollbook up`, or unset") as raised:
        require_prefect(url)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("status", [200, 401, 503])
def test_one_that_answers_is_left_to_prefects_client(status: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as behind, proxy_to(behind.getsockname()[1]) as proxy:
        with proxy.breaking(Answers("GET", "/api/health", status=status)) as broken:
            require_prefect(f"{proxy.url}/api")
        assert broken.count == 1


def test_where_no_flow_runs_pages_do_nothing() -> None:
    pages = Pages()
    pages.show("key", "text", "description")
    pages.progress("key", "description", 0.5)
    pages.close()
