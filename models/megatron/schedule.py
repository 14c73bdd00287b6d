"""The learning rate as a pure function of the number of optimizer steps taken."""

import math

from data.config import OptimizerConfig


def learning_rate(base: float, steps: int, config: OptimizerConfig) -> float:
    """The rate of the optimizer step that follows `steps` finished ones, for a part whose full rate is `base`.

    Warm-up rises linearly and reaches `base` with its last step; then constant, or linear / cosine to 0 at decay_steps.
    """
    if steps < config.warmup_steps:
        return base * (steps + 1) / config.warmup_steps
    if config.schedule == "constant":
        return base
    done = min(1.0, (steps - config.warmup_steps) / (config.decay_steps - config.warmup_steps))
    if config.schedule == "linear":
        return base * (1.0 - done)
    return base * 0.5 * (1.0 + math.cos(math.pi * done))
