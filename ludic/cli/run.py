"""`ludic run ROOT`: run workers and a trainer on this machine or a Ray cluster, and restart them when they die.

The same command resumes a run, with the settings that are stored in the root.
"""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import ludic
from ludic.cli.flags.run import Settings
from ludic.errors import MissingRootError
from ludic.launch.launching import launch
from ludic.launch.local import check_launch
from ludic.launch.process import interrupt_on_sigterm
from ludic.launch.roots import create_run
from ludic.launch.train import outcome
from ludic.store import Root
from ludic.training import inherited_settings as training_settings
from ludic.viewer.output import stdout_console


def earlier_settings(root_url: str, given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the settings of the run and of its newest trainer, without offline settings; {} if there is no run."""
    try:
        run = Root.open(root_url).run
    except MissingRootError:
        return {}
    return {**asdict(run), **training_settings.earlier_settings(root_url, given, online=True)}


def main(settings: Settings) -> None:
    interrupt_on_sigterm()
    check_launch(settings.train, settings.launch, settings.engine, settings.run.num_workers)
    root = create_run(settings.root, settings.run, settings.train, settings.code)
    model, code = settings.run.model, settings.code
    step = launch(root, settings.train, settings.launch, settings.engine, model=model, code=code)
    if settings.launch.eval_every is not None:
        ludic.Run(root).evaluation(measures=["mean_reward"]).print_to(stdout_console())
    print(f"{outcome(root.url, step, settings.train.num_steps)}; `ludic stats {root.url}` shows a summary")
