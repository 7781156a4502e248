"""Find and build the user's classes that settings name: path/to/file.py:ClassName of a parser, a context or an engine.

kind: the setting that is at fault in a message, such as "parser". Every failure raises ConfigError.
"""

from collections.abc import Callable, Sequence
from difflib import get_close_matches
from typing import Any

from ludic.errors import ConfigError
from ludic.paths import local_path
from ludic.user_code import describe, load_named, only_exceptions
from ludic.user_files import NO_FILES, Files, python_file_of, read_user_file


def check_own(name: str, kind: str) -> None:
    """Raise ConfigError if the file of path/to/file.py:ClassName can't be read; runs nothing."""
    try:
        read_user_file(local_path(python_file_of(name) or name, f"the file of {kind} {name}"))
    except OSError as error:
        raise ConfigError(f"{kind} {name}: {error}") from error


def find_own(name: str, kind: str, files: Files = NO_FILES) -> Any:
    """Run the file of path/to/file.py:ClassName, or its replacement in `files`, and return what has that name in it."""
    path, _, class_name = name.rpartition(":")
    _, module = load_named(path, f"{kind} {name}", ConfigError, files)
    found = getattr(module, class_name, None)
    if not callable(found):
        raise ConfigError(f"{kind} {name}: {path} has no class or function {class_name!r}")
    return found


def build_own(name: str, kind: str, make: Callable[[], Any], method: str) -> Any:
    """Call a user's class without arguments; its instance must have `method`."""
    try:
        with only_exceptions():
            built = make()
    except Exception as error:
        raise ConfigError(f"{kind} {name} could not be built without arguments: {describe(error)}") from error
    if not callable(getattr(built, method, None)):
        raise ConfigError(f"{kind} {name}: {type(built).__name__} has no method {method!r}, which a {kind} needs")
    return built


def unknown(name: str, kind: str, known: Sequence[str]) -> ConfigError:
    """Return the error for an unknown name, with the closest known one. known: forms of the built-in names."""
    # Compare without arguments, so that tags:answer finds tag:NAME.
    forms = {form.partition(":")[0]: form for form in known}
    close = get_close_matches(name.partition(":")[0], forms, n=1)
    hint = f"did you mean {forms[close[0]]!r}? There are" if close else "there are"
    return ConfigError(
        f"{kind} {name!r} is unknown; {hint} {', '.join(known)}, and path/to/file.py:ClassName for your own"
    )
