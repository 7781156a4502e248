"""Exchange with other programs: export weights, tables, text and evaluations; import rollouts; assemble calls."""

import inspect
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from os import PathLike, fspath
from typing import TYPE_CHECKING, Annotated, BinaryIO, Literal, Protocol, Unpack

from ludic.app.operations.operation import operation
from ludic.base import Track, find_by_name, untracked
from ludic.errors import ConfigError, MissingRootError
from ludic.settings import EXPORTER, GroupSize, GroupsPerBatch, Index, Seconds, SecondsOfADay, Shown, convert, find
from ludic.settings.table import check

if TYPE_CHECKING:
    from ludic.app.operations.outcomes import Assembled, Imported, Pushed
    from ludic.app.operations.run import Run
    from ludic.app.operations.typed import ExportSettings
    from ludic.base import Result
    from ludic.root import Root


class Exporter(Protocol):
    """A part of the kind EXPORTER. It also takes `track`, and those fields of ExportOptions that apply, by name."""

    def __call__(self, root: "Root", target: str | BinaryIO | None) -> "Result":
        """Write to a file or a folder, a path or a URL, and return what was written; None: where it writes by itself.

        Raises ConfigError if the target exists or does not fit.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions:
    """Format of an export, and its options."""

    format: Annotated[str, EXPORTER]
    """Output format. delta and iceberg register the existing files without copying them; run the command again to add
    new files. hf writes a folder of weights, configuration and tokenizer, for transformers and vLLM. inspect writes
    evaluations as logs of inspect_ai. jsonl and chat write a line for each row: all columns, or OpenAI's chat
    messages. atif writes a trajectory of ATIF v1.7, with token ids and logprobs, for each agent of an episode."""
    table: Literal["rollouts", "evals"] = "rollouts"
    """Table to export."""
    where: str | None = None
    """jsonl, atif and chat: SQL predicate, such as "policy_version > 3"; None exports all rows."""
    sql: str | None = None
    """JSONL: export the result of this query, which may use the same views as `ludic sql`."""
    step: Index | None = None
    """hf: export the checkpoint of this step."""
    version: Index | None = None
    """hf: export this published version; the default, without --step, is the newest version. inspect: export the
    evaluations of this version; None is all."""
    model: str | None = None
    """hf: location of the run's first model, which a LoRA adapter needs; None takes the location in run.json."""

    def __post_init__(self) -> None:
        check(self)
        taken = inspect.signature(find(EXPORTER, self.format)).parameters
        for each in fields(self):
            if each.name not in ("format", *taken) and getattr(self, each.name) != each.default:
                raise ConfigError(f"{each.name} does not apply to format {self.format}; leave it out")
        if self.step is not None and self.version is not None:
            raise ConfigError("step and version both choose the weights; give one of them")
        if self.where and self.sql:
            raise ConfigError("where and sql both choose the rows; give one of them")


@operation(group="Exchange", place=1, options=ExportOptions)
def export(
    run: "Run",
    format: str,
    out: "str | PathLike[str] | BinaryIO | None" = None,
    *,
    track: Track = untracked,
    **options: Unpack["ExportSettings"],
) -> "Result":
    """Export weights (Hugging Face), tables (Delta, Iceberg) or text (JSONL).

    Also evaluations, as logs of inspect_ai. options: fields of ExportOptions. Raises ConfigError if options do not fit
    the format or `out` exists, QueryError if the SQL fails.

    Args:
        out: JSONL: file to write, which must not exist, or an open binary file; None writes to stdout. hf: folder
            or URL to write, which must not exist. inspect: local folder of the logs. Iceberg: local folder of the
            catalog; None uses ROOT/iceberg.
    """
    chosen = convert(ExportOptions, {"format": format, **options})
    exporter = find(EXPORTER, chosen.format)
    given = {each.name: getattr(chosen, each.name) for each in fields(chosen) if each.name != "format"}
    taken = inspect.signature(exporter).parameters
    given = {name: each for name, each in {**given, "track": track}.items() if name in taken}
    written: Result = exporter(run.root, fspath(out) if isinstance(out, PathLike) else out, **given)
    return written


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
            prime-rl, skyrl, art, atif, inspect, lm-eval, lighteval, or path/to/file.py:function (docs/interop.md).
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
    from ludic.app.launch.process import interruptible_unless
    from ludic.app.operations.outcomes import Imported

    times = {"interval_s": interval_s, "rest_s": rest_s, "until_idle_s": until_idle_s}
    for name, value in times.items():
        if value is not None and not follow:
            raise ConfigError(f"{name} applies to follow alone, which is off; leave it out, or follow a folder")
    # Before a run is started for the files.
    find_by_name("ludic.adapters.imports.formats:load_format")(from_)
    paths = [fspath(path) for path in ([files] if isinstance(files, str | PathLike) else files)]
    if not paths:
        raise ConfigError("no file to import was named")
    sizes = {"group_size": group_size, "groups_per_batch": groups_per_batch}
    root = _open_or_start(run, model, from_, env, sizes)
    how = {"env": env, "tokenizer": tokenizer, "model": model}
    if not follow:
        import_files = find_by_name("ludic.adapters.imports.importing:import_files")
        return Imported(root=root.url, files=import_files(root, paths, from_, **how, track=track))
    imported: Imported | None = None
    try:
        with interruptible_unless(stop) as stopped:
            follow_folders = find_by_name("ludic.adapters.imports.following:follow")
            imported = follow_folders(root, paths, from_, stopped, **times, **how)
    except KeyboardInterrupt:
        if imported is None:  # a second Ctrl-C; the first one ends it well
            raise
    return imported


