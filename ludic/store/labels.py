"""labels/: marks and notes that people gave to stored rollouts, appended at any time by any number of people.

Writes labels/{uuid7}.parquet, put if absent, one file for each label. A file is complete and immutable once listed; a
later label of the same name and author replaces an earlier one in the view `labels`. Raises ConfigError for a label
that can't be stored, StoreError if the filesystem fails.
"""

import getpass
import math
from datetime import UTC, datetime

import pyarrow as pa

from ludic.errors import ConfigError
from ludic.printable import storable
from ludic.records import new_id
from ludic.schema import arrow_schema
from ludic.store.catalogue import LABELS, UuidName
from ludic.store.root import Root
from ludic.store.tables import put_table

LABEL = "label"
"""Name of a label whose author gave it no other."""


def put_label(
    root: Root, rollout_id: str, value: float | str | None, note: str | None, *, name: str = LABEL, author: str | None
) -> None:
    """Store one label. value: a number, or a mark in words. Without value and note, it withdraws an earlier label."""
    is_text = isinstance(value, str)
    number = None if is_text or value is None else float(value)
    if number is not None and not math.isfinite(number):
        raise ConfigError(f"the label of {rollout_id} is {number}; wanted a finite number or a text")
    if not name.strip():
        raise ConfigError(f"the label of {rollout_id} has no name; leave it out, or give one such as {LABEL!r}")
    row = {
        "rollout_id": rollout_id,
        "name": storable(name),
        "value": number,
        "text": storable(str(value)) if is_text and value else None,
        "note": storable(note) if note else None,
        "author": storable(author or _user()),
        "created_at": datetime.now(UTC),
        "run_id": root.run_id,
    }
    put_table(root, LABELS, UuidName(new_id()), pa.Table.from_pylist([row], arrow_schema(LABELS.table)))


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError, ImportError) as error:  # a container may have a user without a name
        raise ConfigError("the user of this machine has no name, and a label needs its author; give one") from error
