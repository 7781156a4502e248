"""The catalogue of a root: one row for each kind of file below it, and the only index that defines these files.

A row defines how names are spelled, what a file holds, and how files are numbered, written, kept and shown. Names and
their parser, listings, claims (ludic.root.claims), the checks of `ludic verify`, the stored rows of each SQL view, the
files that `ludic expire` may delete, and the list of files in docs/storage.md are derived from it. The fields of a name
are those of a NamedTuple. A field that is also a column of the table, or a field of the record, must agree with it.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, partial
from typing import TYPE_CHECKING, Annotated, Any, Generic, Literal, NamedTuple, TypeVar, get_type_hints
from urllib.parse import quote, unquote

from ludic.base import PATH_BELOW
from ludic.root.json_records import (
    COMMITTER,
    DIGITS,
    EPISODE,
    WORKER,
    Attempt,
    CheckpointInfo,
    CodeList,
    CompactionRecord,
    CutRecord,
    Delta,
    EpisodeClaim,
    EvaluationRecord,
    Evaluator,
    GatewayLife,
    ImportBegun,
    ImportReport,
    LatestPolicy,
    Lease,
    ModelIdentity,
    Policy,
    QuarantinedFile,
    RunRecord,
    SlotClaim,
    Tombstone,
    read_record,
)
from ludic.root.storage.local import SCRATCH

if TYPE_CHECKING:
    from ludic.root.storage.filesystem import Storage


# --- How the fields of a name are written -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Spelling:
    """How one field is written in a name. `read` raises ValueError for a text that `write` never returns."""

    pattern: str
    read: Callable[[str], Any] = str
    write: Callable[[Any], str] = str
    is_path: bool = False
    """True if it may hold further folders."""


NUMBER = f"({DIGITS})"
"""`pattern` as a capturing group."""

_NUMBER = re.compile(DIGITS)


def parse_number(text: str) -> int | None:
    """Parse a number as ludic writes it; None for a sign, leading zeros, digits of other scripts, over 18 digits."""
    return int(text) if _NUMBER.fullmatch(text) else None


def _int32(text: str) -> int:
    if int(text) >= 2**31:
        raise ValueError(text)
    return int(text)


def _unquote(text: str) -> str:
    name = unquote(text, errors="strict")
    if _quoted(name) != text:  # with another spelling, later reads would look for a name that does not exist
        raise ValueError(text)
    return name


_quoted = lru_cache(maxsize=1024)(partial(quote, safe=""))
WORKER_ID = re.compile(WORKER)
_PARTITION = "version={version}/env={env_name}"
"""Folder of the rollouts that were begun with a version in an environment."""
_PARTITIONS = f"(?:rollouts|evals)/{_PARTITION}|requests|calls".format(version=DIGITS, env_name="[^/]+")
Number = Annotated[int, Spelling(DIGITS, int)]
Int32 = Annotated[int, Spelling(DIGITS, _int32)]
Quoted = Annotated[str, Spelling(r"[^/]+", lru_cache(maxsize=1024)(_unquote), _quoted)]
WorkerIdName = Annotated[str, Spelling(WORKER)]
Committer = Annotated[str, Spelling(COMMITTER)]
Hex16 = Annotated[str, Spelling("[0-9a-f]{16}")]
Hex32 = Annotated[str, Spelling("[0-9a-f]{32}")]
Sha256Name = Annotated[str, Spelling("[0-9a-f]{64}")]
EpisodeId = Annotated[str, Spelling(EPISODE)]
Uuid = Annotated[str, Spelling(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")]
Path = Annotated[str, Spelling(PATH_BELOW, is_path=True)]
MovedPath = Annotated[str, Spelling(rf"(?:{PATH_BELOW})(?<!\.json)", is_path=True)]
MetricsKind = Annotated[Literal["train", "worker"], Spelling("train|worker")]
Suffix = Annotated[str, Spelling("py|sql")]
Partition = Annotated[str, Spelling(_PARTITIONS, is_path=True)]


class Only(NamedTuple):
    """Fields of a file that a root has at most once: none."""


class RolloutsName(NamedTuple):
    version: Number
    env_name: Quoted
    worker_id: Committer
    sequence: Number


class SequenceName(NamedTuple):
    worker_id: Committer
    sequence: Number


class StepName(NamedTuple):
    attempt_id: Int32
    step: Number


class MetricsName(NamedTuple):
    kind: MetricsKind
    writer: WorkerIdName
    sequence: Number


class ReferenceName(NamedTuple):
    model: Hex32
    digest: Hex32


class RankName(NamedTuple):
    attempt_id: Int32
    step: Number
    rank: Number


class ScoresName(NamedTuple):
    scorer: Quoted
    log: Uuid
    sequence: Number


class UuidName(NamedTuple):
    uuid: Uuid


class AttemptName(NamedTuple):
    attempt_id: Int32


class LifeName(NamedTuple):
    slot: Number
    life: Number


class GatewayName(NamedTuple):
    life: Number


class EpisodeClaimName(NamedTuple):
    episode_id: EpisodeId
    attempt: Number
    number: Number


class PromptName(NamedTuple):
    sha256: Sha256Name


class VersionName(NamedTuple):
    version: Number


class VersionFile(NamedTuple):
    version: Number
    file: Path


class StepFile(NamedTuple):
    attempt_id: Int32
    step: Number
    file: Path


class FileName(NamedTuple):
    file: Path


class MovedName(NamedTuple):
    name: MovedPath


class TextName(NamedTuple):
    sha256: Sha256Name
    suffix: Suffix


class NumberName(NamedTuple):
    number: Number


class EvaluationName(NamedTuple):
    evaluation: Hex16


class PlanName(NamedTuple):
    partition: Partition
    number: Number


class ImportName(NamedTuple):
    sha256: Hex16


class DataName(NamedTuple):
    digest: Hex16


# --- A row ----------------------------------------------------------------------------------------------------

F = TypeVar("F", bound="NamedTuple")
R = TypeVar("R")


@dataclass(frozen=True)
class FileKind(Generic[F]):
    """One kind of file of a root. Subclasses define the content; files of this class hold text or any bytes."""

    kind: str
    """Name of the kind in messages; for a table also its name in SQL."""
    fields: type[F]
    template: str
    """Path below the root, with the fields of the name in braces."""
    about: str
    numbered: str = ""
    """What distinguishes the files of this kind, for the docs."""
    put: Literal["once", "once, then by its owner", "replaced"] = "once"
    completes: bool = False
    """True if the file is written last into its folder and makes the folder valid."""
    kept: Literal["always", "expire", "pruned", "while its owner lives", "a cache", "not the run's"] = "always"
    """What deletes the files: nothing, `ludic expire`, the trainer, their owner, anybody, or other programs."""
    view: str | None = None
    """SQL view of the rows as they are stored."""
    rest: bool = False
    """True if it takes the files of a folder whose named files have rows of their own."""

    @cached_property
    def _spellings(self) -> dict[str, Spelling]:
        hints = get_type_hints(self.fields, include_extras=True)
        return {name: hint.__metadata__[0] for name, hint in hints.items()}

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        groups = {name: f"({spelling.pattern})" for name, spelling in self._spellings.items()}
        return re.compile(re.escape(self.template).replace(r"\{", "{").replace(r"\}", "}").format(**groups))

    @cached_property
    def _readers(self) -> Sequence[Callable[[str], Any]]:
        return [spelling.read for spelling in self._spellings.values()]

    @cached_property
    def _writers(self) -> Sequence[tuple[int, Callable[[Any], str]]]:
        """The `write` functions of fields that are not written as they are, with their positions."""
        writers = (spelling.write for spelling in self._spellings.values())
        return [(index, write) for index, write in enumerate(writers) if write is not str]

    @cached_property
    def _format(self) -> str:
        """The template with its fields in order instead of by name."""
        return re.sub(r"\{\w+\}", "{}", self.template)

    @property
    def folder(self) -> str:
        """First folder of the names; empty for a file of the root itself."""
        return self.template.rpartition("/")[0].partition("/")[0]

    @property
    def file(self) -> str:
        """Last part of the names."""
        return self.template.rpartition("/")[2]

    @property
    def ends_with_path(self) -> bool:
        """True if the last part of the names may be a path, so that a folder may have such a name."""
        return any(spelling.is_path and f"{{{name}}}" in self.file for name, spelling in self._spellings.items())

    def name(self, of: F) -> str:
        """Return the path below the root."""
        values = list(of)
        for index, write in self._writers:
            values[index] = write(values[index])
        return self._format.format(*values)

    def name_of(self, record: Any) -> str:
        """Return the path of the file that holds this record."""
        return self.name(self.fields._make([getattr(record, each) for each in self.fields._fields]))

    def parse(self, name: str) -> F | None:
        """Return the fields of a name; None for a name that `name` does not make."""
        match = self._pattern.fullmatch(name)
        if match is None:
            return None
        try:
            return self.fields._make([read(text) for read, text in zip(self._readers, match.groups(), strict=True)])
        except ValueError:
            return None

    def home(self, of: F, values: Mapping[str, Any]) -> str:
        """Return the path of the file that these values belong in. of: the name of the file that holds them."""
        return self.name(of._replace(**{each: values[each] for each in self.fields._fields if each in values}))

    def below(self, **known: Any) -> str:
        """Return the folder of the files with these fields, the first ones of the name: what to list."""
        texts = {name: self._spellings[name].write(value) for name, value in known.items()}
        path = self.template.format(**{name: texts.get(name, "\0") for name in self.fields._fields})
        return path.partition("\0")[0].rpartition("/")[0]

    def first_fields(self, root: "Storage") -> list[Any]:
        """Return the first fields of all names, sorted, by one listing of folders: such as versions."""
        folder, part = self.template.split("/")[:2]
        spelling = next(iter(self._spellings.values()))
        pattern = re.compile(re.escape(part.partition("{")[0]) + f"({spelling.pattern})")
        values = []
        for match in (pattern.fullmatch(name.rpartition("/")[2]) for name in root.folders(folder)):
            with suppress(ValueError):
                values += [spelling.read(match[1])] if match else []
        return sorted(values)

    def listed(self, root: "Storage", **known: Any) -> list[F]:
        """Return the fields of all files, or of those with these first fields, sorted; foreign names are left out."""
        return self.parsed(root.list(self.below(**known)))

    @property
    def glob(self) -> str:
        """Pattern of the names: * within a folder, **/ over folders. It matches some foreign names, too."""
        fields = {name: "**/*" if spelling.is_path else "*" for name, spelling in self._spellings.items()}
        return self.template.format(**fields)

    def names(self, root: "Storage", **known: Any) -> list[str]:
        """Return the paths of all files, or of those with these first fields, in the order of the listing."""
        return [name for name in root.list(self.below(**known)) if self.parse(name) is not None]

    def parsed(self, names: Iterable[str]) -> list[F]:
        """Return the fields of those names that are this row's, sorted."""
        return sorted(found for found in map(self.parse, names) if found is not None)


