"""Convert the result of a user's scorer to the values or the failure that is stored for a rollout."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from reprlib import repr as shortened
from typing import Any

from ludic.base import mask, storable

SCORE = "score"
"""Name of the value of a scorer that returns one number, and of every failure."""

_WANTED = "wanted a number, a dictionary of numbers by name, or a ludic.eval.scoring.outcome.CostedScore of one"
_MOST_CHARACTERS = 500
_TOO_LARGE = 2**63


@dataclass(frozen=True, slots=True, kw_only=True)
class CostedScore:
    """A score and its cost; a user's function may return one."""

    value: float | Mapping[str, float]
    """One number, or several by name."""
    num_input_tokens: int | None = None
    """Tokens that a model read."""
    num_output_tokens: int | None = None
    """Tokens that a model wrote."""
    cost: float | None = None
    """Money, in any currency."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Values of a rollout, or the reason why there are none; and the cost."""

    values: Mapping[str, float] | None = None
    """Finite values by name; None if scoring failed."""
    error: str | None = None
    """Reason of a failure, on one line; None for values."""
    num_input_tokens: int | None = None
    num_output_tokens: int | None = None
    cost: float | None = None


def failed(reason: str, **costs: Any) -> Outcome:
    """Return the outcome of a failure, its reason without secrets. costs: tokens and cost, as fields of Outcome."""
    text = storable(" ".join(mask(reason).split()))
    return Outcome(error=text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}...", **costs)


def to_outcome(result: Any) -> Outcome:
    """Return the outcome of a scorer's result; a failure if the result is invalid."""
    costed = result if isinstance(result, CostedScore) else CostedScore(value=result)
    given = costed.value if isinstance(costed.value, Mapping) else {SCORE: costed.value}
    try:
        values = {_name(name): float(value) for name, value in given.items() if not isinstance(value, str | bytes)}
        costs = {
            "num_input_tokens": _cost(int, costed.num_input_tokens),
            "num_output_tokens": _cost(int, costed.num_output_tokens),
            "cost": _cost(float, costed.cost),
        }
    except (TypeError, ValueError, OverflowError):
        return failed(f"returned {shortened(result)}, {_WANTED}")
    if not values or len(values) < len(given):
        return failed(f"returned {shortened(result)}, {_WANTED}", **costs)
    infinite = [name for name, value in values.items() if not isfinite(value)]
    if infinite:
        return failed(f"returned {values[infinite[0]]} for {infinite[0]!r}, wanted a finite number", **costs)
    return Outcome(values=values, **costs)


def _name(name: Any) -> str:
    if not isinstance(name, str) or not name:
        raise ValueError
    return storable(name)


def _cost(kind: type[float], value: Any) -> Any:
    """Return a cost as an int or a float. Raises ValueError if it is negative, not finite or too large."""
    if value is not None and not 0 <= value < _TOO_LARGE:
        raise ValueError
    return None if value is None else kind(value)
