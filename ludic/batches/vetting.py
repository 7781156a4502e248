"""Look at the rows that a plan has chosen, before the ledger says that a step trains on them.

A plan is made from scalars, and a row's tokens can still be such that no step can train on it: ids beyond the model's
embedding, a logprob that is no logprob. The ledger is written before the step, and every later trainer makes the same
plan again, so that one such row would end a run for ever. What is read here is what training reads: rank 0 keeps it
for its own share of the batch (Plan.tokens). Raises StoreError if rows can't be read.
"""

import logging
from collections.abc import Mapping

import pyarrow as pa

from ludic.batches.reading import read_trained
from ludic.errors import ConfigError
from ludic.models.first_model import vocabulary_of
from ludic.schema.trainable import find_untrainable
from ludic.store import Root

logger = logging.getLogger(__name__)

_MOST_NAMED = 5
"""Maximum number of rows of one look that the log, or an error, names."""


class Vetting:
    """Finds the rows that can't be trained on, and keeps the tokens that it read last."""

    def __init__(self, root: Root) -> None:
        """root: run whose model is trained. Raises ModelError if its model/ is damaged."""
        self._root, self._vocab_size = root, vocabulary_of(root)
        self.tokens: pa.Table | None = None
        """Of the rows of the last look; see ludic.batches.reading.read_trained."""

    def find(self, rows: pa.Table) -> list[str]:
        """Return the rollout_ids of rows that can't be trained on, and name them in the log.

        rows: rollout_id, group_id, the address with root, prompt_length and response_length.
        """
        found = self._look(rows)
        if found:
            logger.warning("%s: %s; they are dropped as untrainable", self._root.url, _describe(found, rows.num_rows))
        return list(found)

    def check(self, rows: pa.Table, where: str) -> None:
        """Raise ConfigError if one of the rows, which are to be used as they are, has no place in the embedding.

        Logprobs only have to be finite: an older ludic trained on others, within its bound of the ratio. where: the
        plan that says so.
        """
        found = self._look(rows, any_logprob=True)
        if found:
            raise ConfigError(
                f"{where}: {_describe(found, rows.num_rows)}, and a replay leaves nothing out; train on these rollouts "
                "in another way, such as offline, which drops them"
            )

    def _look(self, rows: pa.Table, *, any_logprob: bool = False) -> dict[str, str]:
        """Return what is wrong, by rollout_id."""
        self.tokens = None
        if rows.num_rows == 0:
            return {}
        tokens = self.tokens = read_trained(self._root, rows)
        found = find_untrainable(tokens, self._vocab_size, any_logprob=any_logprob)
        ids = tokens["rollout_id"]
        return {ids[row].as_py(): reason for row, reason in found.items()}


def _describe(found: Mapping[str, str], num_rows: int) -> str:
    named = [f"rollout {rollout_id}: {reason}" for rollout_id, reason in list(found.items())[:_MOST_NAMED]]
    if len(found) > len(named):
        named.append(f"and {len(found) - len(named)} more")
    return f"{len(found)} of {num_rows} rows can't be trained on ({'; '.join(named)})"
