"""checkpoints/attempt=A/step=S/: where trainer state lies, by name; ludic.training.checkpoint knows what is in it."""

import re
from collections.abc import Collection
from functools import partial

from ludic.store.attempts import Place, chain, newest_checkpoint, read_parent
from ludic.store.names import NUMBER
from ludic.store.root import Root

MARKER = "checkpoint.json"
"""Put last: a checkpoint without it does not exist."""
_NAME = re.compile(rf"checkpoints/attempt={NUMBER}/step={NUMBER}/{re.escape(MARKER)}")


def checkpoint_folder(place: Place) -> str:
    attempt_id, step = place
    return f"checkpoints/attempt={attempt_id}/step={step}"


def checkpoint_places(root: Root) -> list[Place]:
    """Attempt and step of the complete checkpoints, in order; one listing, no file is read."""
    matches = map(_NAME.fullmatch, root.list("checkpoints"))
    return sorted((int(match[1]), int(match[2])) for match in matches if match)


def place_to_resume(root: Root, attempt_id: int, places: Collection[Place]) -> Place | None:
    """The newest of these checkpoints on the chain of parents from an attempt; None where it stands on none."""
    return newest_checkpoint(chain(attempt_id, partial(read_parent, root)), places)
