"""Define and encode the records in the JSON files of a root; ludic.root.catalogue says which file holds which.

Fields that older files lack have defaults. Unknown keys, which a newer ludic wrote, are ignored when a file is read.
Records hold plain values only; their use is with the code that writes and reads them. Raises SchemaError if a file does
not hold its record.
"""

import ast
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import ceil
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import msgspec
import numpy as np
from xxhash import xxh3_64_hexdigest

from ludic.base import A_RELATIVE_PATH, MOST_LEASE_S, RELATIVE_PATH, ExampleIds
from ludic.errors import SchemaError
from ludic.records import check_extra_columns

if TYPE_CHECKING:
    from ludic.root.storage.filesystem import Storage

StoredCount = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
"""A number that becomes part of a file name or of an int64 column."""
AttemptId = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
"""A number that becomes part of an int32 column, too."""
Time = Annotated[str, msgspec.Meta(description="ISO 8601")]
"""A time by its writer's clock, in ISO 8601."""

# --- Names in records -----------------------------------------------------------------------------------------
# A root may come from another user, and a name in its records may become a path, or a part of one. A field of such a
# name has one of these types, and decoding refuses a value that leads out of its folder. A new text field of a record
# gets one too, unless no path is made of it: then tests/root/test_names.py lists it.

DIGITS = r"(?:0|[1-9][0-9]{0,17})"
"""Pattern of a number in a file's name, as ludic writes it; it fits into int64."""
COMPACTED = "compacted."
"""Start of the worker_id in the name of a compacted file; its rows keep their own worker_id and sequence."""
IMPORTED_BY = "import-"
"""Start of the worker_id of rows that a foreign file brought."""
WORKER = rf"(?!{re.escape(COMPACTED)})[A-Za-z0-9-][A-Za-z0-9._-]{{0,199}}"
"""Pattern of a worker_id; not "." or "_" first: pyarrow and Spark take such files for hidden ones."""
COMMITTER = rf"{WORKER}|{re.escape(COMPACTED)}{DIGITS}"
"""Pattern of the worker_id in a file's name."""


def _name(pattern: str, about: str) -> msgspec.Meta:
    return msgspec.Meta(pattern=rf"^(?:{pattern})\Z", description=about)


RelativeName = Annotated[str, _name(RELATIVE_PATH, A_RELATIVE_PATH)]
WorkerId = Annotated[str, _name(COMMITTER, "a worker_id: letters, digits, '.', '_' and '-'")]
RunId = Annotated[str, _name("[A-Za-z0-9-]{1,64}", "at most 64 letters, digits and hyphens")]
"""It becomes part of paths on this machine: the cache of scalars, logs, TensorBoard's folder."""
EvaluationId = Annotated[str, _name("[0-9a-f]{16}", "16 hexadecimal digits")]
Sha256 = Annotated[str, _name("[0-9a-f]{64}", "a SHA-256 in hexadecimal")]
EPISODE = "[A-Za-z0-9][A-Za-z0-9._-]{0,127}"
"""Pattern of the name of an agent's episode, which clients of the gateway may choose."""
AN_EPISODE = "at most 128 letters, digits, '.', '_' and '-', beginning with a letter or a digit"
EpisodeName = Annotated[str, _name(EPISODE, AN_EPISODE)]
ModuleName = Annotated[str, _name(r"[^\W\d]\w*", "the name of a module")]
CodeName = Annotated[str, _name(r"[^\0]*\.(?:py|sql)", "the name of a Python or SQL file")]
"""Name of a user's file in the settings: a path as the user typed it. Only a user who names it reads it."""
CodePath = Annotated[str, _name(r"/[^\0\n]*\.(?:py|sql)", "the absolute path of a Python or SQL file")]
"""Path that a user's file was read from, on any machine. It becomes __file__ only with consent to this path."""

# --- Records --------------------------------------------------------------------------------------------------

CheckpointId = tuple[int, int]
"""attempt_id and step of a checkpoint."""
Folder = Literal["rollouts", "evals"]
"""Folder of rollouts."""
Spans = Mapping[WorkerId, Sequence[tuple[int, int]]]
"""Half-open intervals of sequences, by worker_id."""

