"""TextWorld's games made on demand: by their settings, once, kept in a folder under a name of their content."""

import importlib.metadata
import os
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path

from filelock import FileLock
from pydantic import JsonValue

from data.digest import json_digest

try:
    import textworld
    from jericho.jericho import UnsupportedGameWarning
    from textworld.challenges import CHALLENGES
    from textworld.generator import compile_game, make_game
except ImportError as error:
    raise ImportError(
        f"TextWorld cannot be loaded ({error}); install Rollbook with its games: uv sync --extra games, or "
        'pip install "rollbook[games]" (which needs a C compiler)'
    ) from error

# Jericho warns of every game that is not among the classics it knows; TextWorld needs none of that.
warnings.filterwarnings("ignore", category=UnsupportedGameWarning)

SIZES = {"rooms": "nb_rooms", "objects": "nb_objects", "quest_length": "quest_length"}  # ours: GameOptions'
THEMES = ("house", "basic")


class GameError(ValueError):
    """A game that cannot be had; the message names the setting, the rule and the fix."""


def generated(settings: Mapping[str, JsonValue], folder: Path) -> Path:
    """The file (.z8) of the game of these settings; compiled if it is not in the folder yet.

    settings: `seed`; `theme`, house (prose) or basic (short plain sentences); and either `rooms`, `objects` and
    `quest_length`, or `challenge`, one of TextWorld's own (tw-coin_collector, tw-treasure_hunter, tw-simple,
    tw-cooking), with the settings of that as `tw-make CHALLENGE --help` lists them. Equal settings give equal bytes.
    Raises GameError.
    """
    settings = {"seed": 0, "theme": "house"} | dict(settings)
    name = json_digest([importlib.metadata.version("textworld"), settings])[:32]
    made = folder / name / "game.z8"
    if made.is_file():
        return made
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / f"{name}.lock"):  # siblings wait for one compiler instead of each running its own
        if not made.is_file():
            with tempfile.TemporaryDirectory(dir=folder, prefix="making-") as scratch:
                _make(settings, Path(scratch) / name)
                os.rename(Path(scratch) / name, made.parent)
    return made


def _make(settings: Mapping[str, JsonValue], folder: Path) -> None:
    options = textworld.GameOptions()
    options.seeds = _whole("seed", settings["seed"], 0)
    options.path = str(folder / "game.z8")
    if settings["theme"] not in THEMES:
        raise GameError(f"game.theme = {settings['theme']!r}; it must be one of {', '.join(THEMES)}")
    options.grammar.theme = settings["theme"]
    own = {name: value for name, value in settings.items() if name not in ("seed", "theme", "challenge")}
    game = _challenge(settings["challenge"], own, options) if "challenge" in settings else _house(own, options)
    compile_game(game, options)


def _house(sizes: Mapping[str, JsonValue], options: "textworld.GameOptions") -> "textworld.Game":
    for name, value in sizes.items():
        if name not in SIZES:
            raise GameError(f"game.{name} = {value!r}: no such setting; there are seed, theme, {', '.join(SIZES)}")
        setattr(options, SIZES[name], _whole(name, value, 1))
    return make_game(options)


def _challenge(name: JsonValue, own: Mapping[str, JsonValue], options: "textworld.GameOptions") -> "textworld.Game":
    if name not in CHALLENGES:
        raise GameError(f"game.challenge = {name!r}; it must be one of {', '.join(CHALLENGES)}")
    _, make, parser = CHALLENGES[name]
    words = [f"--{key}" if value is True else f"--{key}={value}" for key, value in own.items() if value is not False]
    try:
        return make(vars(parser().parse_args(words)), options)
    except SystemExit:
        raise GameError(f"game: {name} does not take {dict(own)}; tw-make {name} --help lists its settings") from None


def _whole(name: str, value: JsonValue, least: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise GameError(f"game.{name} = {value!r}; it must be a whole number of at least {least}")
    return value
