"""Two drivers of one run, started at once under two homes that share a store: one goes on, the other names it."""

import subprocess
from collections.abc import Callable
from typing import Any

import pytest

from data.ledger import Ledger
from data.store import Store
from tests.flows.chaos import require_equal

pytestmark = pytest.mark.slow


def test_one_goes_on_and_the_other_names_it(desk: Callable[[str], Any], finished: tuple[Any, str]) -> None:
    twin, _ = finished
    homes = [desk("home"), desk("home")]
    store = f"file://{homes[0].folder}/shared"
    drivers = [
        subprocess.Popen(
            home.command(*home.small(f"resources.store={store}")), cwd=home.folder, env=home.environment,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for home in homes
    ]  # fmt: skip
    said = [driver.communicate(timeout=500)[0] for driver in drivers]
    assert sorted(driver.returncode for driver in drivers) == [0, 1], said
    winner = next(driver for driver in drivers if driver.returncode == 0)
    loser = said[1 - drivers.index(winner)]
    assert f"run 'small' is driven by process {winner.pid} on " in loser, loser
    require_equal(Ledger(Store(store), "small"), twin.ledger, 3)
