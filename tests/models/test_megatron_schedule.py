"""The learning rate as a function of the steps taken."""

import pytest

from data.config import OptimizerConfig
from models.megatron.schedule import learning_rate


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        # Warm-up over 2 steps: 1/2, 2/2; then 4 steps from step 2 to step 6.
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]),
        # (1 + cos 0) / 2, (1 + cos 45°) / 2 = .853553, (1 + cos 90°) / 2, (1 + cos 135°) / 2 = .146447
        ("cosine", [0.5, 1.0, 1.0, 0.853553, 0.5, 0.146447, 0.0, 0.0]),
    ],
)
def test_warm_up_then_schedule(schedule: str, rates: list[float]) -> None:
    config = OptimizerConfig(schedule=schedule, warmup_steps=2, decay_steps=6)
    assert [learning_rate(1.0, step, config) for step in range(8)] == pytest.approx(rates, abs=1e-6)
    assert learning_rate(0.03, 3, config) == pytest.approx(0.03 * rates[3], rel=1e-5)


def test_without_warm_up_the_first_step_has_the_full_rate() -> None:
    assert learning_rate(0.25, 0, OptimizerConfig()) == 0.25
