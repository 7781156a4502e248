"""`ludic what-if ROOT`: plan stored batches by other rules, print the differences, and optionally train a branch."""

import ludic
from ludic.cli.flags.what_if import Settings
from ludic.viewer.output import print_json, progress_bar, stdout_console


def main(settings: Settings) -> None:
    names = ("advantage", "filters", "algorithm", "sql_params", "steps", "train", "from_step", "num_steps")
    with progress_bar() as track:
        found = ludic.open(settings.root).what_if(**{name: getattr(settings, name) for name in names}, track=track)
    if settings.json:
        print_json(found.to_dict())
    else:
        found.print_to(stdout_console())
