"""Environments by name: built-in, `reasoning_gym/NAME`, or your own class in a file or module.

To add a built-in environment, write its file and its line in BUILT_IN. Every failure raises ConfigError, which says
what was requested, what was found and what to change.
"""

import importlib
import inspect
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from functools import partial
from types import MappingProxyType, ModuleType
from typing import Any

from ludic.environments.addition import Addition
from ludic.environments.environment import Environment, SingleTurnEnvironment
from ludic.environments.guess_number import GuessNumber
from ludic.environments.moar_cats import MoarCats
from ludic.environments.number_comparison import NumberComparison
from ludic.environments.opposites import Opposites
from ludic.environments.reasoning_gym import ReasoningGym, generator_names
from ludic.environments.sequential_digits import SequentialDigits
from ludic.environments.single_turn_adapter import SingleTurn
from ludic.environments.word_problems import WordProblems
from ludic.errors import ConfigError, LudicError
from ludic.user_code import describe, load_named, only_exceptions
from ludic.user_files import NO_FILES, Files

EnvironmentFactory = Callable[[], Environment]
"""Function that returns a new Environment for each episode."""

BUILT_IN: Mapping[str, Callable[..., SingleTurnEnvironment | Environment]] = MappingProxyType(
    {
        "addition": Addition,
        "guess_number": GuessNumber,
        "moar_cats": MoarCats,
        "number_comparison": NumberComparison,
        "opposites": Opposites,
        "sequential_digits": SequentialDigits,
        "word_problems": WordProblems,
    }
)
REASONING_GYM = "reasoning_gym/"


def environment_names() -> tuple[str, ...]:
    """Return every name that needs no file: built-in environments, then those of reasoning_gym."""
    return (*sorted(BUILT_IN), *(REASONING_GYM + name for name in generator_names()))


def make_environment(
    name: str, options: Mapping[str, Any] | None = None, seed: int = 0, files: Files = NO_FILES
) -> EnvironmentFactory:
    """Load an environment and return a factory of new instances, one per episode.

    name: a built-in name, reasoning_gym/NAME, path/to/file.py:ClassName or package.module:ClassName; a class
    may implement either protocol. options: keyword arguments. seed: passed to constructors that take a `seed`, unless
    options hold one. files: files to run instead of those on disk, by path as in the name.
    Raises ConfigError if there is no such environment, or if it can't be loaded, refuses its options, or fits
    neither protocol.
    """
    build = _with_options(name, _find(name, files), dict(options or {}), seed)
    environment = _build_first(name, build)
    # A class with the methods of both protocols is used as Environment, the more general one.
    if isinstance(environment, Environment):
        return build
    if isinstance(environment, SingleTurnEnvironment):
        return partial(SingleTurn, environment)
    raise ConfigError(
        f"environment {name}: {type(environment).__name__} fits neither protocol of ludic.environments.environment; "
        "wanted example(index, split), and either score(example, answer) or reset(example) and step(action)"
    )


def _find(name: str, files: Files) -> Callable[..., Any]:
    """Return the class or function of a name; called with options, it returns an environment."""
    if name in BUILT_IN:
        return BUILT_IN[name]
    if name.startswith(REASONING_GYM):
        return _find_generator(name)
    if ":" in name:
        return _find_class(name, files)
    raise _unknown(name)


def _find_generator(name: str) -> Callable[..., Any]:
    generator = name.removeprefix(REASONING_GYM)
    if generator not in generator_names():
        raise _unknown(name)
    return partial(ReasoningGym, generator)


def _unknown(name: str) -> ConfigError:
    # Compare without prefixes, so that leg_countin finds reasoning_gym/leg_counting.
    full_names = {full.removeprefix(REASONING_GYM): full for full in environment_names()}
    close = get_close_matches(name.removeprefix(REASONING_GYM), full_names, n=3)
    if close:
        return ConfigError(
            f"environment {name!r} is unknown; did you mean {', '.join(full_names[match] for match in close)}? "
            "A class of your own is path/to/file.py:ClassName or package.module:ClassName"
        )
    return ConfigError(
        f"environment {name!r} is unknown; there are path/to/file.py:ClassName, package.module:ClassName, "
        f"{', '.join(sorted(BUILT_IN))}, and {REASONING_GYM}NAME with NAME one of {', '.join(generator_names())}"
    )


def _find_class(name: str, files: Files) -> Callable[..., Any]:
    location, _, class_name = name.rpartition(":")
    if location.endswith(".py"):
        _, module = load_named(location, f"environment {name}", ConfigError, files)
    else:
        module = _load_module(name, location)
    found = getattr(module, class_name, None)
    if callable(found):
        return found
    classes = [
        key for key, value in vars(module).items() if inspect.isclass(value) and value.__module__ == module.__name__
    ]
    raise ConfigError(
        f"environment {name}: {location} has no class {class_name!r}; it defines {', '.join(classes) or 'none'}"
    )


def _load_module(name: str, module_name: str) -> ModuleType:
    try:
        with only_exceptions():
            return importlib.import_module(module_name)
    except Exception as error:
        raise ConfigError(
            f"environment {name}: module {module_name!r} can't be imported: {describe(error)}; "
            "a file that is not installed is named by its path, path/to/file.py:ClassName"
        ) from error


def _with_options(name: str, make: Callable[..., Any], options: dict[str, Any], seed: int) -> Callable[[], Any]:
    """Bind the options, after checking them against the signature."""
    signature = inspect.signature(make)
    kinds = [parameter.kind for parameter in signature.parameters.values()]
    if "seed" in signature.parameters or inspect.Parameter.VAR_KEYWORD in kinds:
        options = {"seed": seed, **options}
    try:
        signature.bind(**options)
    except TypeError as error:
        raise ConfigError(f"environment {name}: {error}; it takes {signature}") from error
    return partial(make, **options)


def _build_first(name: str, build: Callable[[], Any]) -> Any:
    try:
        with only_exceptions():
            return build()
    except LudicError as error:
        raise ConfigError(f"environment {name}: {error}") from error
    except Exception as error:
        raise ConfigError(f"environment {name} could not be built: {describe(error)}") from error
