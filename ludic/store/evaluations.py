"""evaluations/{id}.json: what an evaluation samples and scores with. Put if absent, never changed.

The id is a digest of the settings and of the code, so that equal ids are comparable, also those of two runs. The
samples are rows of evals/, in files of workers named eval-{id}-{examples}-{samples}: a name says which samples the file
holds, and is put once, so that any number of processes share an evaluation.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from hashlib import sha256
from typing import Any

from ludic.store.catalogue import EVALUATIONS, NUMBER
from ludic.store.files import list_files, read_sources
from ludic.store.records import CodeRecord, Evaluation, encode_record
from ludic.store.root import Root

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


def evaluation_of(env_name: str, settings: Mapping[str, Any], code: Sequence[CodeRecord]) -> Evaluation:
    """Return the evaluation with these settings and code, as of now."""
    # Packages are left out: a new version of ludic with the same environment is the same evaluation.
    digests = [[record.role, record.name, record.digests] for record in code]
    text = json.dumps([env_name, dict(settings), digests], sort_keys=True)
    return Evaluation(
        evaluation=sha256(text.encode()).hexdigest()[:16],
        env_name=env_name,
        settings=settings,
        code=[asdict(record) for record in code],
        created_at=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def put_evaluation(root: Root, evaluation: Evaluation) -> None:
    """Store an evaluation, unless it is stored."""
    root.put_if_absent(EVALUATIONS.name_of(evaluation), encode_record(evaluation))


def stored_blocks(root: Root, evaluation: str, version: int) -> list[SampleBlock]:
    """Return the stored blocks of an evaluation of a version, from names, and from footers of compacted files."""
    files = list_files(root, range(version, version + 1), "evals")
    sources = (source for file in files for source in read_sources(root, file))
    blocks = (SampleBlock.parse(source.worker_id) for source in sources)
    return [block for block in blocks if block is not None and block.evaluation == evaluation]
