"""Create the jinja environment of ludic's HTML: the report and the pages of `ludic view --web`.

Stored text is hostile: templates escape every value, and control characters are spelt out.
"""

import json
import re
from functools import cache
from html import escape
from typing import Any

import jinja2
from markupsafe import Markup

from ludic.base import number, to_plain
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
    environment.filters["advice"] = _advice
    environment.filters["json"] = lambda value: json.dumps(spelt(value), allow_nan=False)
    return environment


def spelt(value: Any) -> Any:
    """Return plain values for a script, with control characters of their texts spelt out, and NaN as None."""
    plain = to_plain(value)
    if isinstance(plain, str):
        return printable(plain)
    if isinstance(plain, dict):
        return {printable(key): spelt(item) for key, item in plain.items()}
    return list(map(spelt, plain)) if isinstance(plain, list) else plain


def _shown(value: Any) -> Any:
    """Spell out control characters of a text before it is escaped; show None as a dash."""
    if value is None:
        return "-"
    return printable(value) if type(value) is str else value  # Markup is a subclass, and is already escaped


def _advice(text: str) -> Markup:
    """Return an escaped text in which no line breaks after the hyphens of a flag."""
    return Markup(re.sub(r"--[a-z][a-z-]*", r'<span class="flag">\g<0></span>', escape(printable(text))))
