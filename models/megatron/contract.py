"""What goes into the trainer and comes out of it: plain data, without torch and without Megatron."""

from dataclasses import dataclass

import numpy as np

from data.config import CriticConfig, OptimizerConfig, TrainConfig
from ops.ragged import Ragged


@dataclass(frozen=True)
class Setup:
    """What a trainer is built for; a trainer that holds the same weights under another setup is not the same."""

    critic: CriticConfig
    optimizer: OptimizerConfig
    recompute: bool = False  # the layers' activations in the backward pass; changes no result


@dataclass(frozen=True)
class TrainOptions:
    train: TrainConfig
    temperature: float  # of the distribution sampled from; > 0
    policy_frozen: bool = False  # critic-only warm-up: no weight of the policy moves
    step_unit: str = "token"  # of the advantages; the critic learns the value of each step


@dataclass(frozen=True)
class TrainBatch:
    """One iteration's trajectories. Every field has the rows of `streams`; index i speaks of token i."""

    streams: Ragged  # int32, the token ids
    action_mask: Ragged  # bool, tokens that the policy sampled; the same mask as in replay
    loss_mask: Ragged  # bool, subset of action_mask: tokens that are optimised
    old_logprobs: Ragged  # float32
    advantages: Ragged  # float32
    returns: Ragged | None = None  # float32, needed with a critic
    old_values: Ragged | None = None  # float32, needed with a critic
    weights: Ragged | None = None  # float32, each token's share in the policy loss; None: 1
    value_mask: Ragged | None = None  # bool, of the loss tokens those whose value is learned; None: all


@dataclass(frozen=True)
class Replayed:
    """What the present weights say of given streams. Full stream length; 0 where the token is no action."""

    logprobs: Ragged  # float32, log-probability of token i given the tokens before it
    entropy: Ragged  # float32, entropy (nats) of the distribution that token i was drawn from
    values: Ragged | None  # float32, value of the state before token i: read at i - 1
    bootstrap_values: np.ndarray | None  # [rows] float32, value of the state after the row's last token


class SickStep(RuntimeError):
    """An optimizer step that must not be taken: raised before any weight has moved by it."""

    def __init__(self, step: int, rows: list[int], what: str) -> None:
        super().__init__(step, rows, what)  # the arguments, so that it pickles
        self.step, self.rows, self.what = step, rows, what

    def __str__(self) -> str:
        return f"optimizer step {self.step}: {self.what} in rows {self.rows}; look at these trajectories"


class NonFiniteLoss(SickStep):
    """The loss or the gradient is NaN or infinite. rows: those of the loss; of a gradient, the whole mini-batch."""


class BeyondLimit(SickStep):
    """The policy has moved further from the one that sampled than the config allows. rows: the worst first."""