@operation(group="Exchange", place=3)
def assemble(
    run: "Run",
    *,
    into: Annotated[str | PathLike[str] | None, Shown("NEW")] = None,
    tokenizer: Annotated[str | None, Shown("NAME")] = None,
    track: Track = untracked,
) -> "Assembled":
    """Assemble the stored model calls of agents into rollouts.

    Episodes that are over and have no rows yet become rows; scores that were posted after the rows become scores of
    the scorer `posted`. A second call adds nothing. The view call_audit says where each call's tokens are, or why they
    are in no row. Raises ConfigError if another version of ludic has assembled an episode.

    Args:
        into: Root for the rows of all episodes, such as with a better version of ludic; created with this run's
            settings if it does not exist. None adds the missing rows to this run.
        tokenizer: Folder, Hugging Face id or URL of a tokenizer for calls that were recorded as text; None leaves them
            out.
    """
    from ludic.app.operations.outcomes import Assembled
    from ludic.gateway import TextTokens, assemble_root
    from ludic.models import read_stop_tokens, tokenizer_of
    from ludic.run import create_root, run_of

    root = run.root.writable() if into is None else run.root
    make_tokens = None
    if tokenizer is not None:
        make_tokens = TextTokens(tokenizer_of(root, tokenizer), read_stop_tokens(root, tokenizer))
    target = None if into is None else create_root(fspath(into), run_of(root), like=root)
    report = assemble_root(root, target, make_tokens=make_tokens, track=track)
    return Assembled(root=(target or root).url, **{each.name: getattr(report, each.name) for each in fields(report)})


@operation(group="Exchange", place=4)
def push(
    run: "Run",
    repo: Annotated[str, Shown("OWNER/NAME")],
    *,
    to: Annotated[str | PathLike[str] | None, Shown("FOLDER")] = None,
    version: Index | None = None,
    parts: Literal["all", "model", "rollouts"] = "all",
    public: bool = False,
    personal: bool = False,
    license: str | None = None,
    model: str | None = None,
) -> "Pushed":
    """Push a run to the Hugging Face Hub: its weights as a model, its rollouts as a data set, each with a card.

    The data set is a root, which `ludic view`, sql and report open. The login is that of `hf auth login` or HF_TOKEN.
    Raises ConfigError for a name that the Hub does not take, a folder that exists, and a public push that names
    machines or people; StoreError if the Hub refuses.

    Args:
        repo: Repository of the model; the data set is OWNER/NAME-rollouts. Both are created, private.
        to: Write what would be sent to this new folder, and send nothing.
        version: Published version of the weights; None is the newest.
        parts: Push the model, the rollouts, or both.
        public: Create public repositories, or push to those that are.
        personal: Send what names hosts, users and home folders in public, too; --to lists it.
        license: License for the cards, such as apache-2.0; None states none.
        model: Location of the run's first model, which a LoRA adapter needs; None takes the location in run.json.
    """
    send = find_by_name("ludic.adapters.exports.hub:push")
    pushed: Pushed = send(
        run,
        repo,
        to=None if to is None else fspath(to),
        version=version,
        parts=parts,
        public=public,
        personal=personal,
        license=license,
        model=model,
    )
    return pushed


def _open_or_start(
    run: "Run | str", model: str | None, from_: str, env: str | None, sizes: Mapping[str, int]
) -> "Root":
    """Return the root of a run to import into; a run that does not exist is started if there is a model for it."""
    from ludic.root import Root

    try:
        return Root.open(run, writable=True) if isinstance(run, str) else run.root.writable()
    except MissingRootError:
        if model is None:
            raise ConfigError(f"{run} holds no run; --model FOLDER_OR_ID starts one") from None
        start = find_by_name("ludic.adapters.imports.importing:start_for_import")
        return start(str(run), model, from_, env=env, **sizes)
