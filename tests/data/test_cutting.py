"""Texts that are cut to fit: what they then take, and what is said of the rest."""

import json

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from data.cutting import Cut, cut, share


def test_the_longest_are_cut_first() -> None:
    """13 bytes: 3 for the short one leave 10, of which a third, 3, stands at the end."""
    assert cut(["abc", "x" * 10 + "y" * 10], 13) == ["abc", ("x" * 7, 10, "y" * 3)]
    assert cut(["abc", "xyz"], 6) == ["abc", "xyz"]
    assert cut([], 5) == [] and cut(["a"], 0) == [("", 1, "")]


def test_no_character_is_cut_apart() -> None:
    """Of 3 bytes each, 8 allowed: 6 before and 2 at the end, which are none."""
    assert cut(["日本語テキスト"], 8) == [("日本", 5, "")]


def test_escapes_are_counted_as_they_are_written() -> None:
    r"""NUL is \u0000, six bytes: of 24, two thirds hold two, and one third one."""
    assert cut(["\x00" * 10], 24) == [("\x00" * 2, 7, "\x00")]


def test_share_is_the_level_that_fills_the_budget() -> None:
    """3 + 10 = 13; 4 and 4 of 8; nothing to cut gives the largest."""
    assert share(np.array([3, 20]), 13) == 10 and share(np.array([9, 9]), 8) == 4 and share(np.array([3, 5]), 100) == 5


def size(found: str | Cut) -> int:
    parts = [found] if isinstance(found, str) else [found[0], found[2]]
    text = json.dumps("".join(parts), ensure_ascii=False)[1:-1]
    for character in "<>&\u2028\u2029":
        text = text.replace(character, "\\u0000")
    return len(text.encode("utf-8", "backslashreplace"))


ANY_TEXT = st.text(st.characters(codec=None) | st.sampled_from('<>&"\\\u2028\u2029\x00\ud800日é'))


@given(st.lists(ANY_TEXT, max_size=6), st.integers(0, 200))
def test_all_together_fit_and_nothing_is_lost_uncounted(texts: list[str], budget: int) -> None:
    found = cut(texts, budget)
    assert sum(map(size, found)) <= budget
    for text, kept in zip(texts, found, strict=True):
        if isinstance(kept, tuple):
            head, gone, tail = kept
            assert text.startswith(head) and text.endswith(tail) and len(head) + gone + len(tail) == len(text)
        else:
            assert kept == text
