"""Hold back a planner's groups until their scorers have scored them, then pass the scores to SQL.

A group is released when every scorer has returned a score or a failure for all its rollouts, or when its waiting time
ends. Rows without a value are then dropped as `unscored`; a group whose rows were scored by different versions of a
scorer is dropped as `mixed_scorers`, unless versions may be mixed. Reads no files. Raises ConfigError for a bad
reference.
"""

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

import duckdb
import pyarrow as pa

from ludic.base import read_packaged
from ludic.errors import ConfigError, QueryError
from ludic.root.sql.library import SqlText, required_columns, run_query

_REFERENCE = re.compile(r"(?P<scorer>[^@:,]+)(?:@(?P<version>[0-9a-f]+))?(?::(?P<value>[^@:,]+))?")
_DEFAULT_VALUE = "score"

_FORGET = "create or replace table scores as from scores where rollout_id in (select rollout_id from rollouts)"
_END_WAIT = """
create or replace table found_scores as
from found_scores anti join (from waiting where group_id in (from ready)) using (rollout_id);
create or replace table waiting as from waiting where group_id not in (from ready)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScorerReference:
    """A scorer, and optionally one version of it and the name of one of its values."""

    scorer: str
    version: str = ""
    """First digits of the version; empty for any version."""
    value: str = _DEFAULT_VALUE
    """Name of the value."""

    @classmethod
    def parse(cls, text: str, setting: str) -> Self:
        """Parse SCORER, SCORER@VERSION, SCORER:VALUE or SCORER@VERSION:VALUE. Raises ConfigError."""
        match = _REFERENCE.fullmatch(text)
        if match is None:
            raise ConfigError(f"{setting} has {text!r}, wanted SCORER or SCORER@VERSION, where VERSION is hexadecimal")
        return cls(scorer=match["scorer"], version=match["version"] or "", value=match["value"] or _DEFAULT_VALUE)


def parse_references(
    scorers: Sequence[str], reward_scorer: str | None
) -> tuple[dict[str, str], ScorerReference | None]:
    """Return the wanted version of each scorer, or its first digits, and the scorer of the reward.

    Raises ConfigError if a reference is malformed, or if two name different versions of a scorer.
    """
    references = [ScorerReference.parse(text, "scorers") for text in scorers]
    reward = None if reward_scorer is None else ScorerReference.parse(reward_scorer, "reward_scorer")
    versions: dict[str, str] = {}
    for each in [*references, *([reward] if reward else [])]:
        if versions.setdefault(each.scorer, each.version) != each.version:
            raise ConfigError(
                f"scorers and reward_scorer name several versions of {each.scorer!r}: "
                f"{versions[each.scorer] or 'any'} and {each.version or 'any'}; name one"
            )
    return versions, reward


def open_gate(
    con: duckdb.DuckDBPyConnection,
    scorers: Sequence[str],
    reward_scorer: str | None,
    *,
    mixed: bool,
    wait_s: float | None,
) -> "ScoreGate | None":
    """Return a gate for the scorers of a planner's rules; None if they name none. Raises ConfigError."""
    versions, reward = parse_references(scorers, reward_scorer)
    return ScoreGate(con, versions, reward, mixed=mixed, wait_s=wait_s) if versions else None


@contextmanager
def names_missing_scorers() -> Iterator[None]:
    """Raise QueryError with the setting to change if SQL reads the table `scores` of a planner without scorers."""
    try:
        yield
    except QueryError as error:
        if "name scores does not exist" not in str(error):
            raise
        raise QueryError(f"{error}; it reads scores, so name their scorers in the setting scorers") from error