CUT_ATTEMPT = 1
"""The attempt of every file in a cut."""
CHECKPOINT_FORMAT = 2
"""2: the cursor holds sources by version. An older ludic would not see them as consumed. This ludic also reads 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """The fields of run.json that the root itself reads; ludic.run.config.RunConfig has all settings of a run."""

    run_id: RunId
    """A uuid7, drawn when the run was started."""
    schema_version: str
    """Version of the schema of the ludic that started the run."""
    model: str
    env: tuple[str, ...]
    example_ids: ExampleIds = "question"
    """Identification of examples of questions, fixed when the root is created; absent in older files."""
    env_options: Mapping[str, Any] = field(default_factory=dict)
    extra_columns: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_extra_columns(self.extra_columns)


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeRecord:
    """Code that determined rewards or advantages, as recorded for attempts and for workers' lives."""

    role: str
    """Role of a kind of ludic.settings.kinds."""
    name: str
    """Name of the code in the settings."""
    sha256: Sha256 | None
    """SHA-256 of its text, stored as code/{sha256}.py or .sql if it is a user's file; None if it has no source file."""
    path: str | None = None
    """Path that a user's file was read from."""
    package: str | None = None
    """Name and version of the installed package that contains it, such as ludic-rl 0.1.0."""
    imports: Mapping[str, str] = field(default_factory=dict)
    """Digests of the modules that were read with a user's file, by module name; heldout is that of the held-out
    questions of qa/SOURCE."""

    @property
    def digests(self) -> dict[str, str | None]:
        """SHA-256 by module name; "" is the file itself."""
        return {"": self.sha256, **self.imports}


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherTrainer:
    """The trainer of another program, whose steps were recorded (docs/record.md)."""

    name: str
    """Program and version, such as trl 1.16.0."""
    settings: Mapping[str, Any]
    """Its settings under its own names; none of them is a setting of ludic."""


RECORDED = "recorded"
"""Key of an attempt's config if another program trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One start of a trainer."""

    attempt_id: AttemptId
    parent_attempt: AttemptId | None
    """Attempt of the checkpoint that this one resumed from; None if it started from the run's first weights."""
    parent_step: StoredCount | None
    """Step of that checkpoint; later steps of the parent are superseded."""
    owner: str
    """Host and pid of the trainer as host-pid, for people."""
    created_at: Time
    config: Mapping[str, Any]
    """The trainer's settings; the next start uses them unless it is given others."""
    numerics: Mapping[str, Any] | None = None
    """Threads, versions and hardware that affect the last bits of the weights; None if not recorded."""
    code: Sequence[Mapping[str, Any]] = field(default_factory=list)
    """The code of its advantage, filters and selection, each as a CodeRecord."""
    claim_id: str | None = None
    """Lease.claim_id of its lease; None in files of older versions, and in a cut, which nobody claimed."""

    @property
    def parent(self) -> CheckpointId | None:
        if self.parent_attempt is None or self.parent_step is None:
            return None
        return self.parent_attempt, self.parent_step

    @property
    def other_trainer(self) -> OtherTrainer | None:
        """The trainer of another program; None if ludic's own trained."""
        return other_trainer(self.config)


def other_trainer(config: Mapping[str, Any]) -> OtherTrainer | None:
    """Return the trainer of another program whose steps an attempt records; None if ludic's own trained.

    config: of the attempt. Fields that the program left out are empty.
    """
    found = config.get(RECORDED)
    if not isinstance(found, Mapping):
        return None
    return OtherTrainer(name=str(found.get("trainer") or "another trainer"), settings=dict(found.get("settings") or {}))


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """Content of attempts/N.lease."""

    attempt_id: int
    claim_id: str
    """Unique id chosen by the owner, so that no two claims are equal."""
    owner: str
    """Host and pid of the owner as host-pid, for people."""
    since: str
    """Time of the claim by the owner's clock, for people."""
    process: str | None
    """The owner's process as `describe_process` identifies it; None if the system doesn't show it."""
    lease_s: Annotated[float, msgspec.Meta(gt=0, le=MOST_LEASE_S)]
    """Seconds without a renewal after which the owner is considered dead."""
    num_renewals: int = 0
    released: bool = False
    """True if the owner has ended, or never intended to renew."""
    error: str | None = None
    """Error that ended the owner, on one line; None for an orderly end, and in files of older versions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotClaim:
    """Claim of a slot by one life of a worker."""

    slot: int
    """Part of the schedule that the worker samples."""
    life: int
    """Number of the life, from 1 in each slot."""
    worker_id: WorkerId
    """Prefix of the names of this life's files."""
    owner: str
    """host-pid, for people."""
    created_at: Time
    """Time of the claim by the owner's clock; for people."""
    process: str | None = None
    """Identity of the owner's process among all processes of all machines; None if the system doesn't give it."""
    ended_at: Time | None = None
    """Time of the worker's orderly end; None while it runs, or if it was killed."""
    code: Sequence[Mapping[str, Any]] = field(default_factory=list)
    """Source files of its environments, each as a CodeRecord."""
    lost: Mapping[str, Any] | None = None
    """Rows that a recorder could not store, as ludic.run.recording.losses.Lost; None if nothing was lost, and for
    workers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayLife:
    """gateways/N.json: one start of a gateway, and its lease."""

    life: StoredCount
    """Number of the life, from 1."""
    worker_id: WorkerId
    """Prefix of the names of this life's files of calls/."""
    owner: str
    """host-pid, for people."""
    address: str
    """URL at which other gateways send clients to it; empty in the process of a worker."""
    created_at: Time
    process: str | None = None
    """The process as ludic.root.claims.describe_process identifies it; None if the system doesn't show it."""
    lease_s: Annotated[float, msgspec.Meta(gt=0, le=MOST_LEASE_S)]
    """Seconds without a renewal after which another life may take its episodes."""
    num_renewals: StoredCount = 0
    ended_at: Time | None = None
    """Time of its orderly end; None while it runs, or if it was killed."""


