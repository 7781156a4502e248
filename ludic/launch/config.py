"""Settings of the processes that one machine runs. Imports nothing slow, so that `--help` answers at once."""

from dataclasses import dataclass

from ludic.bounds import check_numbers, check_types
from ludic.defaults import ENGINE, ENV_TIMEOUT_S
from ludic.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchConfig:
    """Processes that `ludic run` starts on this machine."""

    local_workers: int | None = None
    """Number of workers to start on this machine, 0 for none; None starts num_workers, all of the schedule."""
    ranks: int = 1
    """Number of processes that train together."""
    engine: str = ENGINE
    """Inference engine of the workers: a built-in name (transformers), or path/to/file.py:ClassName of your own."""
    trainer_gpus: str | None = None
    """GPUs of the trainer, such as 0,1, one for each rank; None takes the first ones."""
    worker_gpus: str | None = None
    """GPUs that the workers divide among them, such as 2,3; None takes those that the trainer does not use."""
    env_timeout_s: float | None = ENV_TIMEOUT_S
    """Seconds that one environment call may take in a worker started here; None means no limit."""
    take_over: bool = False
    """Fence the trainer that owns the run, even if it is alive; without this flag, a live owner refuses the start."""

    def __post_init__(self) -> None:
        check_types(self)
        check_numbers(self)

    def workers_of(self, num_workers: int) -> int:
        """Return the number of workers to start. num_workers: workers of the run's schedule. Raises ConfigError."""
        if self.local_workers is None:
            return num_workers
        if not 0 <= self.local_workers <= num_workers:
            raise ConfigError(f"local_workers is {self.local_workers}, wanted 0 to num_workers ({num_workers})")
        return self.local_workers
