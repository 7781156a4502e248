"""cut.json: says that a root is a cut, the part of a run that replays some steps, and which weights must come out.

A cut has one attempt, 1: the batches of its steps and the checkpoint before them. Written by ludic.what_if.cut.
"""

from contextlib import suppress
from dataclasses import replace

from ludic.errors import SchemaError
from ludic.store.attempts import newest_attempt_id
from ludic.store.catalogue import ATTEMPTS, CUT, AttemptName
from ludic.store.checkpoints import MARKER, checkpoint_folder, parse_marker
from ludic.store.records import CUT_ATTEMPT, CutRecord, encode_record
from ludic.store.root import Root


def read_cut(root: Root) -> CutRecord | None:
    """Return cut.json; None if the root is no cut. Raises SchemaError if it is damaged."""
    return CUT.read(root)


def find_cut(root: Root) -> CutRecord | None:
    """Return cut.json; None if the root is no cut, or if the file is damaged, which `ludic verify` names."""
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
