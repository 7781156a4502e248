"""The lists that the viewer shows, as SQL over the views of a run: versions, groups, rollouts, answers to one example.

A list selects few columns and no tokens, so that it opens fast. The user's predicate and order may name every column of
its relation; they are part of a query that may only read (ludic.sql.query).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ludic.sql.library import quote
from ludic.sql.reports import MEANS

Table = Literal["rollouts", "evals"]
Kind = Literal["version", "group", "rollout"]

# A label is shown as its mark, or as a star if it is only a note.
_MARKS = """
left join (
    select rollout_id, string_agg(coalesce(text, value::varchar, '*'), ' ' order by created_at) as marks
    from labels
    group by rollout_id
) using (rollout_id)
"""
_TRAINING = """
left join (
    select
        rollout_id,
        max(step) as step,
        max_by(advantage, step) as advantage,
        max_by(if(used, null, reason), step) as dropped_by
    from batches
    group by rollout_id
) using (rollout_id)
"""
FRACTIONS = {
    "truncated": "truncated_fraction",
    "incomplete": "incomplete_fraction",
    "unparsed": "parse_error_fraction",
    "failed": "error_fraction",
}
"""Shares of a version's rollouts, by their short names, which are also those of `ludic stats`."""
_FIRST_COLUMNS = ("rollout_id", "episode_reward", "marks")
_LAST_COLUMNS = (
    "response_length",
    "num_turns",
    "finish_reason",
    "truncation_reason",
    "error",
    "env_example_id",
    "agent_id",
    "version",
    "env_name",
)
_TRAINING_COLUMNS = ("step", "advantage", "dropped_by")
_GROUP_COLUMNS = (
    "group_id",
    "reward_mean",
    "reward_min",
    "reward_max",
    "reward_std",
    "num_rollouts",
    "num_scored",
    "response_length_mean",
    "num_truncated",
    "num_parse_errors",
    "num_errors",
)


@dataclass(frozen=True, slots=True)
class Order:
    """An order of rows: a SQL expression over the columns, and its direction. Missing values are last."""

    by: str
    descending: bool = False

    @classmethod
    def parse(cls, text: str) -> "Order":
        """Read an expression with an optional asc or desc at its end."""
        expression, _, direction = text.strip().rpartition(" ")
        if expression and direction.lower() in ("asc", "desc"):
            return cls(expression.strip(), direction.lower() == "desc")
        return cls(text.strip())

    def __str__(self) -> str:
        return f"{self.by} desc" if self.descending else self.by


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """A list of rows of one kind."""

    title: str
    kind: Kind
    relation: str
    """SQL of the rows; predicates may name all of its columns."""
    columns: tuple[str, ...]
    """Columns that are shown; the first ones identify the row, and break ties of the order."""
    order: Order
    params: Mapping[str, Any] = field(default_factory=dict)
    table: Table = "rollouts"

    def query(self, where: str, order: Order, limit: int) -> str:
        """Return the SQL of the first rows that a predicate chooses; an empty one chooses all."""
        # The user's texts have their own lines, so that a comment at their end does not hide a parenthesis.
        direction = "desc" if order.descending else "asc"
        return (
            f"select {', '.join(map(quote_name, self.columns))} from (\n{self.relation}\n) as listed "  # noqa: S608
            f"where (\n{where or 'true'}\n) order by (\n{order.by}\n) {direction} nulls last, "
            f"{quote_name(self.columns[0])} limit {limit}"
        )

    def count_query(self, where: str) -> str:
        return f"select count(*) from (\n{self.relation}\n) as listed where (\n{where or 'true'}\n)"  # noqa: S608


def quote_name(name: str) -> str:
    """Return a name as an identifier of SQL."""
    return '"' + name.replace('"', '""') + '"'


def versions(table: Table) -> Listing:
    """The policy versions that sampled rollouts, or evaluations, by environment."""
    renamed = ", ".join(f"{old} as {new}" for new, old in FRACTIONS.items())
    return Listing(
        title="versions" if table == "rollouts" else "versions in evals",
        kind="version",
        relation=f"select * rename ({renamed}) from (select version, env, {MEANS} from {table} group by all)",  # noqa: S608
        columns=(
            "version",
            "env",
            "num_rollouts",
            "num_groups",
            "reward_mean",
            "response_length_mean",
            *FRACTIONS,
        ),
        order=Order("version", descending=True),
        table=table,
    )


def groups(version: int, env: str) -> Listing:
    """The groups of a version in one environment."""
    return Listing(
        title=f"groups of version {version}, {env}",
        kind="group",
        relation="select * from groups where version = $version and env = $env",
        columns=_GROUP_COLUMNS,
        order=Order("created_at"),
        params={"version": version, "env": env},
    )


def rollouts(table: Table, *, title: str = "", with_training: bool = False, **equal: Any) -> Listing:
    """Rollouts, or rollouts of evaluations, whose columns equal these values.

    with_training: also show the newest step that considered each, its advantage, and the filter that dropped it.
    """
    named = title or ", ".join(f"{name} {value}" for name, value in equal.items())
    scope = " and ".join(f"{quote_name(name)} = ${name}" for name in equal) or "true"
    training = _TRAINING if with_training else ""
    return Listing(
        title=f"{table} of {named}" if named else f"all {table}",
        kind="rollout",
        relation=f"select * from {table}\n{_MARKS}{training}where {scope}",  # noqa: S608
        columns=_FIRST_COLUMNS + (_TRAINING_COLUMNS if with_training else ()) + _LAST_COLUMNS,
        order=Order("created_at"),
        params=equal,
        table=table,
    )


def answers(env_name: str, example_id: str, but: str) -> Listing:
    """All answers to one example, in rollouts and evals, but one."""
    parts = " union all by name ".join(
        f"select {quote(table)} as found_in, * from {table} where env_name = $env_name "  # noqa: S608
        "and env_example_id = $example_id and rollout_id <> $but"
        for table in ("rollouts", "evals")
    )
    return Listing(
        title=f"answers to {env_name} {example_id}: choose one to compare",
        kind="rollout",
        relation=f"select * from ({parts})\n{_MARKS}",  # noqa: S608
        columns=(
            "rollout_id",
            "found_in",
            "version",
            "agent_id",
            "temperature",
            "episode_reward",
            "response_length",
            "num_turns",
            "finish_reason",
            "marks",
        ),
        order=Order("version", descending=True),
        params={"env_name": env_name, "example_id": example_id, "but": but},
    )
