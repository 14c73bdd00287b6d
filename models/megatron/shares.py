"""Which rows and which tokens of a micro-batch a rank works on."""

import math
from dataclasses import dataclass

import numpy as np
from megatron.core import parallel_state

from ops.ragged import offsets_of


@dataclass(frozen=True)
class Shares:
    """How a micro-batch is laid over the ranks: rows over data-parallel ones, tokens over the others."""

    data: int = 1
    data_rank: int = 0
    context: int = 1
    context_rank: int = 0
    sequence: int = 1  # ranks that share the tokens between layers (tensor ranks with sequence parallelism)

    @classmethod
    def of_this_rank(cls, sequence_parallel: bool) -> "Shares":
        tensor = parallel_state.get_tensor_model_parallel_world_size()
        return cls(
            data=parallel_state.get_data_parallel_world_size(),
            data_rank=parallel_state.get_data_parallel_rank(),
            context=parallel_state.get_context_parallel_world_size(),
            context_rank=parallel_state.get_context_parallel_rank(),
            sequence=tensor if sequence_parallel else 1,
        )

    def rows(self, rows: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """This rank's part of a micro-batch's `rows`; may be empty. lengths: of all rows of the caller's Ragged."""
        return split_rows(rows, lengths[rows], self.data)[self.data_rank]

    def padded(self, lengths: np.ndarray) -> np.ndarray:
        """Row lengths in the packed layout, [rows] or, with a row of padding at the end, [rows + 1] int64.

        Each row is cut into 2 · context equal chunks, and the whole must divide by the ranks that share it. No
        micro-batch is without tokens: a rank with an empty share takes part in all collectives.
        """
        chunks = 2 * self.context if self.context > 1 else 1
        unit = math.lcm(chunks, self.context * self.sequence)
        padded = -(-lengths // chunks) * chunks
        total = int(padded.sum())
        tail = -total % unit if total else unit
        return np.append(padded, tail) if tail else padded

    def own_tokens(self, padded: np.ndarray, rank: int) -> np.ndarray:
        """[tokens / context] int64, packed index of each token of context rank `rank`, in its order.

        Of each row's 2 · context chunks it has numbers `rank` and 2 · context - 1 - `rank`, so that all ranks attend to
        as many tokens (zigzag, as in Megatron).
        """
        starts, local = offsets_of(padded)[:-1], padded // self.context
        within = np.arange(local.sum()) - np.repeat(offsets_of(local)[:-1], local)
        chunk = np.repeat(local // 2, local)
        late = within >= chunk
        number = np.where(late, 2 * self.context - 1 - rank, rank)
        return np.repeat(starts, local) + number * chunk + within - np.where(late, chunk, 0)


def split_rows(rows: np.ndarray, lengths: np.ndarray, parts: int) -> list[np.ndarray]:
    """`rows` in `parts` shares with about as many tokens each: the longest row first, always to the lightest share.

    lengths: of each of the rows. Within a share the order stays. Ties go to the row and the share that come first.
    """
    if parts == 1:
        return [rows]
    load, members = [0] * parts, [[] for _ in range(parts)]
    for index in np.argsort(-lengths, kind="stable"):
        lightest = load.index(min(load))
        load[lightest] += int(lengths[index])
        members[lightest].append(index)
    return [rows[np.sort(np.array(chosen, np.int64))] for chosen in members]
