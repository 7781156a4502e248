"""Export a run's files as a table, its rows as text, its weights for Hugging Face, its evaluations for inspect_ai.

delta and iceberg register the existing files without a copy (tables.py); jsonl streams rows (text.py); hf copies
weights (weights.py); inspect writes logs (inspect_logs.py). Each is imported when it is used, so that `ludic export
--help` answers at once. Raises ConfigError if options conflict or the target exists, StoreError if a table's writer
fails, QueryError if the SQL fails.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, BinaryIO, Literal, TypeAlias

from ludic.errors import ConfigError
from ludic.paths import local_path
from ludic.settings import Index, SettingsError, check

if TYPE_CHECKING:
    from ludic.adapters.exports.inspect_logs import LogsReport
    from ludic.adapters.exports.tables import TableReport
    from ludic.adapters.exports.text import TextReport
    from ludic.adapters.exports.weights import WeightsReport
    from ludic.defaults import Track
    from ludic.store import Root

ExportFormat = Literal["hf", "delta", "iceberg", "jsonl", "inspect"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions:
    """Format of an export, and its options."""

    format: ExportFormat
    """Output format. delta and iceberg register the existing files without copying them; run the command again to add
    new files. hf writes a folder of weights, configuration and tokenizer, for transformers and vLLM. inspect writes
    evaluations as logs of inspect_ai."""
    table: Literal["rollouts", "evals"] = "rollouts"
    """Table to export."""
    where: str | None = None
    """jsonl: SQL predicate, such as "policy_version > 3"; None exports all rows."""
    sql: str | None = None
    """jsonl: export the result of this query, which may use the same views as `ludic sql`."""
    step: Index | None = None
    """hf: export the checkpoint of this step."""
    version: Index | None = None
    """hf: export this published version; the default, without --step, is the newest version. inspect: export the
    evaluations of this version; None is all."""
    model: str | None = None
    """hf: location of the run's first model, which a LoRA adapter needs; None takes the location in run.json."""

    def __post_init__(self) -> None:
        check(self)
        of_format = {
            **dict.fromkeys(("where", "sql"), ("jsonl",)),
            **dict.fromkeys(("step", "model"), ("hf",)),
            "version": ("hf", "inspect"),
        }
        for name, formats in of_format.items():
            if getattr(self, name) is not None and self.format not in formats:
                raise ConfigError(f"{name} does not apply to format {self.format}; leave it out")
        if self.step is not None and self.version is not None:
            raise ConfigError("step and version both choose the weights; give one of them")
        if self.where and self.sql:
            raise ConfigError("where and sql both choose the rows; give one of them")


Exported: TypeAlias = "TableReport | TextReport | WeightsReport | LogsReport"
"""What an export wrote."""


def export(root: "Root", options: ExportOptions, target: str | BinaryIO | None, track: "Track") -> Exported:
    """Export as the options say; return what was written.

    target: jsonl: file to write, which must not exist, or an open binary file; None is stdout. hf: folder or URL
    to write. inspect: local folder of the logs. iceberg: local folder of the catalog; None uses ROOT/iceberg.
    """
    match options.format:
        case "delta":
            from ludic.adapters.exports.tables import export_delta

            if target is not None:
                raise SettingsError("out does not apply to format delta; leave it out")
            return export_delta(root, options.table, track)
        case "iceberg":
            from ludic.adapters.exports.tables import export_iceberg

            catalog = None if target is None else local_path(_url(target, "iceberg"), "the catalog")
            return export_iceberg(root, options.table, catalog, track)
        case "hf":
            from ludic.adapters.exports.weights import export_weights

            url = _url(target, "hf")
            return export_weights(root, url, step=options.step, version=options.version, model=options.model)
        case "inspect":
            from ludic.adapters.exports.inspect_logs import export_logs

            return export_logs(root, local_path(_url(target, "inspect"), "the folder of logs"), options.version, track)
    from ludic.adapters.exports.text import export_text

    return export_text(root, target, table=options.table, where=options.where, sql=options.sql)


def _url(target: str | BinaryIO | None, format: str) -> str:
    if not isinstance(target, str):
        raise SettingsError(f"format {format} needs out: a folder or URL that does not exist")
    return target
