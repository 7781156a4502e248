"""Flags of `ludic train`."""

from dataclasses import dataclass, field

from ludic.cli.settings import Algorithm, RootUrl
from ludic.code.consent import CodeSettings
from ludic.settings import CountOr0, Processes, StopWithin, check
from ludic.training.config import TrainConfig

FIRST = (
    "algorithm",
    "num_steps",
    "learning_rate",
    "advantage",
    "filters",
    "objective",
    "max_tokens_per_micro_batch",
    "lora_rank",
    "dtype",
    "device",
    "ranks",
    "checkpoint_every",
    "resume",
)
"""Settings that the first page of --help shows."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    root: RootUrl
    """Folder or URL of the run. Training continues from the last checkpoint, if there is one. With --sources or
    --replay-batches, the run is created if it does not exist."""
    algorithm: Algorithm = None
    """Use the settings of this algorithm (docs/algorithms.md); settings given explicitly override them."""
    train: TrainConfig = field(default_factory=TrainConfig)
    code: CodeSettings = field(default_factory=CodeSettings)
    model: str | None = None
    """First weights of a run that is created here; None takes the model of its first source. For an existing run: the
    location of its first model, if it is not where run.json says."""
    resume: bool = False
    """Fail if there is no complete checkpoint to resume from. Without this flag, a run with a checkpoint is resumed,
    and a run without one starts from its first weights."""
    ranks: Processes = 1
    """Number of processes that train together, started here under torchrun."""
    stop_within_s: StopWithin | None = None
    """Seconds that a rank may take to stop cleanly after SIGTERM, such as to finish a step and write a checkpoint; then
    it is killed. None takes the setting of the `ludic run` that started this process, else its default."""
    take_over: bool = False
    """Fence the trainer that owns the run, even if it is alive; without this flag, a live owner refuses the start."""
    replaces: CountOr0 | None = None
    """Attempt that is known to have ended, so that its lease is not watched; set by `ludic run`."""

    def __post_init__(self) -> None:
        check(self)
