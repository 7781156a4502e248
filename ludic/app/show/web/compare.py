"""The page of two rollouts side by side: their numbers, and where their texts differ or their tokens in colours."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

from ludic.app.show.transcript import Lookup, with_messages
from ludic.app.show.web.conversation import (
    MESSAGES_A_PAGE,
    Fact,
    ShownMessage,
    best_sibling,
    page_index,
    page_links,
    shown_messages,
)
from ludic.app.show.web.pages import PageAnswer, PageRequest, page, short_id
from ludic.app.show.web.rollout import colour_of, head_of, read_page_of_tokens, tokens_of
from ludic.app.show.web.texts import CHARACTERS_A_PAGE, Difference, Piece, differ
from ludic.app.show.web.tokens import advantage_scale


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedRollout:
    """One of the rollouts."""

    title: str
    href: str
    head: Sequence[Fact]
    best_href: str | None
    """Address with the best other rollout of its group on the other side; None if it is there, or there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownPair:
    """The messages with one index of both rollouts."""

    messages: tuple[ShownMessage | None, ShownMessage | None]
    pieces: tuple[Sequence[Piece], Sequence[Piece]] | None
    """Contents in pieces; None if only one side has the message, or it is of another role there."""
    note: str
    """What is common, and what was not compared."""


@page("compare", "Compare")
def compare(request: PageRequest) -> PageAnswer:
    """Two rollouts side by side."""
    color = colour_of(request, "none")
    with_stats = color in ("advantage", "ratio")
    first_found = request.data.find(request.required("a"), trained=with_stats)
    other_id = request.required("b")
    found = [
        first_found,
        (None if with_stats else _sibling(first_found, other_id))
        or request.data.find(other_id, trained=with_stats, near=first_found),
    ]
    rows = [with_messages(each.rows[0], request.data.token_reader) for each in found]
    num_common = _num_common(*(row["messages"] for row in rows))
    longest = max(len(row["messages"]) for row in rows) - num_common
    first = num_common + page_index(request, "message", longest, MESSAGES_A_PAGE) * MESSAGES_A_PAGE
    values = {
        "sides": [_side(request, found, index) for index in range(2)],
        "same_example": len({(row["env_name"], row["env_example_id"]) for row in rows}) == 1,
        "same": rows[0]["rollout_id"] == rows[1]["rollout_id"],
        "wanted": rows[0]["wanted"] if rows[0]["wanted"] == rows[1]["wanted"] else None,
        "common": shown_messages(request, rows[0], 0, min(num_common, MESSAGES_A_PAGE)),
        "num_common": num_common,
        "pairs": _pairs(request, rows, first) if color == "none" else [],
        "pages": page_links(request, "message", longest, MESSAGES_A_PAGE, "messages"),
        "tokens": [] if color == "none" else _tokens(request, found),
        "colours": [(name, None if name == color else request.here(color=name)) for name in _SHOWN],
        "color": color,
    }
    return PageAnswer("compare.html.j2", values, title="Two rollouts")


_SHOWN = ("none", "logprob", "advantage", "ratio", "mask")


def _sibling(found: Lookup, rollout_id: str) -> Lookup | None:
    """Return a rollout of the same group, which has been read with it; None if it is of another group."""
    rows = [row for row in found.group if row["rollout_id"] == rollout_id]
    return replace(found, rows=rows, records=()) if rows else None


def _num_common(a: Sequence[Any], b: Sequence[Any]) -> int:
    """Return the number of first messages that both have."""
    return next((i for i, (one, other) in enumerate(zip(a, b, strict=False)) if one != other), min(len(a), len(b)))


def _side(request: PageRequest, found: Sequence[Lookup], index: int) -> ComparedRollout:
    own, other = found[index], found[1 - index]
    row, best = own.rows[0], best_sibling(own, own.rows[0])
    names = ("a", "b")
    is_shown = best is None or best["rollout_id"] == other.rows[0]["rollout_id"]
    return ComparedRollout(
        title=f"{short_id(row['rollout_id'])}, version {row['version']}",
        href=request.link("rollout", id=row["rollout_id"]),
        head=head_of(request, own),
        best_href=None if best is None or is_shown else request.here(**{names[1 - index]: best["rollout_id"]}),
    )


def _pairs(request: PageRequest, rows: Sequence[dict[str, Any]], first: int) -> list[ShownPair]:
    shown = zip_longest(shown_messages(request, rows[0], first), shown_messages(request, rows[1], first))
    return [
        ShownPair(messages=messages, **_difference(rows, index, messages))
        for index, messages in enumerate(shown, start=first)
    ]


def _difference(rows: Sequence[dict[str, Any]], index: int, messages: tuple[Any, Any]) -> dict[str, Any]:
    if None in messages or messages[0].role != messages[1].role:
        return {"pieces": None, "note": ""}
    a, b = (row["messages"][index]["content"] for row in rows)
    found = differ(a[:CHARACTERS_A_PAGE], b[:CHARACTERS_A_PAGE])
    more = max(len(a), len(b)) - CHARACTERS_A_PAGE
    return {"pieces": (found.a, found.b), "note": _note(found, more)}


def _note(found: Difference, num_more: int) -> str:
    notes = []
    if found.is_equal:
        notes.append("equal")
    elif found.num_common:
        notes.append(f"both begin with the same {found.num_common:,} characters")
    if found.unit is None:
        notes.append("too long to compare between their common beginning and end")
    elif found.unit == "line":
        notes.append("compared line by line")
    if num_more > 0:
        notes.append(f"only the first {CHARACTERS_A_PAGE:,} characters are compared and shown")
    return "; ".join(notes)


def _tokens(request: PageRequest, found: Sequence[Lookup]) -> list[dict[str, Any]]:
    """Return the tokens of both, with one scale of advantages."""
    color = colour_of(request, "none")
    pages = [(read_page_of_tokens(request, each.rows[0])[1], each.advantage) for each in found]
    scale = advantage_scale(pages)
    return [tokens_of(request, each, color, scale) for each in found]