EpisodeEndKind = Literal["complete", "failed", "given_up", "expired"]
"""How an agent's episode ended: expired if its time was over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeClaim:
    """episodes/ID/ATTEMPT/N.json: an agent's episode, and the life of a gateway that has it.

    A life that takes it over puts the next number; the newest number counts.
    """

    episode_id: EpisodeName
    attempt: StoredCount
    """Attempt at the episode, from 1."""
    number: StoredCount
    """Number of the claim, from 1 in each attempt."""
    life: StoredCount
    """Life of the gateway that has the episode."""
    worker_id: WorkerId
    """worker_id of that life."""
    key_digest: Sha256
    """SHA-256 of the API key that opens the episode; the key itself is not stored."""
    opened_at: Time
    expires_at: Time | None = None
    """Time at which the episode ends by itself; None if it has no limit."""
    group_id: str
    """As the columns of rollouts from here to env_example_id."""
    group_index: int = 0
    group_size: int = 1
    request_index: int = 0
    env_name: str
    env_example_id: str
    purpose: Literal["train", "eval"] = "train"
    seed: int = 0
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Other values of its rows, by column of rollouts, such as wanted and example_columns."""
    sealed_at: Time | None = None
    """Time of its end, after which no call is accepted; None while it is open."""
    end: EpisodeEndKind | None = None
    error: str | None = None
    """Error that ended it, with secrets masked."""
    reward: float | None = None
    """Reward of the whole episode; None if it was not scored."""
    reward_components: Mapping[str, float] = field(default_factory=dict)
    correct: bool | None = None
    scored_at: Time | None = None
    scored_call_id: str | None = None
    """Call whose answer was scored, if the scorer named it."""
    left_behind: Sequence[str] = ()
    """call_ids of stored calls that count no more: the agent was started again, and asked for something else."""
    agent: Mapping[str, Any] = field(default_factory=dict)
    """What the agent's command left: exit code and last output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """policy.json: the origin of a version's weights."""

    version: StoredCount
    step: int
    """Gradient steps that made these weights."""
    attempt_id: AttemptId
    parent_version: int | None
    created_at: Time


