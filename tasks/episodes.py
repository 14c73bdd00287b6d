"""From prompts to trajectories that were played: what generate and a warm start have in common."""

import functools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import JsonValue

from data.digest import file_digest
from data.environment_config import EnvironmentConfig
from data.prompts import DEMONSTRATION, Prompt, load_source
from data.user_code import load
from models.agents.loop import Play, Rules, Trajectory
from models.engines.contract import RolloutEngine, SamplingParams
from models.environments.contract import Episode
from models.environments.spec import EnvironmentSpec
from models.environments.worlds import Environments, Unanswered

if TYPE_CHECKING:
    from models.tokenizer import Tokenizer

IN_THREADS, IN_PROCESSES = 512, 48  # trajectories at a time; a game's process has some 50 MB
source_of = functools.lru_cache(maxsize=8)(load_source)
log = logging.getLogger("rollbook")


class EnvironmentsFailed(RuntimeError):
    """Not one trajectory of a step could be played."""


@dataclass(frozen=True)
class Played:
    """What answers the policy, and how long."""

    spec: EnvironmentSpec
    config: EnvironmentConfig

    def keyed(self) -> dict[str, JsonValue]:
        """What of it enters a step's key: the settings, and the content of the files that built-in tools read."""
        files = {name: file_digest(Path(name)) for name in self.spec.files if Path(name).is_file()}
        return self.config.semantic() | ({"files": files} if files else {})


def played_in(config: EnvironmentConfig) -> Played | None:
    """None for a config without an environment. Raises UserCodeError for a user's file that cannot be read."""
    if config.kind is None:
        return None
    kind, *tools = (load(name) if ":" in name else name for name in (config.kind, *config.tools))
    return Played(EnvironmentSpec(kind, tuple(tools), config.options, config.announce), config)


def episode_of(name: str, prompt: Prompt, seed: int) -> Episode:
    """What a trajectory starts from; its metadata is all that scorers and environments learn of the prompt."""
    metadata = {key: value for key, value in prompt.metadata.items() if key != DEMONSTRATION}
    return Episode(name, tuple(prompt.messages), metadata | {"prompt_id": prompt.prompt_id}, seed)


def play(
    engine: RolloutEngine,
    tokenizer: "Tokenizer",
    params: SamplingParams,
    played: Played | None,
    trajectories: Sequence[Trajectory],
    enough: int | None = None,
) -> int:
    """Play each to its end, or until `enough` groups are whole. Returns how many tokens were sampled.

    Raises EnvironmentsFailed if not one trajectory could be played.
    """
    if played is None:
        return Play(engine, tokenizer, params, Unanswered(), Rules()).run(trajectories)
    if tokenizer.rewrites_history:
        log.warning("the chat template shows earlier turns otherwise than they were sampled; streams keep what was")
    worlds = Environments(played.spec, played.config.timeout_s)
    in_flight = played.config.in_flight or (IN_PROCESSES if played.spec.isolate else IN_THREADS)
    rules = Rules(played.config.max_turns, in_flight, enough)
    sampled = Play(engine, tokenizer, params, worlds, rules).run(trajectories)
    ended = [trajectory for trajectory in trajectories if trajectory.status != "carried"]
    if ended and all(trajectory.status == "failed" for trajectory in ended):
        raise EnvironmentsFailed(
            f"all {len(ended)} trajectories failed, the first one by: {ended[0].error}; nothing can be learned from "
            "them: mend the environment"
        )
    return sampled
