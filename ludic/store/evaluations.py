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

from ludic.store.code_files import CodeRecord
from ludic.store.files import list_files
from ludic.store.json_files import encode_record, read_record
from ludic.store.names import NUMBER
from ludic.store.root import Root
from ludic.store.sources import read_sources

FOLDER = "evaluations"
MOST_SAMPLES = 100_000
"""Samples of one example; request_index is the example's index times this, plus the sample's index."""

_ID = re.compile(r"[0-9a-f]{16}")
_WORKER_ID = re.compile(rf"eval-([0-9a-f]{{16}})-{NUMBER}\.{NUMBER}-{NUMBER}\.{NUMBER}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """What an evaluation samples and scores with; neither the weights, nor the number of examples and samples."""

    evaluation: str
    """Id: 16 hexadecimal digits."""
    env_name: str
    settings: Mapping[str, Any]
    """Settings that decide the samples: the environment and its options, sampling, seed, and those of the agent."""
    code: Sequence[Mapping[str, Any]]
    """Code that sampled and scored, each as a ludic.store.code_files.CodeRecord."""
    created_at: str

    @classmethod
    def of(cls, env_name: str, settings: Mapping[str, Any], code: Sequence[CodeRecord]) -> "Evaluation":
        """Return the evaluation with these settings and code, as of now."""
        # Packages are left out: a new version of ludic with the same environment is the same evaluation.
        digests = [[record.role, record.name, record.digests] for record in code]
        text = json.dumps([env_name, dict(settings), digests], sort_keys=True)
        return cls(
            evaluation=sha256(text.encode()).hexdigest()[:16],
            env_name=env_name,
            settings=settings,
            code=[asdict(record) for record in code],
            created_at=datetime.now(UTC).isoformat(timespec="seconds"),
        )


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


def put_evaluation(root: Root, evaluation: Evaluation) -> None:
    """Store an evaluation, unless it is stored."""
    root.put_if_absent(evaluation_name(evaluation.evaluation), encode_record(evaluation))


def read_evaluation(root: Root, evaluation: str) -> Evaluation | None:
    """Return an evaluation; None if it is not stored. Raises SchemaError if the file is broken."""
    advice = "delete it; the next `ludic eval` with its settings puts it back"
    return read_record(root, evaluation_name(evaluation), Evaluation, "evaluation", advice)


def evaluation_name(evaluation: str) -> str:
    """Return the path below the root."""
    assert _ID.fullmatch(evaluation), f"{evaluation!r} is no id of an evaluation"
    return f"{FOLDER}/{evaluation}.json"


def stored_blocks(root: Root, evaluation: str, version: int) -> list[SampleBlock]:
    """Return the stored blocks of an evaluation of a version, from names, and from footers of compacted files."""
    files = list_files(root, range(version, version + 1), "evals")
    sources = (source for file in files for source in read_sources(root, file))
    blocks = (SampleBlock.parse(source.worker_id) for source in sources)
    return [block for block in blocks if block is not None and block.evaluation == evaluation]
