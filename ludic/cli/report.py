"""`ludic report ROOT`: write a run, its evaluations and a comparison as one HTML file."""

from dataclasses import fields

import ludic
from ludic.cli.flags.report import Settings
from ludic.viewer.output import printable, size, stdout_console


def main(settings: Settings) -> None:
    measure = {field.name: getattr(settings.measure, field.name) for field in fields(settings.measure)}
    options = {name: getattr(settings, name) for name in ("versions", "compare", "overwrite")}
    report = ludic.open(settings.root).report(settings.output, **options, **measure)
    text = f"{report.location}: {size(len(report.html.encode()))}, one file without scripts or requests"
    stdout_console().print(printable(text), soft_wrap=True)
