"""Pages of one question: the answers of a group, and the answers to one example over all versions side by side."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import polars as pl

from ludic.app.show.lookup import UnknownIdError, look_up
from ludic.app.show.stats import extremes
from ludic.app.show.transcript import prompt_of, with_messages
from ludic.app.show.web.conversation import (
    MESSAGES_A_PAGE,
    Fact,
    ShownMessage,
    members,
    page_index,
    page_links,
    paged,
    shown_messages,
    shown_text,
)
from ludic.app.show.web.pages import PageAnswer, PageRequest, PageTable, page, short_id
from ludic.base import number, plural
from ludic.records import Row
from ludic.root.sql import figure

_VERSIONS_A_PAGE = 6
_ANSWERS_A_VERSION = 4
_ANSWERS_A_PAGE = 24
"""Answers of the page of one version."""


# --- A group ---------------------------------------------------------------------------------------------------------


@page("group", "Group")
def group(request: PageRequest) -> PageAnswer:
    """The rollouts of a group, and its best and worst answers."""
    part = request.required("id")
    with request.data.reading() as con:
        found = look_up(request.data.root, part, "group", con=con)
    rows = [with_messages(row, request.data.token_reader) for row in found.group]
    first = rows[0]
    table = members(request, found)
    shown = extremes(row for row in rows if not row["depth"])
    prompt = len(prompt_of(first["messages"]))
    values = {
        "facts": _facts_of_group(request, rows),
        "wanted": shown_text(request, first, "wanted", first["wanted"]),
        "prompt": shown_messages(request, first, 0, prompt),
        "rollouts": paged(request, table, "member"),
        "extremes": [_extreme(request, title, row) for title, row in shown],
        "compare_href": request.link(
            "compare", **dict(zip("ab", (row["rollout_id"] for _, row in shown), strict=False))
        )
        if len(shown) > 1
        else None,
    }
    return PageAnswer("group.html.j2", values, title=f"Group {short_id(first['group_id'])}", tables=[table])


def _facts_of_group(request: PageRequest, rows: Sequence[Row]) -> list[Fact]:
    first = rows[0]
    rewards = [row["episode_reward"] for row in rows if row["episode_reward"] is not None and not row["depth"]]
    mean = number(fmean(rewards), 4) if rewards else "not scored"
    of = f"{number(min(rewards), 4)} to {number(max(rewards), 4)} of {len(rewards)} scored" if rewards else ""
    example = request.link("example", env=first["env_name"], id=first["env_example_id"])
    return [
        Fact("mean reward", mean),
        *([Fact("rewards", of)] if of else []),
        Fact("example", f"{first['env_name']} {first['env_example_id']} ({first['purpose']})", example),
        Fact("policy", f"version {first['policy_version']} of {first['model']}"),
        Fact("rollouts", f"{len(rows)} of {plural(len({row['episode_id'] for row in rows}), 'episode')}"),
        Fact("group", first["group_id"], request.link("group", id=first["group_id"])),
    ]


def _extreme(request: PageRequest, title: str, row: Row) -> dict[str, Any]:
    """Return a rollout with the messages after its prompt."""
    first = len(prompt_of(row["messages"]))
    return {
        "title": f"{title}, reward {number(row['episode_reward'], 4)}",
        "href": request.link("rollout", id=row["rollout_id"]),
        "messages": shown_messages(request, row, first),
        "left": max(0, len(row["messages"]) - first - MESSAGES_A_PAGE),
    }


# --- An example over versions ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownAnswer:
    """One answer of a version."""

    href: str
    reward: str
    title: str
    """Where it is from, and its length and end."""
    message: ShownMessage | None
    """Its last message; None if the row has no messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExampleColumn:
    """The answers of one version."""

    version: int
    reward: str
    counts: str
    answers: Sequence[ShownAnswer]
    num_more: int
    href: str
    """Address of all answers of the version."""


