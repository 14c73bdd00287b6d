"""A calculator for the model: arithmetic of numbers, whose work is bounded."""

import ast
import math
import operator
from collections.abc import Callable

LENGTH = 1_000  # characters of an expression
BITS = 4_096  # of any integer on the way

Number = int | float

BINARY: dict[type[ast.operator], Callable[[Number, Number], Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
UNARY: dict[type[ast.unaryop], Callable[[Number], Number]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}


def calculator(expression: str) -> int | float:
    """Calculate an arithmetic expression of numbers, + - * / // % ** and parentheses."""
    if len(expression) > LENGTH:
        raise ValueError(f"the expression has {len(expression)} characters; at most {LENGTH} are allowed")
    try:
        return _value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, MemoryError, RecursionError):
        raise ValueError(f"{expression[:100]!r} is no arithmetic expression") from None
    except ArithmeticError as error:
        raise ValueError(f"{expression[:100]!r}: {error.args[-1]}") from None


def _value(node: ast.expr) -> Number:
    match node:
        case ast.Constant(value=value) if type(value) in (int, float):
            return _bounded(value)
        case ast.UnaryOp(op=op, operand=operand) if type(op) in UNARY:
            return UNARY[type(op)](_value(operand))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in BINARY:
            return _binary(type(op), _value(left), _value(right))
        case _:
            raise ValueError(f"{type(node).__name__} is not allowed; numbers, + - * / // % ** and parentheses are")


def _binary(op: type[ast.operator], left: Number, right: Number) -> Number:
    whole = isinstance(left, int) and isinstance(right, int)
    if op is ast.Pow and whole and abs(left) > 1 and (left.bit_length() - 1) * right > BITS:
        raise ValueError(f"the power is too large: more than {BITS} bits")
    return _bounded(BINARY[op](left, right))


def _bounded(number: Number) -> Number:
    if isinstance(number, complex) or not (isinstance(number, int) or math.isfinite(number)):
        raise ValueError(f"{number} is no finite real number")
    if isinstance(number, int) and number.bit_length() > BITS:
        raise ValueError(f"the number is too large: more than {BITS} bits")
    return number
