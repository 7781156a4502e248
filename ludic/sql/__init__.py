"""Query the files of a run with DuckDB; the only layer that uses DuckDB."""

from ludic.sql.connect import connect, refresh
from ludic.sql.library import (
    SqlText,
    advantages,
    load_advantage,
    load_filter,
    required_columns,
    run_checks,
    run_query,
)
from ludic.sql.planner import BatchRules, Planner, Shortage

__all__ = [
    "BatchRules",
    "Planner",
    "Shortage",
    "SqlText",
    "advantages",
    "connect",
    "load_advantage",
    "load_filter",
    "refresh",
    "required_columns",
    "run_checks",
    "run_query",
]
