"""Steps of a run's effective ledger, and the rollouts that a step considered.

Reads attempts/, batches/, rollouts/ and expired/. Raises ConfigError, which names the missing step or file.
"""

from collections.abc import Mapping, Sequence

import pyarrow as pa

from ludic.errors import ConfigError, StoreError
from ludic.store import Root, read_ledger
from ludic.store.ledger import attempt_of_steps, read_rollouts


def planned_steps(root: Root) -> dict[int, int]:
    """Return the attempt_id of each step of the effective ledger, in order of steps. Raises ConfigError for none."""
    planned = attempt_of_steps(root)
    if not planned:
        raise ConfigError(f"{root.url}: no step has been planned (batches/ is empty); train the run first")
    return planned


def parse_steps(text: str | None, planned: Mapping[int, int], url: str) -> list[int]:
    """Return the planned steps of "7" or "10-20"; None is all. Raises ConfigError for a step that was not planned."""
    if text is None:
        return list(planned)
    first, dash, last = text.strip().partition("-")
    if not first.isdecimal() or not (last.isdecimal() if dash else True):
        raise ConfigError(f"steps is {text!r}, wanted one step such as 7, or a range such as 10-20")
    low, high = int(first), int(last or first)
    for step in (low, high):
        check_planned(step, planned, url)
    if low > high:
        raise ConfigError(f"steps is {text!r}; the first step comes after the last one")
    return [step for step in planned if low <= step <= high]


def check_planned(step: int, planned: Mapping[int, int], url: str) -> None:
    """Raise ConfigError unless a step was planned."""
    if step not in planned:
        raise ConfigError(f"{url} has no step {step}; its batches have steps {min(planned)} to {max(planned)}")


def read_step(root: Root, planned: Mapping[int, int], step: int) -> pa.Table:
    """Return the ledger rows of a planned step."""
    return read_ledger(root, planned[step], step)


def read_considered(root: Root, rows: pa.Table, columns: Sequence[str]) -> pa.Table:
    """Return columns of the rollouts of ledger rows, in their order. Raises ConfigError if their files are gone."""
    try:
        return read_rollouts(root, rows, columns)
    except StoreError as error:
        step = rows["step"][0].as_py()
        names = [name for name in rows["file"].unique().to_pylist() if f"/{name} " in str(error)]
        if not names:
            raise
        raise ConfigError(
            f"{root.url}: step {step} needs {names[0]}, which is gone: its rollouts have expired or were deleted"
        ) from error
