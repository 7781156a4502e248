"""cut.json: says that a root is a cut, the part of a run that replays some steps, and which weights must come out.

A cut has one attempt, 1: the batches of its steps and the checkpoint before them. Written by ludic.what_if.cut.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from ludic.store.attempts import CheckpointId, newest_attempt_id
from ludic.store.checkpoints import MARKER, CheckpointInfo, checkpoint_folder
from ludic.store.json_files import Count, read_record
from ludic.store.root import Root

CUT_FILE = "cut.json"
CUT_ATTEMPT = 1
"""The attempt of every file in a cut."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CutRecord:
    """Content of cut.json."""

    step: Count
    """Step that the cut is for; the last one whose batch it holds."""
    first_step: Count
    """First step whose batch it holds; a replay begins here."""
    weights_sha256: Mapping[str, str] = field(default_factory=dict)
    """SHA-256 of the weight files after `step`, by name; empty if the run did not keep these weights in float32."""

    @property
    def end(self) -> CheckpointId:
        return CUT_ATTEMPT, self.step

    @property
    def start(self) -> CheckpointId | None:
        """Checkpoint that a replay begins with; None for the first weights."""
        return (CUT_ATTEMPT, self.first_step - 1) if self.first_step > 1 else None


def read_cut(root: Root) -> CutRecord | None:
    """Return cut.json; None if the root is no cut. Raises SchemaError if it is damaged."""
    return read_record(root, CUT_FILE, CutRecord, "record of a cut")


def begin_from_cut(root: Root, source: Root) -> None:
    """Copy the checkpoint that a cut begins with into a new root; does nothing for other sources or a begun root.

    An interrupted copy is done again: the attempt that names the checkpoint is put last.
    """
    cut = read_cut(source)
    if cut is None or cut.start is None or newest_attempt_id(root):
        return
    folder, attempt = checkpoint_folder(cut.start), f"attempts/{CUT_ATTEMPT}.json"
    with root.scratch_folder() as scratch:
        source.download(folder, scratch, leave_out=[MARKER])
        root.upload(scratch, folder)
    marker = f"{folder}/{MARKER}"
    info = CheckpointInfo.from_json(source.read(marker), f"{source.url}/{marker}")
    root.put_if_absent(marker, replace(info, run_id=root.run_id).to_json())
    root.put_if_absent(attempt, source.read(attempt))
