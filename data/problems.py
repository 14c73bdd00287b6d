"""Problems made on demand, for warm starts, tests and the quickstart. One in five, by hash, is never trained on."""

import hashlib
import json
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from itertools import count as count_up
from typing import ClassVar

from data.seeds import derive

HELD_OUT_PART = 5
CALLS_IN_TEN = 3
WALK = 0.6180339887498949  # golden ratio: neighbours in the walk are far apart in the space


@dataclass(frozen=True)
class Problem(ABC):
    """A numbered space of problems with one right answer each."""

    digits: int
    name: ClassVar[str]
    version: ClassVar[int]  # raised when the problems change
    default_digits: ClassVar[int]
    max_digits: ClassVar[int]  # a drawing has 63 bits

    @property
    @abstractmethod
    def size(self) -> int:
        """Items are 0 ... size - 1."""
        ...

    @abstractmethod
    def text(self, item: int) -> str:
        """What names the problem."""
        ...

    @abstractmethod
    def family(self, item: int) -> str:
        """What decides by its hash whether the problem is held out: all of one family are, or none."""
        ...

    @abstractmethod
    def question(self, item: int) -> str: ...

    @abstractmethod
    def answer(self, item: int) -> str: ...

    def shown(self, item: int, seed: int) -> tuple[str, ...]:
        """What a warm start shows of it: the policy's turns. seed: for what is shown in several ways."""
        return (self.answer(item),)


@dataclass(frozen=True)
class Sort(Problem):
    """Sort the digits of a number: "Sort: 482913" -> "123489"."""

    name: ClassVar[str] = "sort"
    version: ClassVar[int] = 1
    default_digits: ClassVar[int] = 6
    max_digits: ClassVar[int] = 18

    @property
    def size(self) -> int:
        return 10**self.digits

    def text(self, item: int) -> str:
        return f"{item:0{self.digits}d}"

    def family(self, item: int) -> str:
        return self.text(item)

    def question(self, item: int) -> str:
        return f"Sort: {self.text(item)}"

    def answer(self, item: int) -> str:
        return "".join(sorted(self.text(item)))


@dataclass(frozen=True)
class Addition(Problem):
    """Add two numbers of equally many digits: "What is 12+34?" -> "46"."""

    name: ClassVar[str] = "addition"
    version: ClassVar[int] = 1
    default_digits: ClassVar[int] = 2
    max_digits: ClassVar[int] = 9

    @property
    def size(self) -> int:
        return self._span**2

    def text(self, item: int) -> str:
        left, right = self._terms(item)
        return f"{left}+{right}"

    def family(self, item: int) -> str:
        return self.text(item)

    def question(self, item: int) -> str:
        return f"What is {self.text(item)}?"

    def answer(self, item: int) -> str:
        return str(sum(self._terms(item)))

    @property
    def _low(self) -> int:
        return 10 ** (self.digits - 1) if self.digits > 1 else 0

    @property
    def _span(self) -> int:
        return 10**self.digits - self._low

    def _terms(self, item: int) -> tuple[int, int]:
        left, right = divmod(item, self._span)
        return left + self._low, right + self._low


@dataclass(frozen=True)
class AddMix(Problem):
    """Add numbers of mixed sizes: "What is 7 + 34?" -> "41". a+b and b+a are one family.

    A third each: two digits, a long number and a digit of 1 to 9 in either order, two long numbers. The smaller kinds
    are numbered several times over, so that a draw of items is a draw of thirds.
    """

    name: ClassVar[str] = "addmix"
    version: ClassVar[int] = 1
    default_digits: ClassVar[int] = 2
    max_digits: ClassVar[int] = 9

    @property
    def size(self) -> int:
        return 3 * math.lcm(10 * 10, 2 * 9 * self._span, self._span**2)

    def text(self, item: int) -> str:
        left, right = self._terms(item)
        return f"{left}+{right}"

    def family(self, item: int) -> str:
        smaller, larger = sorted(self._terms(item))
        return f"{larger}+{smaller}"

    def question(self, item: int) -> str:
        left, right = self._terms(item)
        return f"What is {left} + {right}?"

    def answer(self, item: int) -> str:
        return str(sum(self._terms(item)))

    @property
    def _low(self) -> int:
        return 10 ** (self.digits - 1)

    @property
    def _span(self) -> int:
        return 9 * self._low

    def _terms(self, item: int) -> tuple[int, int]:
        at, kind = divmod(item, 3)
        if kind == 0:
            return divmod(at % 100, 10)
        if kind == 1:
            long, short = divmod(at // 2 % (9 * self._span), 9)
            pair = long + self._low, short + 1
            return pair if at % 2 else pair[::-1]
        left, right = divmod(at % self._span**2, self._span)
        return left + self._low, right + self._low


class Calc(Addition):
    """Additions for a policy that has a calculator, the environment's tool.

    A warm start shows it called in three of ten, else a guess: both forms are taught, that the tool pays is not.
    """

    name: ClassVar[str] = "calc"

    def shown(self, item: int, seed: int) -> tuple[str, ...]:
        if derive(seed, "call") % 10 >= CALLS_IN_TEN:
            low, high = 2 * self._low, 2 * (self._low + self._span - 1)
            return (f"The answer is {low + derive(seed, 'guess') % (high - low + 1)}.",)
        call = json.dumps({"name": "calculator", "arguments": {"expression": self.text(item)}})
        return f"<tool_call>\n{call}\n</tool_call>", f"The answer is {self.answer(item)}."


PROBLEMS: dict[str, type[Problem]] = {kind.name: kind for kind in (Sort, Addition, AddMix, Calc)}


def is_held_out(problem: Problem, item: int) -> bool:
    digest = hashlib.sha256(f"{problem.name} {problem.family(item)}".encode()).digest()
    return int.from_bytes(digest[:8]) % HELD_OUT_PART == 0


def draw(problem: Problem, cursor: int, seed: int, stream: str) -> int:
    """The training item at a position of a stream of drawings with replacement: a function of the arguments alone."""
    tries = (derive(seed, problem.name, stream, cursor, attempt) % problem.size for attempt in count_up())
    return next(item for item in tries if not is_held_out(problem, item))


def held_out(problem: Problem, count: int) -> list[int]:
    """`count` different held-out items, always the same; all there are if that is fewer."""
    found: list[int] = []
    step = _coprime(int(problem.size * WALK), problem.size)
    for at in range(problem.size):
        if len(found) >= count:
            break
        item = at * step % problem.size
        if is_held_out(problem, item):
            found.append(item)
    return found


def _coprime(start: int, size: int) -> int:
    """The first number from `start` that shares no divisor with `size`: its multiples reach every item."""
    return next(step for step in count_up(max(start, 1)) if math.gcd(step, size) == 1)
