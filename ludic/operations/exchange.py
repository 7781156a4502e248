"""Exchange with other programs: export weights, tables, text and evaluations; import rollouts."""

from collections.abc import Sequence
from os import PathLike, fspath
from typing import TYPE_CHECKING, Annotated, BinaryIO, Unpack

from ludic.adapters.exports.exporting import ExportOptions
from ludic.defaults import Track, untracked
from ludic.errors import ConfigError, MissingRootError
from ludic.settings import GroupSize, GroupsPerBatch, Shown, convert, operation

if TYPE_CHECKING:
    from ludic.adapters.exports.exporting import Exported, Format
    from ludic.adapters.imports.importing import Imported
    from ludic.operations.run import Run
    from ludic.operations.typed import ExportSettings


@operation(options=ExportOptions)
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


@operation()
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
    track: Track = untracked,
) -> "Imported":
    """Import rollouts that other programs wrote.

    A second import of a file changes nothing. Raises ConfigError for an unknown format or a foreign file.

    Args:
        run: Folder or URL of the run; created if it does not exist and --model is given.
        files: Files to import, paths or URLs.
        from_: Format of the files: jsonl (also for the forms of conversations and pairs in docs/fit.md), verl, trl,
            prime-rl, art, inspect, lm-eval, lighteval, or path/to/file.py:function (docs/interop.md).
        env: Environment name for records without one, and for all samples of inspect, lm-eval and lighteval instead of
            their task; None uses the task, or the name of the format or function.
        tokenizer: Folder, Hugging Face id or URL of the tokenizer for texts; None uses the tokenizer of the run's
            model.
        model: Folder, Hugging Face id or URL of the weights, for a run that is created; for another run, another
            location of its model.
        group_size: Group size in the settings of a run that is created. Imported groups keep their size.
        groups_per_batch: Groups per batch in the settings of a run that is created.
    """
    from ludic.adapters.imports.formats import load_format
    from ludic.adapters.imports.importing import Imported, import_files, start_for_import
    from ludic.store import Root

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
    reports = import_files(root, paths, from_, env=env, tokenizer=tokenizer, model=model, track=track)
    return Imported(root=root.url, files=reports)
