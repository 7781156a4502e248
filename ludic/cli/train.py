"""`ludic train ROOT`: train on a run's rollouts, on one rank or several."""

import os

from ludic.cli.flags.train import Settings
from ludic.launch.process import stop_on_signals, stop_variables
from ludic.launch.train import become_ranks, open_to_train, outcome, train_here
from ludic.training.inherited_settings import earlier_settings as earlier_settings


def main(settings: Settings) -> None:
    if settings.stop_within_s is not None:
        os.environ.update(stop_variables(settings.stop_within_s))
    root = open_to_train(settings.root, settings.train, model=settings.model, resume=settings.resume)
    options = {name: getattr(settings, name) for name in ("code", "model", "resume", "take_over", "replaces")}
    if settings.ranks > 1 and "WORLD_SIZE" not in os.environ:
        become_ranks(root, settings.train, settings.ranks, **options)
    step = train_here(root, settings.train, stop_on_signals(), **options)
    if os.environ.get("RANK", "0") == "0":
        print(outcome(root.url, step, None if settings.train.batch.is_stored else settings.train.num_steps))
