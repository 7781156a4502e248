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

import functools
import gc
import hashlib
import itertools
import json
import re
import sys
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ludic.adapters.imports.episodes import GetStopTokens, GetTokenizer, ImportedEpisode, ImportedRow, Texts, rows_of
from ludic.adapters.imports.formats import ImportFormat, load_format
from ludic.adapters.imports.records import ImportRecord, as_texts, open_file, read_records, read_state
from ludic.base import Track, is_lines, is_url, untracked
from ludic.errors import ConfigError, LudicError, NameTakenError, RefusedRecordError
from ludic.models import read_stop_tokens, tokenizer_of
from ludic.records import (
    CAPTURES,
    WITHOUT_LOGPROBS,
    Rollout,
    RolloutBatch,
    RolloutGroup,
    RolloutMetadata,
    find_problems,
)
from ludic.root import (
    IMPORTED,
    IMPORTED_BY,
    IMPORTS,
    ImportBegun,
    ImportName,
    ImportReport,
    Refusal,
    Root,
    encode_record,
)
from ludic.root.rows import Folder, RolloutWriter
from ludic.root.weights import (
    is_hub_id,
    remember_model,
    vocabulary_of,
)
from ludic.run import SAMPLED_WITH, RunConfig, create_root, episode_columns, example_id, row_arrays, run_of
from ludic.settings import only_exceptions

LOGPROBS_ABSENT: Mapping[str, str] = {"logprobs": "absent"}
"""Metadata of rollouts that an import before rollouts 1.8 made without logprobs, which an export of them has, too."""

SMALL = 200
"""Maximum characters of a field without a column that is kept as metadata."""

_NAMESPACE = uuid.UUID("6d0f4a2e-9c1b-5e57-8a43-0f6c1f2b7d90")

# Larger than a worker's files, since the delay of an import does not matter.
_GROUPS_A_FILE = 64
_TOKENS_A_FILE = 1 << 22


@dataclass(frozen=True, slots=True, kw_only=True)
class _Import:
    """The import of one file into a root, and its usable and refused records."""

    root: Root
    url: str
    format: ImportFormat
    env_name: str
    """Environment of records that name none."""
    tokenizer: str
    """Name of the tokenizer that get_tokenizer loads."""
    get_tokenizer: GetTokenizer
    get_stop_tokens: GetStopTokens
    path: Mapping[str, str]
    """Fields that the format reads from the file's path."""
    vocab_size: int | None
    """Tokens that the run's model knows; None if the root keeps no model."""
    sha256: str
    """Digest of the file's content and its `path`: a step given only in the name distinguishes two equal files."""
    episodes: dict[tuple[str, ...], list[tuple[int, Sequence[Rollout]]]] = field(default_factory=dict)
    """The number in the file and the rollouts of each usable episode, by group; `_groups` gives the rollouts ids."""
    numbers: Iterator[int] = field(default_factory=itertools.count)
    kept: Counter[str] = field(default_factory=Counter)
    not_kept: Counter[str] = field(default_factory=Counter)
    refused: list[Refusal] = field(default_factory=list)
    tokenizers: set[str] = field(default_factory=set)
    """Its name, once it has made tokens of a text."""
    form: list[str] = field(default_factory=list)
    """The form of all records, once it is known."""

    @property
    def worker_id(self) -> str:
        return f"{IMPORTED_BY}{self.sha256[:16]}"

    def id(self, kind: str, *numbers: int) -> str:
        """Return a uuid5, which is the same for the same content. numbers: of the episode in the file, and of a row."""
        return str(uuid.uuid5(_NAMESPACE, "/".join([self.sha256, kind, *map(str, numbers)])))


