"""Measure contamination: the part of evaluated prompts that occurs in texts that runs trained on.

Reads evals/, the ledgers and the messages of the rollouts that they used, through the SQL of
ludic/root/sql/contamination/ or a user's file. Raises ConfigError if nothing is evaluated or trained on, QueryError for
SQL that fails.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import duckdb
import pyarrow as pa

from ludic.errors import ConfigError, QueryError
from ludic.eval.estimates import Chosen, Samples, nothing_stored
from ludic.root import Root
from ludic.root.sql import RootLike, SqlText, ask, check_parameters, connect, figure, load_text, run_query
from ludic.settings import CONTAMINATION

_COLUMNS = ("env_name", "env_example_id", "num_ngrams", "num_found", "rollout_id", "num_shared")
_WANTED = f"wanted one SELECT that returns {', '.join(_COLUMNS)}"
_OVER = "with eval_episodes as (from chosen_episodes)\n"
_EXAMPLES = _OVER + "select *\nfrom (\n{}\n)\norder by num_found / greatest(num_ngrams, 1) desc, num_found desc, 1, 2"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Overlaps:
    """Overlaps of evaluated prompts with trained texts."""

    examples: pa.Table
    """A row for each example: its n-grams, those that were found, and the rollout with the most of them."""
    num_trained: int
    """Rollouts that gradient steps used."""
    num_absent: int
    """Rollouts without text in these roots, which were not compared."""


def find_overlaps(
    root: Root, also: Sequence[RootLike], chosen: Chosen, query: str, params: Mapping[str, Any]
) -> Overlaps:
    """Compare the chosen samples' prompts with what the root and `also` trained on.

    query: a name in ludic/root/sql/contamination/, or the path of a .sql file. params: values of its parameters.
    """
    text = load_text(CONTAMINATION, query, "{}", _WANTED)
    check_parameters([text], params, known=())
    episodes = _episodes(root, chosen)
    with connect([root, *also]) as con:
        con.from_arrow(episodes).create("chosen_episodes")
        (trained,) = ask(con, root, figure("trained_rollouts"))
        if not trained["num_trained"]:
            raise ConfigError(f"no gradient step is in the ledger of {root.url}; name the run that trained")
        return Overlaps(examples=_run(con, text, text.bind(params)), **trained)


def _episodes(root: Root, chosen: Chosen) -> pa.Table:
    with connect(root) as con:
        table = Samples.choose(root, con, chosen).ask("from eval_episodes")
        if not table.num_rows:
            raise ConfigError(nothing_stored(con, root, chosen))
    return table


def _run(con: duckdb.DuckDBPyConnection, text: SqlText, values: Mapping[str, Any]) -> pa.Table:
    try:
        found = run_query(con, f"{_OVER}select * from (\n{text.text}\n) limit 0", values).column_names  # noqa: S608
        if sorted(found) != sorted(_COLUMNS):
            raise QueryError(f"returns {', '.join(found)}")
        return run_query(con, _EXAMPLES.format(text.text), values).select(_COLUMNS)
    except QueryError as error:
        raise QueryError(f"{text.source}: {error}; {_WANTED}") from error
