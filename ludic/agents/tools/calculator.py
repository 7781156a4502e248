"""Compute arithmetic expressions exactly, with fractions, from Python's syntax tree and never by running code."""

import ast
import math
import operator
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

from ludic.errors import ToolError

MAX_CHARS = 1_000
"""Maximum characters of an expression."""
MAX_BITS = 4_096
"""Maximum bits of a numerator or denominator of any intermediate value; about 1,230 decimal digits."""
MAX_FACTORIAL = 500

BINARY: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
UNARY: Mapping[type[ast.unaryop], Callable[[Any], Any]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}


async def calculator(expression: str) -> str:
    """Compute an arithmetic expression exactly. Knows + - * / // % **, parentheses, and the functions abs, ceil,
    factorial, floor, gcd, lcm, max, min, round.

    Args:
        expression: The expression, such as (2 + 3) * 4 / 7
    """
    return calculate(expression)


def calculate(expression: str) -> str:
    """Return the value of an expression: 7, 0.25, or 1/3 (about 0.3333333333). Raises ToolError if it has none."""
    if len(expression) > MAX_CHARS:
        raise ToolError(f"the expression has {len(expression):,} characters; at most {MAX_CHARS:,} are allowed")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
        return _as_text(_value(tree.body, expression.strip()))
    except SyntaxError as error:
        raise ToolError(f"{expression!r} is not an arithmetic expression: {error.msg}") from error
    except ZeroDivisionError as error:
        raise ToolError("division by zero") from error
    except (ValueError, TypeError, MemoryError, RecursionError) as error:
        raise ToolError(f"{expression!r} can't be computed: {error}") from error


def _value(node: ast.expr, source: str) -> Fraction:
    match node:
        case ast.Constant():
            value = _number(node, source)
        case ast.UnaryOp() if type(node.op) in UNARY:
            value = UNARY[type(node.op)](_value(node.operand, source))
        case ast.BinOp(op=ast.Pow()):
            value = _power(_value(node.left, source), _value(node.right, source))
        case ast.BinOp() if type(node.op) in BINARY:
            value = Fraction(BINARY[type(node.op)](_value(node.left, source), _value(node.right, source)))
        case ast.Call(func=ast.Name(id=name), keywords=[]) if name in FUNCTIONS:
            value = Fraction(FUNCTIONS[name](*(_value(argument, source) for argument in node.args)))
        case _:
            raise ToolError(_unknown(node, source))
    return _bounded(value)


def _number(node: ast.Constant, source: str) -> Fraction:
    if isinstance(node.value, int) and not isinstance(node.value, bool):
        return Fraction(node.value)
    if not isinstance(node.value, float):
        raise ToolError(_unknown(node, source))
    text = ast.get_source_segment(source, node) or ""
    _, _, exponent = text.lower().partition("e")
    if exponent and abs(int(exponent)) > MAX_BITS:
        raise ToolError(f"{text} is too large or too small")
    return Fraction(text)  # from the text, since the float 0.1 is not exactly a tenth


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        raise ToolError(f"the exponent {_as_text(exponent)} is not a whole number, so the power is not exact")
    if abs(base) not in (0, 1) and _num_bits(base) * abs(exponent) > 2 * MAX_BITS:
        raise ToolError("the power is too large")
    return Fraction(base ** int(exponent))


def _factorial(number: Fraction) -> int:
    if not 0 <= number <= MAX_FACTORIAL:
        raise ToolError(f"factorial is known from 0 to {MAX_FACTORIAL}")
    return math.factorial(_whole(number))


def _round(number: Fraction, digits: Fraction = Fraction(0)) -> Fraction:
    """Round half to even, as Python does."""
    if abs(digits) > MAX_BITS // 4:
        raise ToolError("round takes fewer digits")
    return Fraction(round(number, _whole(digits)))


def _whole(number: Fraction) -> int:
    if number.denominator != 1:
        raise ToolError(f"{_as_text(number)} is not a whole number")
    return int(number)


FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "abs": abs,
    "ceil": math.ceil,
    "factorial": _factorial,
    "floor": math.floor,
    "gcd": lambda *numbers: math.gcd(*map(_whole, numbers)),
    "lcm": lambda *numbers: math.lcm(*map(_whole, numbers)),
    "max": max,
    "min": min,
    "round": _round,
}


def _bounded(value: Fraction) -> Fraction:
    if _num_bits(value) > MAX_BITS:
        raise ToolError(f"a number has more than {MAX_BITS:,} bits, which is too large")
    return value


def _num_bits(value: Fraction) -> int:
    return max(value.numerator.bit_length(), value.denominator.bit_length())


def _as_text(value: Fraction) -> str:
    if value.denominator == 1:
        return str(value.numerator)
    twos, rest = 0, value.denominator
    while rest % 2 == 0:
        twos, rest = twos + 1, rest // 2
    fives = 0
    while rest % 5 == 0:
        fives, rest = fives + 1, rest // 5
    if rest == 1:  # a finite decimal
        digits = max(twos, fives)
        text = str(abs(value.numerator) * 10**digits // value.denominator).rjust(digits + 1, "0")
        return f"{'-' if value < 0 else ''}{text[:-digits]}.{text[-digits:]}"
    return f"{value} (about {_approximate(value)})"


def _approximate(value: Fraction) -> str:
    try:
        return f"{float(value):.10g}"
    except OverflowError:
        return f"{value.numerator // value.denominator}"


def _unknown(node: ast.expr, source: str) -> str:
    text = ast.get_source_segment(source, node) or source
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitXor):
        return f"{text}: write ** for a power, not ^"
    if isinstance(node, ast.Tuple):
        return f"{text}: write numbers without commas, and one expression at a time"
    return f"{text} is not allowed; there are numbers, + - * / // % **, parentheses, and {', '.join(FUNCTIONS)}"
