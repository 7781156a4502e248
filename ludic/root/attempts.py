"""Record the attempts of a trainer, and find the checkpoint to resume from: attempts/, checkpoints/ and cut.json."""

import contextlib
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any

from ludic.errors import FencedError, OwnedError, SchemaError
from ludic.root.catalogue import ATTEMPTS, CHECKPOINTS, CUT, STATE_FILES, AttemptName, StepName
from ludic.root.claims import check_claim, claim, newest_claim, read_lease
from ludic.root.json_records import (
    CHECKPOINT_FORMAT,
    CUT_ATTEMPT,
    Attempt,
    CheckpointId,
    CheckpointInfo,
    CutRecord,
    Lease,
    OtherTrainer,
    decode_json,
    decode_record,
    encode_record,
)
from ludic.root.root import Root
from ludic.root.weights.weight_folders import MANIFEST, check_folder
from ludic.settings import with_current_names

# --- Attempts -------------------------------------------------------------------------------------------------
# Attempts: attempts/N.json records the Nth start of a trainer on a root.
#
# The trainer with the newest claim owns the root; an older trainer stops at its next write. A trainer whose own claim
# is no longer stored stops too: the root was deleted, and may hold another run by now.
#
# An attempt names its parent, the attempt and step of the checkpoint that it resumed from. The chain
# of parents from the newest attempt is the effective ledger; steps off the chain are superseded.
#
# A trainer claims the root (attempts/N.lease) before it chooses the parent. After each checkpoint a trainer checks that
# there is no newer claim, and only then deletes older checkpoints: either it sees the claim, or the new trainer
# sees that checkpoint. So a checkpoint that a successor resumes from is never deleted.


def start_attempt(
    root: Root,
    *,
    parent_attempt: int | None = None,
    parent_step: int | None = None,
    config: Mapping[str, Any] | None = None,
    numerics: Mapping[str, Any] | None = None,
) -> Attempt:
    """Take ownership of the root and fence every earlier attempt, alive or not.

    Its lease counts as released from the start, so the next trainer does not wait for it.
    """
    lease, newest = None, newest_claim(root)
    while lease is None:
        with contextlib.suppress(OwnedError):
            lease = claim(root, newest, released=True)
        newest += 1
    parent = None if parent_attempt is None or parent_step is None else (parent_attempt, parent_step)
    return record_attempt(root, lease, parent, config or {}, numerics)


def record_attempt(
    root: Root,
    lease: Lease,
    parent: CheckpointId | None,
    config: Mapping[str, Any],
    numerics: Mapping[str, Any] | None = None,
    *,
    code: Sequence[Mapping[str, Any]] = (),
) -> Attempt:
    """Put the attempt that a lease claims.

    Raises FencedError if another process has put it, ReplacedRootError if the lease is no longer stored.
    """
    check_claim(root, lease.attempt_id, lease.claim_id)
    parent_attempt, parent_step = parent or (None, None)
    attempt = Attempt(
        attempt_id=lease.attempt_id,
        parent_attempt=parent_attempt,
        parent_step=parent_step,
        owner=lease.owner,
        created_at=datetime.now(UTC).isoformat(),
        config=dict(config),
        numerics=numerics,
        code=list(code),
        claim_id=lease.claim_id,
    )
    name = ATTEMPTS.name_of(attempt)
    if not root.put_if_absent(name, encode_record(attempt)):
        raise FencedError(f"{root.url}/{name} exists with other content: another process trains as this attempt")
    return attempt


def newest_attempt_id(root: Root) -> int:
    """Return the highest attempt_id that is listed; 0 if no trainer has started."""
    return max((found.attempt_id for found in ATTEMPTS.listed(root)), default=0)


def read_attempt(root: Root, attempt_id: int) -> Attempt:
    """Read an attempt, without fields that a newer ludic has added; settings of older versions get their current names.

    Raises FileNotFoundError if there is no such attempt, SchemaError if its file is broken.
    """
    attempt = ATTEMPTS.read(root, attempt_id)
    if attempt is None:
        raise FileNotFoundError(f"{root.url}/{ATTEMPTS.name(AttemptName(attempt_id))}")
    return replace(attempt, config=with_current_names(attempt.config))


