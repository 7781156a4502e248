"""Create the jinja environment of ludic's HTML: the report and the pages of `ludic view --web`.

Stored text is hostile: templates escape every value, and control characters are spelt out.
"""

from functools import cache
from typing import Any

import jinja2

from ludic.base import number
from ludic.base.printable import printable


@cache
def templates(folder: str) -> jinja2.Environment:
    """Return the templates of a folder of ludic/app/show. A name that a template misspells raises UndefinedError."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("ludic.app.show", folder),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_shown,
    )
    environment.filters["number"] = number
    return environment


def _shown(value: Any) -> Any:
    """Spell out control characters of a text before it is escaped; show None as a dash."""
    if value is None:
        return "-"
    return printable(value) if type(value) is str else value  # Markup is a subclass, and is already escaped
