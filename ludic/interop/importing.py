"""Import rollouts that other programs wrote into a root, with the same writer and checks as a worker's rollouts.

Reads a peer's file, and writes:
  imports/{worker_id}.json        put first: the file, how it is read, and the time
  rollouts/ and evals/            whole groups only
  imports/{worker_id}.done.json   put last: the report
The worker_id is `import-` and the beginning of a SHA-256 of the file's content and the fields in its path. All output
follows from the file's content and imports/{worker_id}.json, so a second call finishes an interrupted import, and does
nothing after a finished import. A record that can't be used is refused alone, with its line and reason. Raises
ConfigError if a file holds no usable record, or was imported in another way.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from ludic.errors import ConfigError, LudicError, SchemaError
from ludic.interop.episodes import Episode, GetTokenizer, rollout_episode
from ludic.interop.mapping import FormatMapping
from ludic.interop.reading import NumberedRecord, digest, path_fields, read_records
from ludic.interop.record import Record, RefusedRecordError
from ludic.interop.rows import LOGPROBS_ABSENT, RowMaker
from ludic.interop.verifiers import verifiers_episodes
from ludic.records import Rollout, RolloutBatch, RolloutGroup, RolloutMetadata
from ludic.schema.validation import find_problems
from ludic.store import RolloutWriter, Root
from ludic.store.files import Folder
from ludic.store.json_files import decode_json, encode_json

# Larger than a worker's files, since the delay of an import does not matter.
_GROUPS_A_FILE = 64
_TOKENS_A_FILE = 1 << 22


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A record that was not imported."""

    line: int
    """Line or row in the file, counted from 1."""
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportReport:
    """Result of importing a file."""

    file: str
    worker_id: str
    num_records: int
    num_groups: int
    num_rollouts: int
    num_without_logprobs: int
    num_unscored: int
    kept_as_metadata: Mapping[str, int]
    """Number of episodes by field, for fields that no column holds and that are kept in metadata."""
    not_kept: Mapping[str, int]
    """Number of episodes by field, for fields that no column holds and that are too large for metadata."""
    refused: Sequence[Refusal]
    was_there: bool = False
    """True if the file had been imported before; then nothing was written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Importing:
    """The import of one file into a root."""

    root: Root
    url: str
    mapping: FormatMapping
    env_name: str
    """Environment of records that name none."""
    path: Mapping[str, str]
    """Fields that the mapping reads from the file's path."""
    sha256: str
    """Digest of the file's content and its `path`: a step given only in the name distinguishes two equal files."""

    @classmethod
    def of(cls, root: Root, url: str, mapping: FormatMapping, env_name: str) -> "_Importing":
        path = path_fields(url, mapping)
        identity = hashlib.sha256(json.dumps([digest(url), path], sort_keys=True).encode()).hexdigest()
        return cls(root=root, url=url, mapping=mapping, env_name=env_name, path=path, sha256=identity)

    @property
    def worker_id(self) -> str:
        return f"import-{self.sha256[:16]}"

    @property
    def row_maker(self) -> RowMaker:
        return RowMaker(sha256=self.sha256, run=self.root.run, env_name=self.env_name)


@dataclass(slots=True)
class _Findings:
    """Usable and refused records of a file."""

    num_records: int = 0
    rows: dict[tuple[str, ...], list[list[Rollout]]] = field(default_factory=dict)
    """The rows of each usable episode, by group."""
    kept: Counter[str] = field(default_factory=Counter)
    not_kept: Counter[str] = field(default_factory=Counter)
    refused: list[Refusal] = field(default_factory=list)


def import_file(
    root: Root, url: str, mapping: FormatMapping, *, env_name: str, tokenizer: str, get_tokenizer: GetTokenizer
) -> ImportReport:
    """Import one file; a second call changes nothing. All rollouts of the file are in memory at once.

    env_name: environment of records that name none. tokenizer: name of the tokenizer that get_tokenizer loads, which
    is recorded in imports/.
    """
    job = _Importing.of(root, url, mapping, env_name)
    how = {"format": mapping.name, "mapping_sha256": mapping.sha256, "env_name": env_name, "tokenizer": tokenizer}
    begun, done = f"imports/{job.worker_id}.json", f"imports/{job.worker_id}.done.json"
    _check_same(job, how, _read_json(root, begun))
    earlier = _read_json(root, done)
    if earlier is not None:
        refused = [Refusal(**refusal) for refusal in earlier["refused"]]
        return ImportReport(**earlier | {"file": url, "refused": refused, "was_there": True})
    findings = _read(job, get_tokenizer)
    groups = list(_groups(job, findings))
    root.put_if_absent(begun, encode_json(how | {"file": url, "created_at": _now()}))
    stored = _check_same(job, how, _read_json(root, begun))
    _write(job, groups, datetime.fromisoformat(stored["created_at"]))
    report = _report(job, findings, groups)
    root.put_if_absent(done, encode_json(asdict(report)))
    return report


def _now() -> str:
    return datetime.now(UTC).isoformat()


def _read_json(root: Root, name: str) -> dict[str, Any] | None:
    try:
        return decode_json(root.read(name))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise SchemaError(f"{root.url}/{name} can't be read: {error}") from error