@dataclass(frozen=True)
class Table(FileKind[F]):
    """Parquet files with rows of a table of schemas/."""

    table: str = field(kw_only=True)
    most_rows: int = field(kw_only=True)
    """Maximum rows of a file that ludic reads, far more than it writes: millions of equal rows take few bytes in a file
    but gigabytes of memory."""
    merged_by: str | None = None
    """Column by which `ludic compact` sorts the rows of files that it merges; None if it merges none."""


@dataclass(frozen=True)
class Records(FileKind[F], Generic[F, R]):
    """JSON files with one record each."""

    record: type[R] = field(kw_only=True)
    noun: str = field(kw_only=True)
    """Noun for a file of this kind in errors."""
    remedy: str = ""
    """What to do about a broken file, in an error."""
    first: int | None = None
    """First number of a register: put N if absent, N + 1 is newer, no gaps. None for other rows."""
    hidden: tuple[str, ...] = ()
    """Fields that the view leaves out."""

    def read(self, root: "Storage", *of: Any) -> R | None:
        """Return a record; None if the file does not exist. of: the name. Raises SchemaError if it is broken."""
        return read_record(root, self.name(self.fields._make(of)), self.record, self.noun, self.remedy)


@dataclass(frozen=True)
class WeightFiles(FileKind[F]):
    """Files in a format of Hugging Face or torch; the folder's manifest has their digests."""


