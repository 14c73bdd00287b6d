"""What of a URL may be shown."""

import pytest

from data.addresses import without_password

SHOWN = {
    "postgresql://me:secret@host:5432/db": "postgresql://me:***@host:5432/db",
    "postgresql://me:se:c@ret@host/db?x=1": "postgresql://me:***@host/db?x=1",
    "postgresql://me@host/db": "postgresql://me@host/db",
    "sqlite:////tmp/a:b@c.db": "sqlite:////tmp/a:b@c.db",
    "http://127.0.0.1:5050": "http://127.0.0.1:5050",
}


@pytest.mark.parametrize("url", SHOWN)
def test_a_password_is_not_shown(url: str):
    assert without_password(url) == SHOWN[url]
