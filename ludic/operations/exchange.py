"""Exchange with other programs: export weights, tables, text and evaluations; import rollouts."""

import threading
from collections.abc import Sequence
from os import PathLike, fspath
from typing import TYPE_CHECKING, Annotated, BinaryIO, Unpack

from ludic.adapters.exports.exporting import ExportOptions
from ludic.defaults import Track, untracked
from ludic.errors import ConfigError, MissingRootError
from ludic.operations.operation import operation
from ludic.settings import GroupSize, GroupsPerBatch, Seconds, SecondsOfADay, Shown, convert

if TYPE_CHECKING:
    from ludic.adapters.exports.exporting import Exported, Format
    from ludic.adapters.imports.importing import Imported
    from ludic.operations.run import Run
    from ludic.operations.typed import ExportSettings


@operation(group="Exchange", place=1, options=ExportOptions)
def export(
    run: "Run",
    format: "Format",
    out: "str | PathLike[str] | BinaryIO | None" = None,
    *,
    track: Track = untracked,
    **options: Unpack["ExportSettings"],
) -> "Exported":
    """Export weights (Hugging Face), tables (Delta, Iceberg) or text (JSONL, CSV).

    Also evaluations, as logs of inspect_ai. options: fields of ExportOptions. Raises ConfigError if options do not fit
    the format or `out` exists, QueryError if the SQL fails.

    Args:
        out: JSONL and CSV: file to write, which must not exist, or an open binary file; None writes to stdout. hf:
            folder or URL to write, which must not exist. inspect: local folder of the logs. Iceberg: local folder of
            the catalog; None uses ROOT/iceberg.
    """
    from ludic.adapters.exports.exporting import export

    chosen = convert(ExportOptions, {"format": format, **options})
    return export(run.root, chosen, fspath(out) if isinstance(out, PathLike) else out, track)


@operation(group="Exchange", place=2)
def import_(
    run: "Run | str",
    files: Annotated[str | PathLike[str] | Sequence[str | PathLike[str]], Shown("FILE", by_position=True)],
    from_: Annotated[str, Shown("FORMAT")],
    *,
    env: str | None = None,
    tokenizer: str | None = None,
    model: str | None = None,
    group_size: GroupSize = 8,
    groups_per_batch: GroupsPerBatch = 8,
    follow: bool = False,
    interval_s: SecondsOfADay | None = None,
    rest_s: Seconds | None = None,
    until_idle_s: Seconds | None = None,
    stop: threading.Event | None = None,
    track: Track = untracked,
) -> "Imported":
    """Import rollouts that other programs wrote.

    A second import of a file changes nothing. With --follow the files are those that a running program leaves in a
    folder: each is imported once, when it is complete, until Ctrl-C or SIGTERM; a new start goes on. Raises ConfigError
    for an unknown format or a foreign file, which --follow names and leaves out.

    Args:
        run: Folder or URL of the run; created if it does not exist and --model is given.
        files: Files to import, paths or URLs; with --follow folders, or URLs of folders.
        from_: Format of the files: jsonl (also for the forms of conversations and pairs in docs/fit.md), verl, trl,
            prime-rl, skyrl, art, inspect, lm-eval, lighteval, or path/to/file.py:function (docs/interop.md).
        env: Environment name for records without one, and for all samples of inspect, lm-eval and lighteval instead of
            their task; None uses the task, or the name of the format or function.
        tokenizer: Folder, Hugging Face id or URL of the tokenizer for texts; None uses the tokenizer of the run's
            model.
        model: Folder, Hugging Face id or URL of the weights, for a run that is created; for another run, another
            location of its model.
        group_size: Group size in the settings of a run that is created. Imported groups keep their size.
        groups_per_batch: Groups per batch in the settings of a run that is created.
        follow: Follow folders: import each file of the format when its program has written it.
        interval_s: Seconds between two looks into the folders; None is 2.
        rest_s: Seconds without change after which a file is complete that its program may append to (jsonl, prime-rl,
            lm-eval, an own function); sooner if there is a file of a newer step. None is 600, or until_idle_s if that
            is shorter.
        until_idle_s: End when no file was new or changed for this many seconds; None goes on until it is stopped.
        stop: Ends --follow when it is set, instead of Ctrl-C.
    """
    from ludic.adapters.imports.following import INTERVAL_S, Times
    from ludic.adapters.imports.following import follow as follow_folders
    from ludic.adapters.imports.formats import load_format
    from ludic.adapters.imports.importing import Imported, import_files, start_for_import
    from ludic.launch.process import interruptible_unless
    from ludic.store import Root

    for name, value in {"interval_s": interval_s, "rest_s": rest_s, "until_idle_s": until_idle_s}.items():
        if value is not None and not follow:
            raise ConfigError(f"{name} applies to follow alone, which is off; leave it out, or follow a folder")
    load_format(from_)  # before a run is started for the files
    paths = [fspath(path) for path in ([files] if isinstance(files, str | PathLike) else files)]
    if not paths:
        raise ConfigError("no file to import was named")
    try:
        root = Root.open(run, writable=True) if isinstance(run, str) else run.root.writable()
    except MissingRootError:
        if model is None:
            raise ConfigError(f"{run} holds no run; --model FOLDER_OR_ID starts one") from None
        sizes = {"group_size": group_size, "groups_per_batch": groups_per_batch}
        root = start_for_import(str(run), model, from_, env=env, **sizes)
    how = {"env": env, "tokenizer": tokenizer, "model": model}
    if not follow:
        return Imported(root=root.url, files=import_files(root, paths, from_, **how, track=track))
    imported: Imported | None = None
    try:
        with interruptible_unless(stop) as stopped:
            times = Times(interval_s=interval_s or INTERVAL_S, rest_s=rest_s, until_idle_s=until_idle_s)
            imported = follow_folders(root, paths, from_, stopped, times, **how)
    except KeyboardInterrupt:
        if imported is None:  # a second Ctrl-C; the first one ends it well
            raise
    return imported
