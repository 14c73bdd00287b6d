"""Patience is of an outage: it ends with any answer, and begins anew with the next one."""

import time
from collections.abc import Callable

import pytest

from data.patience import Patience


def failing(*errors: Exception) -> Callable[[], str]:
    left = list(errors)

    def call() -> str:
        if left:
            raise left.pop(0)
        return "done"

    return call


def test_a_refusal_ends_an_outage() -> None:
    patiently = Patience("here", 0.6, lambda error: isinstance(error, TimeoutError), str)
    with pytest.raises(FileExistsError):
        patiently(failing(TimeoutError(), FileExistsError()))
    time.sleep(0.7)
    assert patiently(failing(TimeoutError())) == "done"
