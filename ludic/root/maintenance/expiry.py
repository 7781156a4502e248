"""Delete files of rollouts and other rows that a rule says are no longer needed.

Only whole files are deleted. Files that a resumed trainer would train on, or that steps were trained on, are kept by
default. The trainer prunes weights and checkpoints; the ledger, metrics and policy.json are never deleted. Raises
QueryError for a bad predicate, StoreError if the filesystem fails.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Any

import pyarrow.compute as pc

from ludic.base import Frame, Part, Result, Track, plural, size, untracked
from ludic.errors import SchemaError
from ludic.root.attempts import checkpoint_to_resume, newest_attempt
from ludic.root.catalogue import CALLS
from ludic.root.gateways import episode_claims
from ludic.root.json_records import ExpiredPartition, Folder
from ludic.root.maintenance.expiry_rule import ExpiryRule
from ludic.root.root import Root
from ludic.root.rows.files import FOLDERS, SourceFile, list_versions
from ludic.root.rows.parquet import open_parquet
from ludic.root.rows.reader import Cursor
from ludic.root.rows.tombstones import (
    StoredFile,
    all_rows_match,
    delete_files,
    is_trained_on,
    is_unconsumed,
    stored_files,
)
from ludic.root.rows.tombstones import expire as expire_files
from ludic.root.sql.connection import connect
from ludic.root.sql.query import ask
from ludic.root.sql.reports import figure
from ludic.root.weights.policies import latest_policy

_CONCURRENT_READS = 16
_COUNT_MATCHES = """
select worker_id, sequence, count(*) as num_rows, count(*) filter (where {predicate}) as num_matching
from {folder}
group by worker_id, sequence
"""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ExpiryReport(Result):
    """Files that an expiry deleted, and matching files and rows that it kept; in a dry run, as they would be."""

    root: str
    """URL or path of the root."""
    folder: str
    rule: str
    dry_run: bool
    expired: Sequence[ExpiredPartition] = ()
    """Deleted files of rollouts or evals, by partition."""
    files: dict[str, int] = field(default_factory=dict)
    """Deleted files of a folder without partitions, and their bytes."""
    kept_to_resume: Sequence[StoredFile] = ()
    """Matching files that a resumed trainer would train on."""
    kept_to_replay: Sequence[StoredFile] = ()
    """Matching files that steps were trained on."""
    num_matching_rows_left: int = 0
    """Matching rows in files that also hold rows that do not match."""

    def to_dict(self) -> dict[str, Any]:
        figures = {"root": self.root, "rule": self.rule, "dry_run": self.dry_run}
        if self.folder not in FOLDERS:
            return figures | {"deleted": list(self.files)}
        return figures | {
            "expired": [asdict(partition) for partition in self.expired],
            "kept_to_resume": [stored.file.name for stored in self.kept_to_resume],
            "kept_to_replay": [stored.file.name for stored in self.kept_to_replay],
            "num_matching_rows_left": self.num_matching_rows_left,
        }

    def parts(self) -> Iterator[Part]:
        """Files deleted, by partition, and files kept, with the reason."""
        done = "would be deleted" if self.dry_run else "deleted"
        if self.folder not in FOLDERS:
            sizes = self.files.values()
            yield f"{plural(len(sizes), 'file')}, {size(sum(sizes))}, {done}"
            return
        rows = [asdict(partition) for partition in self.expired]
        if rows:
            columns = ("version", "env_name", "num_files", "num_rows", "size_bytes")
            yield Frame("expired", rows, columns)
        files, num_rows, bytes_ = (sum(row[name] for row in rows) for name in ("num_files", "num_rows", "size_bytes"))
        yield f"{plural(files, 'file')} with {plural(num_rows, 'row')}, {size(bytes_)}, {done}"
        for kept, why, flag in (
            (self.kept_to_resume, "a trainer that resumes would still train on them", "--break-resume"),
            (self.kept_to_replay, "steps were trained on them", "--break-replay"),
        ):
            if kept:
                bytes_kept = size(sum(stored.size_bytes for stored in kept))
                yield f"kept {plural(len(kept), 'file')}, {bytes_kept}: {why}; {flag} deletes them too"
        if self.num_matching_rows_left:
            rows_left = plural(self.num_matching_rows_left, "row")
            yield f"{rows_left} more match in files that hold other rows too; only whole files are deleted"


def expire(
    root: Root,
    rule: ExpiryRule,
    *,
    break_resume: bool = False,
    break_replay: bool = False,
    dry_run: bool = False,
    track: Track = untracked,
) -> ExpiryReport:
    """Delete the files whose rows all match the rule, and put a tombstone.

    break_resume: also delete rollouts that a resumed trainer would train on. break_replay: also delete rollouts that
    steps were trained on, so that those steps can't be replayed. Raises QueryError for a bad predicate; StoreError if
    the filesystem fails: then call it again.
    """
    folder = next((folder for folder in FOLDERS if folder == rule.folder), None)
    if folder is None:
        by_step = "step" in rule.row.fields._fields
        files = _files_of_older_steps(root, rule) if by_step else _older_files(root, rule, track)
        if not dry_run:
            delete_files(root, files, track)
        return ExpiryReport(root=root.url, folder=rule.folder, rule=str(rule), dry_run=dry_run, files=files)
    matching, num_rows_left = _match(root, rule, folder)
    for_resume = for_replay = list[StoredFile]()
    if folder == "rollouts" and not break_resume:
        for_resume = _needed_to_resume(root, matching)
    if folder == "rollouts" and not break_replay:
        for_replay = _needed_to_replay(root, matching)
    kept = {stored.file for stored in (*for_resume, *for_replay)}
    chosen = [stored for stored in matching if stored.file not in kept]
    return ExpiryReport(
        root=root.url,
        folder=folder,
        rule=str(rule),
        dry_run=dry_run,
        expired=expire_files(root, chosen, rule=str(rule), dry_run=dry_run, track=track),
        kept_to_resume=for_resume,
        kept_to_replay=for_replay,
        num_matching_rows_left=num_rows_left,
    )


def _files_of_older_steps(root: Root, rule: ExpiryRule) -> dict[str, int]:
    """Return the files and their bytes. They get no tombstone: resume and replay do not read them."""
    latest = latest_policy(root)
    rows = ask(
        connect(root),
        root,
        figure("steps_before_version"),
        {"first_kept": rule.first_kept(latest.version if latest else 0)},
    )
    steps = {(row["attempt_id"], row["step"]) for row in rows}
    sizes, row = root.sizes(rule.folder), rule.row
    found = {name: row.parse(name) for name in sizes}
    return {name: sizes[name] for name, of in found.items() if of and (of.attempt_id, of.step) in steps}


def _older_files(root: Root, rule: ExpiryRule, track: Track) -> dict[str, int]:
    """Return the files of a folder whose rows are all older, and their bytes; not those that can't be read.

    They get no tombstone: the ledger holds the used rewards, and rollouts show which requests are done.
    """
    assert rule.age is not None
    first_kept, row = datetime.now(UTC) - rule.age, rule.row

    if row is CALLS:
        return _older_episodes(root, first_kept)

    def is_older(name: str) -> bool:
        with suppress(SchemaError, FileNotFoundError):
            with open_parquet(root, name, row.table, whole=True) as parquet:
                newest = pc.max(parquet.read(["created_at"], use_threads=False)["created_at"]).as_py()
            return newest is not None and newest < first_kept
        return False

    sizes = {name: size for name, size in root.sizes(rule.folder).items() if row.parse(name) is not None}
    with ThreadPoolExecutor(_CONCURRENT_READS) as pool:
        older = list(track(pool.map(is_older, sizes), len(sizes), "files read"))
    return {name: size for (name, size), chosen in zip(sizes.items(), older, strict=True) if chosen}


def _older_episodes(root: Root, first_kept: datetime) -> dict[str, int]:
    """Return the files of calls that hold only whole episodes that are over and older, and their bytes.

    A call is stored as its difference to an earlier one of its episode, so an episode is kept or deleted whole.
    """
    sizes = {name: size for name, size in root.sizes(CALLS.folder).items() if CALLS.parse(name) is not None}
    with ThreadPoolExecutor(_CONCURRENT_READS) as pool:
        found = dict(zip(sizes, pool.map(partial(_episodes_of, root), sizes), strict=True))
    now = datetime.now(UTC)
    is_kept = {
        (claim.episode_id, claim.attempt)
        for claim in episode_claims(root)
        if claim.sealed_at is None
        and (claim.expires_at is None or datetime.fromisoformat(claim.expires_at).astimezone(UTC) > now)
    }
    chosen = {name for name, (episodes, newest) in found.items() if newest is not None and newest < first_kept}
    while True:  # a file that is kept keeps its episodes, and these their other files
        is_kept.update(*(found[name][0] for name in found.keys() - chosen))
        left = {name for name in chosen if is_kept.isdisjoint(found[name][0])}
        if left == chosen:
            return {name: size for name, size in sizes.items() if name in chosen}
        chosen = left


def _episodes_of(root: Root, name: str) -> tuple[set[tuple[str, int]], datetime | None]:
    """Return the episodes of a file of calls, and the time of its newest row; None if it can't be read."""
    with suppress(SchemaError, FileNotFoundError):
        with open_parquet(root, name, CALLS.table, whole=True) as parquet:
            rows = parquet.read(["episode_id", "attempt", "created_at"], use_threads=False)
        episodes = set(zip(rows["episode_id"].to_pylist(), rows["attempt"].to_pylist(), strict=True))
        return episodes, pc.max(rows["created_at"]).as_py()
    return set(), None