@dataclass(frozen=True, slots=True, kw_only=True)
class LatestPolicy:
    """policies/LATEST: the version to sample with, and the budget of open groups (ludic.training.batches.budget)."""

    version: StoredCount
    budget: StoredCount | None = None
    """Groups that may be open at a time, of all workers together. None in files of older versions, whose trainers
    asked for groups by version: workers wait until a trainer of this version writes the file."""
    num_workers: int = 1
    """Workers that share the budget, at least one."""
    num_ready: StoredCount = 0
    """Open groups that the trainer has read, or trains on."""
    oldest_version: StoredCount = 0
    """Rollouts of versions before this one are not read any more."""
    seen: Mapping[WorkerId, int] = field(default_factory=dict)
    """Sequence of the newest file that the trainer has read, by worker_id."""
    attempt_id: int = 0
    """Attempt whose trainer wrote the file."""
    planned_step: int = 0
    """Newest step whose rollouts are chosen."""
    run_id: str | None = field(default=None, compare=False)
    """Run whose trainer wrote the file: a worker that outlives its root detects that without another read.
    `point_latest` sets it; None in files of older versions."""

    def num_allowed(self, num_unread: int) -> int:
        """Return how many further groups a worker may start. num_unread: its open groups that the trainer has not read.

        It may start another group while the total would be below the budget if every worker had as many open groups as
        this one; so the workers together exceed the budget by less than one group each.
        """
        free = (self.budget or 0) - self.num_ready - num_unread * self.num_workers
        return max(0, ceil(free / self.num_workers))


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """delta.json: the base version of a difference, and the digests of the resulting files."""

    version: StoredCount
    base: StoredCount
    """Version to whose files the differences are applied; always an earlier one."""
    files: dict[RelativeName, str]
    """Digest of each file of the whole version, by name, as in digests.json."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """digests.json of a folder of weights."""

    files: dict[RelativeName, str]
    """Digest of each file, by its name below the folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointInfo:
    """Content of checkpoint.json."""

    attempt_id: int
    """Attempt (trainer start) that wrote the checkpoint."""
    step: int
    """Last gradient step in the weights."""
    policy_version: int
    """Newest version that the trainer had published."""
    cursor: Mapping[str, Any]
    """The reader's position after this step, as JSON values."""
    config: Mapping[str, Any]
    """The trainer's settings, as JSON values."""
    num_ranks: int
    """Number of ranks that wrote the checkpoint."""
    run_id: str | None = field(default=None, compare=False)
    """Run that the checkpoint is of; None in files of older versions."""
    format_version: int = CHECKPOINT_FORMAT


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelIdentity:
    """Fingerprints of a run's first model: SHA-256 of each file, by its name in the model's folder."""

    source: str
    """Folder, Hugging Face id or URL of the model, as typed."""
    folder: str | None = None
    """Absolute path of the model's folder; None for a model from elsewhere."""
    revision: str | None = None
    """Commit of a model from the Hub."""
    config: Mapping[RelativeName, str]
    tokenizer: Mapping[RelativeName, str]
    weights: Mapping[RelativeName, str]
    """Empty if the weights are not known, for example of a model that another program trained."""

    def differences(self, other: "ModelIdentity") -> str:
        """Describe in one sentence which files differ in another model; empty if it is the same model.

        Weights that are not known differ from none.
        """
        verbs = {"config": "differs", "tokenizer": "differs", "weights": "differ"}
        if not (self.weights and other.weights):
            del verbs["weights"]
        pairs = {kind: (getattr(self, kind), getattr(other, kind)) for kind in verbs}
        named = {
            kind: sorted(name for name in mine.keys() | theirs.keys() if mine.get(name) != theirs.get(name))
            for kind, (mine, theirs) in pairs.items()
        }
        return "; ".join(f"{kind} {verbs[kind]} ({', '.join(names)})" for kind, names in named.items() if names)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationRecord:
    """Settings and code of an evaluation, without the weights and the number of examples and samples."""

    evaluation: EvaluationId
    env_name: str
    settings: Mapping[str, Any]
    """Settings that decide the samples: the environment and its options, sampling, seed, and those of the agent."""
    code: Sequence[Mapping[str, Any]]
    """Code that sampled and scored, each as a CodeRecord."""
    created_at: Time


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluator:
    """Content of evaluators/{id}.json."""

    owner: str
    """host-pid, for people."""
    process: str | None
    """The process as ludic.root.claims.describe_process identifies it; None if the system doesn't show it."""
    blocks: Sequence[RelativeName]
    """Names below the root of the files with samples that the process is going to store."""
    num_changes: StoredCount = 0
    """Grows with each put, so that a renewal changes the file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpiredPartition:
    """The files, rows and groups that an expiry deletes from one partition."""

    folder: Folder
    version: int
    env_name: str
    num_files: int
    num_rows: int
    size_bytes: int
    files: Spans
    """Deleted files, by the worker_id in their names; a compacted file's worker_id is compacted.N."""
    sources: Spans
    """Sources of the deleted rows."""
    groups: Sequence[tuple[int, int]]
    """Half-open intervals of the group numbers of workers that follow the schedule."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tombstone:
    """expired/N.json: the record of one expiry."""

    created_at: Time
    rule: str
    """The rule that chose the files, as text for people."""
    partitions: tuple[ExpiredPartition, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class QuarantinedFile:
    """A quarantined file."""

    name: RelativeName
    """Name of the file below the root before it was moved."""
    reason: str
    """Why the file was quarantined; empty if the note is gone."""
    found_at: str
    """Time in ISO 8601, UTC; empty if the note is gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CutRecord:
    """Content of cut.json."""

    step: StoredCount
    """Step that the cut is for; the last one whose batch it holds."""
    first_step: StoredCount
    """First step whose batch it holds; a replay begins here."""
    weights_sha256: Mapping[RelativeName, str] = field(default_factory=dict)
    """SHA-256 of the weight files after `step`, by name; empty if the run did not keep these weights in float32."""

    @property
    def end(self) -> CheckpointId:
        return CUT_ATTEMPT, self.step

    @property
    def start(self) -> CheckpointId | None:
        """Checkpoint that a replay begins with; None for the first weights."""
        return (CUT_ATTEMPT, self.first_step - 1) if self.first_step > 1 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class TextEntry:
    """Entry of one text in a list of code/."""

    sha256: Sha256
    path: CodePath
    """Absolute path that the text was read from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry(TextEntry):
    """Entry of one file in a list of code/, with the modules that it imports."""

    imports: Mapping[ModuleName, TextEntry]


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeList:
    """code/N.json: names of users' files, and their texts; each list holds all of the lists before it."""

    files: Mapping[CodeName, FileEntry]
    """Entries by the file's name in the settings."""
    owner: str = ""
    """host-pid of the process that put the list, for people."""
    created_at: Time = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedOutput:
    """A compacted file, and the sources that it replaces."""

    name: RelativeName
    """Path below the root."""
    sources: Sequence[tuple[WorkerId, StoredCount]]
    """worker_id and sequence of each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactionRecord:
    """compactions/PARTITION/N.json: one compaction of a partition."""

    outputs: Sequence[PlannedOutput]


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportBegun:
    """imports/import-ID.json: a file that is imported, and how."""

    format: str
    env_name: str
    tokenizer: str
    file: str
    created_at: Time
    code_sha256: str | None = ""
    """Digest of the format's own code; None for a format of ludic, empty in files of older versions."""
    size_bytes: int | None = None
    """Size of the file; None if its filesystem does not say, and in files of older versions."""
    modified: str = ""
    """Time of the file's last change, or its ETag, from its filesystem; empty where size_bytes is None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A line of an imported file that was not used."""

    line: int
    """Line or row in the file, counted from 1."""
    reason: str


