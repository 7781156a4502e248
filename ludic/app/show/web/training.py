"""Pages of what training did with what was sampled: requests and their fates, and drops by reason."""

from typing import Any

from ludic.app.show.lookup import UnknownIdError
from ludic.app.show.web.conversation import page_index, page_links
from ludic.app.show.web.pages import PageAnswer, PageRequest, PageTable, page, with_values
from ludic.root.sql import figure

_ROWS_A_PAGE = 50


@page("requests", "requests", menu=60)
def requests(request: PageRequest) -> PageAnswer:
    """The groups that workers started, how each ended, and what the trainer did with it."""
    counts = request.data.ask(figure("requests_by_fate"), {}).to_dicts()
    fates = PageTable(
        name="fates",
        rows=counts,
        columns=tuple(counts[0]) if counts else (),
        titles={
            "num_groups": "groups",
            "sampled_s_mean": "seconds, mean",
            "off_policy_steps_mean": "off-policy steps",
        },
        links={"outcome": lambda row: request.link("requests", outcome=row["outcome"], fate=row["fate"] or "none")},
    )
    values: dict[str, Any] = {"fates": fates, "groups": None, "pages": [], "all_href": request.link("requests")}
    tables = [fates]
    if chosen := _chosen(request, counts):
        some = _groups(request, chosen)
        values |= {"groups": some, "chosen": chosen}
        values["pages"] = page_links(request, "row", chosen["num_groups"], _ROWS_A_PAGE, "groups")
        tables.append(some)
    return PageAnswer("requests.html.j2", values, title="Requests", tables=tables)


def _chosen(request: PageRequest, counts: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the row of the outcome and fate that the address names; None if it names none. Raises UnknownIdError."""
    outcome, fate = request.query.get("outcome"), request.query.get("fate", "none")
    if not outcome:
        return None
    found = next((row for row in counts if (row["outcome"], row["fate"] or "none") == (outcome, fate)), None)
    if found is None:
        raise UnknownIdError(f"no request has the outcome {outcome!r} with the fate {fate!r}")
    return found


def _groups(request: PageRequest, chosen: dict[str, Any]) -> PageTable:
    """Return a page of the groups with an outcome and a fate, newest first; its CSV has all of them."""
    params = {"outcome": chosen["outcome"], "fate": chosen["fate"]}
    first = page_index(request, "row", chosen["num_groups"], _ROWS_A_PAGE) * _ROWS_A_PAGE
    query = figure("requests_of_fate")
    rows = request.data.ask(query, {**params, "most": _ROWS_A_PAGE, "skip": first}).to_dicts()
    columns = with_values(rows)
    return PageTable(
        name="groups",
        rows=rows,
        columns=columns,
        links={
            "group_id": lambda row: request.link("group", id=row["group_id"]) if row["outcome"] == "complete" else None,
            "next_group_id": lambda row: row["next_group_id"] and request.link("group", id=row["next_group_id"]),
            "env_example_id": lambda row: request.link("example", env=row["env_name"], id=row["env_example_id"]),
        },
        titles={"group_number": "number", "sampled_s": "seconds", "next_group_id": "sampled again as"},
        query=(query, {**params, "most": chosen["num_groups"], "skip": 0}),
    )


@page("drops", "drops", menu=61)
def drops(request: PageRequest) -> PageAnswer:
    """Rollouts that gradient steps dropped, by reason, and those of one reason."""
    reasons = request.data.ask(figure("drops_by_reason"), {}).to_dicts()
    table = PageTable(
        name="reasons",
        rows=reasons,
        columns=("reason", "num_rollouts", "num_groups", "first_step", "last_step", "reward_mean"),
        links={"reason": lambda row: request.link("drops", reason=row["reason"])},
    )
    values: dict[str, Any] = {"reasons": table, "rollouts": None, "pages": [], "all_href": request.link("drops")}
    tables = [table]
    reason = request.query.get("reason")
    if reason:
        count = next((row["num_rollouts"] for row in reasons if row["reason"] == reason), None)
        if count is None:
            raise UnknownIdError(f"no rollout was dropped for the reason {reason!r}")
        some = _dropped(request, reason, count)
        values |= {"rollouts": some, "reason": reason, "count": count}
        values["pages"] = page_links(request, "row", count, _ROWS_A_PAGE, "rollouts")
        tables.append(some)
    return PageAnswer("drops.html.j2", values, title="Drops", tables=tables)


def _dropped(request: PageRequest, reason: str, count: int) -> PageTable:
    """Return a page of the rollouts that were dropped for a reason, newest steps first; its CSV has all of them."""
    first = page_index(request, "row", count, _ROWS_A_PAGE) * _ROWS_A_PAGE
    query = figure("dropped_rollouts")
    rows = request.data.ask(query, {"reason": reason, "most": _ROWS_A_PAGE, "skip": first}).to_dicts()
    return PageTable(
        name="rollouts",
        rows=rows,
        columns=with_values(rows),
        links={
            "rollout_id": lambda row: request.link("rollout", id=row["rollout_id"]),
            "group_id": lambda row: request.link("group", id=row["group_id"]),
        },
        query=(query, {"reason": reason, "most": count, "skip": 0}),
    )
