"""Compute the figures of a run from the SQL files of ludic/root/sql/figures/, and the reports of `ludic watch
--totals`.

Each file is one SELECT; its first comment says what it gives. Raises QueryError if a file of the run can't be read
(`connect(root, without=...)` leaves it out).
"""

from string import Template
from typing import Any

import duckdb
import pyarrow as pa

from ludic.base import read_packaged
from ludic.root.json_records import Folder
from ludic.root.root import Root
from ludic.root.sql.connection import open_duckdb
from ludic.root.sql.query import ask, ask_table


def figure(name: str) -> str:
    """Return the SQL of a figure: ludic/root/sql/figures/NAME.sql."""
    return read_packaged("figures", name)


def means(keys: str, rows: Folder) -> str:
    """Return the SQL of counts, means and fractions. keys: columns to group by, joined by commas.

    Rollouts have equal weight; in evaluations examples have, whatever their number of samples.
    """
    text = figure("means_of_examples") if rows == "evals" else figure("means")
    return Template(text).substitute(keys=keys)


def means_of_evaluation(rows: pa.Table) -> list[dict[str, Any]]:
    """Return the rows of `means` by environment, of rows of evals/ of one version, with SCALAR_COLUMNS."""
    with open_duckdb() as con:
        con.register("stored", rows)
        con.execute("create temp view evals as select *, policy_version as version, env_name as env from stored")
        con.execute(f"create temp view eval_episodes as\n{read_packaged('views', 'eval_episodes')}")
        return con.sql(means("env_name", "evals")).to_arrow_table().to_pylist()


def texts(rows: Folder) -> str:
    """Return the SQL of the beginnings of questions and answers of rollouts."""
    return Template(figure("texts_of_rollouts")).safe_substitute(rows=rows)


def steps_by_environment(con: duckdb.DuckDBPyConnection, root: Root, after_step: int = 0) -> list[dict[str, Any]]:
    """Return means of each gradient step after a step, by environment, over the rollouts that it considered.

    Columns: step, env_name, reward_mean, response_length_mean (tokens), signal (share of groups whose rewards differ),
    truncated_fraction, error_fraction. Report and trackers show these series; an unknown value is None.
    """
    return ask(con, root, figure("steps_by_environment"), {"after_step": after_step})


def components_by_environment(con: duckdb.DuckDBPyConnection, root: Root, after_step: int = 0) -> list[dict[str, Any]]:
    """Return the mean of each reward component of each gradient step after a step, by environment.

    Columns: step, env_name, component, value_mean, over the considered rollouts that have the component.
    """
    return ask(con, root, figure("components_by_environment"), {"after_step": after_step})


def read_reports(con: duckdb.DuckDBPyConnection, root: Root) -> dict[str, pa.Table]:
    """Return each report by name; rollouts and steps have one row, the others a row per item. Reads no tokens."""
    reports = {
        "rollouts": figure("rollouts"),
        "environments": means("env_name", "rollouts"),
        "versions": means("version", "rollouts"),
        "evals": means("policy_version, env_name", "evals"),
        "steps": figure("totals_of_steps"),
        "drops": figure("drops"),
        "attempts": figure("attempts"),
        "scores": figure("scores"),
        "lost": figure("lost"),
    }
    return {name: ask_table(con, root, sql) for name, sql in reports.items()}
