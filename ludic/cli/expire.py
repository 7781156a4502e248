"""`ludic expire ROOT --keep-versions N | --older-than 7d | --where SQL`: delete rollouts that are no longer needed.

Deletes whole files only. By default it keeps files that a resumed trainer would train on or that steps were trained on.
The trainer prunes weights and checkpoints; the ledger, metrics and policy.json are never deleted.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from rich.console import Console

from ludic.cli.flags.expire import AGE, Settings
from ludic.cli.query import ask
from ludic.sql import connect
from ludic.store import Cursor, Root, latest_policy
from ludic.store.attempts import newest_attempt
from ludic.store.checkpoints import checkpoint_to_resume
from ludic.store.files import Source, list_versions
from ludic.store.retention import (
    ExpiredPartition,
    StoredFile,
    all_rows_match,
    expire,
    is_trained_on,
    is_unconsumed,
    stored_files,
)
from ludic.store.token_stats import token_stats_step
from ludic.viewer.output import plain_table, plural, print_json, printable, progress_bar, size, stdout_console

_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}
_MOST_ROWS = 40
_COUNT_MATCHES = """
select worker_id, sequence, count(*) as num_rows, count(*) filter (where {predicate}) as num_matching
from {folder}
group by worker_id, sequence
"""

_OLDER_STEPS = "select distinct attempt_id, step from all_batches where trainer_version < $oldest"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Choice:
    """Files that the rule deletes, and matching files and rows that are kept."""

    chosen: list[StoredFile]
    """Files to delete."""
    num_rows_left: int
    """Matching rows in files that also hold rows that do not match."""
    for_resume: list[StoredFile]
    """Matching files that are kept for a trainer that resumes."""
    for_replay: list[StoredFile]
    """Matching files that are kept because steps were trained on them."""


def main(settings: Settings) -> None:
    root = Root.open(settings.root, writable=not settings.dry_run)
    if settings.folder == "token_stats":
        _expire_token_stats(root, settings)
        return
    choice = _choose(root, settings)
    with progress_bar() as track:
        expired = expire(root, choice.chosen, rule=settings.rule, dry_run=settings.dry_run, track=track)
    if settings.json:
        print_json({"root": root.url, "rule": settings.rule, "dry_run": settings.dry_run} | _as_json(choice, expired))
    else:
        _print(stdout_console(), choice, expired, dry_run=settings.dry_run)


def _expire_token_stats(root: Root, settings: Settings) -> None:
    """Delete the token statistics of older steps. Leaves no tombstone: resume and replay do not read them."""
    latest = latest_policy(root)
    oldest = (latest.version if latest else 0) - (settings.keep_versions or 0) + 1
    rows = ask(connect(root), root, _OLDER_STEPS, {"oldest": oldest})
    steps = {(row["attempt_id"], row["step"]) for row in rows}
    sizes = {
        name: num_bytes for name, num_bytes in root.sizes("token_stats").items() if token_stats_step(name) in steps
    }
    if not settings.dry_run:
        for name in sizes:
            root.delete(name)
    if settings.json:
        print_json({"root": root.url, "rule": settings.rule, "dry_run": settings.dry_run, "deleted": list(sizes)})
    else:
        done = "would be deleted" if settings.dry_run else "deleted"
        stdout_console().print(f"{plural(len(sizes), 'file')}, {size(sum(sizes.values()))}, {done}")


def _choose(root: Root, settings: Settings) -> _Choice:
    matching, num_rows_left = _match(root, settings)
    for_resume = for_replay = list[StoredFile]()
    if settings.folder == "rollouts" and not settings.break_resume:
        for_resume = _needed_to_resume(root, matching)
    if settings.folder == "rollouts" and not settings.break_replay:
        for_replay = _needed_to_replay(root, matching)
    kept = {stored.file for stored in (*for_resume, *for_replay)}
    chosen = [stored for stored in matching if stored.file not in kept]
    return _Choice(chosen=chosen, num_rows_left=num_rows_left, for_resume=for_resume, for_replay=for_replay)


def _match(root: Root, settings: Settings) -> tuple[list[StoredFile], int]:
    """Return the files in which all rows match, and the number of matching rows in other files."""
    files = stored_files(root, settings.rollouts_folder)
    if settings.keep_versions is not None:
        latest = latest_policy(root)
        versions = [*list_versions(root, settings.rollouts_folder), *([latest.version] if latest else [])]
        oldest = max(versions, default=0) - settings.keep_versions + 1
        return [stored for stored in files if stored.file.version < oldest], 0
    predicate, params = settings.where, {}
    if settings.older_than is not None:
        predicate, params = "created_at < $before", {"before": datetime.now(UTC) - _age(settings.older_than)}
    sql = _COUNT_MATCHES.format(predicate=f"coalesce((\n{predicate}\n), false)", folder=settings.folder)
    counts = ask(connect(root), root, sql, params)
    rows = {Source(row["worker_id"], row["sequence"]): (row["num_rows"], row["num_matching"]) for row in counts}
    return all_rows_match(files, rows)


def _age(text: str) -> timedelta:
    match = AGE.fullmatch(text)
    assert match is not None
    return timedelta(**{_UNITS[match[2]]: int(match[1])})


def _needed_to_resume(root: Root, files: Sequence[StoredFile]) -> list[StoredFile]:
    """Return the files that the newest trainer would read and that its checkpoint has not consumed."""
    attempt, latest = newest_attempt(root), latest_policy(root)
    if attempt is None:
        return []
    checkpoint = checkpoint_to_resume(root, attempt)
    cursor = Cursor.from_dict(dict(checkpoint.cursor)) if checkpoint else Cursor()
    most = attempt.config.get("max_off_policy_steps")
    first = 0 if most is None or latest is None else latest.version - most
    return [stored for stored in files if is_unconsumed(stored, first, cursor)]


def _needed_to_replay(root: Root, files: Sequence[StoredFile]) -> list[StoredFile]:
    names = {row["file"] for row in ask(connect(root), root, "select distinct file from batches where used")}
    return [stored for stored in files if is_trained_on(stored, names)]


def _as_json(choice: _Choice, expired: Sequence[ExpiredPartition]) -> dict[str, Any]:
    return {
        "expired": [asdict(partition) for partition in expired],
        "kept_to_resume": [stored.file.name for stored in choice.for_resume],
        "kept_to_replay": [stored.file.name for stored in choice.for_replay],
        "num_matching_rows_left": choice.num_rows_left,
    }


def _print(console: Console, choice: _Choice, expired: Sequence[ExpiredPartition], *, dry_run: bool) -> None:
    if expired:
        _print_table(console, expired)
    for line in _sentences(choice, expired, dry_run=dry_run):
        console.print(line, soft_wrap=True)


def _sentences(choice: _Choice, expired: Sequence[ExpiredPartition], *, dry_run: bool) -> Iterator[str]:
    done = "would be deleted" if dry_run else "deleted"
    files, rows = (sum(getattr(partition, name) for partition in expired) for name in ("num_files", "num_rows"))
    size_bytes = sum(partition.size_bytes for partition in expired)
    yield f"{plural(files, 'file')} with {plural(rows, 'row')}, {size(size_bytes)}, {done}"
    for kept, why, flag in (
        (choice.for_resume, "a trainer that resumes would still train on them", "--break-resume"),
        (choice.for_replay, "steps were trained on them", "--break-replay"),
    ):
        if kept:
            bytes_kept = size(sum(stored.size_bytes for stored in kept))
            yield f"kept {plural(len(kept), 'file')}, {bytes_kept}: {why}; {flag} deletes them too"
    if choice.num_rows_left:
        rows_left = plural(choice.num_rows_left, "row")
        yield f"{rows_left} more match in files that hold other rows too; only whole files are deleted"


def _print_table(console: Console, expired: Sequence[ExpiredPartition]) -> None:
    table = plain_table("version", "environment", ">files", ">rows", ">bytes")
    for partition in expired[:_MOST_ROWS]:
        counts = (f"{partition.num_files:,}", f"{partition.num_rows:,}", size(partition.size_bytes))
        table.add_row(str(partition.version), printable(partition.env_name), *counts)
    console.print(table)
    if len(expired) > _MOST_ROWS:
        console.print(f"… {len(expired):,} partitions in all")
