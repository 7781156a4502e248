"""Flags of `ludic export`."""

from dataclasses import dataclass

from ludic.adapters.exports.exporting import ExportOptions
from ludic.cli.settings import RootUrl
from ludic.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Settings:
    root: RootUrl
    """Folder or URL of the run."""
    options: ExportOptions
    catalog: str | None = None
    """Iceberg: local folder of the catalog; None uses ROOT/iceberg."""
    out: str | None = None
    """JSONL and CSV: file to write, which must not exist; None writes to stdout. hf: folder or URL to write.
    inspect: local folder of the logs."""
    json: bool = False
    """Delta, Iceberg, hf and inspect: print the report as JSON."""

    def __post_init__(self) -> None:
        format = self.options.format
        of_other_formats = {
            "catalog": self.catalog is not None and format != "iceberg",
            "out": self.out is not None and format in ("delta", "iceberg"),
            "json": self.json and self.is_text,
        }
        for name, is_wrong in of_other_formats.items():
            if is_wrong:
                raise ConfigError(f"--{name} does not apply to --format {format}; leave it out")
        if format == "hf" and self.out is None:
            raise ConfigError("--format hf needs --out: a folder or URL that does not exist")
        if format == "inspect" and self.out is None:
            raise ConfigError("--format inspect needs --out: a local folder for the logs")

    @property
    def is_text(self) -> bool:
        """Return whether the format is text, which is printed to stdout without --out."""
        return self.options.format in ("jsonl", "csv")
