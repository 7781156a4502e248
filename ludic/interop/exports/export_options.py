"""Options of an export, by format. Imports nothing slow, so that `ludic export --help` answers at once."""

from dataclasses import dataclass
from typing import Literal

from ludic.errors import ConfigError
from ludic.settings import Index, check

Format = Literal["hf", "delta", "iceberg", "jsonl", "csv", "inspect"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions:
    """Format of an export, and its options."""

    format: Format
    """Output format. delta and iceberg register the existing files without copying them; run the command again to add
    new files. hf writes a folder of weights, configuration and tokenizer, for transformers and vLLM. inspect writes
    evaluations as logs of inspect_ai."""
    table: Literal["rollouts", "evals"] = "rollouts"
    """Table to export."""
    where: str | None = None
    """JSONL and CSV: SQL predicate, such as "policy_version > 3"; None exports all rows."""
    sql: str | None = None
    """JSONL and CSV: export the result of this query, which may use the same views as `ludic sql`."""
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
            **dict.fromkeys(("where", "sql"), ("jsonl", "csv")),
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
