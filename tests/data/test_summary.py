"""What an iteration's clock says, with the steps' own times beside it."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from data.summary import IterationSummary, Wall

STEPS = {"generate": 2.0, "score": 0.5, "replay": 1.0, "advantages": 0.25, "train": 3.0, "publish": 0.75}


def orchestration(wall: Wall) -> float | None:
    manifests = {step: cast(Any, SimpleNamespace(seconds=seconds)) for step, seconds in STEPS.items()}
    return IterationSummary(0, manifests, wall).orchestration


@pytest.mark.parametrize(
    ("wall", "left"),
    [
        (Wall(8.0), 0.5),  # the steps are 7.5 s
        (Wall(8.0, together=True), 1.0),  # score's .5 s lie within replay's
        (Wall(8.0, waited=0.25, handing=0.125, together=True), 0.625),
        (Wall(8.0, before=("generate",), together=True), 3.0),  # its rollouts were made ahead
        (Wall(1.0, before=("generate", "score", "replay", "advantages", "train"), together=True), 0.25),  # resumed
        (Wall(5.0, before=("generate", "score"), together=True), 0.0),  # resumed while replay ran
    ],
)
def test_orchestration_is_what_no_step_and_no_waiting_takes(wall: Wall, left: float) -> None:
    assert orchestration(wall) == pytest.approx(left)
