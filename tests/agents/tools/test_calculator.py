"""An exact calculator, and what it refuses."""

import math
import time
from contextlib import suppress
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ludic.agents.tools.calculator import calculate
from ludic.errors import ToolError


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("2 + 3 * 4", "14"),
        ("(2 + 3) * -4", "-20"),
        ("0.1 + 0.2", "0.3"),
        ("1e-3 * 5", "0.005"),
        ("7 / 2", "3.5"),
        ("-1 / 8", "-0.125"),
        ("1 / 3", "1/3 (about 0.3333333333)"),
        ("2 / 3 + 1 / 3", "1"),
        ("-7 // 2", "-4"),
        ("-7 % 3", "2"),
        ("2 ** 10", "1024"),
        ("2 ** -2", "0.25"),
        ("(2 / 3) ** 2", "4/9 (about 0.4444444444)"),
        ("abs(-3) + max(1, 5, 2) - min(4, 3)", "5"),
        ("round(2.567, 1)", "2.6"),
        ("floor(-1.5) + ceil(1.2)", "0"),
        ("gcd(12, 18) * lcm(4, 6)", "72"),
        ("factorial(20)", "2432902008176640000"),
        (" 1_000 ", "1000"),
    ],
)
def test_values_are_exact(expression: str, value: str) -> None:
    assert calculate(expression) == value


@pytest.mark.parametrize(
    ("expression", "error"),
    [
        ("1 / 0", "division by zero"),
        ("0 ** -1", "division by zero"),
        ("2 ^ 3", r"write \*\* for a power"),
        ("1,000", "write numbers without commas"),
        ("2 ** 0.5", "the exponent 0.5 is not a whole number"),
        ("2 ** 100000", "the power is too large"),
        ("9 ** 9 ** 9 ** 9", "the power is too large"),
        ("10 ** 1000 * 10 ** 1000", "more than 4,096 bits"),
        ("1e999999999", "too large or too small"),
        ("factorial(501)", "from 0 to 500"),
        ("factorial(1.5)", "1.5 is not a whole number"),
        ("round(1, 10 ** 9)", "round takes fewer digits"),
        ("max()", "at least 1 argument"),
        ("abs(1, 2)", "exactly one argument"),
        ("x + 1", "x is not allowed; there are numbers"),
        ("sqrt(2)", r"sqrt\(2\) is not allowed"),
        ("__import__('os').getcwd()", "is not allowed"),
        ("(1).__class__", "is not allowed"),
        ("'a' * 3", "'a' is not allowed"),
        ("True", "True is not allowed"),
        ("1 if 2 else 3", "is not allowed"),
        ("", "is not an arithmetic expression"),
        ("2 +", "is not an arithmetic expression"),
        ("(" * 500, "is not an arithmetic expression|can't be computed"),
        ("-" * 999 + "1", "can't be computed"),
        ("1" * 1001, "has 1,001 characters; at most 1,000"),
    ],
)
def test_anything_else_is_refused_at_once(expression: str, error: str) -> None:
    start = time.process_time()
    with pytest.raises(ToolError, match=error):
        calculate(expression)
    assert time.process_time() - start < 1


@given(a=st.integers(), b=st.integers().filter(bool), c=st.decimals(allow_nan=False, allow_infinity=False, places=4))
def test_it_agrees_with_fractions(a: int, b: int, c: object) -> None:
    expected = Fraction(a, b) * Fraction(str(c)) - a // b
    text = calculate(f"({a}) / ({b}) * ({c}) - ({a}) // ({b})")
    exact = text.split(" (about ")[0]
    assert Fraction(exact) == expected
    if " (about " in text:
        assert math.isclose(float(text.split(" (about ")[1][:-1]), float(expected), rel_tol=1e-9)


@given(st.text(max_size=60) | st.text(alphabet="0123456789+-*/%().e, abs", max_size=60))
def test_every_text_has_a_value_or_an_error(expression: str) -> None:
    with suppress(ToolError):
        assert calculate(expression)
