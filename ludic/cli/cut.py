"""`ludic cut ROOT --step S OUT`: write the smallest folder that replays a step bit for bit."""

import ludic
from ludic.cli.flags.cut import Settings
from ludic.viewer.output import print_json, stdout_console


def main(settings: Settings) -> None:
    made = ludic.open(settings.root).cut(settings.step, settings.out)
    if settings.json:
        print_json(made.to_dict())
    else:
        made.print_to(stdout_console())
