"""Text games: those that TextWorld makes and plays, and the files that it can play. Needs the extra `games`."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import JsonValue

from data.home import cache_folder, home_folder
from models.environments.actions import said_action, snapped
from models.environments.contract import Environment, Episode, Message, Reply
from models.environments.generated import GameError, generated, textworld
from models.environments.observations import observation, with_opening

PARTS = ("objective", "description", "inventory", "feedback", "commands")
REWARDS = ("success", "score")
# Of the interpreter, not of the game: they write files, end it, or bring back what a sibling saved.
NOT_PLAYED = frozenset({"save", "restore", "restart", "quit", "q", "undo", "script", "transcript", "notranscript"})
STATUS_LINE = re.compile(r">\s{8,}-=.*=-\s*-?\d+/-?\d+\s*$")
TYPED = re.compile("[ -~]{1,120}")  # a Z-machine's interpreter crashes at a control character
NEXT_COMMAND = re.compile(r"[.,;\n]|\bthen\b")


class TextWorldEnvironment(Environment):
    """A game, played by commands. An episode ends when it is won or lost.

    The game is the prompt's: `metadata.game_file`, a file (.z8 with its .json, any other Z-machine story, or .tw-pddl),
    or `metadata.game`, the settings of `generated`, over those of the option `game`. opening, later: what the policy is
    shown first and after each turn, of PARTS. leave_out: commands beginning with one of these words are not offered.
    reward: "success", 1 in the turn that wins; "score", the points of each turn. step_penalty is taken off every turn.
    """

    isolate = True

    def __init__(
        self,
        game: Mapping[str, JsonValue] | None = None,
        opening: Sequence[str] = ("objective", "description", "commands"),
        later: Sequence[str] = ("feedback", "commands"),
        leave_out: Sequence[str] = (),
        reward: str = "success",
        step_penalty: float = 0.0,
    ) -> None:
        for part in (*opening, *later):
            if part not in PARTS:
                raise GameError(f"options: {part!r} cannot be shown; opening and later take {', '.join(PARTS)}")
        if reward not in REWARDS:
            raise GameError(f"options: reward = {reward!r}; it must be one of {', '.join(REWARDS)}")
        self._game = game or {}
        self._opening, self._later, self._leave_out = opening, later, frozenset(leave_out)
        self._reward, self._step_penalty = reward, step_penalty
        self._world: textworld.Environment | None = None
        self._commands: list[str] = []
        self._score = 0

    def reset(self, episode: Episode) -> Sequence[Message]:
        shown = {part for part in (*self._opening, *self._later) if part != "commands"}
        asked = textworld.EnvInfos(
            admissible_commands=True, won=True, lost=True, score=True, **dict.fromkeys(shown, True)
        )
        self._world = textworld.start(str(self._file(episode.metadata)), asked)
        state = self._world.reset()
        self._look(state)
        return with_opening(episode.messages, self._shown(state, self._opening))

    def step(self, said: str) -> Reply:
        command = snapped(said_action(said), self._commands)
        if command not in self._commands:
            command = NEXT_COMMAND.split(command)[0].strip()  # TextWorld loses count when a line holds two
            if _of_the_interpreter(command) or not TYPED.fullmatch(command):
                return Reply((observation(f"{command!r} is not part of the game."),), reward=-self._step_penalty)
        before = self._score
        state, _, done = self._world.step(command)
        self._look(state)
        gain = self._score - before if self._reward == "score" else float(bool(state.won))
        over = bool(done or state.won or state.lost)
        messages = () if over else (observation(self._shown(state, self._later)),)
        return Reply(messages, done=over, reward=gain - self._step_penalty)

    def close(self) -> None:
        world, self._world = self._world, None
        if world is not None:
            world.close()

    def winning_commands(self, metadata: Mapping[str, JsonValue]) -> list[str]:
        """Commands that win the game of a prompt, for demonstrations. Raises GameError where TextWorld knows none."""
        file = self._file(metadata)
        world = textworld.start(str(file), textworld.EnvInfos(policy_commands=True))
        try:
            commands = world.reset().policy_commands
        finally:
            world.close()
        if not commands:
            raise GameError(f"{file}: TextWorld knows no way to win it; take a game that TextWorld has made")
        return list(commands)

    def _file(self, metadata: Mapping[str, JsonValue]) -> Path:
        named = metadata.get("game_file")
        if named is None:
            settings = metadata.get("game", {})
            if not isinstance(settings, Mapping):
                raise GameError(f"metadata.game = {settings!r}; it must be an object of settings, as {{'seed': 3}}")
            return generated({**self._game, **settings}, cache_folder(home_folder()) / "textworld")
        if not isinstance(named, str) or not Path(named).is_file():
            raise GameError(f"metadata.game_file = {named!r}: no such file here; name it by its absolute path")
        return Path(named)

    def _look(self, state: "textworld.GameState") -> None:
        admissible = state.admissible_commands or []
        self._commands = [command for command in admissible if command.split()[0] not in self._leave_out]
        self._score = state.score or 0

    def _shown(self, state: "textworld.GameState", parts: Sequence[str]) -> str:
        texts = {part: squeezed(state.get(part) or "") for part in parts}
        if "commands" in texts and self._commands:
            texts["commands"] = f"Commands: {', '.join(self._commands)}"
        return "\n".join(text for text in texts.values() if text)


def squeezed(text: str) -> str:
    """Without the status line, the banner, and every other line that has neither letter nor digit."""
    lines = (line.strip() for line in STATUS_LINE.sub("", text).splitlines())
    return "\n".join(line for line in lines if re.search(r"[^\W_]", line))


def _of_the_interpreter(command: str) -> bool:
    words = command.casefold().split()
    return any(word in NOT_PLAYED or word.startswith(("tw-", "#", "$")) for word in words)
