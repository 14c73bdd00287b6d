"""One response to one reward, in a scorer process. Light to import: such a process holds nothing else."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from data.user_code import UserCode
from ops.scorers import SCORERS


@dataclass(frozen=True)
class Scored:
    """What a scorer said of one response."""

    reward: float
    components: dict[str, float]
    extracted: str | None = None


def load_scorer(scorer: UserCode | str) -> None:
    """Run a user's file once in this process. Raises UserCodeError if that fails."""
    if isinstance(scorer, UserCode):
        _ = scorer.function


def call_scorer(scorer: UserCode | str, response: str, metadata: Mapping[str, Any]) -> Scored:
    """The reward of one response. Raises for whatever is no reward."""
    if isinstance(scorer, UserCode):
        return _checked(scorer.function(response, metadata), scorer.name)
    reference = metadata.get("answer")
    if reference is None:
        raise ValueError(f"scorer {scorer!r} needs metadata.answer, and prompt {metadata.get('prompt_id')} has none")
    found = SCORERS[scorer](response, str(reference))
    return Scored(found.reward, {}, found.extracted)


def _checked(said: Any, name: str) -> Scored:
    """A number, or a dict of numbers with the key 'reward' (the others are components)."""
    parts = dict(said) if isinstance(said, Mapping) else {"reward": said}
    bad = {k: v for k, v in parts.items() if not isinstance(v, int | float) or not math.isfinite(v)}
    if bad or "reward" not in parts:
        raise TypeError(f"scorer {name} returned {said!r}; it must be a finite number, or a dict of them with 'reward'")
    reward = float(parts.pop("reward"))
    return Scored(reward, {str(k): float(v) for k, v in parts.items()})
