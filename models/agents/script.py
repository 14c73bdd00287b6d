"""Demonstrations: what is to be said, turn by turn, as a rollout engine. Streams come about as the policy's do."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from models.engines.contract import SAMPLED, Completion, EngineHealth, Request, SamplingParams

if TYPE_CHECKING:
    from pathlib import Path

    from models.tokenizer import Tokenizer


class Script:
    """A RolloutEngine (models.engines.contract) that serves no weights."""

    name = "script"
    version = "1"
    policy_digest = "script"

    def __init__(self, turns: Mapping[str, Sequence[str]], tokenizer: "Tokenizer") -> None:
        """turns: the texts of each trajectory."""
        self._left = {trajectory: list(texts) for trajectory, texts in turns.items()}
        self._tokenizer = tokenizer

    def logprob_semantics(self, params: SamplingParams) -> str:
        return SAMPLED

    def generate(self, requests: Sequence[Request], params: SamplingParams) -> list[Completion]:
        """Raises ValueError for a trajectory that goes on after its last text."""
        return [self._next(request.trajectory_id) for request in requests]

    def _next(self, trajectory: str) -> Completion:
        if not self._left[trajectory]:
            raise ValueError(
                f"the demonstration {trajectory} is over and its environment goes on; let its last turn end the episode"
            )
        ids = [*self._tokenizer.encode(self._left[trajectory].pop(0)), self._tokenizer.eos_ids[0]]
        return Completion(trajectory, np.array(ids, np.int32), np.zeros(len(ids), np.float32), "stop", 0, "script")

    def update_weights(
        self, folder: "Path", version: int, digest: str, in_memory: bool = False, verified: bool = False
    ) -> None:
        raise NotImplementedError("a script has no weights")

    def health(self) -> EngineHealth:
        return EngineHealth(True, self.name, "cpu", None, None, None)
