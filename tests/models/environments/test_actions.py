"""What a policy says becomes a command, by rules worked by hand; openings join the user's turn."""

import pytest

from models.environments.actions import said_action, snapped
from models.environments.observations import with_opening

ROOM = ["go east", "go to desk 1", "go to desk 12", "look", "take mug 1", "take mug 1 from desk 1"]


@pytest.mark.parametrize(
    ("said", "action"),
    [
        ("go east", "go east"),
        ("  go east \n", "go east"),
        ("Thought: a desk.\nAction: go to desk 1", "go to desk 1"),
        ("Action: look\nAction: go east", "go east"),  # the last one
        ("Action:", ""),
        ("action: look", "action: look"),  # the mark as it is
    ],
)
def test_the_action_is_what_follows_the_last_mark(said: str, action: str) -> None:
    assert said_action(said) == action


@pytest.mark.parametrize(
    ("action", "command"),
    [
        ("go east", "go east"),
        ("Go East.", "go east"),  # neither case nor punctuation
        ("go to desk 12", "go to desk 12"),  # exact before "desk 1" within it
        ("I go east now", "go east"),
        ("go to desk 123", "go to desk 1"),  # within none; 3 of 5 words as with "... 12", and the first
        ("look, then go east", "look"),  # the first in the text
        ("take mug 1 from desk 1 please", "take mug 1 from desk 1"),  # of two that begin at one word the longer
        ("mug 1", "take mug 1"),  # within two commands: the shorter
        ("take the mug 1", "take mug 1"),  # {take, mug, 1} of {take, the, mug, 1}: 3/4
        ("walk east", "walk east"),  # 1/3 with "go east": too little
        ("dance", "dance"),
        ("a", "a"),  # within "take" by its letter only
        ("", ""),
        ("!?", "!?"),
    ],
)
def test_it_is_snapped_to_a_command(action: str, command: str) -> None:
    assert snapped(action, ROOM) == command


def test_half_of_the_words_are_too_few() -> None:
    """{put, mug, down} and {take, mug, down}: 2 of 4."""
    assert snapped("put mug down", ["take mug down"]) == "put mug down"


def test_of_commands_of_the_same_words_the_first_counts() -> None:
    assert snapped("GO", ["go!", "go"]) == "go!"


def test_without_commands_nothing_is_changed() -> None:
    assert snapped("go east", []) == "go east"


USER = {"role": "user", "content": "Play."}
SYSTEM = {"role": "system", "content": "You play."}


def test_the_opening_joins_the_last_user_turn() -> None:
    assert with_opening([SYSTEM, USER], "A room.") == (SYSTEM, {"role": "user", "content": "Play.\n\nA room."})


def test_after_another_turn_or_none_the_opening_is_a_turn() -> None:
    opening = {"role": "user", "content": "A room."}
    assert with_opening([SYSTEM], "A room.") == (SYSTEM, opening)
    assert with_opening([], "A room.") == (opening,)
    assert with_opening([USER], "") == (USER,)
