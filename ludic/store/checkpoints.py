"""Folders of checkpoints, checkpoints/attempt=A/step=S/; ludic.training.checkpoint reads and writes their content."""

import re
from collections.abc import Collection
from functools import partial

from ludic.store.attempts import CheckpointId, chain, newest_checkpoint, read_parent
from ludic.store.names import NUMBER
from ludic.store.root import Root

MARKER = "checkpoint.json"
"""File put last: a checkpoint without it does not count."""
_NAME = re.compile(rf"checkpoints/attempt={NUMBER}/step={NUMBER}/{re.escape(MARKER)}")
NOTHING_TO_RESUME = "has no complete checkpoint to resume from; without --resume it starts from the first weights"
"""What an error says of a root without a checkpoint, after the root's URL."""


def checkpoint_folder(place: CheckpointId) -> str:
    attempt_id, step = place
    return f"checkpoints/attempt={attempt_id}/step={step}"


def checkpoint_ids(root: Root) -> list[CheckpointId]:
    """Return attempt and step of the complete checkpoints, sorted; takes one listing and reads no file."""
    matches = map(_NAME.fullmatch, root.list("checkpoints"))
    return sorted((int(match[1]), int(match[2])) for match in matches if match)


def checkpoint_id_to_resume(root: Root, attempt_id: int, places: Collection[CheckpointId]) -> CheckpointId | None:
    """Return the newest of these checkpoints on an attempt's chain of parents; None if none is on it."""
    return newest_checkpoint(chain(attempt_id, partial(read_parent, root)), places)
