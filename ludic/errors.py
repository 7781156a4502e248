"""Define every error that ludic raises on purpose; each is also a standard Python error.

A message says where the error is, the value found, the value wanted, and what to do. The command line
prints it as one line and exits with 1. Any other error is a bug and shows its traceback.
"""

from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from types import MappingProxyType

from ludic.base import mask

_MOST_LISTED = 20
"""Maximum number of names that a message lists."""


DETAIL_INDENT = "    "
"""Prefix of each line of a `detail` on the command line."""


class LudicError(Exception):
    """Base class of all errors that ludic raises on purpose."""

    exit_code = 1
    """Exit status of a command that it ends."""
    detail: str | None = None
    """Lines that the command line prints after the message, such as the traceback of a user's code."""
    is_lasting = False
    """True if a new start would meet the same error, for example a mistake in the settings or in the user's code."""


LASTING_EXIT_CODE = 78
"""Exit status of a process of a run that a lasting error ends, so that it is not started again; sysexits.h calls it
EX_CONFIG."""


class SchemaError(LudicError, ValueError):
    """A file or a table does not match its schema."""


class RefusedRecordError(SchemaError):
    """A record of another program can't be used. It is counted, and reported with its line and this reason."""


class NewerSchemaError(SchemaError):
    """A file is intact, but has a newer major schema version than this ludic reads."""


class InvalidBatchError(LudicError, ValueError):
    """A batch holds bad rows; none of the batch was written."""


class StoreError(LudicError, OSError):
    """A filesystem operation failed, or the filesystem lacks a guarantee that the store needs."""


class MissingRootError(LudicError, FileNotFoundError):
    """There is no run at the given root."""


class NameTakenError(LudicError, FileExistsError):
    """A file that only one process may create exists with other content."""


class FencedError(LudicError, RuntimeError):
    """A newer attempt owns this root; this process must stop."""


class ReplacedRootError(FencedError):
    """The root was deleted, or deleted and created again, since this process opened it; this process must stop."""


class SlotTakenError(LudicError, RuntimeError):
    """A newer worker holds the slot; this process must stop."""

    exit_code = 93
    """A supervisor that restarts workers waits until the other worker has ended, if the slot has a newer claim. Other
    programs rarely use this status."""


class OwnedError(LudicError, RuntimeError):
    """Another live trainer owns this root; nothing was written."""


class ConfigError(LudicError, ValueError):
    """A setting is out of range, unknown, or contradicts another."""

    is_lasting = True


class MissingPackageError(ConfigError, ImportError):
    """A package is needed that an extra of ludic installs."""


class ConsentError(LudicError, PermissionError):
    """A root names code that the user of this machine has not agreed to run; none of it was run."""

    is_lasting = True


class QueryError(LudicError, ValueError):
    """A SQL query, an advantage file or a filter could not be run."""

    is_lasting = True


class ModelError(LudicError, ValueError):
    """A model folder or a tokenizer could not be loaded. Not lasting: a worker restarts with newer weights."""


class HalfLoadedError(ModelError):
    """Weights failed to load half-way; the engine can't sample until others are loaded."""

    def __init__(self, folder: str) -> None:
        super().__init__(f"{folder}: its weights are half loaded; load a version again, then sample")


class EngineError(LudicError, RuntimeError):
    """An inference engine's process or server has ended, or broke its contract; a worker must start it again."""


class NoServerError(LudicError, ConnectionError):
    """No inference server answers, or none holds the wanted weights yet; one may do so later."""


class TrainingError(LudicError, ArithmeticError):
    """A loss or a gradient is not finite; the weights were not changed."""


class TimeLimitError(LudicError, TimeoutError):
    """A call of an environment took longer than its time limit."""


class NotCalledError(TimeLimitError):
    """A call of an environment was not made, since another one of its episode took too long."""


class JudgeError(LudicError, RuntimeError):
    """A judge did not answer, or its answer is unusable."""


class ScorerError(LudicError, RuntimeError):
    """A scorer returned no finite number, raised an error in a process of its own, or its process ended."""

    failure_traceback: str | None = None
    """Traceback of the user's code in that process; None if its process ended."""
    components: Mapping[str, float] = MappingProxyType({})
    """Reward components of the other scorers, by name; a failed rollout keeps them."""


class ToolError(LudicError, RuntimeError):
    """A tool call was refused or failed; the message is for the model that made the call."""


class StalledError(LudicError, TimeoutError):
    """No rollouts arrived for longer than the time limit."""


class AllFailedError(StalledError):
    """Every rollout of the last batches failed, such as by a mistake in a user's code."""

    is_lasting = True


class AllDroppedError(StalledError):
    """Rollouts arrived and filters dropped them for longer than the time limit."""

    is_lasting = True


class Interruption(BaseException):
    """A timer interrupted a user's code; not an Exception, so that code that catches Exception does not continue."""


class StopNowInterrupt(KeyboardInterrupt):
    """A second Ctrl-C. A KeyboardInterrupt that a user's code raises itself does not count as one."""


def one_line(error: BaseException) -> str:
    """Return an error's message on one line and without secrets, for use in another message; never raises."""
    try:
        return " ".join(mask(str(error)).split())
    except Exception as failure:  # raised by a user's __str__
        return f"its message could not be read, {type(failure).__name__} was raised"


def renamed(module: str, name: str, now: Mapping[str, str]) -> Exception:
    """Return the error of a module for an attribute that it lacks. now: names by former name."""
    if name in now:
        return ImportError(f"{module}.{name} is called {now[name]} now")
    return AttributeError(f"module {module!r} has no attribute {name!r}")


def unknown_name(
    what: str,
    name: str,
    known: Iterable[str],
    *,
    listed: Sequence[str] | None = None,
    close: Sequence[str] | None = None,
    own: Sequence[str] = (),
    elsewhere: str = "",
) -> str:
    """Return the message about an unknown name, such as: parser 'boxd' is unknown; did you mean 'boxed'?

    known: all names. listed: names to list instead of these. close: suggestions instead of the similar ones. own: forms
    of users' own names. elsewhere: text instead of a list that is too long.
    """
    known = [*known]
    listed = known if listed is None else listed
    close = similar_names(name, known) if close is None else close
    parts = []
    if elsewhere and len(listed) > _MOST_LISTED:
        parts += [] if close else [elsewhere]
    elif (len(listed) <= _MOST_LISTED or not close) and (listed or not own):
        parts.append(f"there are {', '.join(listed)}" if listed else "there is none")
    parts += [f"your own is {' or '.join(own)}"] if own else []
    text = "; ".join(parts)
    if not close:
        return f"{what} {name!r} is unknown; {text}"
    hint = f"{what} {name!r} is unknown; did you mean {' or '.join(map(repr, close))}?"
    return f"{hint} {text[:1].upper()}{text[1:]}" if text else hint


def similar_names(name: str, known: Iterable[str], *, least: float = 0.6) -> list[str]:
    """Return the names that may be meant by an unknown one, at most three, the most similar first.

    least: similarity from 0 to 1 that a name must have, as difflib measures it.
    Names such as tag:NAME and prefix/NAME are compared without argument and prefix, and then, of several, as a whole.
    """
    alike: dict[str, list[str]] = {}
    for each in known:
        alike.setdefault(_core(each), []).append(each)
    cores = get_close_matches(_core(name), alike, cutoff=least)
    return [get_close_matches(name, alike[core], n=1, cutoff=0)[0] for core in cores]


def _core(name: str) -> str:
    return name.partition(":")[0].rpartition("/")[2]