class ScoreGate:
    """The tables `waiting`, `found_scores` and `scores` beside the table `rollouts` of a planner's connection."""

    def __init__(
        self,
        con: duckdb.DuckDBPyConnection,
        versions: Mapping[str, str],
        reward: ScorerReference | None,
        *,
        mixed: bool,
        wait_s: float | None,
    ) -> None:
        """versions: wanted of each scorer, from `parse_references`. wait_s: None waits without a limit."""
        self._con, self._versions, self._wait_s = con, versions, wait_s
        self._facts = {"num_scorers": len(versions), "mixed": mixed}
        self._reward = {"reward_scorer": reward and reward.scorer, "reward_name": reward.value if reward else ""}
        self._has_news = False
        self._oldest: float | None = None
        con.execute("create table waiting as select *, null::double as since from rollouts")
        con.execute(
            "create table found_scores (rollout_id varchar, name varchar, value double, scorer varchar,"
            " scorer_version varchar, error varchar, created_at timestamptz)"
        )
        con.execute("create table scores as from found_scores")

    @property
    def scorers(self) -> list[str]:
        """Names of the scorers."""
        return list(self._versions)

    def is_read_by(self, text: SqlText | None) -> bool:
        """Return whether a predicate may read values that a row has only after it was scored."""
        columns = ["scores", *(["episode_reward"] if self._reward["reward_scorer"] else [])]
        return text is not None and bool(required_columns([text], columns))

    def note_arrivals(self) -> None:
        """Start the wait of rows that were inserted into `waiting`."""
        self._con.execute("update waiting set since = $now_s where since is null", {"now_s": time.monotonic()})
        self._has_news = True
        self._note_oldest()

    def add(self, scores: pa.Table) -> None:
        """Add rows of the scores table, with ludic.root.rows.tables.PLAN_COLUMNS; ignores other scorers and
        versions."""
        self._con.register("arriving", scores)
        try:
            for scorer, version in self._versions.items():
                self._con.execute(
                    "insert into found_scores by name "
                    "select * from arriving where scorer = $scorer and starts_with(scorer_version, $version)",
                    {"scorer": scorer, "version": version},
                )
        finally:
            self._con.unregister("arriving")
        self._has_news = True

    def release(self) -> bool:
        """Move groups whose wait has ended into `rollouts`, their scores into `scores`; return whether there were any.

        Takes no time if nothing was added and no group's waiting time ended.
        """
        now_s = time.monotonic()
        is_due = self._oldest is not None and self._wait_s is not None and self._oldest + self._wait_s <= now_s
        if self._oldest is None or not (self._has_news or is_due):
            return False
        self._has_news = False
        self._make("score_versions", {"mixed": self._facts["mixed"]})
        times = {"wait_s": self._wait_s, "now_s": now_s, "num_scorers": self._facts["num_scorers"]}
        num_ready = self._make("ready", times)
        if num_ready:
            mixed = {"mixed": self._facts["mixed"]}
            run_query(self._con, f"insert into scores by name\n{read_packaged('plan', 'scores')}", mixed)
            released = read_packaged("plan", "released")
            run_query(self._con, f"insert into rollouts by name\n{released}", {**self._facts, **self._reward})
            self._con.execute(_END_WAIT)
            self._note_oldest()
        return num_ready > 0

    def forget_planned(self) -> None:
        """Drop the scores of rows that are no longer in `rollouts`."""
        self._con.execute(_FORGET)

    def describe(self) -> str | None:
        """Describe the scores that groups wait for, as a part of a sentence; None if no group waits."""
        if self._oldest is None:
            return None
        rows = run_query(self._con, read_packaged("plan", "waiting"), {"scorers": self.scorers}).to_pylist()
        parts = [f"{self._named(row['scorer'])} has not scored {row['num_rollouts']} rollouts" for row in rows]
        return f"{self.num_waiting_groups} groups wait for scores: {', '.join(parts) or 'of one version'}"

    @property
    def num_waiting_groups(self) -> int:
        """Number of groups that wait for scores."""
        return self._con.execute("select count(distinct group_id) from waiting where refusal is null").fetchall()[0][0]

    def _named(self, scorer: str) -> str:
        version = self._versions[scorer]
        return f"{scorer}@{version}" if version else scorer

    def _make(self, table: str, params: Mapping[str, Any]) -> int:
        """Make a table from its file in ludic/root/sql/plan/; return its number of rows."""
        run_query(self._con, f"create or replace temp table {table} as\n{read_packaged('plan', table)}", params)
        return self._con.execute(f"select count(*) from {table}").fetchall()[0][0]  # noqa: S608

    def _note_oldest(self) -> None:
        self._oldest = self._con.execute("select min(since) from waiting").fetchall()[0][0]
