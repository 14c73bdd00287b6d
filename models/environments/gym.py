"""Gymnasium's text games: environments whose observations are text and whose actions have names."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import JsonValue

from models.environments.actions import said_action, snapped
from models.environments.contract import Environment, Episode, Message, Reply
from models.environments.observations import observation, with_opening

try:
    import gymnasium
    from gymnasium import spaces
except ImportError as error:
    raise ImportError(
        f"Gymnasium cannot be loaded ({error}); install Rollbook with its games: uv sync --extra games, or "
        'pip install "rollbook[games]"'
    ) from error

HIGHLIGHT = re.compile(r"\x1b\[[\d;]*m(.*?)\x1b\[0m", re.DOTALL)


class GymEnvironment(Environment):
    """An environment of Gymnasium: `id`, as registered, or a subclass's own `make`.

    game: keyword arguments of `gymnasium.make`; those of the prompt's `metadata.game` go over them. Its `seed`, where
    there is one, is the reset's, and all siblings start alike; else each starts by its trajectory's own. actions: names
    of a discrete space's actions in their order, or the only texts that a text space is to get.
    """

    isolate = True

    def __init__(
        self,
        id: str | None = None,
        actions: Sequence[str] = (),
        game: Mapping[str, JsonValue] | None = None,
    ) -> None:
        self._id, self._actions, self._game = id, list(actions), game or {}
        self._world: gymnasium.Env[Any, Any] | None = None

    def make(self, game: Mapping[str, JsonValue]) -> "gymnasium.Env[Any, Any]":
        """The world of one trajectory; game: the settings, without the seed. For a subclass to override."""
        if self._id is None:
            raise ValueError('options: no id; name one, as "FrozenLake-v1", or override make(game) in a subclass')
        return gymnasium.make(self._id, **game)

    def text(self, seen: Any, info: Mapping[str, Any]) -> str:
        """An observation as text: itself, or what `render` says in the mode "ansi". For a subclass to override."""
        if isinstance(seen, str):
            return seen
        if self._world.render_mode == "ansi":
            return HIGHLIGHT.sub(r"[\1]", self._world.render()).strip("\n")
        raise ValueError(
            f"observation {seen!r} is no text; set options.game.render_mode = 'ansi', or override text(seen, info)"
        )

    def reset(self, episode: Episode) -> Sequence[Message]:
        own = episode.metadata.get("game", {})
        if not isinstance(own, Mapping):
            raise ValueError(f"metadata.game = {own!r}; it must be an object of settings, as {{'seed': 3}}")
        game = {**self._game, **own}
        seed = game.pop("seed", episode.seed)
        self._world = self.make(game)
        self._check_actions(self._world.action_space)
        return with_opening(episode.messages, self.text(*self._world.reset(seed=seed)))

    def step(self, said: str) -> Reply:
        action = snapped(said_action(said), self._actions)
        if self._actions and action not in self._actions:
            return Reply((observation(f"{action!r} is none of: {', '.join(self._actions)}"),), reward=0.0)
        space = self._world.action_space
        if not isinstance(space, spaces.Discrete):
            if action not in space:
                return Reply((observation(f"{action!r} is no action here."),), reward=0.0)
            given: int | str = action
        else:
            given = self._actions.index(action) + int(space.start)
        seen, reward, terminated, truncated, info = self._world.step(given)
        over = bool(terminated or truncated)
        return Reply(() if over else (observation(self.text(seen, info)),), done=over, reward=float(reward))

    def close(self) -> None:
        world, self._world = self._world, None
        if world is not None:
            world.close()

    def _check_actions(self, space: "gymnasium.Space[Any]") -> None:
        if isinstance(space, spaces.Discrete):
            if len(self._actions) != space.n or len(set(self._actions)) != space.n:
                raise ValueError(
                    f"options.actions = {self._actions} for {space.n} actions; give each its own name, in their order"
                )
        elif not isinstance(space, spaces.Text):
            raise ValueError(f"the action space is {space}; it must be text, or discrete with options.actions")
