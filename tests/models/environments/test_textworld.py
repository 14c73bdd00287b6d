"""Games that TextWorld makes and plays here. Skipped where it is not installed: `make test-games` adds it."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

textworld = pytest.importorskip("textworld", reason="TextWorld is an extra; `make test-games` adds it")

from models.environments.contract import Episode  # noqa: E402
from models.environments.generated import GameError, generated  # noqa: E402
from models.environments.textworld import TextWorldEnvironment, squeezed  # noqa: E402

COIN = {"game": {"challenge": "tw-coin_collector", "theme": "basic", "level": 3, "seed": 3}}
COMMANDS_ONLY = {"opening": ["commands"], "later": ["commands"], "leave_out": ["examine", "inventory", "look"]}
PROMPT = ({"role": "user", "content": "Find the coin."},)


@pytest.fixture(scope="module", autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Games are made once for all tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ROLLBOOK_HOME", str(tmp_path_factory.mktemp("home")))
        yield


@pytest.fixture
def begun() -> Any:
    """(options, metadata) -> an environment that was reset, and its opening."""
    open_ones: list[TextWorldEnvironment] = []

    def begin(options: Any = None, metadata: Any = None) -> tuple[TextWorldEnvironment, str]:
        world = TextWorldEnvironment(**(options or {}))
        open_ones.append(world)
        [opening] = world.reset(Episode("t", PROMPT, metadata or COIN, 1))
        return world, str(opening["content"])

    yield begin
    for world in open_ones:
        world.close()


Begin = Callable[..., tuple[TextWorldEnvironment, str]]


def test_the_winning_commands_win(begun: Begin) -> None:
    """Three commands at .1 each: -.1, -.1, 1 - .1, in all 1 - 3 x .1."""
    world, _ = begun({"step_penalty": 0.1})
    commands = world.winning_commands(COIN)
    replies = [world.step(f"Thought: on.\nAction: {command}") for command in commands]
    assert len(commands) == 3 and commands[-1] == "take coin"
    assert [reply.reward for reply in replies] == pytest.approx([-0.1, -0.1, 0.9])
    assert [reply.done for reply in replies] == [False, False, True]
    assert replies[-1].messages == ()


def test_success_is_of_the_last_turn_and_score_of_each(begun: Begin) -> None:
    """A meal is one point when it is prepared and one when it is eaten, which wins."""
    meal = {"game": {"challenge": "tw-cooking", "recipe": 1, "seed": 1}}
    for reward, expected in (("success", [0, 1]), ("score", [1, 1])):
        world, _ = begun({"reward": reward}, meal)
        assert [world.step(command).reward for command in ("prepare meal", "eat meal")] == expected


def test_commands_alone_are_short(begun: Begin) -> None:
    """The first of a chain of rooms has one way out, and nothing in it."""
    world, opening = begun(COMMANDS_ONLY)
    way = world.winning_commands(COIN)[0]
    assert opening == f"Find the coin.\n\nCommands: {way}"
    reply = world.step(way)
    assert reply.messages[0]["role"] == "user"
    assert set(str(reply.messages[0]["content"]).removeprefix("Commands: ").split(", ")) == {
        world.winning_commands(COIN)[1],
        {"north": "go south", "south": "go north", "east": "go west", "west": "go east"}[way.split()[1]],
    }


def test_the_opening_has_the_parts_asked_for(begun: Begin) -> None:
    _, opening = begun({"opening": ["objective", "inventory", "commands"]})
    lines = opening.splitlines()
    assert lines[2].startswith("First, go ") and lines[2].endswith(".")
    assert lines[3:] == ["You are carrying nothing.", lines[-1]] and lines[-1].startswith("Commands: go ")
    _, opening = begun({"opening": ["feedback"]})
    assert "$$" not in opening and "___" not in opening and "-= Room" in opening
    assert not opening.endswith("0/1")


def test_status_line_banner_and_blank_lines_are_left_out() -> None:
    told = "\n  |  $$ \\__ \n\n-= Hall =-\n A hall.  \n\n\n>          -= Hall =-0/1"
    assert squeezed(told) == "-= Hall =-\nA hall."
    assert squeezed("*** The End ***\nYou scored 1.") == "*** The End ***\nYou scored 1."


def test_siblings_share_the_game_and_not_the_episode(begun: Begin) -> None:
    first, opening = begun(COMMANDS_ONLY)
    second, same = begun(COMMANDS_ONLY)
    first.step(first.winning_commands(COIN)[0])
    assert opening == same
    assert [second.step(command).done for command in second.winning_commands(COIN)] == [False, False, True]


@pytest.mark.parametrize(
    "said",
    [
        "save",
        "restore",
        "RESTART",
        "quit",
        "script",
        "tw-print player_room",
        "please save",
        "go\x14 est",
        "\u00fc",
        "x" * 200,
    ],
)
def test_the_interpreter_is_not_commanded(begun: Begin, said: str) -> None:
    """ "save" would write beside the game, where a sibling's "restore" finds it."""
    world, _ = begun({"step_penalty": 0.1})
    folder = generated(COIN["game"], Path(os.environ["ROLLBOOK_HOME"]) / "cache" / "textworld").parent
    before = sorted(folder.iterdir())
    reply = world.step(said)
    assert reply.messages[0]["content"] == f"{said!r} is not part of the game."
    assert (reply.reward, reply.done) == (-0.1, False)
    assert sorted(folder.iterdir()) == before
    assert [world.step(command).done for command in world.winning_commands(COIN)] == [False, False, True]