OWN_FORM = "ludic"
"""Form of imported records under ludic's own names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportReport:
    """imports/import-ID.done.json: the result of importing a file."""

    file: str
    worker_id: WorkerId
    num_records: int
    num_groups: int
    num_rollouts: int
    num_without_logprobs: int
    """Number of rollouts without the sampler's logprobs."""
    num_unscored: int
    kept_as_metadata: Mapping[str, int]
    """Number of episodes by field, for fields that no column holds and that are kept in metadata."""
    not_kept: Mapping[str, int]
    """Number of episodes by field, for fields that no column holds and that are too large for metadata; number of
    messages by field, such as messages[].cache_control, for fields of messages that are not used."""
    refused: Sequence[Refusal]
    was_there: bool = False
    """True if the file had been imported before; then nothing was written."""
    form: str = ""
    """Form of the records, such as ShareGPT; empty if the format has one, and for imports before forms were stored."""
    num_from_text: int = 0
    """Number of rollouts without logprobs whose tokens were encoded from texts; 0 in reports before rollouts 1.8."""
    tokenizer: str = ""
    """Tokenizer with which the import encoded texts; empty if it encoded none, and before rollouts 1.8."""


# --- JSON files with a digest of their own text ---------------------------------------------------------------
# Encode and decode JSON files that end with a digest of their own text, so that reading detects a flipped bit.
#
#     {
#       "version": 3,
#       "digest": "xxh3_64:0123456789abcdef"
#     }
#
# The digest covers all bytes before its line. A file without a digest, from an older ludic or written by hand, is read
# unchecked. A last line that is nearly a digest line counts as damaged. Only `read_record` opens a file.


Record = TypeVar("Record")

_BEGIN, _END = b',\n  "digest": "xxh3_64:', b'"\n}\n'
_DIGITS = 16
_LAST_LINE = len(_BEGIN) + _DIGITS + len(_END)
_FEW_BITS = 16


