"""Find the files that an entry of a suite names, relative to the suite's folder.

A path below the working directory stays relative to it, as in `--env qa/sums.jsonl`; any other becomes absolute. So a
suite in a project gives the same names on every machine. Raises ConfigError for a missing file, with its key.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ludic.code.consent import QUESTIONS, SCORER_OPTIONS
from ludic.code.files import python_file_of
from ludic.code.kinds import own_code_of, parser_stages
from ludic.errors import ConfigError
from ludic.paths import local_path

_DATA = (".jsonl", ".parquet")


@dataclass(frozen=True, slots=True)
class Paths:
    """Finds files of a suite."""

    folder: Path
    """Folder of the suite."""

    def resolve(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return an entry's values with the paths of files that are there. Values of other types stay as they are."""
        env = values["env"]
        known: dict[str, Callable[[Any], Any]] = {
            "env": self._env,
            "options": lambda options: self._options(env, options),
            "parser": self._parser,
            "tools": lambda tools: [self._code("tools", tool) for tool in tools] if isinstance(tools, list) else tools,
            "measures": lambda names: [self._sql(name) for name in names] if isinstance(names, list) else names,
            **{key: self._code_of(key) for key in ("context", "protocol")},
        }
        return {key: known[key](value) if key in known else value for key, value in values.items()}

    def _env(self, env: str) -> str:
        if not env.startswith(QUESTIONS) or python_file_of(env) is not None:
            return self._code("env", env)
        return f"{QUESTIONS}{self._source('questions', env.removeprefix(QUESTIONS))}"

    def _source(self, key: str, source: Any) -> Any:
        """Return the path of a file of questions or a folder of a dataset; the name of a dataset stays as it is."""
        if not isinstance(source, str) or not (source.endswith(_DATA) or _is_there(self.folder / source)):
            return source
        return self._path(key, source)

    def _options(self, env: str, options: Mapping[str, Any]) -> dict[str, Any]:
        if not env.startswith(QUESTIONS):
            return dict(options)
        known = {
            **{key: self._code_of(key) for key in SCORER_OPTIONS},
            "heldout": lambda name: self._heldout(env, name),
        }
        return {key: known[key](value) if key in known else value for key, value in options.items()}

    def _heldout(self, env: str, heldout: Any) -> Any:
        return self._source("heldout", heldout) if env.endswith(_DATA) else heldout

    def _parser(self, parser: Any) -> Any:
        if not isinstance(parser, str):
            return parser
        stages = parser_stages(parser)
        found = [own_code_of(stage) for stage in stages]
        new = [
            stage.removesuffix(own) + self._code("parser", own) if own else stage
            for stage, own in zip(stages, found, strict=True)
        ]
        return "|".join(new) if any(found) else parser

    def _sql(self, name: Any) -> Any:
        return self._path("measures", name) if isinstance(name, str) and name.endswith(".sql") else name

    def _code_of(self, key: str) -> Callable[[Any], Any]:
        return lambda value: self._code(key, value)

    def _code(self, key: str, setting: Any) -> Any:
        """Return path/to/file.py:name with the file's path; any other setting stays as it is."""
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
