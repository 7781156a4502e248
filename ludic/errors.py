"""Every error that ludic raises on purpose; each is also a standard one.

A message says where, what was found, what was wanted, and what to do. The command line
prints it as one line and exits with 1; anything else is a bug and shows its traceback.
"""


class LudicError(Exception):
    """Root of all errors that ludic explains."""


class SchemaError(LudicError, ValueError):
    """A file or a table does not match its schema."""


class NewerSchemaError(SchemaError):
    """A file is sound, and of a newer major version than this ludic reads."""


class InvalidBatchError(LudicError, ValueError):
    """A batch holds bad rows; nothing of it was written."""


class StoreError(LudicError, OSError):
    """A filesystem refused, or does not keep a promise that the store needs."""


class MissingRootError(LudicError, FileNotFoundError):
    """There is no run at the given root."""


class NameTakenError(LudicError, FileExistsError):
    """A file that only one process may create exists with other content."""


class FencedError(LudicError, RuntimeError):
    """A newer attempt owns this root; this process must stop."""


class SlotTakenError(LudicError, RuntimeError):
    """A newer worker holds the slot; this process must stop."""


class OwnedError(LudicError, RuntimeError):
    """Another trainer owns this root and lives; nothing was written."""


class ConfigError(LudicError, ValueError):
    """A setting is out of range, unknown, or contradicts another."""


class ConsentError(LudicError, PermissionError):
    """A root names code that the user of this machine has not agreed to run; none of it was run."""


class QueryError(LudicError, ValueError):
    """A SQL text, an advantage file or a filter could not be run."""


class ModelError(LudicError, ValueError):
    """A model folder or a tokenizer could not be loaded."""


class TrainingError(LudicError, ArithmeticError):
    """A loss or a gradient is not finite; the weights were left as they were."""


class TimeLimitError(LudicError, TimeoutError):
    """A call of an environment took longer than its limit."""


class StalledError(LudicError, TimeoutError):
    """Nothing arrived for longer than the stall limit."""


def in_a_line(error: Exception) -> str:
    """What an error says, for a message of ours: without line breaks."""
    return " ".join(str(error).split())