@contextmanager
def _without_collections() -> Iterator[None]:
    """Keep Python from collecting garbage, which takes a fourth of an import: it walks the objects of torch, too."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@_without_collections()
def import_file(
    root: Root,
    url: str,
    fmt: ImportFormat,
    *,
    env_name: str,
    tokenizer: str,
    get_tokenizer: GetTokenizer,
    get_stop_tokens: GetStopTokens = tuple,
    track: Track = untracked,
) -> ImportReport:
    """Import one file; a second call changes nothing. All rollouts of the file are in memory at once.

    env_name: environment of records that name none. tokenizer: name of the tokenizer that get_tokenizer loads, which
    is recorded in imports/. get_stop_tokens: of the tokenizer's model, besides the tokenizer's eos_token.
    """
    state = read_state(url)
    path, sha256, num_lines = identity(url, fmt)
    job = _Import(
        root=root,
        url=url,
        format=fmt,
        env_name=env_name,
        tokenizer=tokenizer,
        get_tokenizer=get_tokenizer,
        get_stop_tokens=get_stop_tokens,
        path=path,
        vocab_size=vocabulary_of(root),
        sha256=sha256,
    )
    how: dict[str, Any] = {
        "format": fmt.name,
        "code_sha256": fmt.code_sha256,
        "env_name": env_name,
        "tokenizer": tokenizer,
    }
    name = ImportName(sha256[:16])
    _check_same(job, how, IMPORTS.read(root, *name))
    earlier = IMPORTED.read(root, *name)
    if earlier is not None:
        return replace(earlier, file=url, was_there=True)
    num_records = _read(job, track(fmt.read(url), num_lines, "records"))
    groups = list(_groups(job))
    if read_state(url) != state:
        raise ConfigError(f"{url} changed while it was read; import it when its program has written it")
    begun = ImportBegun(**how, **asdict(state), file=url, created_at=datetime.now(UTC).isoformat())
    if not root.put_if_absent(IMPORTS.name(name), encode_record(begun)):
        begun = _check_same(job, how, IMPORTS.read(root, *name)) or begun
    _write(job, groups, datetime.fromisoformat(begun.created_at), track)
    report = _report(job, num_records, groups)
    root.put_if_absent(IMPORTED.name(name), encode_record(report))
    return report


def identity(url: str, fmt: ImportFormat, size: int | None = None) -> tuple[dict[str, str], str, int | None]:
    """Return the fields in a file's full path, the digest of its content and these fields, and its number of lines.

    The number is None if records are no lines. size: reads the first bytes alone, as many.
    """
    match = re.search(fmt.path, url if is_url(url) else Path(url).absolute().as_posix())
    path = {name: value for name, value in match.groupdict().items() if value is not None} if match else {}
    content, num_lines, beginning = hashlib.sha256(), 0, b""
    left = sys.maxsize if size is None else size
    with open_file(url) as file:
        while chunk := file.read(min(1 << 20, left)):
            left -= len(chunk)
            content.update(chunk)
            num_lines += chunk.count(b"\n")
            beginning = beginning or chunk[:8]
    digest = hashlib.sha256(json.dumps([content.hexdigest(), path], sort_keys=True).encode()).hexdigest()
    return path, digest, num_lines if fmt.read is read_records and is_lines(beginning, url) else None


def _check_same(job: _Import, how: Mapping[str, Any], stored: ImportBegun | None) -> ImportBegun | None:
    """Raises ConfigError if the file was imported in another way, since its rollouts would then be stored twice."""
    for name, value in how.items():
        if stored is not None and (before := getattr(stored, name)) not in ("", value):
            raise ConfigError(
                f"{job.url} was imported into {job.root.url} before, with {name} {before!r}, not {value!r}; "
                f"its rollouts have worker_id {job.worker_id}: expire them, or import into another root"
            )
    return stored


# --- Reading ---------------------------------------------------------------------------------------------


_RECORDS_A_BATCH = 256
"""Records that become rollouts together: their texts are encoded, and their rollouts checked, in one call."""


def _read(job: _Import, records: Iterable[tuple[int, Any]]) -> int:
    """Use or refuse every record; return their number. Raises ConfigError if no record can be used."""
    num_records, unread = 0, iter(records)
    while batch := list(itertools.islice(unread, _RECORDS_A_BATCH)):
        num_records += len(batch)
        refused = _use(job, [values for _, values in batch])
        job.refused.extend(Refusal(line=batch[index][0], reason=reason) for index, reason in sorted(refused.items()))
        gc.collect(1)  # the garbage of this batch; older objects are not walked
    if not job.episodes:
        first = f"; the first, at {job.refused[0].line}: {job.refused[0].reason}" if job.refused else ""
        raise ConfigError(f"{job.url}: none of {num_records} records can be used as format {job.format.name}{first}")
    return num_records


def _use(job: _Import, batch: Sequence[dict[str, Any] | str]) -> dict[int, str]:
    """Add the episodes of records to their groups; return why records were refused, by their indexes.

    The episodes of a record before the one that can't be used are added, and those after it are not.
    """
    refused: dict[int, str] = {}
    drafts: list[_Draft] = []
    for index, values in enumerate(batch):
        with _refusing(job, refused, index):
            if isinstance(values, str):
                raise RefusedRecordError(values)
            record = ImportRecord({**job.path, **values}, {*job.path, *job.root.extra_columns})
            drafts += [_Draft(index, record, episode) for episode in _episodes(job, record)]
    made: list[_Made] = []
    found = rows_of([draft.episode for draft in drafts], job.get_tokenizer, job.get_stop_tokens)
    for draft, rows in zip(drafts, found, strict=True):
        if draft.index not in refused:
            with _refusing(job, refused, draft.index):
                made.append(_make(job, draft, rows, str(len(made))))
    ended: set[int] = set()
    for each, reason in zip(made, _reasons(job, [each.rollouts for each in made]), strict=True):
        if each.index in ended:
            continue
        if reason is not None:
            ended.add(each.index)
            refused[each.index] = reason
            continue
        job.episodes.setdefault(each.group, []).append((next(job.numbers), each.rollouts))
        job.kept.update(each.kept)
        job.not_kept.update(each.not_kept)
    return refused


@contextmanager
def _refusing(job: _Import, refused: dict[int, str], index: int) -> Iterator[None]:
    """Refuse a record, by its index, if the block raises; other LudicErrors than RefusedRecordError pass."""
    try:
        yield
    except RefusedRecordError as error:
        refused[index] = str(error)
    except LudicError:
        raise
    except Exception as error:
        refused[index] = job.format.describe(error)


def _episodes(job: _Import, record: ImportRecord) -> list[ImportedEpisode]:
    with only_exceptions():
        found = job.format.function(record)
        episodes = [found] if isinstance(found, ImportedEpisode) else list(found)
    if not episodes:
        raise RefusedRecordError("gives no episode")
    for episode in episodes:
        if job.form and episode.form != job.form[0]:
            raise RefusedRecordError(f"is {episode.form}, and the records before it are {job.form[0]}")
        job.form[:] = [episode.form]
    return episodes


# --- Rollouts --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Draft:
    index: int
    """Index of its record in the batch."""
    record: ImportRecord
    episode: ImportedEpisode


@dataclass(frozen=True, slots=True, kw_only=True)
class _Made:
    """An episode whose rollouts are not checked yet."""

    index: int
    group: tuple[str, ...]
    rollouts: Sequence[Rollout]
    kept: Collection[str]
    """Names of fields that became metadata."""
    not_kept: Counter[str]
    """Number of fields that are too long for it, and of messages with fields that are not read, by their names."""


def _make(job: _Import, draft: _Draft, rows: list[ImportedRow] | Exception, place: str) -> _Made:
    """Return the rollouts of an episode. place: identifies it until its number, and so its ids, are known."""
    if isinstance(rows, Exception):
        raise rows
    if not rows:
        raise RefusedRecordError("has no token or text of the model")
    record, episode = draft.record, draft.episode
    texts = as_texts({**record.rest(), **episode.unused})
    metadata = {**as_texts(episode.metadata), **{name: text for name, text in texts.items() if len(text) <= SMALL}}
    columns = {**_columns(job, record, episode, rows[0]), "request_index": -1, "group_id": place, "episode_id": place}
    if any(row.is_from_text for row in rows):
        job.tokenizers.add(job.tokenizer)
    given = columns.pop("capture", None)
    rollouts = [
        Rollout(
            **columns,
            capture=_capture(row, given, metadata),
            **_row_columns(row, columns["episode_reward"] if row is rows[-1] else None),
            rollout_id=f"{place}/{segment}",
            segment_index=segment,
            trajectory_id=f"{place}/0",
            metadata=metadata,
        )
        for segment, row in enumerate(rows)
    ]
    return _Made(
        index=draft.index,
        group=(_group_key(episode, columns, rows[0]), columns["env_name"], columns["purpose"]),
        rollouts=rollouts,
        kept=metadata.keys(),
        not_kept=Counter([name for name, text in texts.items() if len(text) > SMALL])
        + sum((Counter(row.unread) for row in rows), Counter()),
    )


def _capture(row: ImportedRow, given: str | None, metadata: Mapping[str, str]) -> Any:
    """Return what was kept of the sampling of a row. given: what the record says. Raises RefusedRecordError."""
    possible: Sequence[str] = ("sampler", "trainer", "ids", "text")
    if row.is_from_text:
        possible, has = ("text",), "texts without token ids"
    elif "response_logprobs" not in row.columns:
        possible, has = ("ids", "text"), "no response_logprobs"
    elif given is None and LOGPROBS_ABSENT.items() <= metadata.items():
        return "text"
    if given is None or given in possible or given not in CAPTURES:  # an unknown one is refused with the row
        return possible[0] if given is None else given
    raise RefusedRecordError(f"capture is {given}, and the record has {has}; wanted {' or '.join(possible)}")


def _reasons(job: _Import, episodes: Sequence[Sequence[Rollout]]) -> list[str | None]:
    """Return why the store would refuse each episode, None if it takes it. Checks halves if not all are taken."""
    if not episodes:
        return []
    groups = tuple(RolloutGroup(key="", rollouts=tuple(rollouts)) for rollouts in episodes)
    batch = RolloutBatch(groups=groups, metadata=RolloutMetadata(worker_id=job.worker_id))
    try:
        problems = find_problems(batch, job.root.extra_columns, vocab_size=job.vocab_size)
        reason = "; ".join(f"{problem.column} {problem.reason}" for problem in problems[:3])
    except LudicError:
        raise
    except Exception as error:
        reason = job.format.describe(error)
    if not reason:
        return [None] * len(episodes)
    if len(episodes) == 1:
        return [reason]
    middle = len(episodes) // 2
    return [*_reasons(job, episodes[:middle]), *_reasons(job, episodes[middle:])]


def _columns(job: _Import, record: ImportRecord, episode: ImportedEpisode, row: ImportedRow) -> dict[str, Any]:
    """Return the columns that the rows of an episode share, as if it were a group of one."""
    run = run_of(job.root)
    own = {name: record.values.get(name) for name in run.extra_columns}
    named = record.text(job.format.env_field) if job.format.env_field else None
    given = {name: value for name, value in episode.columns.items() if value is not None}
    given = {"env_name": named or job.env_name, "env_example_id": example_id(_prompt(episode, row)), **given}
    given["extra"] = {name: value for name, value in own.items() if value is not None} | given.get("extra", {})
    sampled_with = {name: getattr(run, name) for name in SAMPLED_WITH}
    return episode_columns(given, sampled_with, max_column_characters=run.max_column_characters)


def _row_columns(row: ImportedRow, reward: float | None) -> dict[str, Any]:
    """Return the columns of one row. reward: the episode's, in its last row."""
    steps = tuple(row.agent_steps or ())
    return {
        "columns": row_arrays(row.columns, reward),
        "num_turns": max(1, len(steps)),
        "agent_steps": steps,
        "messages": tuple(row.messages),
    }


