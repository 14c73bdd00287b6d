"""One micro-batch of training or replay: the packed rows and the tensors of its action and loss tokens."""

from dataclasses import dataclass

import numpy as np
import torch

from models.megatron.batch import PackedBatch, flat_indices, pack
from models.megatron.contract import TrainBatch
from models.megatron.networks import Reads
from models.megatron.shares import Shares
from ops.losses import step_denominator
from ops.ragged import Ragged, offsets_of

_ONE = Shares()


@dataclass(frozen=True)
class Micro:
    """Action tokens are those that the policy sampled; the log-probs of exactly these are computed, here and in replay.

    The set is the same in both, so that both run the same matrix products and agree to the last bit.
    """

    packed: PackedBatch
    source: np.ndarray  # [actions] int64, index of each action token in the caller's flat arrays
    owner: np.ndarray  # [actions] int64, which of the micro-batch's rows it is in
    reads: Reads
    last: torch.Tensor  # [rows] int64, index of each row's last token in the packed rows


@dataclass(frozen=True)
class Lesson:
    """The loss tokens of a Micro, with what the losses need of them; [tokens] float32 unless said otherwise."""

    micro: Micro
    among_actions: torch.Tensor  # [tokens] int64, index among the micro-batch's action tokens
    offsets: torch.Tensor  # [rows + 1] int64
    rows: np.ndarray  # [tokens] int64, the row number of each token
    old_logprobs: torch.Tensor
    advantages: torch.Tensor
    returns: torch.Tensor | None
    old_values: torch.Tensor | None
    weights: torch.Tensor | None  # of the policy loss
    valued: torch.Tensor | None  # bool, the tokens of the value loss; None: all
    value_scale: float  # see value_scale


def prepare(
    streams: Ragged, action_mask: Ragged, rows: np.ndarray, device: torch.device, shares: Shares = _ONE
) -> Micro:
    """Packs this rank's share of the rows and finds their action tokens."""
    rows = shares.rows(rows, streams.lengths)
    packed = pack(streams, rows, device, shares)
    flat = flat_indices(streams.offsets, rows)
    actions = np.flatnonzero(action_mask.values[flat])
    source, lengths = flat[actions], streams.lengths[rows]
    targets = streams.values[source].astype(np.int64)
    return Micro(
        packed=packed,
        source=source,
        owner=np.repeat(np.arange(len(rows)), lengths)[actions],
        reads=Reads(torch.from_numpy(packed.at[actions] - 1).to(device), torch.from_numpy(targets).to(device)),
        last=torch.from_numpy(packed.at[offsets_of(lengths)[1:] - 1]).to(device),
    )


def prepare_lesson(
    batch: TrainBatch, rows: np.ndarray, device: torch.device, shares: Shares = _ONE, value_scale: float = 1.0
) -> Lesson:
    """The same, with the loss tokens' columns."""
    micro = prepare(batch.streams, batch.action_mask, rows, device, shares)
    rows = micro.packed.rows
    kept = np.flatnonzero(batch.loss_mask.values[micro.source])
    source, owner = micro.source[kept], micro.owner[kept]

    def column(values: Ragged | None) -> torch.Tensor | None:
        return None if values is None else torch.from_numpy(values.values[source].astype(np.float32)).to(device)

    return Lesson(
        micro=micro,
        among_actions=torch.from_numpy(kept).to(device),
        offsets=torch.from_numpy(offsets_of(np.bincount(owner, minlength=len(rows)))).to(device),
        rows=rows[owner],
        old_logprobs=column(batch.old_logprobs),
        advantages=column(batch.advantages),
        returns=column(batch.returns),
        old_values=column(batch.old_values),
        weights=column(batch.weights),
        valued=None if batch.value_mask is None else torch.from_numpy(batch.value_mask.values[source]).to(device),
        value_scale=value_scale,
    )


def value_scale(batch: TrainBatch, rows: np.ndarray, mode: str) -> float:
    """What the value loss of an optimizer step over `rows` is multiplied by, to be divided by its own count.

    The step's losses add up and are divided by one count, that of the loss tokens (or of rows, which is the same here).
    """
    if batch.value_mask is None:
        return 1.0
    valued = batch.loss_mask.like(batch.loss_mask.values & batch.value_mask.values)
    return step_denominator(batch.loss_mask, rows, mode) / step_denominator(valued, rows, mode)


def check_streams(streams: Ragged, action_mask: Ragged) -> None:
    """Raises ValueError for masks of another length, an empty stream, or an action that nothing predicts."""
    _check_rows(streams, action_mask, "action_mask")
    if len(empty := np.flatnonzero(streams.lengths == 0)):
        raise ValueError(f"row {empty[0]}: an empty stream; every trajectory begins with its prompt")
    if len(first := np.flatnonzero(action_mask.values[streams.offsets[:-1]])):
        raise ValueError(
            f"row {first[0]}: its first token is an action, which nothing predicts; put a prompt before it"
        )


def check_batch(batch: TrainBatch, critic: bool) -> None:
    """check_streams, and ValueError for a column of other rows, a stray loss token, or a critic without its columns."""
    check_streams(batch.streams, batch.action_mask)
    for name in ("loss_mask", "old_logprobs", "advantages", "returns", "old_values", "weights", "value_mask"):
        column = getattr(batch, name)
        if column is not None:
            _check_rows(batch.streams, column, name)
        elif critic and name not in ("weights", "value_mask"):
            raise ValueError(
                f"{name} is missing; a critic learns from returns and old_values: replay with values first"
            )
    stray = np.flatnonzero(batch.loss_mask.values & ~batch.action_mask.values)
    if len(stray):
        row = int(np.searchsorted(batch.streams.offsets, stray[0], side="right")) - 1
        raise ValueError(f"row {row}: a loss token that is no action; loss_mask must be a subset of action_mask")


def _check_rows(streams: Ragged, column: Ragged, name: str) -> None:
    if not np.array_equal(streams.offsets, column.offsets):
        raise ValueError(f"{name}: its rows differ in length from those of streams; it needs one entry per token")