def newest_attempt(root: Root, before: int | None = None) -> Attempt | None:
    """Return the newest of all attempts, or of those below `before`; None if there is none.

    Tries names downwards from the newest claim, since a trainer may die between its claim and its attempt.
    """
    for attempt_id in range(newest_claim(root) if before is None else before - 1, 0, -1):
        with contextlib.suppress(FileNotFoundError):
            return read_attempt(root, attempt_id)
    return None


def other_trainer_of(root: Root) -> OtherTrainer | None:
    """Return the trainer of another program whose steps the newest attempt records; None if ludic's own trains here.

    Raises SchemaError if the attempt's file is broken.
    """
    attempt = newest_attempt(root)
    return None if attempt is None else attempt.other_trainer


def check_not_recorded(root: Root) -> None:
    """Raise OwnedError if the steps of this root are those of another program's trainer (docs/record.md).

    ludic's own trainer has no checkpoint of that program to resume from, so it would supersede all its steps. Rollouts
    of ludic's workers would reach no trainer.
    """
    other = other_trainer_of(root)
    if other is not None:
        raise OwnedError(
            f"{root.url} records the steps of {other.name}, so ludic does not sample or train in it; "
            f"train on its rollouts in a root of its own: `ludic train OTHER_ROOT --offline --sources {root.url}`"
        )


def read_parent(root: Root, attempt_id: int) -> CheckpointId | None:
    """Return an attempt's parent; None if it has none or the attempt is gone."""
    with contextlib.suppress(FileNotFoundError):
        return read_attempt(root, attempt_id).parent
    return None


def check_not_fenced(root: Root, attempt: Attempt) -> None:
    """Check that this attempt owns the root, by reads of its own claim and of the next, since claims have no gaps.

    Raises FencedError if a newer trainer has claimed it, ReplacedRootError if its own claim is no longer stored.
    """
    check_not_replaced(root, attempt)
    newer = read_lease(root, attempt.attempt_id + 1)
    if newer is not None:
        raise FencedError(
            f"{root.url}: attempt {attempt.attempt_id} was replaced by attempt {newer.attempt_id} of {newer.owner} "
            f"at {newer.since}; this trainer stops"
        )


def check_not_replaced(root: Root, attempt: Attempt) -> None:
    """Check that the root is the one that this attempt claimed, also if a newer attempt owns it by now.

    Raises ReplacedRootError.
    """
    if attempt.claim_id is None:
        root.check_same_run()
    else:
        check_claim(root, attempt.attempt_id, attempt.claim_id)


@dataclass(frozen=True, slots=True)
class Link:
    """The part of one attempt that belongs to the effective ledger."""

    attempt_id: int
    last_step: int | None
    """Last step that counts; None for the newest attempt, all of whose steps count."""


def chain(attempt_id: int, parent_of: Callable[[int], CheckpointId | None]) -> Iterator[Link]:
    """Yield an attempt and its chain of parents, newest first; the SQL view attempt_chain has the same links.

    parent_of: returns an attempt's parent, or None if it has none or the attempt is gone.
    """
    link = Link(attempt_id, None)
    while True:
        yield link
        parent = parent_of(link.attempt_id)
        if parent is None or parent[0] >= link.attempt_id:  # a damaged file could make a cycle
            return
        link = Link(parent[0], parent[1] if link.last_step is None else min(parent[1], link.last_step))


def newest_checkpoint(links: Iterable[Link], checkpoints: Collection[CheckpointId]) -> CheckpointId | None:
    """Return the newest complete checkpoint on the chain, from which a trainer resumes; None if there is none.

    Checkpoints off the chain do not count: a fenced trainer may have finished one that no attempt continues.
    """
    for link in links:
        steps = [
            step
            for attempt_id, step in checkpoints
            if attempt_id == link.attempt_id and (link.last_step is None or step <= link.last_step)
        ]
        if steps:
            return link.attempt_id, max(steps)
    return None


