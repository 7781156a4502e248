"""Checkpoints on the root, checkpoints/attempt=A/step=S/: markers, which one to resume from, pruning. Imports no torch.

ludic.training.checkpoint writes and reads the content.
"""

import logging
from collections.abc import Callable, Collection, MutableMapping
from functools import partial

from ludic.errors import SchemaError
from ludic.store.attempts import (
    chain,
    check_not_fenced,
    newest_checkpoint,
    outdated,
    read_parent,
)
from ludic.store.catalogue import CHECKPOINTS, STATE_FILES, StepName
from ludic.store.manifest import MANIFEST, check_folder
from ludic.store.records import CHECKPOINT_FORMAT, Attempt, CheckpointId, CheckpointInfo, decode_json, decode_record
from ludic.store.root import Root

logger = logging.getLogger(__name__)

MARKER = CHECKPOINTS.file
"""File put last: a checkpoint without it does not count."""

NOTHING_TO_RESUME = "has no complete checkpoint to resume from; without --resume it starts from the first weights"
"""End of the error for a root without a checkpoint; the root's URL comes first."""


def checkpoint_folder(checkpoint_id: CheckpointId) -> str:
    attempt_id, step = checkpoint_id
    return CHECKPOINTS.below(attempt_id=attempt_id, step=step)


def folder_of(info: CheckpointInfo) -> str:
    """Return the folder of a checkpoint below the root."""
    return checkpoint_folder((info.attempt_id, info.step))


def parse_marker(data: bytes, where: str) -> CheckpointInfo:
    """Parse checkpoint.json. Raises SchemaError, which names `where`, if it is not one of this format version."""
    try:
        info = decode_record(data, CheckpointInfo)
    except ValueError as error:
        raise SchemaError(f"{where} is not a checkpoint.json that ludic can read: {error}") from error
    if info.format_version not in range(1, CHECKPOINT_FORMAT + 1):
        raise SchemaError(
            f"{where} has format {info.format_version}, this ludic reads 1 to {CHECKPOINT_FORMAT}; upgrade ludic"
        )
    return info


def checkpoint_ids(root: Root) -> list[CheckpointId]:
    """Return attempt and step of the complete checkpoints, sorted; takes one listing and reads no file."""
    return [(found.attempt_id, found.step) for found in CHECKPOINTS.listed(root)]


def checkpoint_id_to_resume(root: Root, attempt_id: int, existing: Collection[CheckpointId]) -> CheckpointId | None:
    """Return the newest of these checkpoints on an attempt's chain of parents; None if none is on it."""
    return newest_checkpoint(chain(attempt_id, partial(read_parent, root)), existing)


def last_checkpoint(
    root: Root, attempt: Attempt | None, is_sound: Callable[[CheckpointInfo], bool] = lambda info: True
) -> CheckpointInfo | None:
    """Return the newest complete checkpoint on the chain of parents of an attempt; None if there is none.

    is_sound: checkpoints for which it is false are skipped. By default only markers are read.
    """
    if attempt is None:
        return None
    found = {(info.attempt_id, info.step): info for info in complete_checkpoints(root)}
    while (checkpoint_id := checkpoint_id_to_resume(root, attempt.attempt_id, found)) is not None:
        if is_sound(found[checkpoint_id]):
            return found[checkpoint_id]
        del found[checkpoint_id]
    return None


def checkpoint_to_resume(
    root: Root, attempt: Attempt | None, verdicts: MutableMapping[str, bool] | None = None
) -> CheckpointInfo | None:
    """The last checkpoint whose files match their digests; None to start from the first weights.

    One that does not match is passed over with a warning. verdicts: whether a checkpoint is sound, by name; one that
    is in there is not read again, others are added.
    """
    verdicts = {} if verdicts is None else verdicts

    def is_sound(info: CheckpointInfo) -> bool:
        name = folder_of(info)
        if name not in verdicts:
            verdicts[name] = _is_sound(root, name)
        return verdicts[name]

    return last_checkpoint(root, attempt, is_sound)


def _is_sound(root: Root, name: str) -> bool:
    try:
        check_folder(root, name)
    except FileNotFoundError:  # another trainer has pruned it in between
        return False
    except SchemaError as error:
        logger.warning("%s; the checkpoint is passed over", error)
        return False
    return True


def complete_checkpoints(root: Root) -> list[CheckpointInfo]:
    """Return checkpoints of this run that have a marker, ordered by attempt and step.

    Raises SchemaError for a marker that ludic can't read.
    """
    found = [_read_marker(root, CHECKPOINTS.name(StepName(*checkpoint_id))) for checkpoint_id in checkpoint_ids(root)]
    return [info for info in found if info and _is_of_run(root, info)]


def _is_of_run(root: Root, info: CheckpointInfo) -> bool:
    """Return whether a trainer of this run wrote a checkpoint; warns of another's, which outlived a deleted root."""
    if info.run_id in (None, root.run_id):
        return True
    logger.warning(
        "%s/%s is of run %s, which was deleted here; the checkpoint is passed over, delete it",
        root.url,
        folder_of(info),
        info.run_id,
    )
    return False


def _read_marker(root: Root, name: str) -> CheckpointInfo | None:
    """Read a marker; returns None if it was deleted since listing or is half-written, for example by a copying tool."""
    try:
        data = root.read(name)
        decode_json(data)
    except (FileNotFoundError, ValueError):
        return None
    return parse_marker(data, f"{root.url}/{name}")


def prune_checkpoints(root: Root, attempt: Attempt, keep: int, *, every: int | None = None) -> list[str]:
    """Delete old and incomplete checkpoints; returns their names.

    Keeps the newest `keep` complete checkpoints, those whose step is a multiple of `every`, and incomplete ones of
    this attempt and later ones.

    Call it on rank 0, right after a checkpoint of `attempt`. Raises FencedError if a newer attempt owns the root:
    claims are read after that checkpoint is complete and before the first deletion, see ludic.store.attempts.
    """
    begun = {(found.attempt_id, found.step) for found in STATE_FILES.listed(root)}
    complete = {(info.attempt_id, info.step): folder_of(info) for info in complete_checkpoints(root)}
    # A fenced trainer may still complete such a checkpoint; then it is not on the chain.
    incomplete = sorted(each for each in begun - complete.keys() if each[0] < attempt.attempt_id)
    old = [
        complete[checkpoint_id]
        for checkpoint_id in outdated(complete, keep)
        if every is None or checkpoint_id[1] % every
    ]
    old += map(checkpoint_folder, incomplete)
    check_not_fenced(root, attempt)
    for name in old:
        # The marker first, so that a deletion cut short leaves nothing that counts; then what lists the other files.
        for first in (f"{name}/{MARKER}", f"{name}/{MANIFEST}", name):
            root.delete(first)
    return old