def _match(root: Root, rule: ExpiryRule, folder: Folder) -> tuple[list[StoredFile], int]:
    """Return the files in which all rows match, and the number of matching rows in other files."""
    files = stored_files(root, folder)
    latest = latest_policy(root)
    newest = max([*list_versions(root, folder), *([latest.version] if latest else [])], default=0)
    first_kept = rule.first_kept(newest)
    if first_kept is not None:
        return [stored for stored in files if stored.file.version < first_kept], 0
    predicate, params = rule.where, dict[str, Any]()
    if rule.age is not None:
        predicate, params = "created_at < $before", {"before": datetime.now(UTC) - rule.age}
    # The predicate has its own lines, so that a comment at its end does not hide the parenthesis.
    sql = _COUNT_MATCHES.format(predicate=f"coalesce((\n{predicate}\n), false)", folder=folder)
    counts = ask(connect(root), root, sql, params)
    rows = {SourceFile(row["worker_id"], row["sequence"]): (row["num_rows"], row["num_matching"]) for row in counts}
    return all_rows_match(files, rows)


def _needed_to_resume(root: Root, files: Sequence[StoredFile]) -> list[StoredFile]:
    """Return the files that the newest trainer would read and that its checkpoint has not consumed."""
    attempt, latest = newest_attempt(root), latest_policy(root)
    if attempt is None or attempt.other_trainer is not None:  # a recorded trainer takes no rollouts from here
        return []
    checkpoint = checkpoint_to_resume(root, attempt)
    cursor = Cursor.from_dict(dict(checkpoint.cursor)) if checkpoint else Cursor()
    most = attempt.config.get("max_off_policy_steps")
    first = 0 if most is None or latest is None else latest.version - most
    return [stored for stored in files if is_unconsumed(stored, first, cursor)]


def _needed_to_replay(root: Root, files: Sequence[StoredFile]) -> list[StoredFile]:
    names = {row["file"] for row in ask(connect(root), root, "select distinct file from batches where used")}
    return [stored for stored in files if is_trained_on(stored, names)]