def _group_key(episode: ImportedEpisode, columns: Mapping[str, Any], row: ImportedRow) -> str:
    if episode.group is not None:
        return json.dumps(["given", episode.group], ensure_ascii=True, default=str)
    return json.dumps([columns["policy_version"], columns["agent_id"], _prompt(episode, row)], ensure_ascii=True)


def _prompt(episode: ImportedEpisode, row: ImportedRow) -> str:
    """Return as JSON what identifies the example of an episode. row: its first."""
    first, given = episode.rows[0], episode.prompt
    if given is None:
        given = first.prompt if isinstance(first, Texts) else row.prompt_tokens.tolist()
    return json.dumps(given, ensure_ascii=True, default=str)


# --- Writing ---------------------------------------------------------------------------------------------


def _groups(job: _Import) -> Iterator[RolloutGroup]:
    """Yield groups, with their ids, in the order of their first episodes; group_size is the real number of episodes."""
    for episodes in job.episodes.values():
        group_id, first = job.id("group", episodes[0][0]), episodes[0][1][0]
        rollouts = tuple(
            replace(
                row,
                group_id=group_id,
                group_index=index,
                group_size=len(episodes),
                request_index=-1 - number,
                episode_id=job.id("episode", number),
                rollout_id=job.id("rollout", number, segment),
                trajectory_id=job.id("rollout", number, 0),
            )
            for index, (number, rows) in enumerate(episodes)
            for segment, row in enumerate(rows)
        )
        yield RolloutGroup(key=f"{first.env_name}/{first.env_example_id}", rollouts=rollouts)


