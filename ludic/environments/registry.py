"""Environments by name: built-in, those of packages and of your data as PREFIX/NAME or by entry points, or your own.

To add a built-in environment, write its class, and its line in ludic.settings.kinds; for those of a package, write an
adapter in ludic/adapters/environments/ and its line there. Raises ConfigError, which names the request, the value found
and the change to make.
"""

import importlib
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import Any

from ludic.base import LUDIC, find_by_name, missing_extra, module_file, name_and_version, package_of
from ludic.environments.environment import (
    RUN_IN,
    Environment,
    Family,
    MultiAgentEnvironment,
    SingleTurnEnvironment,
    misfit_of_methods,
)
from ludic.environments.qa import QuestionOptions, Questions, QuestionScorers, heldout_sha256
from ludic.environments.qa_rows import QuestionSource
from ludic.environments.single_turn import ScorerProcesses, SingleTurn
from ludic.errors import ConfigError, LudicError, MissingPackageError
from ludic.settings import ENVIRONMENT, NO_FILES, Files, find, only_exceptions, packaged_part, python_file_of
from ludic.settings.kinds import unknown
from ludic.settings.user_code import describe
from ludic.settings.user_files import QUESTIONS

EnvironmentFactory = Callable[[], Environment | MultiAgentEnvironment]
"""Function that returns a new Environment for each episode."""


def find_family(prefix: str) -> Family:
    """Return the family of a prefix of ENVIRONMENT.packages; imports its adapter."""
    family: Family = find_by_name(ENVIRONMENT.packages[prefix])
    return family


def environment_names() -> tuple[str, ...]:
    """Return every name that needs no file: built-in environments, then those of the packages that are installed."""
    return (
        *ENVIRONMENT.names(),
        *(prefix + name for prefix in ENVIRONMENT.packages for name in find_family(prefix).names()),
    )


def make_environment(
    name: str, options: Mapping[str, Any] | None = None, seed: int = 0, files: Files = NO_FILES
) -> EnvironmentFactory:
    """Load an environment and return a factory of new instances, one per episode.

    name: a built-in name, one that an installed package brings, PREFIX/NAME of ENVIRONMENT.packages, qa/SOURCE,
    path/to/file.py:ClassName or package.module:ClassName; a class may implement either protocol. options: keyword
    arguments. seed: passed to constructors that take a `seed`, unless options hold one. files: files to run instead of
    those on disk, by path as in the name.

    Raises ConfigError if there is no such environment, or if it can't be loaded, refuses its options, or fits neither
    protocol.
    """
    if not isinstance(options or {}, Mapping):  # a list of pairs would hide a scorer from the check of consent
        raise ConfigError(f"environment {name}: its options are {options!r}, wanted a mapping of names to values")
    build = _with_options(name, _find(name, files), dict(options or {}), seed)
    environment = _build_first(name, build)
    where = getattr(environment, "run_in", RUN_IN[0])
    if where not in RUN_IN:
        raise ConfigError(f"environment {name}: its run_in is {where!r}, wanted {' or '.join(map(repr, RUN_IN))}")
    # A class with the methods of both protocols is used as Environment, the more general one.
    protocols = (MultiAgentEnvironment, Environment, SingleTurnEnvironment)
    fitting = next((each for each in protocols if isinstance(environment, each)), None)
    if fitting is not None and (problem := misfit_of_methods(environment, fitting)):
        raise ConfigError(f"environment {name}: {problem}")
    if isinstance(environment, Environment | MultiAgentEnvironment):
        if where == "process":
            raise ConfigError(f"environment {name}: run_in 'process' is for environments with a question and a score")
        return build
    if isinstance(environment, SingleTurnEnvironment):
        may_move = where == RUN_IN[0] and getattr(environment, "is_pure", False) is True
        if where != "process" and not may_move:
            return partial(SingleTurn, environment)
        processes = ScorerProcesses(name, options or {}, seed, files)
        return partial(SingleTurn, environment, processes, begins_here=may_move)
    raise ConfigError(
        f"environment {name}: {type(environment).__name__} fits neither protocol of ludic.environments.environment; "
        "wanted example(index, split), and either score(example, answer) or reset(example) and step(action)"
    )


