"""`ludic expire ROOT --keep-versions N | --before N | --older-than 7d | --where SQL`: delete old rollouts."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console

import ludic
from ludic.cli.flags.expire import Settings
from ludic.maintenance.expire import ExpiryReport
from ludic.store.files import FOLDERS
from ludic.store.records import ExpiredPartition
from ludic.viewer.output import plain_table, plural, print_json, printable, progress_bar, size, stdout_console

_MOST_ROWS = 40


def main(settings: Settings) -> None:
    run = ludic.open(settings.root)
    with progress_bar() as track:
        report = run.expire(
            **asdict(settings.rule),
            break_resume=settings.break_resume,
            break_replay=settings.break_replay,
            dry_run=settings.dry_run,
            track=track,
        )
    has_partitions = settings.rule.folder in FOLDERS
    if settings.json:
        facts = {"root": run.url, "rule": report.rule, "dry_run": report.dry_run}
        print_json(facts | (_as_json(report) if has_partitions else {"deleted": list(report.files)}))
    elif not has_partitions:
        sizes = report.files.values()
        stdout_console().print(f"{plural(len(sizes), 'file')}, {size(sum(sizes))}, {_done(report)}")
    else:
        _print(stdout_console(), report)


def _done(report: ExpiryReport) -> str:
    return "would be deleted" if report.dry_run else "deleted"


def _as_json(report: ExpiryReport) -> dict[str, Any]:
    return {
        "expired": [asdict(partition) for partition in report.expired],
        "kept_to_resume": [stored.file.name for stored in report.kept_to_resume],
        "kept_to_replay": [stored.file.name for stored in report.kept_to_replay],
        "num_matching_rows_left": report.num_matching_rows_left,
    }


def _print(console: Console, report: ExpiryReport) -> None:
    if report.expired:
        _print_table(console, report.expired)
    for line in _sentences(report):
        console.print(line, soft_wrap=True)


def _sentences(report: ExpiryReport) -> Iterator[str]:
    files, rows = (sum(getattr(partition, name) for partition in report.expired) for name in ("num_files", "num_rows"))
    size_bytes = sum(partition.size_bytes for partition in report.expired)
    yield f"{plural(files, 'file')} with {plural(rows, 'row')}, {size(size_bytes)}, {_done(report)}"
    for kept, why, flag in (
        (report.kept_to_resume, "a trainer that resumes would still train on them", "--break-resume"),
        (report.kept_to_replay, "steps were trained on them", "--break-replay"),
    ):
        if kept:
            bytes_kept = size(sum(stored.size_bytes for stored in kept))
            yield f"kept {plural(len(kept), 'file')}, {bytes_kept}: {why}; {flag} deletes them too"
    if report.num_matching_rows_left:
        rows_left = plural(report.num_matching_rows_left, "row")
        yield f"{rows_left} more match in files that hold other rows too; only whole files are deleted"


def _print_table(console: Console, expired: Sequence[ExpiredPartition]) -> None:
    table = plain_table("version", "environment", ">files", ">rows", ">bytes")
    for partition in expired[:_MOST_ROWS]:
        counts = (f"{partition.num_files:,}", f"{partition.num_rows:,}", size(partition.size_bytes))
        table.add_row(str(partition.version), printable(partition.env_name), *counts)
    console.print(table)
    if len(expired) > _MOST_ROWS:
        console.print(f"… {len(expired):,} partitions in all")
