"""`ludic show ROOT ID`: print one rollout or one group for people to read."""

import ludic
from ludic.cli.flags.show import Settings
from ludic.viewer.output import print_json, stdout_console
from ludic.viewer.transcript import Look


def main(settings: Settings) -> None:
    found = ludic.open(settings.root).show(settings.id)
    if settings.json:
        print_json(found.to_dict())
    else:
        found.print_to(stdout_console(), Look(color=settings.color, tokens=settings.tokens, full=settings.full))
