"""Start the processes of a run with the launcher that the settings name."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol

from ludic.by_name import find_by_name
from ludic.code.consent import CodeSettings
from ludic.engines.config import EngineConfig
from ludic.launch.config import LaunchConfig
from ludic.store import Root
from ludic.training.config import TrainConfig


class Launcher(Protocol):
    """Runs all processes of a run until the trainer is done."""

    def __call__(
        self,
        root: Root,
        config: TrainConfig,
        processes: LaunchConfig,
        engine: EngineConfig,
        *,
        model: str | None = None,
        code: CodeSettings | None = None,
    ) -> int:
        """Return the last step trained.

        model: location of the run's first model, if it is not where run.json says. code: consent to the code in the
        root. Raises ChildError if a process dies repeatedly, ConfigError, OwnedError, KeyboardInterrupt.
        """
        ...


LAUNCHERS: Mapping[str, str] = MappingProxyType(
    {
        "ray": "ludic.adapters.ray.launcher:launch",
    }
)
"""The Launcher of each value of LaunchConfig.launcher but `local`, which is ludic's own."""


def launch(
    root: Root,
    config: TrainConfig,
    processes: LaunchConfig,
    engine: EngineConfig,
    *,
    model: str | None = None,
    code: CodeSettings | None = None,
) -> int:
    """Run all processes, on this machine or with the launcher that `processes` name; see Launcher."""
    if processes.launcher in LAUNCHERS:
        launcher: Launcher = find_by_name(LAUNCHERS[processes.launcher])
        return launcher(root, config, processes, engine, model=model, code=code)
    from ludic.launch.local import launch as launch_here

    return launch_here(root, config, processes, engine, model=model)
