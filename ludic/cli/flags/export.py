"""Flags of `ludic export`."""

from dataclasses import dataclass
from typing import Literal

from ludic.bounds import check_numbers
from ludic.cli.settings import RootUrl
from ludic.errors import ConfigError
from ludic.interop.exports.export_options import ExportOptions, Format


@dataclass(frozen=True, kw_only=True)
class Settings:
    root: RootUrl
    """Folder or URL of the run."""
    format: Format
    """Output format. delta and iceberg register the existing files without copying them; run the command again to add
    new files. hf writes a folder of weights, configuration and tokenizer, for transformers and vLLM."""
    table: Literal["rollouts", "evals"] = "rollouts"
    """Table to export."""
    catalog: str | None = None
    """Iceberg: local folder of the catalog; None uses ROOT/iceberg."""
    where: str | None = None
    """JSONL and CSV: SQL predicate, such as "policy_version > 3"; None exports all rows."""
    sql: str | None = None
    """JSONL and CSV: export the result of this query, which may use the same views as `ludic sql`."""
    out: str | None = None
    """JSONL and CSV: file to write, which must not exist; None writes to stdout. hf: folder or URL to write."""
    step: int | None = None
    """hf: export the checkpoint of this step."""
    version: int | None = None
    """hf: export this published version; the default, without --step, is the newest version."""
    model: str | None = None
    """hf: location of the run's first model, which a LoRA adapter needs; None takes the location in run.json."""
    json: bool = False
    """Delta, Iceberg and hf: print the report as JSON."""

    def __post_init__(self) -> None:
        check_numbers(self)
        if self.catalog is not None and self.format != "iceberg":
            raise ConfigError(f"--catalog does not apply to --format {self.format}; leave it out")
        if self.out is not None and self.format in ("delta", "iceberg"):
            raise ConfigError(f"--out does not apply to --format {self.format}; leave it out")
        if self.json and self.is_text:
            raise ConfigError(f"--json does not apply to --format {self.format}; leave it out")
        if self.format == "hf" and self.out is None:
            raise ConfigError("--format hf needs --out: a folder or URL that does not exist")
        _ = self.options  # raises ConfigError for options that do not apply to the format

    @property
    def is_text(self) -> bool:
        """Return whether the format is text, which is printed to stdout without --out."""
        return self.format in ("jsonl", "csv")

    @property
    def options(self) -> ExportOptions:
        """Return the options for Run.export."""
        names = ("format", "table", "where", "sql", "step", "version", "model")
        return ExportOptions(target=self.out or self.catalog, **{name: getattr(self, name) for name in names})
