"""One response to one reward, in a scorer process. Light to import: such a process holds nothing else."""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from data.config import JudgeConfig
from data.user_code import UserCode
from models.environments.contract import LARGEST
from ops.scorers import SCORERS
from ops.verdicts import answer_in, ask, verdict

type Scorer = UserCode | JudgeConfig | str


@dataclass(frozen=True)
class Response:
    """What is to be scored: the policy's last message, and what it was asked."""

    text: str
    question: str
    metadata: Mapping[str, Any]  # the prompt's


@dataclass(frozen=True)
class Scored:
    """What a scorer said of one response."""

    reward: float
    components: dict[str, float]
    extracted: str | None = None


def load_scorer(scorer: Scorer) -> None:
    """Run a user's file once in this process, or load what the scorer needs. Raises UserCodeError if the file fails."""
    if isinstance(scorer, UserCode):
        _ = scorer.function
    if scorer == "math":
        importlib.import_module("math_verify")  # takes a second
    if isinstance(scorer, JudgeConfig):
        importlib.import_module("infra.judge")


def call_scorer(scorer: Scorer, response: Response) -> Scored:
    """The reward of one response. Raises for whatever is no reward."""
    if isinstance(scorer, UserCode):
        return _checked(scorer.function(response.text, response.metadata), scorer.name)
    name = "judge" if isinstance(scorer, JudgeConfig) else scorer
    reference = response.metadata.get("answer")
    if reference is None:
        asked = response.metadata.get("prompt_id")
        raise ValueError(f"scorer {name!r} needs metadata.answer, and prompt {asked} has none")
    if isinstance(scorer, JudgeConfig):
        return _judged(scorer, response, str(reference))
    found = SCORERS[scorer](response.text, str(reference))
    return Scored(found.reward, {}, found.extracted)


def _judged(judge: JudgeConfig, response: Response, reference: str) -> Scored:
    from infra.judge import answer  # what only a judge needs

    prediction = answer_in(response.text)
    return Scored(verdict(answer(judge, ask(response.question, reference, prediction))), {}, prediction)


def _checked(said: Any, name: str) -> Scored:
    """A number, or a dict of numbers with the key 'reward' (the others are components)."""
    parts = dict(said) if isinstance(said, Mapping) else {"reward": said}
    bad = {k: v for k, v in parts.items() if not isinstance(v, int | float) or not abs(v) <= LARGEST}
    if bad or "reward" not in parts:
        raise TypeError(f"scorer {name} returned {said!r}; it must be a finite number, or a dict of them with 'reward'")
    reward = float(parts.pop("reward"))
    return Scored(reward, {str(k): float(v) for k, v in parts.items()})