# --- The rows -------------------------------------------------------------------------------------------------

RUN = Records(
    "run",
    Only,
    "run.json",
    "settings that workers and the trainer share",
    record=RunRecord,
    noun="run.json",
    completes=True,
)
CUT = Records(
    "cut",
    Only,
    "cut.json",
    "in a cut: the step that it replays, and digests of the expected weights",
    record=CutRecord,
    noun="record of a cut",
)
README = FileKind("readme", Only, "README.txt", "in a cut: how to replay it, for people")

ROLLOUTS = Table(
    "rollouts",
    RolloutsName,
    f"rollouts/{_PARTITION}/{{worker_id}}-{{sequence}}.parquet",
    "one row per rollout",
    table="rollouts",
    most_rows=1 << 22,  # a compacted file of 128 MB has some 100,000 to 800,000
    numbered="a worker's sequence",
    kept="expire",
    merged_by="group_id",
)
EVALS = Table(
    "evals",
    RolloutsName,
    f"evals/{_PARTITION}/{{worker_id}}-{{sequence}}.parquet",
    "one row per rollout of an evaluation; the worker_id says which samples",
    table="rollouts",
    most_rows=1 << 22,  # a compacted file of 128 MB has some 100,000 to 800,000
    numbered="block of samples",
    kept="expire",
    merged_by="group_id",
)
BATCHES = Table(
    "batches",
    StepName,
    "batches/attempt={attempt_id}/step={step}.parquet",
    "the ledger: rollouts used and dropped by a step, with the reason",
    table="batches",
    most_rows=1 << 20,  # a step considers some thousands
    numbered="step",
    view="all_batches",
)
REQUESTS = Table(
    "requests",
    SequenceName,
    "requests/{worker_id}-{sequence}.parquet",
    "start and end of each group of the schedule",
    table="requests",
    most_rows=1 << 23,  # a compacted file of 128 MB has some millions
    numbered="a worker's sequence",
    kept="expire",
    view="requests",
    merged_by="group_id",
)
METRICS = Table(
    "metrics",
    MetricsName,
    "metrics/{kind}-{writer}-{sequence}.parquet",
    "one row per gradient step, and per environment of a worker's file",
    table="metrics",
    most_rows=1 << 12,  # a file has at most 64
    numbered="a writer's sequence",
    view="metrics",
)
REFERENCE = Table(
    "reference",
    ReferenceName,
    "reference/model={model}/{digest}.parquet",
    "logprobs under a reference model",
    table="reference",
    most_rows=1 << 20,  # a file has at most those of a step
    numbered="digest of the rows' keys",
    kept="a cache",
    view="reference",
)
TOKEN_STATS = Table(
    "token_stats",
    RankName,
    "token_stats/attempt={attempt_id}/step={step}-rank={rank}.parquet",
    "on request: numbers of each trained token",
    table="token_stats",
    most_rows=1 << 20,  # a file has at most those of a step
    numbered="step and rank",
    kept="expire",
    view="all_token_stats",
)
SCORES = Table(
    "scores",
    ScoresName,
    "scores/scorer={scorer}/{log}-{sequence}.parquet",
    "values that scorers gave to stored rollouts later",
    table="scores",
    most_rows=1 << 16,  # a file has at most 4,096
    numbered="a log's sequence",
    kept="expire",
    view="all_scores",
)
LABELS = Table(
    "labels",
    UuidName,
    "labels/{uuid}.parquet",
    "a mark or a note that a person gave to a rollout",
    table="labels",
    most_rows=1 << 10,  # a file has one
    numbered="uuid7",
    view="all_labels",
)

