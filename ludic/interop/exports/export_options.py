"""Options of an export, by format. Imports nothing slow, so that `ludic export --help` answers at once."""

from dataclasses import dataclass
from typing import BinaryIO, Literal

from ludic.bounds import check_numbers, check_types
from ludic.errors import ConfigError

Format = Literal["hf", "delta", "iceberg", "jsonl", "csv"]

_TEXT = ("jsonl", "csv")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions:
    """Options of an export. Raises ConfigError for an option that does not apply to the format."""

    format: Format
    target: str | BinaryIO | None = None
    """jsonl, csv: file to write, which must not exist, or an open binary file. hf: folder or URL to write. iceberg:
    local folder of the catalog; None uses ROOT/iceberg."""
    table: Literal["rollouts", "evals"] = "rollouts"
    where: str | None = None
    """jsonl, csv: SQL predicate; None exports all rows."""
    sql: str | None = None
    """jsonl, csv: export the result of this query."""
    step: int | None = None
    """hf: export the checkpoint of this step."""
    version: int | None = None
    """hf: export this published version; without step, None exports the newest."""
    model: str | None = None
    """hf: location of the run's first model, which a LoRA adapter needs; None takes the location in run.json."""

    def __post_init__(self) -> None:
        check_types(self)
        check_numbers(self)
        of_format = {
            "target": (*_TEXT, "hf", "iceberg"),
            **dict.fromkeys(("where", "sql"), _TEXT),
            **dict.fromkeys(("step", "version", "model"), ("hf",)),
        }
        for name, formats in of_format.items():
            if getattr(self, name) is not None and self.format not in formats:
                raise ConfigError(f"{name} does not apply to format {self.format}; leave it out")
        if self.format == "hf" and self.target is None:
            raise ConfigError("format hf needs a target: a folder or URL that does not exist")
        if self.step is not None and self.version is not None:
            raise ConfigError("step and version both choose the weights; give one of them")
        if self.where and self.sql:
            raise ConfigError("where and sql both choose the rows; give one of them")