def test_of_several_raw_commands_the_first_is_played(begun: Begin) -> None:
    """TextWorld would play both and lose count of what is admissible."""
    world, _ = begun({"later": ["feedback"]})
    heard = world.step("jump then sing. quit").messages[0]["content"]
    assert heard == world.step("jump").messages[0]["content"]
    assert world.step("é 中").messages  # another alphabet is only misunderstood


def test_equal_settings_give_equal_bytes_in_any_process(tmp_path: Path) -> None:
    code = "import sys, json; from pathlib import Path; from models.environments.generated import generated; "
    code += "print(generated(json.loads(sys.argv[1]), Path(sys.argv[2])))"
    here = generated(COIN["game"], tmp_path / "here")
    there = subprocess.run(
        [sys.executable, "-c", code, json.dumps(COIN["game"]), str(tmp_path / "there")],
        env=os.environ | {"PYTHONHASHSEED": "5", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    assert Path(there).read_bytes() == here.read_bytes()
    assert Path(there).relative_to(tmp_path / "there") == here.relative_to(tmp_path / "here")
    other = generated({**COIN["game"], "seed": 4}, tmp_path / "here")
    assert other != here and other.read_bytes() != here.read_bytes()


@pytest.mark.slow
def test_processes_at_once_make_one_game(tmp_path: Path) -> None:
    code = "import sys, json; from pathlib import Path; from models.environments.generated import generated; "
    code += "print(generated(json.loads(sys.argv[1]), Path(sys.argv[2])))"

    def make(_: int) -> str:
        words = [sys.executable, "-c", code, json.dumps(COIN["game"]), str(tmp_path)]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        return subprocess.run(words, env=environment, capture_output=True, text=True, check=True).stdout

    with ThreadPoolExecutor(4) as pool:
        assert len(set(pool.map(make, range(4)))) == 1
    [game] = [path for path in tmp_path.iterdir() if path.is_dir()]
    assert sorted(path.name for path in game.iterdir()) == ["game.json", "game.ni", "game.z8"]


def test_a_game_made_by_a_user_is_played(begun: Begin, tmp_path: Path) -> None:
    file = generated({"rooms": 1, "objects": 2, "quest_length": 1, "seed": 5, "theme": "basic"}, tmp_path)
    world, _ = begun({}, {"game_file": str(file)})
    [command] = world.winning_commands({"game_file": str(file)})
    assert world.step(command).done


DOMAIN = """(define (domain kitchen) (:requirements :strips :typing) (:types place thing)
 (:predicates (known ?p - place) (at ?p - place) (on ?t - thing ?p - place) (held ?t - thing))
 (:action go :parameters (?a - place ?b - place) :precondition (at ?a) :effect (and (not (at ?a)) (at ?b)))
 (:action take :parameters (?t - thing ?p - place) :precondition (and (at ?p) (on ?t ?p))
  :effect (and (not (on ?t ?p)) (held ?t)))
 (:action put :parameters (?t - thing ?p - place) :precondition (and (at ?p) (held ?t))
  :effect (and (on ?t ?p) (not (held ?t)))))"""
PROBLEM = """(define (problem one) (:domain kitchen) (:objects desk shelf - place mug - thing)
 (:init (known desk) (known shelf) (at desk) (on mug desk)) (:goal (on mug shelf)))"""
GRAMMAR = '''grammar :: """{"intro": [{"rhs": "Your task is to: put a mug on shelf."}],
 "go.feedback": [{"rhs": "You arrive at {b.name}."}], "take.feedback": [{"rhs": "You pick up the {t.name}."}],
 "put.feedback": [{"rhs": "You put the {t.name} down."}]}""";
action go { template :: "go to {b}"; feedback :: "#go.feedback#"; }
action take { template :: "take {t} from {p}"; feedback :: "#take.feedback#"; }
action put { template :: "put {t} in/on {p}"; feedback :: "#put.feedback#"; }'''


def test_a_file_of_alfworlds_kind_is_played(begun: Begin, tmp_path: Path) -> None:
    pytest.importorskip("fast_downward", reason='the planner is an extra: uv pip install "textworld[pddl]"')
    file = tmp_path / "mug.tw-pddl"
    file.write_text(json.dumps({"pddl_domain": DOMAIN, "pddl_problem": PROBLEM, "grammar": GRAMMAR}))
    world, opening = begun({"opening": ["feedback", "commands"]}, {"game_file": str(file)})
    assert opening.splitlines()[2:] == [
        "Your task is to: put a mug on shelf.",
        "Commands: go to shelf, take mug from desk",
    ]
    said = ("Action: take mug 1 from desk", "Action: go to the shelf", "Action: put mug on shelf")
    assert [world.step(action).reward for action in said] == [0.0, 0.0, 1.0]


def test_a_simulator_that_dies_raises(begun: Begin) -> None:
    world, _ = begun()
    world._world.close()
    with pytest.raises(textworld.core.GameNotRunningError):
        world.step("look")


def test_the_game_is_ended_once(begun: Begin) -> None:
    class Counted(textworld.core.Wrapper):
        closed = 0

        def close(self) -> None:
            Counted.closed += 1
            super().close()

    world, _ = begun()
    world._world = Counted(world._world)
    world.close()
    world.close()
    assert Counted.closed == 1
    TextWorldEnvironment().close()  # never reset: nothing to end


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"game": 3}, "metadata.game = 3"),
        ({"game": {"seed": "3"}}, "game.seed = '3'"),
        ({"game": {"rooms": 0}}, "at least 1"),
        ({"game": {"walls": 4}}, "no such setting"),
        ({"game": {"theme": "castle"}}, "house, basic"),
        ({"game": {"challenge": "tw-chess"}}, "tw-coin_collector"),
        ({"game": {"challenge": "tw-cooking", "walls": 4}}, "tw-make tw-cooking --help"),
        ({"game_file": "nowhere.z8"}, "absolute path"),
    ],
)
def test_a_game_that_cannot_be_had_is_refused(metadata: Any, message: str) -> None:
    with pytest.raises(GameError, match=message):
        TextWorldEnvironment().winning_commands(metadata)


def test_options_that_do_not_exist_are_refused() -> None:
    with pytest.raises(GameError, match="'map' cannot be shown"):
        TextWorldEnvironment(later=["map"])
    with pytest.raises(GameError, match="reward = 'steps'"):
        TextWorldEnvironment(reward="steps")
