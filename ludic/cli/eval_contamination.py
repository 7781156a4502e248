"""`ludic eval contamination ROOT`: print how much of evaluated prompts occurs in texts that runs trained on."""

import ludic
from ludic.cli.flags.eval_contamination import Settings
from ludic.viewer.output import print_json, stdout_console


def main(settings: Settings) -> None:
    options = {name: getattr(settings, name) for name in ("also", "env", "evaluation", "query", "params")}
    found = ludic.open(settings.root).contamination(**options)
    if settings.json:
        print_json(found.to_dict())
    else:
        found.print_to(stdout_console())
