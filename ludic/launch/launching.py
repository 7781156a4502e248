"""Start the processes of a run with the launcher that the settings name."""

from ludic.code.consent import CodeSettings
from ludic.engines.config import EngineConfig
from ludic.launch.config import LaunchConfig
from ludic.store import Root
from ludic.training.config import TrainConfig


def launch(
    root: Root,
    config: TrainConfig,
    processes: LaunchConfig,
    engine: EngineConfig,
    *,
    model: str | None = None,
    code: CodeSettings | None = None,
) -> int:
    """Run all processes until the trainer is done, on this machine or a Ray cluster; returns the last step trained.

    Raises as ludic.launch.local.launch and ludic.launch.ray.launch do.
    """
    if processes.launcher == "ray":
        from ludic.launch.ray import launch as launch_on_ray

        return launch_on_ray(root, config, processes, engine, model=model, code=code)
    from ludic.launch.local import launch as launch_here

    return launch_here(root, config, processes, engine, model=model)
