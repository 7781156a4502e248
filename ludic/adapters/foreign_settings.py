"""Answers to settings of other programs: what each is called in ludic.

Reads docs/coming_from.toml, from the wheel or from the checkout, when it is first asked. ludic.settings finds `answer`
by name once a name is unknown, and docs/coming_from.md has the rows as tables.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ludic.base import read_config

PAGE = "docs/coming_from.md"

_OF_EACH = frozenset({"root", "algorithm"})
"""Parameters that are no settings of a process, and so are not listed among those that are known."""


@dataclass(frozen=True, slots=True)
class Foreign:
    """A setting of another program."""

    names: str
    """Its name; several that are set together, separated by blanks."""
    ours: str
    """Settings of ludic that it becomes, separated by blanks; empty if there are none."""
    note: str = ""
    """What else to know: how to compute the value, or what ludic does instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """Another program, or one of its trainers, with its settings; docs/coming_from.toml says what each field is."""

    name: str
    """Empty for short words, which are of no program alone."""
    config: str
    settings: tuple[Foreign, ...]
    algorithms: tuple[str, ...]
    but: tuple[str, ...]
    in_fit: tuple[Foreign, ...]
    by_algorithm: Mapping[str, tuple[Foreign, ...]]

    def is_for(self, algorithm: str | None) -> bool:
        """Return whether the settings mean something in an algorithm of ludic; None is one that is not known."""
        return algorithm is None or (algorithm not in self.but and algorithm in (self.algorithms or (algorithm,)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Others:
    """Contents of docs/coming_from.toml."""

    programs: tuple[Program, ...]
    short: Program
    other_meaning: frozenset[str]


@cache
def others() -> Others:
    """Return the settings of all programs."""
    tables = read_config(_file())
    return Others(
        programs=tuple(map(_program, tables["program"])),
        short=_program({"name": "", "config": "", "settings": tables["short"]}),
        other_meaning=frozenset(tables["other_meaning"]),
    )


def _file() -> Path:
    """Return the file of the rows: ludic/coming_from.toml in a wheel, docs/coming_from.toml in a checkout."""
    package = Path(__file__).resolve().parents[1]
    packaged = package / "coming_from.toml"
    return packaged if packaged.is_file() else package.parent / "docs" / "coming_from.toml"


def _program(table: Mapping[str, Any]) -> Program:
    lists = {name: tuple(table.get(name, ())) for name in ("algorithms", "but")}
    rows = {name: _rows(table.get(name, ())) for name in ("settings", "in_fit")}
    by_algorithm = {name: _rows(each) for name, each in table.get("by_algorithm", {}).items()}
    return Program(**{**table, **lists, **rows, "by_algorithm": by_algorithm})


def _rows(rows: Iterable[Sequence[str]]) -> tuple[Foreign, ...]:
    return tuple(Foreign(*row) for row in rows)


def answer(
    name: str, known: Collection[str], shown: Callable[[str], str] = str, algorithm: str | None = None
) -> str | None:
    """Return what a setting of another program is here, as the end of a message; None for a name that none has.

    name: as it was given; of a dotted name, parts between the first and the last may be left out. known: settings that
    may be given here. shown: how a setting is written, such as with hyphens as a flag. algorithm: that of the run,
    which decides what a name of TRL's trainers means; None if it is not known.
    """
    found = _find(name, algorithm)
    if found is None:
        return None
    program, full, row = found
    if instead := _row_of(full, program.by_algorithm.get(algorithm or "", ())):
        row = instead
    elif not program.is_for(algorithm):
        return f"{program.name}'s, of {program.config}; leave it out: {algorithm} has no such setting ({PAGE})"
    elif (instead := _row_of(full, program.in_fit)) and instead.ours in known:
        row = instead
    if full in row.ours.split() or (full in others().other_meaning and full in known):
        return None
    which = f"{program.name}'s" if program.name else "a short name"
    which += "" if full == name else f" {full}"
    if not row.ours:
        return f"{which}; ludic has no counterpart: {row.note} ({PAGE})"
    ours = row.ours.split()
    named = " and ".join(each if each == "root" else shown(each) for each in ours)
    elsewhere = "" if {*ours} & {*known, *_OF_EACH} else ", a setting of another command"
    note = f": {row.note}" if row.note else ""
    more = "" if algorithm else _with_other_algorithms(program, full, row, shown)
    return f"{which}; in ludic it is {named}{elsewhere}{note}{more} ({PAGE})"


def _row_of(full: str, rows: Iterable[Foreign]) -> Foreign | None:
    return next((row for row in rows if full in row.names.split()), None)


def _find(name: str, algorithm: str | None) -> tuple[Program, str, Foreign] | None:
    """Return the program, the full name and the row of a name; None if there is none."""
    programs = sorted([*others().programs, others().short], key=lambda program: not program.is_for(algorithm))
    rows = [(program, full, row) for program in programs for row in program.settings for full in row.names.split()]
    parts = name.split(".")
    exact = [each for each in rows if each[1] == name]
    # A name without dots is looked for among names without dots: `n` or `type` alone would mean too much.
    alike = [each for each in rows if len(parts) > 1 and _is_short_for(parts, each[1].split("."))]
    return next(iter(exact or sorted(alike, key=lambda each: each[1].count("."))), None)


def _with_other_algorithms(program: Program, full: str, row: Foreign, shown: Callable[[str], str]) -> str:
    """Say what else a name is, if the algorithm of the run is not known: "; with algorithm sft: epochs"."""
    found: dict[str, list[str]] = {}
    for other in others().programs:
        each = _row_of(full, other.settings)
        if each is None or not other.algorithms or other is program or each.ours in ("", row.ours):
            continue
        own = [name for name in other.algorithms if _row_of(full, other.by_algorithm.get(name, ())) is None]
        found.setdefault(" and ".join(map(shown, each.ours.split())), []).extend(own)
    return "".join(f"; with algorithm {', '.join(algorithms)}: {ours}" for ours, algorithms in found.items())


def _is_short_for(parts: list[str], full: list[str]) -> bool:
    """Return whether parts are those of a full name in their order, the last one included."""
    rest = iter(full)
    return parts[-1] == full[-1] and all(part in rest for part in parts)
