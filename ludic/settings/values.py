"""Values of settings: a value in the type of its setting, its range and role, and the words for values and types.

Raises ConfigError for URLs with secrets. Imports nothing slow, since `ludic COMMAND --help` reads settings.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from numbers import Integral, Real
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Protocol, Union, get_args, get_origin, runtime_checkable

from ludic.base import has_secret, public_url
from ludic.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Range:
    """Allowed numbers from `low` to `high`, both included; with `above`, `low` is excluded. NaN is never inside."""

    low: float
    high: float
    above: bool = False

    def holds(self, value: float) -> bool:
        return (self.low < value if self.above else self.low <= value) and value <= self.high

    def __str__(self) -> str:
        return f"{'above ' if self.above else ''}{self.low:,} to {self.high:,}"

    def wanted(self, value: float) -> str:
        """Describe the bound that a value outside the range violates, for an error message."""
        if value > self.high:
            return f"at most {self.high:,}"
        return f"a number above {self.low}" if self.above else f"at least {self.low:,}"


@runtime_checkable
class PartNames(Protocol):
    """The parts of a kind (ludic.settings.kinds), of which the annotated text names one: Annotated[str, TRACKER]."""

    def names(self) -> Sequence[str]:
        """Return the names that --help and the docs list."""
        ...

    def check(self, name: str) -> None:
        """Raise ConfigError if there is no such part."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """What a setting is, beside its type, range, default and text. It stands on the field, and nowhere else.

    The role of a choice is that of its members' settings too. `ludic.settings.names_of` returns the settings with one.
    """

    first_page: bool = False
    """Whether the first page of --help shows it, of a command with many options."""
    on_card: bool = False
    """Whether the card of a pushed run shows it first."""
    changes_weights: bool = True
    """Whether a trainer's weights depend on it once the batches are given; then a replay must have the same value."""
    of_algorithm: bool = False
    """Whether an algorithm decides it: `--algorithm` sets it, to its default if the algorithm's file lacks it."""
    of_stored: bool = False
    """Whether it selects training on stored rollouts or batches, which a trainer beside workers never inherits."""
    on_cpu: Any = None
    """For a setting whose None follows the device: what None means on the CPU."""
    of_sampling: bool = False
    """Whether it decides how a completion is sampled."""
    of_episodes: bool = False
    """Whether it decides how an agent plays an episode, in training and in evaluations."""
    of_program: bool = False
    """Whether it belongs to an agent that is a program of its own and speaks HTTP: it has no effect without one."""
    of_programs_too: bool = False
    """Whether it decides an episode of such an agent, too, as it does one of ludic's own agent."""
    in_evaluations: bool = False
    """Whether an evaluation may override the run's value."""
    of_call: bool = False
    """Whether it belongs to one call of an evaluation: which weights, and limits of the machine. No suite holds it."""
    free_if_none: bool = False
    """Whether None leaves the choice to ludic, so that it differs from no value that a run has stored."""
    stored_if_set: bool = False
    """Whether run.json lacks it if it is off, so that a ludic that does not know it can open the run."""
    only_with: tuple[str, ...] = ()
    """The cluster systems that use it; () if all do."""


# --- Conversion ----------------------------------------------------------------------------------------------------

Origin = Literal["code", "file", "flag", "stored"]
"""Where a value comes from. Flags are texts. A file says None as the text "None", and may give one value of a list.
What a root has stored may hold a URL that is refused today."""


class MisfitError(Exception):
    """A value does not fit a type; `wanted` is None for the words of the whole type."""

    def __init__(self, wanted: str | None = None, *, is_number: bool = False) -> None:
        super().__init__(wanted)
        self.wanted, self.is_number = wanted, is_number


