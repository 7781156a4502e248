"""`ludic eval ROOT`: sample held-out examples with versions of a run, and print the numbers with error bars."""

import ludic
from ludic.cli.flags.eval import Settings
from ludic.launch.evaluation import open_to_evaluate
from ludic.settings import flat
from ludic.viewer.output import print_json, stdout_console


def main(settings: Settings) -> None:
    run = ludic.Run(open_to_evaluate(settings.root, settings.samples, settings.model, settings.code, settings.suite))
    parts = (settings.samples, settings.measure, settings.code)
    options = {name: value for part in parts for name, value in flat(part).items()}
    own = {name: getattr(settings, name) for name in ("suite", "interval", "engine", "device", "model")}
    found = run.evaluate(**options, **own)
    if settings.json:
        print_json(found.to_dict())
    else:
        found.print_to(stdout_console())