ATTEMPTS = Records(
    "attempts",
    AttemptName,
    "attempts/{attempt_id}.json",
    "one start of a trainer: parent, settings, code",
    record=Attempt,
    noun="attempt",
    numbered="as its lease",
    view="attempts",
    hidden=("code", "claim_id"),
)
LEASES = Records(
    "leases",
    AttemptName,
    "attempts/{attempt_id}.lease",
    "a trainer's claim of the root, renewed while it lives",
    record=Lease,
    noun="lease",
    remedy="see that no trainer runs, and delete it",
    numbered="claims",
    first=1,
    put="once, then by its owner",
)
WORKERS = Records(
    "workers",
    LifeName,
    "workers/slot={slot}/{life}.json",
    "one start of a worker, or of a recorder: its claim of a slot; its code; what it lost",
    record=SlotClaim,
    noun="claim",
    remedy="stop the workers of this slot, and delete it",
    numbered="claims in a slot",
    first=1,
    put="once, then by its owner",
    view="workers",
    hidden=("process", "code"),
)

GATEWAYS = Records(
    "gateways",
    GatewayName,
    "gateways/{life}.json",
    "one start of a gateway, renewed while it lives",
    record=GatewayLife,
    noun="life of a gateway",
    remedy="stop the gateways of this run, and delete it",
    numbered="claims",
    first=1,
    put="once, then by its owner",
    view="gateways",
    hidden=("process",),
)
EPISODES = Records(
    "episodes",
    EpisodeClaimName,
    "episodes/{episode_id}/{attempt}/{number}.json",
    "an agent's episode: the gateway that has it, its end and its reward",
    record=EpisodeClaim,
    noun="claim of an episode",
    remedy="delete it",
    numbered="claims of an attempt",
    first=1,
    put="once, then by its owner",
    view="episode_claims",
    hidden=("key_digest",),
)
PROMPTS = FileKind(
    "prompts",
    PromptName,
    "prompts/{sha256}.json",
    "tools' schemas, or system messages, of calls; put before them",
    numbered="digest of the text",
)
CALLS = Table(
    "calls",
    SequenceName,
    "calls/{worker_id}-{sequence}.parquet",
    "one row per event of an agent's model call; put before its answer leaves",
    table="calls",
    most_rows=1 << 22,  # a compacted file of 128 MB has some 100,000
    numbered="a life's sequence",
    kept="expire",
    view="calls",
    merged_by="episode_id",
)