def _check_same(job: _Importing, how: Mapping[str, str], stored: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Raises ConfigError if the file was imported in another way, since its rollouts would then be stored twice."""
    for name, value in how.items():
        if stored is not None and stored[name] != value:
            raise ConfigError(
                f"{job.url} was imported into {job.root.url} before, with {name} {stored[name]!r}, not {value!r}; "
                f"its rollouts have worker_id {job.worker_id}: expire them, or import into another root"
            )
    return stored or {}


# --- Reading ---------------------------------------------------------------------------------------------


def _read(job: _Importing, get_tokenizer: GetTokenizer) -> _Findings:
    """Read every record, and use or refuse it. Raises ConfigError if no record can be used."""
    findings = _Findings()
    number = 0
    for line, values in read_records(job.url, job.mapping):
        findings.num_records += 1
        try:
            for episode in _episodes(job, (line, values), get_tokenizer):
                _add(job, findings, episode, number)
                number += 1
        except RefusedRecordError as error:
            findings.refused.append(Refusal(line=line, reason=str(error)))
    if not findings.rows:
        first = f"; the first, at {findings.refused[0].line}: {findings.refused[0].reason}" if findings.refused else ""
        raise ConfigError(
            f"{job.url}: none of {findings.num_records} records can be used as format {job.mapping.name}{first}"
        )
    return findings


def _episodes(job: _Importing, record: NumberedRecord, get_tokenizer: GetTokenizer) -> list[Episode]:
    _, values = record
    if isinstance(values, str):
        raise RefusedRecordError(values)
    try:
        seen = Record.of(values, job.mapping, job.path, job.root.run.extra_columns)
        if job.mapping.layout == "episodes":
            return list(verifiers_episodes(seen, get_tokenizer))
        return [rollout_episode(seen, get_tokenizer)]
    except LudicError:
        raise
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        reason = f"is not built as format {job.mapping.name} says: {type(error).__name__}: {error}"
        raise RefusedRecordError(reason) from error


def _add(job: _Importing, findings: _Findings, episode: Episode, number: int) -> None:
    """Add an episode's rows to their group. Raises RefusedRecordError if the store would refuse them."""
    rows = job.row_maker.rows(episode, number)
    _check(job, rows)
    key = (episode.group, rows[0].env_name, episode.purpose)
    findings.rows.setdefault(key, []).append(rows)
    findings.kept.update(episode.metadata.keys())
    findings.not_kept.update(episode.not_kept)


def _check(job: _Importing, rows: Sequence[Rollout]) -> None:
    batch = RolloutBatch(
        groups=(RolloutGroup(key="", rollouts=tuple(rows)),), metadata=RolloutMetadata(worker_id=job.worker_id)
    )
    problems = find_problems(batch, job.root.run.extra_columns)
    if problems:
        raise RefusedRecordError("; ".join(f"{problem.column} {problem.reason}" for problem in problems[:3]))


# --- Writing ---------------------------------------------------------------------------------------------


def _groups(job: _Importing, findings: _Findings) -> Iterator[RolloutGroup]:
    """Yield groups in the order of their first episodes; group_size is the real number of episodes."""
    for (_, env_name, _), episodes in findings.rows.items():
        group_id = episodes[0][0].group_id
        rollouts = tuple(
            replace(row, group_id=group_id, group_index=index, group_size=len(episodes))
            for index, rows in enumerate(episodes)
            for row in rows
        )
        yield RolloutGroup(key=f"{env_name}/{rollouts[0].env_example_id}", rollouts=rollouts)


def _write(job: _Importing, groups: Sequence[RolloutGroup], created_at: datetime) -> None:
    """Write whole groups, in files that follow from the content alone; files that exist already are unchanged."""
    metadata = RolloutMetadata(worker_id=job.worker_id, timestamp=created_at)
    folders: dict[str, Folder] = {"train": "rollouts", "eval": "evals"}
    for purpose, folder in folders.items():
        chosen = [group for group in groups if group.rollouts[0].purpose == purpose]
        with RolloutWriter(job.root, job.worker_id, folder=folder) as writer:
            for part in _parts(chosen):
                # One flush for each batch, so that the content of a file does not depend on the clock.
                writer.append(RolloutBatch(groups=part, metadata=metadata))
                writer.flush()


def _parts(groups: Sequence[RolloutGroup]) -> Iterator[tuple[RolloutGroup, ...]]:
    part: list[RolloutGroup] = []
    num_tokens = 0
    for group in groups:
        part.append(group)
        num_tokens += sum(rollout.prompt_length + rollout.response_length for rollout in group.rollouts)
        if len(part) == _GROUPS_A_FILE or num_tokens >= _TOKENS_A_FILE:
            yield tuple(part)
            part, num_tokens = [], 0
    if part:
        yield tuple(part)


def _report(job: _Importing, findings: _Findings, groups: Sequence[RolloutGroup]) -> ImportReport:
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    return ImportReport(
        file=job.url,
        worker_id=job.worker_id,
        num_records=findings.num_records,
        num_groups=len(groups),
        num_rollouts=len(rollouts),
        num_without_logprobs=sum(LOGPROBS_ABSENT.items() <= rollout.metadata.items() for rollout in rollouts),
        num_unscored=sum(rollout.episode_reward is None for rollout in rollouts),
        kept_as_metadata=dict(sorted(findings.kept.items())),
        not_kept=dict(sorted(findings.not_kept.items())),
        refused=findings.refused,
    )
