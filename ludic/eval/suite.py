"""Read a suite: a TOML file with entries to evaluate, each with an environment, its options and measures.

Everything is checked before sampling begins. Raises ConfigError, which names the file, the entry, the key, the value
found and the value wanted.
"""

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from ludic.base import is_data_file, local_path, read_config
from ludic.errors import ConfigError, QueryError, unknown_name
from ludic.eval.config import EvalConfig, MeasureConfig
from ludic.eval.estimates import check_measures
from ludic.settings import (
    PARSER,
    SCORER,
    SCORER_OPTIONS,
    arguments,
    flat,
    names_of,
    own_code_of,
    parser_stages,
    python_file_of,
    settings_of,
)
from ludic.settings.user_files import QUESTIONS

OF_THE_CALL = names_of(EvalConfig, "of_call")
"""Settings that a suite does not hold: which weights, and limits of the machine."""
_SETTINGS = tuple(
    each.name for each in settings_of(EvalConfig) if each.name not in (*OF_THE_CALL, "env", "env_options")
)
_SHARED = (*_SETTINGS, "measures", "params")
"""Keys of an entry that may also be given at the top, as defaults for all entries."""
_OF_AN_ENTRY = ("name", "env", "questions", "options", *_SHARED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One entry of a suite."""

    name: str
    label: str
    """The suite's file and the entry, for errors."""
    config: EvalConfig
    measure: MeasureConfig

    @property
    def env(self) -> str:
        """Name of its environment."""
        return self.config.env[0]


def read_suite(path: str | PathLike[str], call: EvalConfig, confidence: float = 0.95) -> list[Entry]:
    """Read and check a suite. call: settings OF_THE_CALL; the others must not be given. confidence: of intervals."""
    defaults = flat(EvalConfig())
    for name, value in flat(call).items():
        if name not in OF_THE_CALL and value != defaults[name]:
            raise ConfigError(f"{name} is given beside a suite, which decides it; write it into {fspath(path)}")
    file = local_path(fspath(path), "suite")
    values = _read(file)
    _check_keys(values, ("entries", *_SHARED), str(file))
    tables = values.pop("entries", None)
    if not isinstance(tables, list) or not tables or not all(isinstance(table, dict) for table in tables):
        raise ConfigError(f"{file}: entries is {_show(tables)}, wanted one table [[entries]] or more")
    own = {name: getattr(call, name) for name in OF_THE_CALL}
    reader = _Reader(file=file, shared=values, call=own, confidence=confidence)
    entries = [reader.entry(table, number) for number, table in enumerate(tables, start=1)]
    _refuse_doubles(file, [entry.name for entry in entries])
    return entries


def settings_of_root(entries: Sequence[Entry], call: EvalConfig) -> EvalConfig:
    """Return settings with the environments of all entries, for a root that is created to evaluate a model."""
    first = {entry.env: entry.config for entry in reversed(entries)}
    options = {env: config.env_options[env] for env, config in first.items()}
    return EvalConfig(versions=call.versions, env=tuple(first), env_options=options)


def _read(file: Path) -> dict[str, Any]:
    if not file.is_file():  # a folder, or a pipe that never ends
        raise ConfigError(f"there is no suite {file.absolute()}; wanted a TOML file")
    return read_config(file)


def _check_keys(values: Mapping[str, Any], known: Collection[str], where: str) -> None:
    for key in values:
        if key not in known:
            raise ConfigError(f"{where}: {unknown_name('setting', key, known)}")


def _refuse_doubles(file: Path, names: Sequence[str]) -> None:
    for number, name in enumerate(names, start=1):
        if names.index(name) + 1 < number:
            raise ConfigError(f"{file}: entries {names.index(name) + 1} and {number} are both named {name!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reader:
    """Makes entries of tables."""

    file: Path
    shared: Mapping[str, Any]
    call: Mapping[str, Any]
    confidence: float

    def entry(self, table: Mapping[str, Any], number: int) -> Entry:
        """number: of the entry, from 1, which names it in errors until its name is known."""
        name = table.get("name")
        if not isinstance(name, str) or not name.strip():
            raise ConfigError(f"{self.file}, entry {number}: name is {_show(name)}, wanted a text")
        label = f"{self.file}, entry {name!r}"
        _check_keys(table, _OF_AN_ENTRY, label)
        with labelled(label):
            values = Paths(self.file.parent).resolve(_with_env({**self.shared, **table}))
            measure = self._measure(values)
            config = self._config(values)
            check_measures(measure, config.n)
        return Entry(name=name, label=label, config=config, measure=measure)

    def _config(self, values: Mapping[str, Any]) -> EvalConfig:
        env = values["env"]
        given = {name: values[name] for name in _SETTINGS if name in values}
        options = _table(values, "options")
        settings = {**self.call, **_converted(given, EvalConfig), "env": (env,), "env_options": {env: options}}
        return EvalConfig(**arguments(EvalConfig, settings))

    def _measure(self, values: Mapping[str, Any]) -> MeasureConfig:
        given = _converted({name: values[name] for name in ("measures",) if name in values}, MeasureConfig)
        return MeasureConfig(**given, params=_table(values, "params"), confidence=self.confidence)


@contextmanager
def labelled(label: str) -> Iterator[None]:
    """Begin the message of a ConfigError or a QueryError with a label; an empty one changes nothing."""
    try:
        yield
    except (ConfigError, QueryError) as error:
        raise (type(error)(f"{label}: {error}") if label else error) from error


def _with_env(values: dict[str, Any]) -> dict[str, Any]:
    """Return an entry's values with `env` in place of `questions`; by default all questions are asked."""
    given = [key for key in ("env", "questions") if key in values]
    if len(given) != 1:
        raise ConfigError(f"{' and '.join(given) or 'neither env nor questions'} given, wanted env or questions")
    (key,) = given
    if not isinstance(values[key], str) or not values[key].strip():
        raise ConfigError(f"{key} is {_show(values[key])}, wanted a text")
    options = _table(values, "options")
    if key == "env":
        return {**values, "options": options}
    if not {"heldout", "heldout_share"} & options.keys():
        options = {**options, "heldout_share": 1}
    rest = {name: value for name, value in values.items() if name != key}
    return {**rest, "env": f"{QUESTIONS}{values[key]}", "options": options}


def _table(values: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return a table of JSON values, since the root stores it as JSON."""
    value = values.get(key, {})
    if not isinstance(value, Mapping):
        raise ConfigError(f"{key} is {_show(value)}, wanted a table")
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"{key} is {_show(value)}, wanted values that JSON can hold: {error}") from error
    return value


def _converted(values: Mapping[str, Any], settings: type) -> dict[str, Any]:
    """Return TOML's values in the types of the fields. Raises ConfigError."""
    table = {each.name: each for each in settings_of(settings)}
    return {name: table[name].convert(value) for name, value in values.items()}


def _show(value: Any) -> str:
    return "missing" if value is None else repr(value)[:80]


# --- Files that an entry names, relative to the suite's folder -----------------------------------------
# A path below the working directory stays relative to it, as in `--env qa/sums.jsonl`; any other becomes absolute. So a
# suite in a project gives the same names on every machine.


@dataclass(frozen=True, slots=True)
class Paths:
    """Finds files of a suite."""

    folder: Path
    """Folder of the suite."""

    def resolve(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return an entry's values with the paths of existing files. Values of other types are unchanged."""
        env = values["env"]
        known: dict[str, Callable[[Any], Any]] = {
            "env": self._env,
            "options": lambda options: self._options(env, options),
            "parser": self._parser,
            "tools": lambda tools: [self._code("tools", tool) for tool in tools] if isinstance(tools, list) else tools,
            "measures": lambda names: [self._sql(name) for name in names] if isinstance(names, list) else names,
            "agent": self._code_of("agent"),
            **{key: self._code_of(key) for key in ("context", "protocol")},
        }
        return {key: known[key](value) if key in known else value for key, value in values.items()}

    def _env(self, env: str) -> str:
        if not env.startswith(QUESTIONS) or python_file_of(env) is not None:
            return self._code("env", env)
        return f"{QUESTIONS}{self._source('questions', env.removeprefix(QUESTIONS))}"

    def _source(self, key: str, source: Any) -> Any:
        """Return the path of a file of questions or a folder of a dataset; the name of a dataset is unchanged."""
        if not isinstance(source, str) or not (is_data_file(source) or _is_there(self.folder / source)):
            return source
        return self._path(key, source)

    def _options(self, env: str, options: Mapping[str, Any]) -> dict[str, Any]:
        if not env.startswith(QUESTIONS):
            return dict(options)
        known: dict[str, Callable[[Any], Any]] = {
            **{key: partial(self._scorers, key) for key in SCORER_OPTIONS},
            "heldout": lambda name: self._source("heldout", name) if is_data_file(env) else name,
        }
        return {key: known[key](value) if key in known else value for key, value in options.items()}

    def _parser(self, parser: Any) -> Any:
        if not isinstance(parser, str):
            return parser
        stages = parser_stages(parser)
        found = [own_code_of(PARSER, stage) for stage in stages]
        new = [
            stage.removesuffix(own) + self._code("parser", own) if own else stage
            for stage, own in zip(stages, found, strict=True)
        ]
        return "|".join(new) if any(found) else parser

    def _sql(self, name: Any) -> Any:
        return self._path("measures", name) if isinstance(name, str) and name.endswith(".sql") else name

    def _code_of(self, key: str) -> Callable[[Any], Any]:
        return lambda value: self._code(key, value)

    def _scorers(self, key: str, option: Any) -> Any:
        """Return one name, a list of names, or a mapping of names to weights, with the paths of their files."""
        if isinstance(option, Mapping):
            return {self._scorers(key, name): weight for name, weight in option.items()}
        if isinstance(option, list):
            return [self._scorers(key, name) for name in option]
        own = own_code_of(SCORER, option) if isinstance(option, str) else None
        return option if own is None else option.removesuffix(own) + self._code(key, own)

    def _code(self, key: str, setting: Any) -> Any:
        """Return path/to/file.py:name with the file's path; any other setting is unchanged."""
        file = python_file_of(setting) if isinstance(setting, str) else None
        return setting if file is None else f"{self._path(key, file)}{setting[len(file) :]}"

    def _path(self, key: str, text: str) -> str:
        path = self.folder / local_path(text, key)
        if not _is_there(path):
            raise ConfigError(f"{key} names {text!r}, but there is no file {path.absolute()}")
        found, here = path.resolve(), Path.cwd()
        return str(found.relative_to(here)) if found.is_relative_to(here) else str(found)


def _is_there(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # a name that is too long
        return False
