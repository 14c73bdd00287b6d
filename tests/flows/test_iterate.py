"""The flow `iterate`: one iteration of a run, for schedules of one's own."""

from pathlib import Path

import pytest

from data.ledger import Ledger
from data.store import Store
from data.summary import summarize
from flows.config import load
from tests.flows.conftest import SMALL, SORT


def test_it_does_the_next_iteration_and_refuses_one_whose_predecessors_are_missing(home: Path) -> None:
    from flows.training import iterate

    config = load(SORT, [*SMALL, "iterations=8"])
    with pytest.raises(ValueError, match="iteration 3 is not on record"):
        iterate(config, 4)
    iterate(config, 3)
    assert summarize(Ledger(Store(f"file://{home}/store"), "small")).done == 4