POLICIES = Records(
    "policies",
    VersionName,
    "policies/version={version}/policy.json",
    "the claim of a version: which step made it",
    record=Policy,
    noun="policy.json",
    numbered="claims",
    first=0,
    view="policies",
)
WEIGHTS = WeightFiles(
    "weights",
    VersionName,
    "policies/version={version}/config.json",
    "configuration of a version's weights",
    completes=True,
    kept="pruned",
)
DELTAS = Records(
    "deltas",
    VersionName,
    "policies/version={version}/delta.json",
    "of a version of differences: which version they lead from",
    record=Delta,
    noun="record of differences",
    completes=True,
    kept="pruned",
)
WEIGHT_FILES = WeightFiles(
    "weight files",
    VersionFile,
    "policies/version={version}/{file}",
    "published weights, a Hugging Face folder or differences",
    kept="pruned",
    rest=True,
)
LATEST = Records(
    "latest",
    Only,
    "policies/LATEST",
    "the version to sample with, and the budget of open groups",
    record=LatestPolicy,
    noun="name of a policy",
    remedy="the next publish replaces it",
    put="replaced",
)
CHECKPOINTS = Records(
    "checkpoints",
    StepName,
    "checkpoints/attempt={attempt_id}/step={step}/checkpoint.json",
    "the reader's cursor, and settings",
    record=CheckpointInfo,
    noun="checkpoint.json",
    numbered="step",
    completes=True,
    kept="pruned",
)
STATE_FILES = WeightFiles(
    "state files",
    StepFile,
    "checkpoints/attempt={attempt_id}/step={step}/{file}",
    "weights, optimizer and random states of a checkpoint",
    kept="pruned",
    rest=True,
)
IDENTITY = Records(
    "identity",
    Only,
    "model/identity.json",
    "fingerprints of the first model",
    record=ModelIdentity,
    noun="identity of a model",
    remedy="delete it, and start where the model is",
    completes=True,
)
MODEL = WeightFiles(
    "model",
    FileName,
    "model/{file}",
    "the first model's configuration and tokenizer; its weights if they were made here",
    rest=True,
)

