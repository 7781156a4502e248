"""`ludic bisect ROOT "predicate"`: find the first step at which a SQL predicate is true."""

import ludic
from ludic.cli.flags.bisect import Settings
from ludic.viewer.output import print_json, stdout_console


def main(settings: Settings) -> None:
    found = ludic.open(settings.root).bisect(settings.predicate, settings.table)
    if settings.json:
        print_json(found.to_dict())
    else:
        found.print_to(stdout_console())
