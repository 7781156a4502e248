"""Keep a root sound and small: check it, merge its small files, delete what is no longer needed."""

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Unpack

from ludic.app.operations.operation import operation
from ludic.base import TARGET_BYTES, Track, untracked
from ludic.errors import ConfigError, one_line
from ludic.root.maintenance import ExpiryRule
from ludic.settings import Index, Range, SettingsError, convert

if TYPE_CHECKING:
    from ludic.app.operations.run import Run
    from ludic.app.operations.typed import ExpireSettings
    from ludic.root.maintenance import CompactionReport, ExpiryReport, VerifyReport


@operation(group="Keep", place=1)
def verify(run: "Run", *, repair: bool = False, track: Track = untracked) -> "VerifyReport":
    """Check a root's files and data; quarantine broken files if asked to.

    Returns findings (none if the run is sound), notes and repairs.

    Args:
        run: Folder or URL of the run. In a run that is still active, half-written data may be reported as well.
        repair: Move broken files to quarantine/ with the reason, and delete temporary files that are older than a day.
    """
    from ludic.root import RUN
    from ludic.root.maintenance import Finding, check_root
    from ludic.run import run_of

    report = check_root(run.root.writable() if repair else run.root, track, repair=repair)
    try:
        run_of(run.root)
    except ConfigError as error:
        finding = Finding(check="settings", where=RUN.template, problem=one_line(error))
        return replace(report, findings=[finding, *report.findings])
    return report


@operation(group="Keep", place=2)
def compact(
    run: "Run",
    before: Index | None = None,
    *,
    all_versions: bool = False,
    target_mb: Annotated[int, Range(1, 10**6)] = TARGET_BYTES >> 20,
    dry_run: bool = False,
    track: Track = untracked,
) -> "CompactionReport":
    """Rewrite the many small files of finished versions into few large ones.

    Safe while the run and readers continue; after an interruption, call it again. Files of requests/, and those of
    calls/ whose gateways have ended, have no versions and are always taken. Raises SettingsError for both before and
    all_versions.

    Args:
        before: Compact versions below this one; None takes the versions that workers and the newest trainer no longer
            use.
        all_versions: Compact every version; for a finished run.
        target_mb: Target size of a compacted file, in MiB.
        dry_run: Report the changes without making them.
    """
    from ludic.root.maintenance import compact, sealed_before

    if all_versions and before is not None:
        raise SettingsError("all_versions and before contradict each other; give one of them")
    root = run.root if dry_run else run.root.writable()
    if before is None and not all_versions:
        before = sealed_before(root)
    return compact(root, before_version=before, target_bytes=target_mb << 20, dry_run=dry_run, track=track)


@operation(group="Keep", place=3, rule=ExpiryRule)
def expire(
    run: "Run",
    *,
    break_resume: bool = False,
    break_replay: bool = False,
    dry_run: bool = False,
    track: Track = untracked,
    **rule: Unpack["ExpireSettings"],
) -> "ExpiryReport":
    """Delete rollouts that are no longer needed.

    Deletes the files whose rows all match one rule, except those that a resumed trainer or a replay needs. rule: fields
    of ExpiryRule: one of keep_versions, before, older_than and where; folder. Raises ConfigError for a bad rule,
    QueryError for a bad predicate.

    Args:
        break_resume: Also delete rollouts that a trainer would still train on after it resumes from its checkpoint.
        break_replay: Also delete rollouts that steps were trained on, so that those steps can't be replayed.
        dry_run: Report the deletions without making them.
    """
    from ludic.root.maintenance import expire

    return expire(
        run.root if dry_run else run.root.writable(),
        convert(ExpiryRule, rule),
        break_resume=break_resume,
        break_replay=break_replay,
        dry_run=dry_run,
        track=track,
    )
