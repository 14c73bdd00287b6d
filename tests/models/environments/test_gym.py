"""Gymnasium's games, played through its own FrozenLake and Taxi, and through a world written here."""

from typing import Any

import gymnasium
import pytest
from gymnasium import spaces

from models.environments.contract import Episode
from models.environments.gym import GymEnvironment
from models.environments.spec import EnvironmentSpec

LAKE = {"id": "FrozenLake-v1", "actions": ["left", "down", "right", "up"]}
STILL = {"render_mode": "ansi", "is_slippery": False}
TAXI = {"id": "Taxi-v4", "actions": ["south", "north", "east", "west", "pick up", "drop off"]}


def episode(seed: int = 7, **metadata: Any) -> Episode:
    return Episode("t", ({"role": "user", "content": "Cross the lake."},), metadata, seed)


def test_a_lake_is_crossed() -> None:
    """The map is SFFF FHFH FFFH HFFG: down, down, right, down, right, right leads to G, past every H."""
    world = EnvironmentSpec("gym", options={**LAKE, "game": STILL}).make()
    [opening] = world.reset(episode())
    assert opening == {"role": "user", "content": "Cross the lake.\n\n[S]FFF\nFHFH\nFFFH\nHFFG"}
    replies = [world.step(said) for said in ("down", "Action: Down!", "I go right", "down", "right", "right")]
    assert [reply.reward for reply in replies] == [0, 0, 0, 0, 0, 1]
    assert [reply.done for reply in replies] == [False] * 5 + [True]
    assert replies[2].messages[0]["content"].endswith("SFFF\nFHFH\nF[F]FH\nHFFG")
    assert replies[-1].messages == ()
    world.close()


def test_a_hole_ends_it_without_reward() -> None:
    world = GymEnvironment(**LAKE, game=STILL)
    world.reset(episode())
    world.step("down")
    reply = world.step("right")
    assert (reply.done, reply.reward) == (True, 0.0)
    world.close()


def test_what_is_no_action_leaves_the_world_alone() -> None:
    world = GymEnvironment(**LAKE, game=STILL)
    world.reset(episode())
    reply = world.step("jump")
    assert (reply.done, reply.reward) == (False, 0.0)
    assert reply.messages[0]["content"] == "'jump' is none of: left, down, right, up"
    assert world.step("down").messages[0]["content"].endswith("SFFF\n[F]HFH\nFFFH\nHFFG")
    world.close()


def taxi(of: Episode) -> str:
    world = GymEnvironment(**TAXI, game={"render_mode": "ansi"})
    [opening] = world.reset(of)
    world.close()
    return str(opening["content"])


def test_siblings_start_alike_by_the_prompts_seed_and_apart_by_their_own() -> None:
    """Taxi has 300 starts: of five draws by different seeds not all are one, but for 1 chance in 300^4."""
    assert len({taxi(episode(seed)) for seed in range(5)}) > 1
    assert len({taxi(episode(seed, game={"seed": 3})) for seed in range(5)}) == 1


def test_the_prompts_settings_go_over_the_options() -> None:
    world = GymEnvironment(**LAKE, game={**STILL, "desc": ["SF", "FG"]})
    [opening] = world.reset(episode(game={"desc": ["SF", "HG"]}))
    assert opening["content"].endswith("[S]F\nHG")
    world.close()


class Echo(gymnasium.Env[str, str]):
    """Says what it is told; two turns are all it gives; "boom" breaks it."""

    observation_space = spaces.Text(100)
    action_space = spaces.Text(5, charset="abmo")

    def __init__(self) -> None:
        self.closed = 0
        self.turns = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        return f"seed {seed}", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        if action == "boom":
            raise RuntimeError("the world broke")
        self.turns += 1
        return f"heard {action}", 0.5, False, self.turns == 2, {}

    def close(self) -> None:
        self.closed += 1


class EchoEnvironment(GymEnvironment):
    def make(self, game: Any) -> Echo:
        self.world = Echo()
        return self.world


def test_a_world_of_texts_is_a_subclass_with_its_own_make() -> None:
    world = EchoEnvironment()
    assert world.reset(episode(seed=11))[0]["content"] == "Cross the lake.\n\nseed 11"
    first = world.step("Action: ab")
    assert (first.messages, first.reward, first.done) == (({"role": "user", "content": "heard ab"},), 0.5, False)
    assert world.step("xyz").messages[0]["content"] == "'xyz' is no action here."
    assert world.step("ba").done  # truncated by the world


def test_a_world_that_breaks_raises_and_is_closed_once() -> None:
    world = EchoEnvironment()
    world.reset(episode())
    with pytest.raises(RuntimeError, match="the world broke"):
        world.step("boom")
    world.close()
    world.close()
    assert world.world.closed == 1
    EchoEnvironment().close()  # never reset: nothing to end


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "no id"),
        ({"id": "FrozenLake-v1", "actions": ["left", "down"], "game": STILL}, "for 4 actions"),
        ({"id": "FrozenLake-v1", "actions": ["left", "left", "right", "up"], "game": STILL}, "its own name"),
        (LAKE, "render_mode = 'ansi'"),
        ({"id": "Pendulum-v1"}, "must be text, or discrete"),
    ],
)
def test_what_cannot_be_played_is_refused(options: dict[str, Any], message: str) -> None:
    world = GymEnvironment(**options)
    with pytest.raises(ValueError, match=message):
        world.reset(episode())
    world.close()


def test_settings_that_are_no_object_are_refused() -> None:
    with pytest.raises(ValueError, match=r"metadata.game = 3"):
        GymEnvironment(**LAKE).reset(episode(game=3))