def outdated(checkpoints: Iterable[CheckpointId], keep: int) -> list[CheckpointId]:
    """Return all checkpoints except the newest `keep`, oldest first."""
    assert keep >= 1, "a run must keep a checkpoint"
    return sorted(checkpoints)[:-keep]


# --- Checkpoints ----------------------------------------------------------------------------------------------
# Checkpoints on the root, checkpoints/attempt=A/step=S/: markers, which one to resume from, pruning. Imports no torch.
#
# ludic.training.checkpoint writes and reads the content.


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
    """Return the last checkpoint whose files match their digests; None to start from the first weights.

    A checkpoint that does not match is skipped with a warning. verdicts: by name, whether a checkpoint is sound;
    checkpoints in it are not read again, others are added to it.
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
        logger.warning("%s; this checkpoint is skipped", error)
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
        "%s/%s is of run %s, which was deleted here; this checkpoint is skipped: delete it",
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


def prune_checkpoints(root: Root, attempt: Attempt, keep: int) -> list[str]:
    """Delete old and incomplete checkpoints; returns their names.

    Keeps the newest `keep` complete checkpoints, and incomplete ones of this attempt and later ones.

    Call it on rank 0, right after a checkpoint of `attempt`. Raises FencedError if a newer attempt owns the root:
    claims are read after that checkpoint is complete and before the first deletion, see `Attempts` above.
    """
    begun = {(found.attempt_id, found.step) for found in STATE_FILES.listed(root)}
    complete = {(info.attempt_id, info.step): folder_of(info) for info in complete_checkpoints(root)}
    # A fenced trainer may still complete such a checkpoint; then it is not on the chain.
    incomplete = sorted(each for each in begun - complete.keys() if each[0] < attempt.attempt_id)
    old = [complete[checkpoint_id] for checkpoint_id in outdated(complete, keep)]
    old += map(checkpoint_folder, incomplete)
    check_not_fenced(root, attempt)
    for name in old:
        # Delete the marker first, so that an interrupted deletion leaves no valid checkpoint; then the list of the
        # other files.
        for first in (f"{name}/{MARKER}", f"{name}/{MANIFEST}", name):
            root.delete(first)
    return old


# --- Cuts -----------------------------------------------------------------------------------------------------
# cut.json marks a root as a cut, the part of a run that replays some steps, and holds the digests of the expected
# weights.
#
# A cut has one attempt, 1: the batches of its steps and the checkpoint before them. Written by ludic.eval.what_if.cut.


def read_cut(root: Root) -> CutRecord | None:
    """Return cut.json; None if the root is not a cut. Raises SchemaError if it is damaged."""
    return CUT.read(root)


def find_cut(root: Root) -> CutRecord | None:
    """Return cut.json; None if the root is not a cut, or if the file is damaged, which `ludic verify` names."""
    with suppress(SchemaError):
        return read_cut(root)
    return None


def begin_from_cut(root: Root, source: Root) -> None:
    """Copy the checkpoint that a cut begins with into a new root; does nothing for other sources or a begun root.

    An interrupted copy is done again: the attempt that names the checkpoint is put last.
    """
    cut = read_cut(source)
    if cut is None or cut.start is None or newest_attempt_id(root):
        return
    folder, attempt = checkpoint_folder(cut.start), ATTEMPTS.name(AttemptName(CUT_ATTEMPT))
    with root.scratch_folder() as scratch:
        source.download(folder, scratch, leave_out=[MARKER])
        root.upload(scratch, folder)
    marker = f"{folder}/{MARKER}"
    info = parse_marker(source.read(marker), f"{source.url}/{marker}")
    root.put_if_absent(marker, encode_record(replace(info, run_id=root.run_id)))
    root.put_if_absent(attempt, source.read(attempt))