def load_scorer(name: str, options: Mapping[str, Any], seed: int, files: Files) -> Any:
    """Make an environment for its scores alone, as a process of ScorerProcesses does; no rows of questions are read.

    The arguments are those of make_environment, which has checked them. Raises ConfigError.
    """
    if name.startswith(QUESTIONS) and python_file_of(name) is None:
        return _build_first(name, lambda: QuestionScorers(files, QuestionOptions(**options)))
    return _build_first(name, _with_options(name, _find(name, files), dict(options), seed))


def _find(name: str, files: Files) -> Callable[..., Any]:
    """Return the class or function of a name; called with options, it returns an environment."""
    if python_file_of(name) is not None:  # this also covers a file in a folder named like a prefix
        return find(ENVIRONMENT, name, files)
    if name.startswith(QUESTIONS):
        return _questions(name.removeprefix(QUESTIONS), files)
    prefix = prefix_of(name)
    if prefix:
        return _find_in_family(name, prefix)
    if ":" in name:
        return _find_installed(name)
    if name not in ENVIRONMENT.built_in and packaged_part(ENVIRONMENT, name) is None:
        raise _unknown(name)
    return find(ENVIRONMENT, name)


def _questions(source: str, files: Files) -> Callable[..., Any]:
    """Return a function that takes the fields of QuestionOptions."""

    def make(**options: Any) -> Questions:
        return Questions(source, files, QuestionOptions(**options))

    make.__signature__ = inspect.signature(QuestionOptions)  # type: ignore[attr-defined]
    return make


def prefix_of(name: str) -> str:
    """Return the prefix of a family that a name begins with, or an empty text."""
    return next((prefix for prefix in ENVIRONMENT.packages if name.startswith(prefix)), "")


def _find_in_family(name: str, prefix: str) -> Callable[..., Any]:
    family, within = find_family(prefix), name.removeprefix(prefix)
    try:
        with only_exceptions():
            is_known = family.is_known(within)
    except LudicError:
        raise
    except Exception as error:  # a package that is not installed, or lacks one of its own dependencies
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if isinstance(error, ModuleNotFoundError) and (ours := missing_extra(error)) is not None:
            raise MissingPackageError(f"environment {name}: {ours}") from error
        advice = f"; pip install {missing.partition('.')[0]}" if missing else ""
        package = prefix.rstrip("/")
        raise ConfigError(
            f"environment {name}: the package {package} can't be imported: {describe(error)}{advice}"
        ) from error
    if not is_known:
        raise _unknown(name)
    return partial(family.make, within)


def _unknown(name: str) -> LudicError:
    prefix = prefix_of(name)
    forms = [*ENVIRONMENT.names(), f"{QUESTIONS}FILE", *(f"{each}NAME" for each in ENVIRONMENT.packages)]
    return unknown(
        ENVIRONMENT,
        name,
        known=environment_names(),
        listed=[f"{prefix}{each}" for each in find_family(prefix).names()] if prefix else forms,
    )


def _find_installed(name: str) -> Callable[..., Any]:
    location, _, class_name = name.rpartition(":")
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


def source_of(name: str, options: Mapping[str, Any]) -> tuple[str | None, str | None, dict[str, str]]:
    """Return the identity of an environment's code if it is not a user's file; runs none of the code.

    Returns the sha256 of an installed environment's file or of the data of qa/SOURCE, None if there is none; its
    package with version, None if the module belongs to no package; and under the name `heldout` the sha256 of the file
    with the held-out questions of qa/SOURCE, if there is one.
    """
    if name in ENVIRONMENT.built_in:
        return _digest(inspect.getsourcefile(find(ENVIRONMENT, name))), name_and_version(LUDIC), {}
    if name.startswith(QUESTIONS):
        source = QuestionSource(name=name.removeprefix(QUESTIONS), stored=options.get("stored"))
        heldout = heldout_sha256(source, options)
        others = {} if heldout is None else {"heldout": heldout}
        return source.sha256(), name_and_version(LUDIC), others
    prefix = prefix_of(name)
    if prefix:
        path, package = find_family(prefix).source(name.removeprefix(prefix))
        return _digest(path), package, {}
    module = name.rpartition(":")[0]
    return _digest(module_file(module)), package_of(module), {}


def _digest(path: str | None) -> str | None:
    return sha256(Path(path).read_bytes()).hexdigest() if path and Path(path).is_file() else None
