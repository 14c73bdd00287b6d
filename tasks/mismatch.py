"""Engine against trainer: whether their log-probs of some rollouts may be compared, and how far they are apart."""

import numpy as np
import pyarrow as pa
from pydantic import JsonValue

from data.config import TrainConfig
from models.engines.contract import SAMPLED, SCALED
from ops.mismatch import EDGES, deltas, histogram, mismatch_metrics
from ops.ragged import Ragged, from_arrow


def measure(rollouts: pa.Table, logprobs: Ragged, actions: Ragged) -> tuple[dict[str, float], JsonValue]:
    """Metrics, and the fact for the record: the histogram, or why nothing was measured.

    rollouts: with trajectory_id, rollout_logprobs and sampling; logprobs: the trainer's, full softmax at the
    temperature sampled at.
    """
    if (reason := incomparable(rollouts)) is not None:
        return {}, {"measured": False, "reason": reason}
    apart = deltas(logprobs, from_arrow(rollouts["rollout_logprobs"], "rollout_logprobs"), actions)
    counts: list[JsonValue] = histogram(apart).tolist()
    return mismatch_metrics(apart), {"measured": True, "edges": list(EDGES), "counts": counts}


def incomparable(rollouts: pa.Table) -> str | None:
    """Why the engine's log-probs are not of the full softmax at its temperature: the first trajectory; None if all are.

    rollouts: with trajectory_id and sampling.
    """
    sampling = rollouts["sampling"].combine_chunks()
    names = ("logprob_semantics", "top_p", "top_k")
    semantics, top_p, top_k = (sampling.field(name).to_numpy(zero_copy_only=False) for name in names)
    whole = (top_p >= 1.0) & (top_k == 0)
    wrong = np.flatnonzero(~((semantics == SCALED) | ((semantics == SAMPLED) & whole)))
    if not len(wrong):
        return None
    row = int(wrong[0])
    return (
        f"trajectory {rollouts['trajectory_id'][row]}: its engine's log-probs, {semantics[row]!r} with top_p "
        f"{top_p[row]:g} and top_k {top_k[row]}, are not of the full softmax, as the trainer's are"
    )


def require_comparable(rollouts: pa.Table, train: TrainConfig) -> None:
    """Raises ValueError for rollouts whose log-probs are of another distribution, if training reads them (C24)."""
    reader = train.reads_rollout_logprobs
    if reader and (reason := incomparable(rollouts)) is not None:
        raise ValueError(
            f"{reason}; {reader} compares the two: set train.old_logp_source = 'replay' and train.correction.kind = "
            "'none', or sample with top_p = 1 and top_k = 0"
        )
