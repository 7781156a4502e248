"""`ludic eval compare A B`: compare stored evaluations in pairs, on the same examples."""

import ludic
from ludic.cli.flags.eval_compare import Settings
from ludic.eval.compare import parse_sides
from ludic.viewer.output import print_json, stdout_console


def main(settings: Settings) -> None:
    baseline, *_ = parse_sides(settings.sides)
    measure = {name: getattr(settings.measure, name) for name in ("measures", "params", "confidence")}
    options = {name: getattr(settings, name) for name in ("env", "evaluation", "difference", "seed")}
    found = ludic.Run(baseline.root).compare(*settings.sides, **measure, **options)
    if settings.json:
        print_json(found.to_dict())
    else:
        found.print_to(stdout_console())
