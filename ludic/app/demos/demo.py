"""`ludic demo`. Imports nothing slow, since `ludic --help` reads the docstring below."""

from ludic.app.demos import NUM_WORKERS
from ludic.app.operations.operation import operation
from ludic.settings import PositiveCount


@operation(group="First", place=1, on_sigterm="interrupt", trains=True)
def demo(*, agents: bool = False, root: str | None = None, num_steps: PositiveCount | None = None) -> None:
    """Teach a tiny model on this machine, in a minute; with --agents, to call a tool.

    Args:
        agents: Teach a model to call a tool instead: demonstrations, a warm start, then RL. Takes some minutes.
        root: Folder or URL of the run; a stopped demo is resumed. None is runs/demo, or runs/demo-agents with --agents.
        num_steps: Number of gradient steps of RL. None is 60, or 50 with --agents.
    """
    if agents:
        from ludic.app.demos.calculator import teach_a_tool

        teach_a_tool(root or "runs/demo-agents", num_steps or 50)
    else:
        from ludic.app.launch.config import LaunchConfig
        from ludic.app.launch.fork_server import started_early
        from ludic.engines import EngineConfig

        with started_early(LaunchConfig(), EngineConfig(), NUM_WORKERS):
            from ludic.app.demos.words import teach_words  # imports torch, and meanwhile so does the server

            teach_words(root or "runs/demo", num_steps or 60)