def fit(value: Any, kind: Any, source: Origin) -> Any:
    """Return a value in a type. Raises MisfitError."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _fit_annotated(value, inner, source)
    if origin in (Union, UnionType):
        return _fit_union(value, inner, source)
    if origin is Literal:
        return next((each for each in inner if _is_choice(value, each, source)), None) or _misfit()
    if origin is tuple:
        return _fit_tuple(value, inner, source)
    if origin is Mapping:
        return _fit_mapping(value, source)
    if kind in SCALARS:
        return SCALARS[kind](value, source)
    return value  # a type that is no setting, such as an open file


def _misfit(wanted: str | None = None) -> Any:
    raise MisfitError(wanted)


def _is_choice(value: Any, choice: Any, source: Origin) -> bool:
    return str(choice) == value if source == "flag" else type(value) is type(choice) and value == choice


def _fit_annotated(value: Any, inner: tuple[Any, ...], source: Origin) -> Any:
    for limit in inner[1:]:
        # The root of another machine may name a part that is not installed here.
        if isinstance(limit, PartNames) and source != "stored" and isinstance(value, str):
            limit.check(value)
    found = fit(value, inner[0], source)
    for limit in inner[1:]:
        if isinstance(limit, Range):
            for number in found if isinstance(found, list | tuple) else (found,):
                if number is not None and not limit.holds(number):
                    raise MisfitError(limit.wanted(number), is_number=True)
    return found


def _fit_union(value: Any, kinds: tuple[Any, ...], source: Origin) -> Any:
    if NoneType in kinds and (value is None or (source in ("file", "flag") and value in ("None", ["None"]))):
        return None
    wanted: MisfitError | None = None
    for kind in kinds:
        if kind is not NoneType:
            try:
                return fit(value, kind, source)
            except MisfitError as error:
                is_only = len([each for each in kinds if each is not NoneType]) == 1
                wanted = error if error.is_number or is_only else wanted
    raise wanted or MisfitError


def _fit_tuple(value: Any, inner: tuple[Any, ...], source: Origin) -> tuple[Any, ...]:
    if source == "file" and not isinstance(value, list | tuple):
        value = [value]
    if not isinstance(value, list | tuple):
        raise MisfitError
    kinds = (inner[0],) * len(value) if inner[-1] is ... else inner
    if len(kinds) != len(value):
        raise MisfitError
    try:
        return tuple(fit(each, kind, source) for each, kind in zip(value, kinds, strict=True))
    except MisfitError as error:
        raise error if error.is_number else MisfitError from None


def _fit_mapping(value: Any, source: Origin) -> Mapping[str, Any]:
    """The class checks what a mapping holds, and names the key."""
    if source == "flag":
        try:
            value = json.loads(value)
        except ValueError as error:
            raise MisfitError(f"a JSON object such as '{{\"name\": 1}}' ({error})") from None
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise MisfitError
    return value


def _fit_text(value: Any, source: Origin) -> str:
    return value if isinstance(value, str) else _misfit()


def _fit_bool(value: Any, source: Origin) -> bool:
    if source == "flag":
        return str(value).lower() == "true" if str(value).lower() in _BOOLS else _misfit()
    return value if isinstance(value, bool) else _misfit()


def _fit_int(value: Any, source: Origin) -> int:
    if source == "flag":
        try:
            return int(value)
        except ValueError:
            return _whole(value)
    return int(value) if isinstance(value, Integral) and not isinstance(value, bool) else _misfit()


def _whole(text: str) -> int:
    """Return a whole number that is written like 1e3 or 2.0. Raises MisfitError."""
    try:
        found = Decimal(text)
    except InvalidOperation:
        raise MisfitError from None
    # A larger exponent would take minutes to write out, and is beyond every range.
    if not found.is_finite() or abs(found.adjusted()) > _MOST_DIGITS or found != found.to_integral_value():
        raise MisfitError
    return int(found)


def _fit_float(value: Any, source: Origin) -> float:
    if source == "flag" or (isinstance(value, Real) and not isinstance(value, bool)):
        try:
            return float(value)
        except ValueError:
            raise MisfitError from None
        except OverflowError:  # a whole number beyond the largest float, and so beyond every range
            return float("inf") if value > 0 else float("-inf")
    raise MisfitError


def _fit_path(value: Any, source: Origin) -> Path:
    return Path(value) if isinstance(value, str | Path) else _misfit()


_BOOLS = ("true", "false")
_MOST_DIGITS = 30
SCALARS: Mapping[Any, Callable[[Any, Origin], Any]] = {
    str: _fit_text,
    bool: _fit_bool,
    int: _fit_int,
    float: _fit_float,
    Path: _fit_path,
}


# --- Words ---------------------------------------------------------------------------------------------------------

_WORDS = {
    str: "a text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    Path: "a path",
    NoneType: "None",
}


_MOST_DESCRIBED = 12
"""Names of parts that a description lists."""


def describe(kind: Any, source: Origin = "code") -> str:
    """Describe a type in words: a whole number or None; one of 'a', 'b'; a list, each a text."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Annotated:
        parts = next((each for each in inner[1:] if isinstance(each, PartNames)), None)
        if parts is None or get_origin(inner[0]) is Literal:
            return describe(inner[0], source)
        names = parts.names()
        named = f"one of {', '.join(map(repr, names))}" if len(names) <= _MOST_DESCRIBED else "a name"
        return f"{named} or None" if NoneType in plain_kinds(inner[0]) else named
    if origin in (Union, UnionType):
        return " or ".join(describe(each, source) for each in inner)
    if origin is Literal:
        return f"one of {', '.join(map(repr, inner))}"
    if origin is tuple:
        number = "a list" if inner[-1] is ... else f"{len(inner)} values"
        return f"{number}, each {describe(inner[0], source)}"
    if origin is Mapping:
        return {"flag": "a JSON object", "file": "a table"}.get(source, "a mapping")
    return _WORDS.get(kind, "a value of its type")