def _write(job: _Import, groups: Sequence[RolloutGroup], created_at: datetime, track: Track) -> None:
    """Write whole groups, in files that follow from the content alone; files that exist already are unchanged.

    Raises ConfigError if another version of ludic, which writes other bytes, began this.
    """
    metadata = RolloutMetadata(worker_id=job.worker_id, timestamp=created_at)
    folders: dict[str, Folder] = {"train": "rollouts", "eval": "evals"}
    for purpose, folder in folders.items():
        parts = list(_parts([group for group in groups if group.rollouts[0].purpose == purpose]))
        try:
            with RolloutWriter(job.root, job.worker_id, folder=folder, file_per_batch=True) as writer:
                for part in track(parts, len(parts), "files") if parts else ():
                    writer.append(RolloutBatch(groups=part, metadata=metadata))
        except NameTakenError as error:
            raise ConfigError(
                f"{job.url}: an import of it was interrupted, and this ludic writes other bytes than the one that "
                "began it; finish it with that version of ludic, or import the file into another root"
            ) from error


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


def _report(job: _Import, num_records: int, groups: Sequence[RolloutGroup]) -> ImportReport:
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    return ImportReport(
        file=job.url,
        worker_id=job.worker_id,
        num_records=num_records,
        num_groups=len(groups),
        num_rollouts=len(rollouts),
        num_without_logprobs=sum(rollout.capture in WITHOUT_LOGPROBS for rollout in rollouts),
        num_from_text=sum(rollout.capture == "text" for rollout in rollouts),
        num_unscored=sum(rollout.episode_reward is None for rollout in rollouts),
        kept_as_metadata=dict(sorted(job.kept.items())),
        not_kept=dict(sorted(job.not_kept.items())),
        refused=job.refused,
        tokenizer="".join(job.tokenizers),
        form=job.form[0] if job.form else "",
    )


