"""Texts of rollouts for the page: each by its name, in slices that a browser can hold; and where two texts differ."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any, Literal

CHARACTERS_A_PAGE = 20_000
"""Maximum characters of one text on one page."""
_BEGINNING = 6_000
"""Characters of a text that a page of several texts shows; another page has the rest."""
_MOST_COMPARISONS = 50_000_000
"""Bound on the steps of a comparison, at worst 0.2 s."""
_MOST_CHARACTERS = 100_000
"""Characters of two texts that are compared between their beginnings and their ends."""
_LONGEST_WORD = 50
_UNITS = {"word": re.compile(r"\w+\s*|[^\w\s]\s*|\s+"), "line": re.compile(r"[^\n]+\n?|\n")}
"""Units of a comparison, the finest first; coarser ones are for texts that are too long for it."""


@dataclass(frozen=True, slots=True)
class Slice:
    """Some characters of a text."""

    text: str
    start: int
    length: int
    """Characters of the whole text."""

    @property
    def end(self) -> int:
        return self.start + len(self.text)

    @property
    def num_more(self) -> int:
        """Characters after it."""
        return self.length - self.end

    @property
    def is_whole(self) -> bool:
        return len(self.text) == self.length


def beginning(text: str, most: int = _BEGINNING) -> Slice:
    """Return the beginning of a text."""
    return Slice(text[:most], 0, len(text))


def page_of(text: str, start: int, most: int = CHARACTERS_A_PAGE) -> Slice:
    """Return the page of a text that has the character `start`."""
    first = min(max(0, start), max(0, len(text) - 1)) // most * most
    return Slice(text[first : first + most], first, len(text))


def texts_of(row: Mapping[str, Any]) -> dict[str, str]:
    """Return all texts of a rollout by their names, such as message-0 or result-2-1 (message, call), which links have.

    row: of the rollouts table, with texts in its steps.
    """
    return {name: text for name, text in _named(row) if text}


def _named(row: Mapping[str, Any]) -> Iterator[tuple[str, str | None]]:
    yield "columns", row.get("example_columns")
    yield from (("wanted", row["wanted"]), ("error", row["error"]), ("traceback", row["traceback"]))
    for index, message in enumerate(row["messages"]):
        yield f"message-{index}", message["content"]
        yield f"reasoning-{index}", message.get("reasoning")
        yield from _of_calls(str(index), message["tool_calls"])
    for index, step in enumerate(row["agent_steps"]):
        yield f"action-{index}", step["action"]
        yield f"feedback-{index}", step["parse_feedback"]
        yield from _of_calls(f"step-{index}", step["tool_calls"])
    for index, step in enumerate(row["environment_steps"]):
        yield f"observation-{index}", step["next_observation"]


def _of_calls(place: str, calls: Sequence[Mapping[str, Any]] | None) -> Iterator[tuple[str, str | None]]:
    for number, call in enumerate(calls or ()):
        for name in ("arguments", "result", "error"):
            yield f"{name}-{place}-{number}", call[name]


# --- Differences -----------------------------------------------------------------------------------------------------

PieceKind = Literal["begin", "same", "own", "end"]


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a text beside another text: their common beginning or end, a common part, or one of its own."""

    kind: PieceKind
    text: str


@dataclass(frozen=True, slots=True)
class Difference:
    """Two texts in pieces."""

    a: tuple[Piece, ...]
    b: tuple[Piece, ...]
    num_common: int
    """Characters of the common beginning."""
    unit: str | None = "word"
    """Unit by which the middle was compared, word or line; None if only the beginnings and the ends were, since the
    texts are too long for more."""

    @property
    def is_equal(self) -> bool:
        return all(piece.kind == "begin" for piece in (*self.a, *self.b))


def differ(a: str, b: str) -> Difference:
    """Return where two texts differ: after their common beginning and before their common end, word by word."""
    start = _at_word(a, b, _num_common(a, b))
    reversed_a, reversed_b = a[start:][::-1], b[start:][::-1]
    length = _at_word(reversed_a, reversed_b, _num_common(reversed_a, reversed_b))
    own_a, own_b = a[start : len(a) - length], b[start : len(b) - length]
    units = ((name, _in_units(own_a, own_b, unit)) for name, unit in _UNITS.items())
    whole = ([Piece("own", own_a)], [Piece("own", own_b)])
    unit, (pieces_a, pieces_b) = next(((name, found) for name, found in units if found is not None), (None, whole))
    begin, end = Piece("begin", a[:start]), Piece("end", a[len(a) - length :])
    of_a, of_b = (tuple(piece for piece in (begin, *own, end) if piece.text) for own in (pieces_a, pieces_b))
    return Difference(of_a, of_b, start, unit)


def _num_common(a: str, b: str) -> int:
    """Return the number of characters with which both begin."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if a[:middle] == b[:middle] else (low, middle - 1)
    return low


def _at_word(a: str, b: str, length: int) -> int:
    """Shorten a common beginning so that it ends between two words; one within a very long word stays."""
    if not any(map(str.isalnum, a[length : length + 1] + b[length : length + 1])):
        return length
    word = next((back for back in range(min(length, _LONGEST_WORD)) if not a[length - back - 1].isalnum()), None)
    return 0 if word is None and length <= _LONGEST_WORD else length - (word or 0)


def _in_units(a: str, b: str, unit: re.Pattern[str]) -> tuple[list[Piece], list[Piece]] | None:
    """Return two texts in common and own parts; None if that would take too long."""
    if len(a) + len(b) > _MOST_CHARACTERS:
        return None
    units_a, units_b = unit.findall(a), unit.findall(b)
    counts = Counter(units_b)
    # SequenceMatcher looks at each pair of equal units once for each match that it finds.
    if sum(counts[each] for each in units_a) * min(len(units_a), len(units_b)) > _MOST_COMPARISONS:
        return None
    pieces: tuple[list[Piece], list[Piece]] = ([], [])
    for tag, first_a, end_a, first_b, end_b in SequenceMatcher(None, units_a, units_b, False).get_opcodes():
        kind: PieceKind = "same" if tag == "equal" else "own"
        pieces[0].append(Piece(kind, "".join(units_a[first_a:end_a])))
        pieces[1].append(Piece(kind, "".join(units_b[first_b:end_b])))
    return pieces