def found_text(value: Any, source: Origin, *, is_number: bool) -> str:
    """Describe a value for an error message; a flag's values as they were typed."""
    if source != "flag":
        return repr(value)
    values = value if isinstance(value, list) else [value]
    return " ".join(values if is_number else map(repr, values)) or "empty"


def annotations(kind: Any) -> Iterator[Any]:
    yield from getattr(kind, "__metadata__", ())
    for inner in get_args(kind)[: 1 if get_origin(kind) is Annotated else None]:
        if get_origin(kind) is not Literal:
            yield from annotations(inner)


def plain_kinds(kind: Any) -> tuple[Any, ...]:
    """Return the types that a field may have, without annotations."""
    if get_origin(kind) is Annotated:
        return plain_kinds(get_args(kind)[0])
    if get_origin(kind) in (Union, UnionType):
        return tuple(each for inner in get_args(kind) for each in plain_kinds(inner))
    return (kind,)


# --- URLs with secrets ---------------------------------------------------------------------------------------------


def check_url(text: str, what: str, advice: str | None = None) -> None:
    """Refuse a URL with a secret, which files, logs and lists of processes would show; other texts pass.

    what: the setting's name. advice: what to do. Raises ConfigError, without the secret.
    """
    if has_secret(text):
        raise ConfigError(
            f"{what} holds a user, a password or a key ({public_url(text)}), which files, logs and lists of processes "
            f"would show; {advice or 'put it into the environment'}"
        )


def check_utf8(value: Any, what: str) -> None:
    """Refuse a text or a path that UTF-8 can't hold, also in lists and mappings: no file, query or log could hold it.

    Python gives bytes of the command line and of file names that are no UTF-8 as such texts. what: the setting's name.
    Raises ConfigError.
    """
    names = texts([*value]) if isinstance(value, Mapping) else ()
    for text in (*names, *texts(str(value) if isinstance(value, Path) else value)):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            code = ord(text[error.start])
            is_byte = 0xDC80 <= code <= 0xDCFF
            found = f"the byte 0x{code - 0xDC00:02x}, which is no UTF-8" if is_byte else "half a character"
            advice = "write or rename it in UTF-8" if is_byte else "write whole characters"
            near = text[max(0, error.start - 40) : error.start + 40]
            raise ConfigError(f"{what} holds {found}, in {near!r}; {advice}") from None


def texts(value: Any) -> Iterator[str]:
    """Yield all texts in a value, also in lists and mappings."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from texts(each)
