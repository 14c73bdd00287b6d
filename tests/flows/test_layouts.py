"""A real run on several ranks, which then goes on under another layout: its ledger is kept, no step is redone."""

from collections.abc import Callable
from typing import Any

import pytest

from data.ledger import Ledger
from data.store import Store

SHORT = ("warm_start.steps=20", "prompts.per_iteration=16", "train.mini_batch=8", "evaluate.problems=0")
STEPS = ("replay", "train", "publish")


@pytest.mark.slow
def test_a_run_goes_on_under_another_layout(desk: Callable[[str], Any]) -> None:
    mine = desk("layouts")
    ledger = Ledger(Store(f"file://{mine.folder}/.rollbook/store"), "small")
    mine.run(*SHORT, "iterations=1", "layout.data=2")
    first = {step: ledger.find(ledger.at(0, step)) for step in STEPS}
    assert all(made.execution["layout"]["data"] == 2 for made in first.values())

    mine.run(*SHORT, "iterations=2", "layout.tensor=2", "layout.sequence_parallel=true")
    assert {step: ledger.find(ledger.at(0, step)) for step in STEPS} == first
    replayed, trained = (ledger.find(ledger.at(1, step)) for step in ("replay", "train"))
    assert trained.execution["layout"]["tensor"] == 2
    assert trained.inputs["state"] == first["train"].content_digest
    # fp32: the engine's log-probs and those of weights that two ranks hold, and of the state that two others saved.
    assert replayed.metrics["engine_logprob_gap/max"] <= 1e-4
