"""Answers to settings of other programs: what each is called in ludic. ludic.foreign_tables has the names."""

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from ludic.foreign_tables import PROGRAMS, SHORT, Foreign, Program

PAGE = "docs/coming_from.md"

_WORD = re.compile(r"(?:--|\+{1,2}|~)?([A-Za-z_][\w-]*(?:\.[\w-]+)+)(?:=(.*))?", re.DOTALL)
"""Matches a setting as verl and prime-rl take it: actor_rollout_ref.rollout.n=8, --trainer.optim.lr."""
_OTHER_MEANING = frozenset({"max_steps"})
"""Names that ludic has, too, with another meaning: they can't be told from its own."""
_OF_EACH = frozenset({"root", "algorithm"})
"""Parameters that are no settings of a process, and so are not listed among those that are known."""
_IN_PYTHON = {
    "reward_funcs": (
        "reward",
        "functions with TRL's signature are taken as they are, such as reward=[accuracy, length]",
    ),
    "reward_weights": ("reward", "a dict of functions with weights, such as reward={'right': (right, 1.0)}"),
    "train_dataset": ("dataset", ""),
    "eval_dataset": ("heldout", "a share of the questions, or a file"),
}
"""Arguments of ludic.fit in the place of TRL's."""
_BY_ALGORITHM = {("orpo", "beta"): ("orpo_weight", "")}
"""Settings that a trainer of TRL shares with another one, under one name with another meaning."""


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
    if (algorithm, full) in _BY_ALGORITHM:
        row = Foreign(full, *_BY_ALGORITHM[algorithm or "", full])
    elif not program.is_for(algorithm):
        return f"{program.name}'s, of {program.config}; leave it out: {algorithm} has no such setting ({PAGE})"
    elif full in _IN_PYTHON and _IN_PYTHON[full][0] in known and (full != "eval_dataset" or row.ours):
        row = Foreign(full, *_IN_PYTHON[full])
    if full in row.ours.split() or (full in _OTHER_MEANING and full in known):
        return None
    which = "a short name" if program is SHORT else f"{program.name}'s"
    which += "" if full == name else f" {full}"
    if not row.ours:
        return f"{which}; ludic has no counterpart: {row.note} ({PAGE})"
    ours = row.ours.split()
    named = " and ".join(each if each == "root" else shown(each) for each in ours)
    elsewhere = "" if {*ours} & {*known, *_OF_EACH} else ", a setting of another command"
    note = f": {row.note}" if row.note else ""
    others = "" if algorithm else _with_other_algorithms(program, full, row, shown)
    return f"{which}; in ludic it is {named}{elsewhere}{note}{others} ({PAGE})"


def answer_word(
    word: str, known: Collection[str], shown: Callable[[str], str] = str, algorithm: str | None = None
) -> str | None:
    """Return the same for an argument such as actor.lr=1e-6 or --trainer.optim.lr; None for any other word."""
    match = _WORD.fullmatch(word)
    if match is None or (match[2] is None and not word.startswith("--")):
        return None
    return answer(match[1].replace("-", "_"), known, shown, algorithm)


def dotted_names(name: str, value: Any) -> Iterator[str]:
    """Yield the settings in a table of a file by dotted names, such as trainer.optim.lr; of lists of tables, too."""
    tables = value if isinstance(value, list) else [value]
    if not all(isinstance(each, Mapping) for each in tables):
        yield name
        return
    for table in tables:
        for key, each in table.items():
            yield from dotted_names(f"{name}.{key}", each)


def _find(name: str, algorithm: str | None) -> tuple[Program, str, Foreign] | None:
    """Return the program, the full name and the row of a name; None if there is none."""
    programs = sorted([*PROGRAMS, SHORT], key=lambda program: not program.is_for(algorithm))
    rows = [(program, full, row) for program in programs for row in program.settings for full in row.names.split()]
    parts = name.split(".")
    exact = [each for each in rows if each[1] == name]
    # A name without dots is looked for among names without dots: `n` or `type` alone would mean too much.
    alike = [each for each in rows if len(parts) > 1 and _is_short_for(parts, each[1].split("."))]
    return next(iter(exact or sorted(alike, key=lambda each: each[1].count("."))), None)


def _with_other_algorithms(program: Program, full: str, row: Foreign, shown: Callable[[str], str]) -> str:
    """Say what else a name is, if the algorithm of the run is not known: "; with algorithm sft: epochs"."""
    found: dict[str, list[str]] = {}
    for other in PROGRAMS:
        for each in other.settings if other.algorithms and other is not program else ():
            if full in each.names.split() and each.ours not in ("", row.ours):
                own = [algorithm for algorithm in other.algorithms if (algorithm, full) not in _BY_ALGORITHM]
                found.setdefault(" and ".join(map(shown, each.ours.split())), []).extend(own)
    return "".join(f"; with algorithm {', '.join(algorithms)}: {ours}" for ours, algorithms in found.items())


def _is_short_for(parts: list[str], full: list[str]) -> bool:
    """Return whether parts are those of a full name in their order, the last one included."""
    rest = iter(full)
    return parts[-1] == full[-1] and all(part in rest for part in parts)
