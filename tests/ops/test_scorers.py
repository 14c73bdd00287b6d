"""Rule-based scorers."""

from fractions import Fraction

import pytest

from ops.scorers import Score, exact, integer, last_boxed, math, number, parse_number


@pytest.mark.parametrize(
    ("prediction", "reference", "reward"),
    [("123", "123", 1), (" 123\n", "123 ", 1), ("1 23", "123", 0), ("", "123", 0), ("ABC", "abc", 0)],
)
def test_exact(prediction, reference, reward):
    assert exact(prediction, reference) == Score(reward, prediction.strip())


@pytest.mark.parametrize(
    ("prediction", "reference", "reward", "extracted"),
    [
        (r"so \boxed{42}.", "42", 1, "42"),
        (r"\boxed{1}, no, \boxed{2}", "2", 1, "2"),
        (r"\boxed{1}, no, \boxed{2}", "1", 0, "2"),
        (r"\boxed{12} and then \boxed{13", "12", 1, "12"),  # unclosed: no box
        (r"\boxed{13", "13", 0, None),
        (r"\boxed{x = 7}", "7", 1, "7"),
        (r"\boxed{a = b = \frac{3}{4}}", ".75", 1, r"\frac{3}{4}"),
        (r"\boxed{1,234}", "1234", 1, "1,234"),
        (r"\boxed{1,23}", "123", 0, "1,23"),
        (r"\boxed{\$5.00}", "5", 1, r"\$5.00"),
        (r"\boxed{-3/4}", "-0.75", 1, "-3/4"),
        (r"\boxed{}", "0", 0, ""),
        (r"\boxed{two}", "2", 0, "two"),
        ("work\n#### 18", "18", 1, "18"),
        ("#### 17\nno\n#### 18\n", "18", 1, "18"),
        (r"\boxed{1} #### 2", "1", 1, "1"),  # a box wins
        ("#### 18", "3 + 15\n#### 18", 1, "18"),  # GSM8K's own answers as reference
        ("the answer is 42", "42", 0, None),  # never just the last number
        ("42", "42", 0, None),
        ("", "42", 0, None),
    ],
)
def test_number(prediction, reference, reward, extracted):
    assert number(prediction, reference) == Score(reward, extracted)


@pytest.mark.parametrize(
    ("prediction", "reference", "reward", "extracted"),
    [
        ("46", "46", 1, "46"),
        ("12 + 34 = 46.", "46", 1, "46"),
        ("46, no, 47", "46", 0, "47"),
        ("The sum is 1,234,567!", "1234567", 1, "1,234,567"),
        ("1,2", "2", 1, "2"),  # no thousands: a list
        ("1,2345", "2345", 1, "2345"),
        ("it is 007", "7", 1, "007"),
        ("-5", "-5", 1, "-5"),
        ("\u22125", "-5", 1, "\u22125"),
        ("(-5)", "-5", 1, "-5"),
        ("+5", "5", 1, "5"),
        ("8 - 5", "5", 1, "5"),
        ("8-5", "5", 1, "5"),  # a difference, a hyphen
        ("step-5", "5", 1, "5"),
        ("8-5", "-5", 0, "5"),
        ("5", "-5", 0, "5"),
        ("-0", "0", 1, "-0"),
        ("3.46", "46", 0, None),  # decimals are no integer
        ("46 or .5", "46", 1, "46"),
        ("46.0", "46", 0, None),
        ("1,234.5", "5", 0, None),
        ("wait...46", "46", 1, "46"),
        ("**46**<|im_end|>", "46", 1, "46"),
        ("9" * 5000, "9", 0, "9" * 5000),
        ("forty-six", "46", 0, None),
        ("", "46", 0, None),
    ],
)
def test_integer(prediction, reference, reward, extracted):
    assert integer(prediction, reference) == Score(reward, extracted)


@pytest.mark.parametrize("reference", ["", "forty", "1.5"])
def test_integer_refuses_a_reference_that_is_none(reference):
    with pytest.raises(ValueError, match=r"reference .* not an integer"):
        integer("1", reference)


@pytest.mark.parametrize("reference", ["", "forty-two", "1/0", "9" * 200])
def test_number_refuses_a_reference_that_is_none(reference):
    with pytest.raises(ValueError, match=r"reference .* not a number"):
        number(r"\boxed{1}", reference)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0.1", Fraction(1, 10)),
        ("+12.", Fraction(12)),
        (r"\dfrac{6}{4}", Fraction(3, 2)),
        ("1,234,567", Fraction(1234567)),
        ("\u22125", Fraction(-5)),
        ("1/0", None),
        (r"\frac{1}{0}", None),
        ("1e9999999999", None),  # would not fit into memory
        ("9" * 5000, None),
        ("--1", None),
        ("1 apple", None),
    ],
)
def test_parse_number(text, value):
    assert parse_number(text) == value


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{1\boxed{2}}", "2"),
        (r"}} \boxed{1} {", "1"),
        ("no box", None),
        (r"\boxed{" * 10_000, None),
    ],
)
def test_last_boxed(text, content):
    assert last_boxed(text) == content


@pytest.mark.parametrize(
    ("prediction", "reference", "reward"),
    [
        (r"\boxed{\frac{1}{2}}", "0.5", 1),
        (r"It is $x^2+2x+1$.", "(x+1)^2", 1),
        ("42", "42", 1),
        (r"\boxed{41}", "42", 0),
        (r"\boxed{", "42", 0),
        ("no idea", "42", 0),
        ("", "42", 0),
    ],
)
def test_math(prediction, reference, reward):
    assert math(prediction, reference).reward == reward


def test_math_shows_what_it_extracted():
    assert math(r"so \boxed{\frac{1}{2}}", "0.5").extracted == r"\frac{1}{2}"
    assert math("no idea", "42").extracted is None


@pytest.mark.parametrize("reference", ["", "  "])
def test_math_refuses_a_reference_that_it_cannot_read(reference):
    with pytest.raises(ValueError, match="math-verify reads no expression"):
        math("1", reference)
