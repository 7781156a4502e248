"""What the screens show: rows of guarded queries over one run, single rollouts, and labels.

Reads the root through one sealed connection, which lets users' predicates only read. Threads may share it; a query
waits for the one before. Raises QueryError for a wrong predicate, UnknownIdError, StoreError.
"""

import math
import threading
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

import duckdb
import polars as pl

from ludic.show.found import Found, look_up
from ludic.show.terminal.listings import Listing, Order
from ludic.show.tokens import TokenReader, load_token_reader
from ludic.sql.connect import connect, refresh
from ludic.sql.query import result_of, to_frame
from ludic.store import Root
from ludic.store.tables import LABEL, put_label

MOST_ROWS = 200_000
"""Rows of a list that are held in memory, the first in its order; some 20 MB."""

_MOST_LOG_RATIO = 20.0
_TRAINED = """
select trainer_logprobs, token_advantages
from batches
left join token_stats using (attempt_id, step, rollout_id)
where batches.rollout_id = $id
order by step
limit 1
"""
_LABELS = "select name, value, text, note, author, created_at from labels where rollout_id = $id order by created_at"


class RunData:
    """One run, as the screens see it."""

    def __init__(self, root: Root, author: str | None = None) -> None:
        self.root, self._author = root, author
        self._lock = threading.Lock()
        self._connection: duckdb.DuckDBPyConnection | None = None

    def rows(self, listing: Listing, where: str, order: Order) -> pl.DataFrame:
        """Return the first MOST_ROWS rows of a list that a SQL predicate chooses, in an order."""
        return self.ask(listing.query(where, order, MOST_ROWS), listing.params)

    def count(self, listing: Listing, where: str) -> int:
        """Return the number of all rows that a predicate chooses."""
        return int(self.ask(listing.count_query(where), listing.params).item())

    def ask(self, query: str, params: Mapping[str, Any]) -> pl.DataFrame:
        """Return the rows of a query that may only read."""
        with self._lock:
            with result_of(self._connected(), [self.root], query, params) as reader:
                return to_frame(reader)

    def _connected(self) -> duckdb.DuckDBPyConnection:
        """Return the connection; the caller holds the lock."""
        if self._connection is None:
            self._connection = connect(self.root, sealed=True)
        return self._connection

    def stop(self) -> None:
        """End the query that is running; its caller gets a QueryError."""
        if self._connection is not None:
            self._connection.interrupt()

    def refresh(self) -> None:
        """Let later queries show rollouts that are stored by then."""
        with self._lock:
            if self._connection is not None:
                refresh(self._connection)

    def find(self, rollout_id: str) -> Found:
        """Return a rollout, whose row also has lists of ratios and token_advantages if training stored them."""
        with self._lock:
            found = look_up(self.root, rollout_id, "rollout", con=self._connected())
        row = found.rows[0]
        trained = self.ask(_TRAINED, {"id": row["rollout_id"]}).to_dicts() if found.uses else []
        if not trained:
            return found
        logprobs = trained[0]["trainer_logprobs"] or []
        ratios = [_ratio(*pair) for pair in zip(logprobs, row["response_logprobs"], strict=False)]
        return replace(found, rows=[row | {"ratios": ratios, "token_advantages": trained[0]["token_advantages"]}])

    def labels(self, rollout_id: str) -> list[dict[str, Any]]:
        """Return the labels of a rollout, oldest first."""
        return self.ask(_LABELS, {"id": rollout_id}).to_dicts()

    def label(self, rollout_id: str, mark: str, note: str, name: str = LABEL) -> None:
        """Store a label. mark: read as a number if it is one; an empty mark and note withdraw the label."""
        root = Root.open(self.root.url, writable=True)
        put_label(root, rollout_id, _as_mark(mark.strip()), note.strip() or None, name=name, author=self._author)

    @cached_property
    def token_reader(self) -> TokenReader:
        return load_token_reader(self.root)


def _as_mark(text: str) -> float | str | None:
    try:
        number = float(text)
    except ValueError:
        return text or None
    return number if math.isfinite(number) else text


def _ratio(trainer_logprob: float, sampler_logprob: float) -> float:
    difference = trainer_logprob - sampler_logprob
    return math.exp(max(-_MOST_LOG_RATIO, min(_MOST_LOG_RATIO, difference)))
