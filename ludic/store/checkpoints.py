"""checkpoints/attempt=A/step=S/: where trainer state lies, by name; ludic.training.checkpoint knows what is in it."""

import re

from ludic.store.attempts import Place
from ludic.store.root import Root

MARKER = "checkpoint.json"
"""Put last: a checkpoint without it does not exist."""
_NAME = re.compile(rf"checkpoints/attempt=(\d+)/step=(\d+)/{re.escape(MARKER)}")


def checkpoint_folder(place: Place) -> str:
    attempt_id, step = place
    return f"checkpoints/attempt={attempt_id}/step={step}"


def checkpoint_places(root: Root) -> list[Place]:
    """Attempt and step of the complete checkpoints, in order; one listing, no file is read."""
    matches = map(_NAME.fullmatch, root.list("checkpoints"))
    return sorted((int(match[1]), int(match[2])) for match in matches if match)