CODE = Records(
    "code",
    NumberName,
    "code/{number}.json",
    "names of users' files, and their texts",
    record=CodeList,
    noun="list of users' files",
    numbered="claims",
    first=1,
)
TEXTS = FileKind(
    "texts",
    TextName,
    "code/{sha256}.{suffix}",
    "copy of a user's file, which the run executes",
    numbered="digest of the text",
)
EVALUATIONS = Records(
    "evaluations",
    EvaluationName,
    "evaluations/{evaluation}.json",
    "what an evaluation samples and scores with",
    record=EvaluationRecord,
    noun="evaluation",
    remedy="delete it; the next `ludic eval` with its settings puts it back",
    numbered="digest of the settings",
    view="evaluations",
)
EVALUATORS = Records(
    "evaluators",
    UuidName,
    "evaluators/{uuid}.json",
    "the blocks that a running `ludic eval` samples; deleted at its end",
    record=Evaluator,
    noun="list of an evaluation's open blocks",
    remedy="delete it",
    numbered="uuid7",
    put="replaced",
    kept="while its owner lives",
)

COMPACTIONS = Records(
    "compactions",
    PlanName,
    "compactions/{partition}/{number}.json",
    "which files a compaction replaces",
    record=CompactionRecord,
    noun="plan of a compaction",
    numbered="claims in a partition",
    first=0,
    view="compactions",
)
EXPIRED = Records(
    "expired",
    NumberName,
    "expired/{number}.json",
    "tombstone: the files that an expiry deleted",
    record=Tombstone,
    noun="tombstone",
    numbered="claims",
    first=0,
    view="expirations",
)
IMPORTS = Records(
    "imports",
    ImportName,
    "imports/import-{sha256}.json",
    "a file that is imported, and how; put first",
    record=ImportBegun,
    noun="record of an import",
    remedy="delete it, and import the file again",
    numbered="digest of the file",
)
IMPORTED = Records(
    "imported",
    ImportName,
    "imports/import-{sha256}.done.json",
    "the report of an import; put last",
    record=ImportReport,
    noun="report of an import",
    remedy="delete it, and import the file again",
    numbered="digest of the file",
)
QUARANTINED = FileKind(
    "quarantined",
    MovedName,
    "quarantine/{name}",
    "a broken file, moved out of the readers' way",
    put="replaced",
)
QUARANTINE = Records(
    "quarantine",
    MovedName,
    "quarantine/{name}.json",
    "why it was moved",
    record=QuarantinedFile,
    noun="note",
    remedy="move it out of the run, or delete it",
    put="replaced",
    view="quarantine",
)
OLD_QUARANTINED = FileKind(
    "old quarantined", MovedName, "set_aside/{name}", "a broken file, of an older ludic", put="replaced"
)
OLD_QUARANTINE = Records(
    "old quarantine",
    MovedName,
    "set_aside/{name}.json",
    "why it was moved, of an older ludic",
    record=QuarantinedFile,
    noun="note",
    put="replaced",
)

DATA = FileKind(
    "data",
    DataName,
    "inputs/questions-{digest}.jsonl",
    "the data set of a run that was given it as values",
    numbered="digest of the rows",
)


def _foreign(folder: str, about: str) -> FileKind[FileName]:
    return FileKind(folder, FileName, f"{folder}/{{file}}", about, put="replaced", kept="not the run's", rest=True)