# --- Files into a run ------------------------------------------------------------------------------------


def import_files(
    root: Root,
    files: Sequence[str],
    format: str,
    *,
    env: str | None = None,
    tokenizer: str | None = None,
    model: str | None = None,
    track: Track = untracked,
) -> list[ImportReport]:
    """Import files, paths or URLs, of one format; return a report for each. The options are those of `importer`."""
    if not files:
        raise ConfigError("no file to import was named")
    _, import_one = importer(root, format, env=env, tokenizer=tokenizer, model=model)
    return [import_one(url, track) for url in track(files, len(files), "files to import")]


def importer(
    root: Root, format: str, *, env: str | None = None, tokenizer: str | None = None, model: str | None = None
) -> tuple[ImportFormat, Callable[[str, Track], ImportReport]]:
    """Return a format, and a function that imports a file of it, a path or URL.

    format: the name of a built-in format, or the path of a user's. env: environment of records that name none, and of
    samples of other evaluation programs whatever their task; None uses the format's name. tokenizer: folder, Hugging
    Face id or URL of the tokenizer for texts; None uses the run's. model: another location of the run's model, which is
    stored in the run.
    """
    mapping = load_format(format)
    if env is not None:
        mapping = replace(mapping, env_field="")
    if model not in (None, root.record.model):
        remember_model(root, model)
    get_tokenizer = functools.cache(lambda: tokenizer_of(root, tokenizer))
    get_stop_tokens = functools.cache(lambda: read_stop_tokens(root, tokenizer))

    def import_one(url: str, track: Track) -> ImportReport:
        return import_file(
            root,
            url,
            mapping,
            env_name=env or mapping.name,
            tokenizer=tokenizer or root.record.model,
            get_tokenizer=get_tokenizer,
            get_stop_tokens=get_stop_tokens,
            track=track,
        )

    return mapping, import_one


def start_for_import(
    url: str, model: str, format: str, *, env: str | None = None, group_size: int = 8, groups_per_batch: int = 8
) -> Root:
    """Start a run for imported rollouts. Weights of a Hugging Face id are not downloaded: an import needs none."""
    names = (env or load_format(format).name,)
    run = RunConfig(model=model, env=names, group_size=group_size, groups_per_batch=groups_per_batch)
    root = create_root(url, run)
    if not is_hub_id(model):
        remember_model(root)
    return root