@page("example", "Example")
def example(request: PageRequest) -> PageAnswer:
    """One example's answers, a column for each version, newest first; of one version all of them."""
    env_name, example_id = request.required("env"), request.required("id")
    answers = request.data.ask(figure("answers_of_example"), {"env_name": env_name, "id": example_id})
    if answers.is_empty():
        raise UnknownIdError(f"no answer to example {example_id!r} of environment {env_name!r} is stored")
    versions = _by_version(answers)
    only = _only_version(request, versions)
    if only is None:
        first = page_index(request, "column", len(versions), _VERSIONS_A_PAGE) * _VERSIONS_A_PAGE
        some, skip, most = versions[first : first + _VERSIONS_A_PAGE], 0, _ANSWERS_A_VERSION
        pages = page_links(request, "column", len(versions), _VERSIONS_A_PAGE)
    else:
        some, most = [only], _ANSWERS_A_PAGE
        skip = page_index(request, "answer", only["num_answers"], most) * most
        pages = page_links(request, "answer", only["num_answers"], most)
    rows = {
        row["version"]: answers.filter(pl.col("version") == row["version"]).slice(skip, most).to_dicts() for row in some
    }
    found = [row for each in rows.values() for row in each]
    texts = _texts(request, found)
    shown = next((row for row in found if texts[row["rollout_id"]]["messages"]), None)
    prompt = prompt_of(texts[shown["rollout_id"]]["messages"]) if shown else []
    table = PageTable(
        name="versions",
        rows=versions,
        columns=("version", "reward_mean", "accuracy", "num_answers", "num_samples", "num_scored"),
        titles={"num_samples": "of them in evaluations"},
        links={"version": lambda row: request.here(version=row["version"], column=None, answer=None)},
    )
    values = {
        "env_name": env_name,
        "example_id": example_id,
        "columns": [_column(request, row, rows[row["version"]], texts) for row in some],
        "pages": pages,
        "prompt": shown_messages(request, {**shown, "messages": prompt}) if shown else [],
        "wanted": next((text["wanted"] for text in texts.values() if text["wanted"] is not None), None),
        "versions": table,
        "only": only and only["version"],
        "all_href": request.here(version=None, column=None, answer=None),
    }
    return PageAnswer("example.html.j2", values, title=f"{env_name}, example {example_id}", tables=[table])


def _by_version(answers: pl.DataFrame) -> list[dict[str, Any]]:
    """Return counts and means of the answers of each version, newest first."""
    reward = pl.col("episode_reward")
    return (
        answers.group_by("version", maintain_order=True)
        .agg(
            pl.len().cast(pl.Int64).alias("num_answers"),
            (pl.col("found_in") == "evals").sum().cast(pl.Int64).alias("num_samples"),
            reward.count().cast(pl.Int64).alias("num_scored"),
            reward.mean().alias("reward_mean"),
            reward.min().alias("reward_min"),
            reward.max().alias("reward_max"),
            pl.col("correct").cast(pl.Float64).mean().alias("accuracy"),
        )
        .to_dicts()
    )


def _only_version(request: PageRequest, versions: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the version that the address asks for; None if it asks for all. Raises UnknownIdError."""
    if not request.query.get("version"):
        return None
    version = request.whole_number("version", 0)
    found = next((row for row in versions if row["version"] == version), None)
    if found is None:
        raise UnknownIdError(f"version {version} has no answer to this example")
    return found


def _texts(request: PageRequest, answers: Sequence[Row]) -> dict[str, dict[str, Any]]:
    """Return messages and wanted answer of each answer, by rollout_id."""
    found: dict[str, dict[str, Any]] = {row["rollout_id"]: {"messages": [], "wanted": None} for row in answers}
    for folder in ("rollouts", "evals"):
        some = [row for row in answers if row["found_in"] == folder]
        if some:
            ids, versions = [row["rollout_id"] for row in some], sorted({row["version"] for row in some})
            rows = request.data.ask(figure(f"messages_of_{folder}"), {"ids": ids, "versions": versions}).to_dicts()
            found |= {row["rollout_id"]: {**row, "messages": row["messages"] or []} for row in rows}
    return found


def _column(request: PageRequest, row: Row, answers: Sequence[Row], texts: Mapping[str, Row]) -> ExampleColumn:
    samples = f", {plural(row['num_samples'], 'sample')} of evaluations" if row["num_samples"] else ""
    return ExampleColumn(
        version=row["version"],
        reward="not scored" if row["reward_mean"] is None else number(row["reward_mean"], 4),
        counts=plural(row["num_answers"], "answer") + samples,
        answers=[_answer(request, answer, texts[answer["rollout_id"]]["messages"]) for answer in answers],
        num_more=row["num_answers"] - len(answers),
        href=request.here(version=row["version"], column=None, answer=None),
    )


def _answer(request: PageRequest, row: Row, messages: list[dict[str, Any]]) -> ShownAnswer:
    last = next((i for i in range(len(messages) - 1, -1, -1) if messages[i]["role"] == "assistant"), None)
    parts = [
        "evaluation" if row["found_in"] == "evals" else "",
        row["agent_id"] if row["agent_id"] != "agent" else "",
        plural(row["response_length"], "token"),
        plural(row["num_turns"], "turn") if row["num_turns"] > 1 else "",
        row["ended_by"] or "",
        "" if row["correct"] is None else "correct" if row["correct"] else "wrong",
    ]
    shown = [] if last is None else shown_messages(request, {**row, "messages": messages}, last, 1)
    return ShownAnswer(
        href=request.link("rollout", id=row["rollout_id"]),
        reward="not scored" if row["episode_reward"] is None else number(row["episode_reward"], 4),
        title=", ".join(part for part in parts if part),
        message=next(iter(shown), None),
    )
