"""Flags of `ludic export`."""

from dataclasses import dataclass
from typing import Literal

from ludic.bounds import check_numbers
from ludic.cli.settings import RootUrl
from ludic.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Settings:
    root: RootUrl
    """Folder or URL of the run."""
    format: Literal["hf", "delta", "iceberg", "jsonl", "csv"]
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
    """hf: location of the run's first model, which a LoRA adapter needs; None means where run.json says."""
    json: bool = False
    """Delta, Iceberg and hf: print the report as JSON."""

    def __post_init__(self) -> None:
        check_numbers(self)
        is_text = self.format in ("jsonl", "csv")
        wanted = {"where": is_text, "sql": is_text, "out": is_text or self.format == "hf", "json": not is_text}
        wanted |= {"catalog": self.format == "iceberg", "step": self.format == "hf", "version": self.format == "hf"}
        wanted |= {"model": self.format == "hf"}
        for name, is_wanted in wanted.items():
            value = getattr(self, name)
            if not is_wanted and value is not None and value is not False:
                raise ConfigError(f"--{name} says nothing to --format {self.format}; leave it out")
        if self.format == "hf" and self.out is None:
            raise ConfigError("--format hf wants --out, a folder or a URL that is not there yet")
        if self.step is not None and self.version is not None:
            raise ConfigError("--step and --version both choose the weights; give one of them")
        if self.where and self.sql:
            raise ConfigError("--where and --sql both choose the rows; give one of them")
