"""What a judge is asked, and what its words mean."""

import pytest

from ops.verdicts import LONGEST_PREDICTION, answer_in, ask, verdict


@pytest.mark.parametrize(
    ("said", "right"),
    [
        ("correct", 1),
        ("Correct.", 1),
        ("The answer is CORRECT", 1),
        ("equivalent", 1),
        ("Yes", 1),
        ("yes, both are 4", 1),
        ("incorrect", 0),
        ("Incorrect.", 0),
        ("INCORRECT", 0),
        ("The answer is not correct.", 0),
        ("not   correct", 0),
        ("not\ncorrect", 0),
        ("It isn't correct", 0),
        ("it isnt correct", 0),
        ("Wrong", 0),
        ("not equivalent", 0),
        ("Yes, it is wrong", 0),  # negative first, whatever the order of the words
        ("correct? No: incorrect", 0),
        ("Incorrect. The correct answer is 4", 0),
        ("correctness", 0),  # no word of ours
        ("incorrectly", 0),
        ("yesterday", 0),
        ("wrongly stated, yet correct", 1),
        ("I cannot tell", 0),
        ("", 0),
    ],
)
def test_c30_negative_first(said, right):
    assert verdict(said) == right


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("<answer>4</answer>", "4"),
        ("<answer>3</answer> no, <answer> 4\n</answer> is it", "4"),
        ("<answer>two\nlines</answer>", "two\nlines"),
        ("It is 4.", "It is 4."),
        ("<answer>4", "<answer>4"),
        ("<answer></answer>", ""),
        ("", ""),
    ],
)
def test_the_last_tagged_answer_else_all_of_it(response, answer):
    assert answer_in(response) == answer


def test_what_is_asked():
    """Question, reference and prediction as they are, braces too; the prediction's first 4,000 characters."""
    asked = ask("What is {x}?", "{4}", "{prediction}" + "x" * 5000)
    for part in ("Question:\nWhat is {x}?\n", "Reference answer:\n{4}\n", "Given answer:\n{prediction}xxx"):
        assert part in asked
    assert LONGEST_PREDICTION == 4000
    assert "x" * (4000 - len("{prediction}")) + "\n" in asked and "x" * (4001 - len("{prediction}")) not in asked