UNFINISHED = _foreign(SCRATCH, "files that are not complete yet, of a local root")
INPUTS = _foreign("inputs", "other inputs of `ludic.fit`: the rewards, which code/ has too, and imported rows")
LOGS = _foreign("logs", "output of local processes")
TENSORBOARD = _foreign("tensorboard", "events for TensorBoard")
DELTA_LOGS = {
    folder: _foreign(f"{folder}/_delta_log", "log of a Delta export") for folder in (ROLLOUTS.folder, EVALS.folder)
}
ICEBERG = _foreign("iceberg", "catalogue of an Iceberg export")
PICTURE = FileKind(
    "picture", Only, "reward.png", "curves, drawn by a demo or `ludic push`", put="replaced", kept="not the run's"
)
ANSWERS = _foreign("answers", "of a pushed run: the rollouts as one flat table, for people")
CARD = FileKind(
    "card", Only, "README.md", "of a pushed run: card of the data set", put="replaced", kept="not the run's"
)
HUB = _foreign(".cache", "what the Hub's client notes beside a downloaded data set")
GIT_ATTRIBUTES = FileKind(
    "git attributes", Only, ".gitattributes", "added by the Hub", put="replaced", kept="not the run's"
)
FOREIGN: tuple[FileKind[Any], ...] = (
    *(UNFINISHED, INPUTS, LOGS, TENSORBOARD, *DELTA_LOGS.values()),
    *(ICEBERG, PICTURE, ANSWERS, CARD, HUB, GIT_ATTRIBUTES),
)
"""Files in a root that do not belong to the run: not checked, copied or counted."""

SHARED: tuple[FileKind[Any], ...] = (
    *(MODEL, IDENTITY, ROLLOUTS, EVALS, BATCHES, REQUESTS, METRICS, SCORES, LABELS, TOKEN_STATS),
    *(ATTEMPTS, POLICIES, EVALUATIONS, COMPACTIONS, EXPIRED),
)
"""Files of a data set that `ludic push` makes, beside run.json: what was sampled, judged and trained on, and how.

Weights, users' code, claims of live processes, imports' file names and broken files are left out; and agents' calls,
prompts and episodes: they hold what people typed, also in token ids, which no masking reaches, and digests of keys.
"""

FILE_KINDS: tuple[FileKind[Any], ...] = (
    *(RUN, MODEL, IDENTITY, ROLLOUTS, EVALS, BATCHES, POLICIES, WEIGHT_FILES, WEIGHTS, DELTAS, LATEST, STATE_FILES),
    *(CHECKPOINTS, ATTEMPTS, LEASES, WORKERS, CODE, TEXTS, REQUESTS, METRICS, REFERENCE, EVALUATIONS),
    *(EVALUATORS, SCORES, LABELS, TOKEN_STATS, COMPACTIONS, EXPIRED, IMPORTS, IMPORTED, DATA),
    *(GATEWAYS, EPISODES, PROMPTS, CALLS),
    *(QUARANTINE, QUARANTINED),
    *(OLD_QUARANTINE, OLD_QUARANTINED, CUT, README),
    *FOREIGN,
)
"""All kinds of files, in the order of docs/storage.md."""


@lru_cache(maxsize=1)
def _rows_by_head() -> Mapping[str, list[FileKind[Any]]]:
    """Return the rows by what their names begin with; a folder's other files come after its named ones."""
    found: dict[str, list[FileKind[Any]]] = {}
    for row in sorted(FILE_KINDS, key=lambda row: row.rest):
        found.setdefault(row.template.partition("/")[0], []).append(row)
    return found


def file_kind_of(name: str) -> FileKind[Any] | None:
    """Return the row that makes this name; None for a foreign name."""
    rows = _rows_by_head().get(name.partition("/")[0], [])
    return next((row for row in rows if row.parse(name) is not None), None)


def to_markdown() -> str:
    """Return the rows as a table of Markdown."""
    lines = ["| file | what it holds | numbered by | put | kept | SQL view |", "| --- | --- | --- | --- | --- | --- |"]
    for row in FILE_KINDS:
        last = "; completes its folder" if row.completes else ""
        view = f"`{row.view}`" if row.view else ""
        put = f"{row.put}{last}" if row.kept != "not the run's" else ""
        lines.append(f"| `{row.template}` | {row.about} | {row.numbered} | {put} | {row.kept} | {view} |")
    return "\n".join(lines) + "\n"
