"""Names below a root as others may have written them: numbers in them, and whether they stay below the root."""

import re

from ludic.errors import SchemaError

NUMBER = r"(0|[1-9][0-9]{0,17})"
"""A number in a file's name, as ludic writes it; it fits into int64."""

_NUMBER = re.compile(NUMBER)


def parse_number(text: str) -> int | None:
    """None for what ludic would write otherwise: a sign, leading zeros, digits of other scripts, over 18 digits."""
    return int(text) if _NUMBER.fullmatch(text) else None


def parse_attempt_id(text: str) -> int | None:
    """As parse_number, for what fits into int32, as attempts in tables must."""
    number = parse_number(text)
    return number if number is not None and number < 2**31 else None


def parse_numbers(texts: list[str]) -> list[int]:
    """The numbers among the texts, in order."""
    return sorted(number for number in map(parse_number, texts) if number is not None)


def check_inside(name: str, url: str) -> str:
    """Raises SchemaError for a name that leads out of the root: a damaged or a hostile file named it."""
    if ".." in name.split("/") or "\0" in name:
        raise SchemaError(f"{url}: a file of the run names {name!r}, which leads out of the run; it is not touched")
    return name
