"""`@operation`: one function is a method of `Run`, a command with flags and help, and its lines of docs.

A function whose first parameter is `run` is a method of `Run`. One with a `group` is a command. Method and command have
the function's name; a command has hyphens for underscores, and neither has one at its end, unless it is a keyword of
Python: `what_if` is `ludic what-if` and `Run.what_if`, `import_` is `ludic import` and `Run.import_`.
"""

import inspect
import keyword
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, Literal, TypeVar, get_args

from ludic.base import TRAIN, missing_extra, require
from ludic.errors import LudicError
from ludic.settings import RUN, Setting, check_utf8, make_operation, settings_of

F = TypeVar("F", bound=Callable[..., Any])


class Methods:
    """Base of `Run`, which gets the operations as methods; their types are in methods.pyi."""


Group = Literal["First", "Start", "Look", "Evaluate", "Ask again", "Keep", "Exchange"]
"""Groups of commands in `ludic --help`, in this order. The first one has no title there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command, as its operation registered it."""

    operation: Callable[..., Any]
    group: Group
    place: int = 100
    """Sorts the commands of a group in the help."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Values that the command gives where no flag does, unlike a call in Python."""
    only_in_file: tuple[type, ...] = ()
    """Dataclasses whose settings the command takes from the file of --config, and not as flags."""
    on_sigterm: Literal["stop", "interrupt"] | None = None
    """stop: SIGTERM and Ctrl-C set its parameter `stop`, and it ends with success. interrupt: SIGTERM is a Ctrl-C."""

    @property
    def about(self) -> str:
        """First line of the operation's docstring, without its full stop."""
        return (self.operation.__doc__ or "").strip().partition("\n")[0].rstrip(".")


COMMANDS: dict[str, Command] = {}
"""Commands by name, as far as their modules are imported; `ludic.app.cli.commands` imports all."""


def operation(
    *,
    group: Group | None = None,
    place: int = 100,
    defaults: Mapping[str, Any] | None = None,
    only_in_file: tuple[type, ...] = (),
    on_sigterm: Literal["stop", "interrupt"] | None = None,
    trains: bool = False,
    **groups: type,
) -> Callable[[F], F]:
    """Make a function an operation, whose parameters are settings (see `settings_of`).

    Its `**settings` are fields of these dataclasses, by their flat names; the names here are those of the groups in
    --help. It checks arguments that have a range or choices, as a dataclass checks its fields. Raises ConfigError, and
    MissingPackageError if a package is missing that an extra installs.

    group: makes it a command; the other arguments are those of `Command`. trains: it samples or trains, and so begins
    nothing without torch.
    """

    def decorate(function: F) -> F:
        make_operation(function, groups)
        name, method = command_name(function), method_name(function)
        is_method = next(iter(inspect.signature(function).parameters), "") == RUN

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                given = inspect.signature(function).bind_partial(*args, **kwargs)
            except TypeError:
                return function(*args, **kwargs)  # whose own error names the function
            try:
                _convert(function, given.arguments)
                if trains:
                    require("torch", TRAIN, f"ludic {name}" if group else f"ludic.{method}")
                return function(*given.args, **given.kwargs)
            except ModuleNotFoundError as error:
                if (missing := missing_extra(error)) is None:
                    raise
                told: LudicError = missing
            except LudicError as error:
                told = error
            # Frames of ludic, and those of the causes that the message names, would hide it and the line of the user's
            # program above it.
            if told.detail and told.detail not in getattr(told, "__notes__", ()):
                told.add_note(told.detail)
            raise told.with_traceback(None) from None

        if is_method:
            setattr(Methods, method, call)
        if group is not None:
            assert group in get_args(Group), group
            assert name not in COMMANDS, f"two functions are `ludic {name}`"
            COMMANDS[name] = Command(
                operation=call,
                group=group,
                place=place,
                defaults=defaults or {},
                only_in_file=only_in_file,
                on_sigterm=on_sigterm,
            )
        return call  # type: ignore[return-value]

    return decorate


def method_name(function: Callable[..., Any]) -> str:
    """Return the name of an operation as a method of `Run`: what_if, import_, eval."""
    name = function.__name__
    return name if keyword.iskeyword(name.rstrip("_")) else name.rstrip("_")


def command_name(function: Callable[..., Any]) -> str:
    """Return the name of an operation as a command: what-if, import, eval."""
    return function.__name__.rstrip("_").replace("_", "-")


def _convert(function: Callable[..., Any], given: dict[str, Any]) -> None:
    """Check the arguments of a function, and put them into the types of its settings. Raises ConfigError."""
    for each in settings_of(function):
        if each.path or each.field not in given:
            continue
        if _is_checked(each):
            given[each.field] = each.convert(given[each.field])
        elif isinstance(given[each.field], str):
            check_utf8(given[each.field], each.name)


def _is_checked(setting: Setting) -> bool:
    return bool(setting.ranges or setting.choices or setting.is_switch)
