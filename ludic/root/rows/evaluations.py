"""Store the settings of evaluations, and claim the blocks that a process samples: evaluations/ and evaluators/."""

import json
import logging
import os
import re
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from hashlib import sha256
from types import TracebackType
from typing import Any

from ludic.base import LEASE_S
from ludic.errors import LudicError, ReplacedRootError, SchemaError
from ludic.records import new_id
from ludic.root.catalogue import EVALUATIONS, EVALUATORS, NUMBER, UuidName
from ludic.root.claims import describe_process, is_dead, owner_name
from ludic.root.json_records import CodeRecord, EvaluationRecord, Evaluator, encode_record
from ludic.root.root import Root
from ludic.root.rows.files import list_files, read_sources

# --- evaluations/ ---------------------------------------------------------------------------------------------
# evaluations/{id}.json: what an evaluation samples and scores with. Put if absent, never changed.
#
# The id is a digest of the settings and of the code, so that equal ids are comparable, also those of two runs. The
# samples are rows of evals/, in files of workers named eval-{id}-{examples}-{samples}: a name says which samples the
# file holds, and is put once, so that any number of processes share an evaluation.


MOST_SAMPLES = 100_000
"""Samples of one example; request_index is the example's index times this, plus the sample's index."""

_WORKER_ID = re.compile(rf"eval-([0-9a-f]{{16}})-{NUMBER}\.{NUMBER}-{NUMBER}\.{NUMBER}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleBlock:
    """Samples that are stored as one file: of each example in a range, the samples in a range."""

    evaluation: str
    examples: range
    """Indexes of examples in the environment."""
    samples: range
    """Indexes of samples of each example."""

    @property
    def worker_id(self) -> str:
        examples, samples = self.examples, self.samples
        return f"eval-{self.evaluation}-{examples.start}.{examples.stop}-{samples.start}.{samples.stop}"

    @classmethod
    def parse(cls, worker_id: str) -> "SampleBlock | None":
        """Parse a worker_id; returns None for that of another worker."""
        match = _WORKER_ID.fullmatch(worker_id)
        if match is None:
            return None
        first, end, first_sample, end_sample = map(int, match.groups()[1:])
        return cls(evaluation=match[1], examples=range(first, end), samples=range(first_sample, end_sample))


def evaluation_of(env_name: str, settings: Mapping[str, Any], code: Sequence[CodeRecord]) -> EvaluationRecord:
    """Return the evaluation with these settings and code, as of now."""
    # Packages are left out: a new version of ludic with the same environment is the same evaluation.
    digests = [[record.role, record.name, record.digests] for record in code]
    text = json.dumps([env_name, dict(settings), digests], sort_keys=True)
    return EvaluationRecord(
        evaluation=sha256(text.encode()).hexdigest()[:16],
        env_name=env_name,
        settings=settings,
        code=[asdict(record) for record in code],
        created_at=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def put_evaluation(root: Root, evaluation: EvaluationRecord) -> None:
    """Store an evaluation, unless it is stored."""
    root.put_if_absent(EVALUATIONS.name_of(evaluation), encode_record(evaluation))


def stored_blocks(root: Root, evaluation: str, version: int) -> list[SampleBlock]:
    """Return the stored blocks of an evaluation of a version, from names, and from footers of compacted files."""
    files = list_files(root, range(version, version + 1), "evals")
    sources = (source for file in files for source in read_sources(root, file))
    blocks = (SampleBlock.parse(source.worker_id) for source in sources)
    return [block for block in blocks if block is not None and block.evaluation == evaluation]


# --- evaluators/ ----------------------------------------------------------------------------------------------
# evaluators/{id}.json: the blocks that a running process of `ludic eval` samples, so that others leave them to it.
#
# A process puts its file with a block's name before it samples the block, and then reads the files of the others: if
# one of them names the block too, it takes its own claim back. It replaces the file three times per lease length, and
# deletes it when it ends. A file is ignored once its process is proven dead, or if it has not changed for a lease
# length while this process watched; as for leases of trainers, only the watching machine's monotonic clock counts.
#
# Claims only save work. If two processes sample the same block, for example because one was frozen and lost its claim,
# the first to store it wins.


logger = logging.getLogger(__name__)

_RENEWALS_A_LEASE = 3


class BlockClaims:
    """This process's claims of blocks, and those of others. `release` may be called while `take` runs in a thread."""

    def __init__(self, root: Root, lease_s: float = LEASE_S) -> None:
        """lease_s: seconds without a change after which another process's claims expire."""
        self._root, self._uuid, self._lease_s = root, UuidName(new_id()), lease_s
        self._name = EVALUATORS.name(self._uuid)
        self._own = Evaluator(owner=owner_name(), process=describe_process(os.getpid()), blocks=())
        self._changes = threading.Lock()
        self._done = threading.Event()
        self._renewing: threading.Thread | None = None
        self._seen: dict[str, tuple[Evaluator, float]] = {}
        """Other files, and when they were first seen with this content, in seconds of the monotonic clock."""
        self._broken: set[str] = set()

    def __enter__(self) -> "BlockClaims":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Release all claims."""
        self._done.set()
        if self._renewing is None:
            return
        self._renewing.join()
        try:
            self._change(drop=self._own.blocks)
        except LudicError as error:
            logger.warning(
                "%s could not be deleted; other processes wait until its lease expires: %s", self._name, error
            )

    def of_others(self) -> set[str]:
        """Return the blocks that other living processes have claimed. Raises StoreError."""
        names = {EVALUATORS.name(found): found for found in EVALUATORS.listed(self._root) if found != self._uuid}
        self._seen = {name: seen for name, seen in self._seen.items() if name in names}
        return {block for name, found in names.items() for block in self._blocks_of(name, found)}

    def take(self, block: str) -> bool:
        """Claim a block; returns False, and claims nothing, if another living process has claimed it.

        Two processes that claim a block at the same moment may both get False. Raises StoreError, ReplacedRootError.
        """
        self._change(add=(block,))
        if self._renewing is None:
            self._renewing = threading.Thread(target=self._renew, daemon=True, name="ludic-claims")
            self._renewing.start()
        if block in self.of_others():
            self.release(block)
            return False
        return True

    def release(self, block: str) -> None:
        """Release a block, which is stored or given up. Raises as `take` does."""
        self._change(drop=(block,))

    def _change(self, *, add: Sequence[str] = (), drop: Sequence[str] = ()) -> None:
        """Store this process's claims, with a new number."""
        with self._changes:
            blocks = [*(block for block in self._own.blocks if block not in drop), *add]
            self._own = replace(self._own, blocks=blocks, num_changes=self._own.num_changes + 1)
            self._root.check_same_run()
            if blocks:
                self._root.put(self._name, encode_record(self._own))
            else:
                self._root.delete(self._name)

    def _renew(self) -> None:
        while not self._done.wait(self._lease_s / _RENEWALS_A_LEASE):
            try:
                if self._own.blocks:
                    self._change()
            except ReplacedRootError:
                return  # the next block is not stored either, which says so
            except LudicError as error:
                logger.warning("%s could not be renewed, trying again: %s", self._name, error)

    def _blocks_of(self, name: str, of: UuidName) -> Sequence[str]:
        """Return the blocks in another process's file; none if the process is dead or its lease expired."""
        try:
            found = EVALUATORS.read(self._root, *of)
        except SchemaError as error:
            if name not in self._broken:
                logger.warning("%s", error)
                self._broken.add(name)
            return ()
        if found is None:
            return ()
        now = time.monotonic()
        known, since = self._seen.get(name, (None, now))
        if found != known:
            since = now
        self._seen[name] = found, since
        is_over = now - since >= self._lease_s or (found.process is not None and is_dead(found.process))
        if not is_over:
            return found.blocks
        self._root.delete(name)  # if its process was only frozen, the next renewal puts it back
        return ()
