"""Advantages in Python: a function over an Arrow table of rollouts, for rules that are hard to write in SQL.

    def shrunk(rollouts: pa.Table, *, weight: float = 0.5) -> pa.Table

is named as path/to/file.py:shrunk. Its table has a row for each rollout that SQL would see, sorted by rollout_id. The
table has all scalar columns, and those lists, structs and maps whose names occur in the file. Keyword arguments are the
function's $parameters. It returns rollout_id with advantage or token_advantages, as an Arrow table or an object that
exports one (Polars). It is never called without rollouts. Runs the user's file; raises QueryError with file and line.
"""

import importlib.util
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from ludic.code.files import NO_FILES, Files
from ludic.code.kinds import ADVANTAGE, find_own
from ludic.code.run import describe_failure, only_exceptions
from ludic.errors import QueryError

FUNCTION_WANTED = (
    "wanted a function of an Arrow table of rollouts that returns one of rollout_id with advantage (double) or "
    "token_advantages (float list), and with an advantage of pairs pair_id (string)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrowFunction:
    """A function from a user's file."""

    source: str
    """Text path/to/file.py:function, for error messages."""
    path: Path
    function: Callable[..., Any]
    text: str
    """Text of the whole file."""
    defaults: Mapping[str, Any]
    """Default values of optional keyword arguments."""
    parameters: frozenset[str]
    """Names of all keyword arguments."""

    def __call__(self, rollouts: pa.Table, **params: Any) -> pa.Table:
        """Call the function and return its result as an Arrow table. Raises QueryError if that fails."""
        try:
            with only_exceptions():
                result = self.function(rollouts, **params)
        except Exception as error:
            raise QueryError(f"{self.source}: {describe_failure(self.path, error)}") from error
        if not hasattr(result, "__arrow_c_stream__"):
            raise QueryError(f"{self.source}: returns {type(result).__name__}; {FUNCTION_WANTED}")
        return pa.table(result)


def load_function(source: str, files: Files = NO_FILES) -> ArrowFunction:
    """Load the function path/to/file.py:function; runs its file. Raises QueryError.

    files: contents that replace those on disk, by path.
    """
    own = find_own(ADVANTAGE, source, files)
    keywords = _keywords(source, own.value)
    return ArrowFunction(
        source=source,
        path=own.file.path,
        function=own.value,
        text=importlib.util.decode_source(own.file.source),
        defaults={key: value for key, value in keywords.items() if value is not inspect.Parameter.empty},
        parameters=frozenset(keywords),
    )


def _keywords(source: str, function: Callable[..., Any]) -> dict[str, Any]:
    """Return the keyword-only parameters with defaults. Raises QueryError unless there is one other parameter."""
    signature = inspect.signature(function)
    parameters = list(signature.parameters.values())
    keywords = [parameter for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if len(positional) != 1 or len(positional) + len(keywords) < len(parameters):
        raise QueryError(f"{source}: takes {signature}, wanted (rollouts, *, parameter=default, ...)")
    return {keyword.name: keyword.default for keyword in keywords}
