"""Messages, facts and members of a group as the pages show them; long texts and tables with links to the rest."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ludic.app.show.transcript import Lookup, cause_of, fate_of
from ludic.app.show.web.pages import PageRequest, PageTable
from ludic.app.show.web.texts import beginning
from ludic.records import Row

MESSAGES_A_PAGE = 50
_CALLS_A_MESSAGE = 20
"""Tool calls of a message that a page shows; a page of its own has all of them."""
_MOST_COMPONENTS = 6
"""Components of rewards that a table shows as columns; its CSV has all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownText:
    """The beginning of a text, with a link to the rest."""

    text: str
    num_more: int
    href: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownCall:
    """A tool call of a message with its result or error."""

    name: str
    arguments: ShownText
    result: ShownText | None
    error: ShownText | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownMessage:
    """A message of a conversation."""

    role: str
    name: str | None
    content: ShownText
    reasoning: ShownText | None
    calls: Sequence[ShownCall]
    num_more_calls: int
    calls_href: str
    """Address of all calls of the message."""

    @property
    def is_empty(self) -> bool:
        return not (self.content.text.strip() or self.reasoning or self.calls)


@dataclass(frozen=True, slots=True)
class Fact:
    """A line about a thing."""

    title: str
    text: str
    href: str | None = None


def shown_text(request: PageRequest, row: Row, name: str, text: str | None) -> ShownText | None:
    """Return a text of a row as a page shows it, by its name (ludic.app.show.web.texts); None if it is empty."""
    if not text:
        return None
    part = beginning(text)
    href = request.link("text", id=row["rollout_id"], name=name, start=part.end)
    return ShownText(text=part.text, num_more=part.num_more, href=href)


def shown_messages(request: PageRequest, row: Row, first: int = 0, most: int = MESSAGES_A_PAGE) -> list[ShownMessage]:
    """Return `most` messages of a row from the message `first` on."""
    return [
        _shown_message(request, row, index, message)
        for index, message in enumerate(row["messages"][first : first + most], start=first)
    ]


def _shown_message(request: PageRequest, row: Row, index: int, message: Row) -> ShownMessage:
    calls = message["tool_calls"] or ()
    empty = ShownText(text="", num_more=0, href="")
    return ShownMessage(
        role=message["role"],
        name=message["name"],
        content=shown_text(request, row, f"message-{index}", message["content"]) or empty,
        reasoning=shown_text(request, row, f"reasoning-{index}", message.get("reasoning")),
        calls=[_shown_call(request, row, f"{index}-{n}", call) for n, call in enumerate(calls[:_CALLS_A_MESSAGE])],
        num_more_calls=max(0, len(calls) - _CALLS_A_MESSAGE),
        calls_href=request.link("calls", id=row["rollout_id"], message=index),
    )


def _shown_call(request: PageRequest, row: Row, place: str, call: Row) -> ShownCall:
    texts = {name: shown_text(request, row, f"{name}-{place}", call[name]) for name in ("arguments", "result", "error")}
    arguments = texts.pop("arguments") or ShownText(text="", num_more=0, href="")
    return ShownCall(name=call["name"], arguments=arguments, **texts)


# --- Pages of what is long -------------------------------------------------------------------------------------------

ROWS_A_PAGE = 100
"""Rows of a table of one thing on one page; its CSV has all."""


@dataclass(frozen=True, slots=True)
class PagedRows:
    """Some rows of a table, and links to the others."""

    table: PageTable
    pages: Sequence[tuple[str, str | None]]


def paged(request: PageRequest, table: PageTable, parameter: str, size: int = ROWS_A_PAGE) -> PagedRows:
    """Return the rows of a table from the row on that a parameter of the address names."""
    current = page_index(request, parameter, len(table.rows), size)
    some = replace(table, rows=table.rows[current * size : (current + 1) * size])
    return PagedRows(some, page_links(request, parameter, len(table.rows), size, table.name))


def page_index(request: PageRequest, parameter: str, count: int, size: int) -> int:
    """Return the page that a parameter of the address names by an index of an item, within a list's pages."""
    return min(request.whole_number(parameter, 0), max(0, count - 1)) // size


def page_links(
    request: PageRequest, parameter: str, count: int, size: int, anchor: str = ""
) -> list[tuple[str, str | None]]:
    """Return a text and an address for the first, the last and the near pages of a list, None for the current one.

    The list is empty if all is on one page.
    """
    if count <= size:
        return []
    current, last = page_index(request, parameter, count, size), (count - 1) // size
    near = sorted({0, last, *range(max(0, current - 3), min(last, current + 3) + 1)})
    end = f"#{anchor}" if anchor else ""
    return [
        (
            f"{index * size + 1:,} to {min(count, (index + 1) * size):,}",
            None if index == current else request.here(**{parameter: index * size or None}) + end,
        )
        for index in near
    ]


# --- Groups ----------------------------------------------------------------------------------------------------------


def uses_by_rollout(found: Lookup) -> dict[str, dict[str, Any]]:
    """Return the first use in training of each row of a group, by rollout_id."""
    return {use["rollout_id"]: use for use in reversed(found.group_uses)}


def members(request: PageRequest, found: Lookup, *, but: str | None = None, name: str = "rollouts") -> PageTable:
    """Return the rollouts of a group as a table. but: rollout_id of a row that is left out."""
    uses = uses_by_rollout(found)
    rows = [_member(row, uses.get(row["rollout_id"])) for row in found.group if row["rollout_id"] != but]
    components = list(dict.fromkeys(name for row in found.group for name in row["reward_components"]))
    shown = {
        "group_index": True,
        "agent_id": len({row["agent_id"] for row in found.group}) > 1,
        "segment_index": any(row["segment_index"] for row in found.group),
        "rollout_id": True,
        "episode_reward": True,
        "correct": any(row["correct"] is not None for row in found.group),
        **{f"component {each}": True for each in components[:_MOST_COMPONENTS]},
        "advantage": bool(uses),
        "response_length": True,
        "num_turns": any(row["num_turns"] > 1 for row in found.group),
        "ended_by": True,
        "training": True,
        "compare": but is not None,
    }
    links: dict[str, Callable[[Row], str | None]] = {
        "rollout_id": lambda row: request.link("rollout", id=row["rollout_id"]),
        "compare": lambda row: request.link("compare", a=but, b=row["rollout_id"]),
    }
    titles = {"group_index": "index", **{f"component {each}": each for each in components}}
    columns = [column for column, is_shown in shown.items() if is_shown]
    return PageTable(name=name, rows=rows, columns=columns, titles=titles, links=links)


def _member(row: Row, use: dict[str, Any] | None) -> dict[str, Any]:
    names = ("group_index", "agent_id", "segment_index", "rollout_id", "episode_id", "episode_reward", "correct")
    return {
        **{name: row[name] for name in names},
        **{f"component {name}": value for name, value in row["reward_components"].items()},
        "advantage": use["advantage"] if use else None,
        "response_length": row["response_length"],
        "num_turns": row["num_turns"],
        "ended_by": row["error"] or cause_of(row),
        "training": fate_of(use),
        "compare": "compare",
    }


def best_sibling(found: Lookup, row: Row) -> Row | None:
    """Return the row with the highest reward of the group's other episodes; None if none is scored."""
    others = (each for each in found.group if each["episode_id"] != row["episode_id"] and not each["depth"])
    scored = (each for each in others if each["episode_reward"] is not None)
    return max(scored, key=lambda each: each["episode_reward"], default=None)
