"""From what a policy says to an action that its world knows."""

import re
from collections.abc import Sequence

MARK = "Action:"
ALIKE = 0.5  # a command must share more than this part of the words


def said_action(said: str) -> str:
    """The text after the last "Action:", stripped; without one the whole text."""
    return said.rpartition(MARK)[2].strip()


def snapped(action: str, commands: Sequence[str]) -> str:
    """The command that an action means, or the action itself where none fits. Case and punctuation do not count.

    In this order: the command of the same words; a command within the action (the first there, of those that begin at
    one word the longest), or else the shortest one that the action is within; the one whose set of words is most alike,
    |A ∩ B| / |A ∪ B| > 0.5. Of equals the first in `commands`.
    """
    said = _words(action)
    words = [_words(command) for command in commands]
    if not said:
        return action
    if said in words:
        return commands[words.index(said)]
    found = _within(said, words)
    if found is None:
        found = _most_alike(said, words)
    return action if found is None else commands[found]


def _words(text: str) -> list[str]:
    return re.findall(r"[\w'-]+", text.casefold())


def _within(said: list[str], words: list[list[str]]) -> int | None:
    inside = [(at, -len(command), i) for i, command in enumerate(words) if (at := _place(command, said)) is not None]
    around = [(len(command), i) for i, command in enumerate(words) if _place(said, command) is not None]
    if inside:
        return min(inside)[-1]
    return min(around)[-1] if around else None


def _place(part: list[str], whole: list[str]) -> int | None:
    """Where a run of words begins in another. Whole words: "desk 1" is not within "desk 12"."""
    starts = range(len(whole) - len(part) + 1) if part else ()
    return next((at for at in starts if whole[at : at + len(part)] == part), None)


def _most_alike(said: list[str], words: list[list[str]]) -> int | None:
    mine = set(said)
    shares = [len(mine & set(command)) / len(mine | set(command)) for command in words]
    best = max(range(len(words)), key=shares.__getitem__, default=None)
    return best if best is not None and shares[best] > ALIKE else None