def encode_json(values: Mapping[str, Any], *, indent: int | None = 2, allow_nan: bool = True) -> bytes:
    """Return the text of a file with these values. Raises json.dumps's errors."""
    assert values, "a file without values"
    assert "digest" not in values, "digest is the name of the file's own digest"
    head = json.dumps(values, indent=indent, allow_nan=allow_nan).removesuffix("}").rstrip().encode()
    return head + _last_line(head)


def encode_record(record: Any, *, indent: int | None = 2) -> bytes:
    """Return the text of a file with the fields of a dataclass."""
    return encode_json(asdict(record), indent=indent)


def decode_json(data: bytes) -> dict[str, Any]:
    """Return the values of a file. Raises ValueError if it is not a JSON object or does not match its digest."""
    last_line = data[-_LAST_LINE:]
    if last_line != _last_line(data[:-_LAST_LINE]) and _is_nearly_digest(last_line):
        raise ValueError(
            "it does not match its digest, so a disk, a copy or a person has changed it; put a sound copy in its "
            "place, or delete its entry 'digest' if the values are right"
        )
    try:
        values = json.loads(data)
    except RecursionError as error:
        raise ValueError("its values are nested too deep") from error
    if not isinstance(values, dict):
        raise ValueError(f"it holds a JSON {type(values).__name__}, wanted an object")
    values.pop("digest", None)  # another program may have rewritten the file and kept this entry
    return values


def decode_record(data: bytes, record: type[Record]) -> Record:
    """Return the values of a file as a dataclass; unknown keys, written by a newer ludic, are ignored.

    Raises ValueError as decode_json does, and if a value is missing or has another type than its field.
    """
    return convert(decode_json(data), record)


def read_record(root: "Storage", name: str, record: type[Record], what: str, advice: str = "") -> Record | None:
    """Return a file as a dataclass, as decode_record does; None if the file does not exist.

    Raises SchemaError, which names the file, the wanted record (`what`), the reason and the remedy (`advice`).
    """
    try:
        return decode_record(root.read(name), record)
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise SchemaError(
            f"{root.url}/{name} is no {what} that ludic can read: {error}{advice and f'; {advice}'}"
        ) from error


def convert(values: Any, record: type[Record]) -> Record:
    """Convert JSON values to a dataclass. Raises ValueError if one is missing or has another type than its field."""
    try:
        return msgspec.convert(values, record)
    except msgspec.ValidationError as error:
        raise ValueError(_with_found_name(str(error), values)) from error


_ABOUT = {
    repr(meta.pattern): meta.description
    for of in (RelativeName, WorkerId, RunId, EvaluationId, Sha256, EpisodeName, ModuleName, CodeName, CodePath)
    for meta in of.__metadata__  # type: ignore[attr-defined]
}
"""Description of the wanted name, by the pattern as msgspec's errors show it."""
_REFUSED = "Expected `str` matching regex "
"""Beginning of msgspec's error. The pattern follows, then " - at " and the place: `$.runs[0]` or `key` in `$.runs`."""
_MOST_SHOWN = 200


def _with_found_name(error: str, values: Any) -> str:
    """Return msgspec's error with the name that was found, which it leaves out, and words for the pattern."""
    pattern, _, place = error.removeprefix(_REFUSED).partition(" - at ")
    if not error.startswith(_REFUSED) or pattern not in _ABOUT:
        return error
    path = place.removeprefix("`key` in ")
    is_of_key, where, found = path != place, path.strip("`").removeprefix("$"), [values]
    for field_name, index in re.findall(r"\.(\w+)|\[([^][]*)\]", where):
        if index == "...":  # one of a mapping's values
            found = [each for value in found for each in value.values()]
        else:
            found = [value[field_name or int(index)] for value in found]
    names = [name for value in found for name in (value if is_of_key else [value])]
    refused = next(name for name in names if not re.search(ast.literal_eval(pattern), name))
    return f"{where.removeprefix('.')} has {refused[:_MOST_SHOWN]!r}, wanted {_ABOUT[pattern]}"


def _last_line(head: bytes) -> bytes:
    return _BEGIN + xxh3_64_hexdigest(head).encode() + _END


def _is_nearly_digest(last_line: bytes) -> bool:
    """Return whether a last line is a digest line except for at most _FEW_BITS bits outside its digits."""
    if len(last_line) != _LAST_LINE:
        return False
    found, wanted = last_line[: len(_BEGIN)] + last_line[-len(_END) :], _BEGIN + _END
    different = np.frombuffer(found, np.uint8) ^ np.frombuffer(wanted, np.uint8)
    return int(np.unpackbits(different).sum()) <= _FEW_BITS
