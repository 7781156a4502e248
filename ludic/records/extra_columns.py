"""Check the names and types of the columns that a run adds to its rollouts, and bound those of its data set.

Raises ConfigError if a column is invalid. Imports nothing slow, to keep `--help` fast.
"""

import re
from collections.abc import Mapping, Sequence

from ludic.errors import ConfigError

MOST_COLUMN_CHARACTERS = 10_000
"""Largest value of the setting max_column_characters. Questions keep no more of a row in memory."""
FEWEST_COLUMN_CHARACTERS = 100
"""Smallest value of that setting, other than 0: room for the note on the columns that are left out."""
DEFAULT_COLUMN_CHARACTERS = 2_000

_EXTRA_NAME = re.compile(r"x_[a-z0-9_]+")
_EXTRA_ELEMENTS = ("string", "int64", "double", "bool")

EXTRA_TYPES = tuple(f"list<{name}>" if is_list else name for is_list in (False, True) for name in _EXTRA_ELEMENTS)
"""Types that a run's own columns may have, in the notation of type_name."""


def check_extra_columns(extra_columns: Mapping[str, str]) -> None:
    """Raise ConfigError if a name is not x_ with lower-case letters, digits and _, or a type is unknown."""
    for name, type_ in extra_columns.items():
        if not isinstance(name, str) or not _EXTRA_NAME.fullmatch(name):
            raise ConfigError(f"extra column {name!r}: wanted x_ and then lower-case letters, digits or _")
        if type_ not in EXTRA_TYPES:
            raise ConfigError(f"extra column {name!r} is {type_!r}, wanted one of {', '.join(EXTRA_TYPES)}")


def extra_names(names: Sequence[str]) -> list[str]:
    """Return the names that are a run's own columns."""
    return [name for name in names if _EXTRA_NAME.fullmatch(name)]
