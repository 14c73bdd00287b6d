"""Rule-based scorers: (prediction, reference) -> Score. Pure; whoever calls them bounds their time."""

import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

# math-verify can only time itself out by signals, which workers cannot use, and says so at each start.
logging.getLogger("math_verify").setLevel(logging.ERROR)

NO_TIMEOUT = 0
LONGEST_NUMBER = 100  # characters; converting longer digit strings costs more than any real answer is worth
_NUMBER = re.compile(r"([+-]?)(\d+(?:\.\d*)?|\.\d+)(?:/(\d+))?")
_FRACTION = re.compile(r"([+-]?)\\[dt]?frac\{(\d+)\}\{(\d+)\}")
# Sign (a dash after a letter or digit is none), whole part, decimals.
_WRITTEN = re.compile(
    r"((?<!\w)[-\u2212])?([0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(\.[0-9]+)?"
    r"|(?<!\.)\.[0-9]+"
)
_BRACES = re.compile(r"\\boxed\{|[{}]")
_HASHES = re.compile(r"####[ \t]*(\S[^\n]*)")


@dataclass(frozen=True)
class Score:
    reward: float
    extracted: str | None  # the answer that was compared; None if the prediction has none


Scorer = Callable[[str, str], Score]


def exact(prediction: str, reference: str) -> Score:
    """1 if the two are equal, white space at their ends apart, else 0."""
    answer = prediction.strip()
    return Score(float(answer == reference.strip()), answer)


def number(prediction: str, reference: str) -> Score:
    r"""1 if the answer that the prediction marks is the reference number, else 0.

    The answer is what follows the last `=` in the last balanced \boxed{}, else in the last `#### answer` (GSM8K); never
    just the last number in the text. Compared exactly, as integers, decimals or fractions. The reference is a number or
    itself marked in one of these ways. Raises ValueError for a reference that is no number.
    """
    expected = parse_number(_marked(reference) or reference)
    if expected is None:
        raise ValueError(f"reference {reference!r}: not a number; fix the data set or use the scorer 'math' or 'exact'")
    answer = _marked(prediction)
    return Score(float(answer is not None and parse_number(answer) == expected), answer)


def integer(prediction: str, reference: str) -> Score:
    """1 if the last integer in the prediction, marked or not, is the reference, else 0.

    Commas between thousands are dropped, numbers with decimals are passed over. Raises ValueError for a reference that
    is no integer.
    """
    expected = parse_number(reference)
    if expected is None or expected.denominator != 1:
        raise ValueError(f"reference {reference!r}: not an integer; fix the data set or use the scorer 'number'")
    written = [match[0] for match in _WRITTEN.finditer(prediction) if match[2] and not match[3]]
    answer = written[-1] if written else None
    return Score(float(answer is not None and parse_number(answer) == expected), answer)


def math(prediction: str, reference: str) -> Score:
    """1 if math-verify finds the prediction's answer (boxed or not) equal to the reference, else 0.

    Raises ValueError for a reference that math-verify cannot read.
    """
    import math_verify  # with sympy, which takes a second that no other scorer needs

    expected = math_verify.parse(f"\\boxed{{{reference}}}", parsing_timeout=NO_TIMEOUT)
    if not expected:
        raise ValueError(f"reference {reference!r}: math-verify reads no expression in it; fix the data set")
    found = math_verify.parse(prediction, parsing_timeout=NO_TIMEOUT)
    right = math_verify.verify(expected, found, timeout_seconds=NO_TIMEOUT)
    return Score(float(right), str(found[-1]) if found else None)


SCORERS: dict[str, Scorer] = {"exact": exact, "number": number, "integer": integer, "math": math}


def _marked(text: str) -> str | None:
    boxed = last_boxed(text)
    if boxed is None:
        hashes = _HASHES.findall(text)
        boxed = hashes[-1] if hashes else None
    return None if boxed is None else boxed.rsplit("=", 1)[-1].strip()


def last_boxed(text: str) -> str | None:
    r"""The content of the \boxed{...} that opens last among those whose braces balance, None if there is none."""
    opened: list[re.Match[str]] = []
    found: tuple[int, str | None] = (-1, None)
    for brace in _BRACES.finditer(text):
        if brace[0] != "}":
            opened.append(brace)
        elif opened:
            start = opened.pop()
            if start[0] != "{" and start.end() > found[0]:
                found = (start.end(), text[start.end() : brace.start()])
    return found[1]


def parse_number(text: str) -> Fraction | None:
    r"""'1,234', '$5', '-.5', '3/4', '\frac{3}{4}' or '12.0.' -> its exact value; None for anything else."""
    compact = re.sub(r"\\[!,;$]|[\s$]", "", text).rstrip(".").replace("\u2212", "-")
    compact = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", compact)
    if len(compact) > LONGEST_NUMBER:
        return None
    match = _FRACTION.fullmatch(compact) or _NUMBER.fullmatch(compact)
    if match is None:
        return None
    sign, numerator, denominator = match.groups()
    if denominator is not None and not int(denominator):
        return None
    return Fraction(f"{sign}{numerator}") / int(denominator or 1)
