"""Stored rollouts as packed batches, for your own training loop. Writes nothing.

Each rank plans by itself, over the same files and in the same order, so ranks need not communicate.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from ludic.batches.offline import StoredRollouts
from ludic.batches.online import batch_rules
from ludic.batches.stream import RankBatch, read_rank_batch
from ludic.errors import ConfigError
from ludic.sql.planner import Planner
from ludic.store import Root
from ludic.training.config import TrainConfig


class BatchStream:
    """Iterator over batches: one epoch per iteration, reading the next batch while the current one is used.

    Like torchdata's nodes, it has `state_dict` and `load_state_dict`; the state is the one after the last batch
    returned. A new iteration continues an interrupted one. `epoch` counts from 1.
    """

    def __init__(
        self,
        *sources: str | Root,
        config: TrainConfig | None = None,
        groups_per_batch: int | None = None,
        seed: int | None = None,
        rank: int = 0,
        num_ranks: int = 1,
    ) -> None:
        """Read the scalars of all sources.

        config: only settings that choose the content of batches are used: advantage, filters, where, selection,
        sql_params, baseline_over, objective (for pairs), max_tokens_per_micro_batch, max_seq_len.
        groups_per_batch, seed: None takes those of the first source's run.

        Raises ConfigError if there is nothing to train on, MissingRootError, StoreError, QueryError.
        """
        if not 0 <= rank < num_ranks:
            raise ConfigError(f"rank is {rank} of {num_ranks}, wanted 0 to {num_ranks - 1}")
        roots = [source if isinstance(source, Root) else Root.open(source) for source in sources]
        if not roots:
            raise ConfigError("BatchStream was given no root, wanted at least one")
        self._config, self._root = (config or TrainConfig()).replace(offline=True), roots[0]
        run = roots[0].run
        self._rules = batch_rules(
            self._config.batch,
            groups_per_batch or run.groups_per_batch,
            run.seed if seed is None else seed,
            pairs=self._config.loss.is_paired,
        )
        self._stored = StoredRollouts.read(roots, self._rules, own=roots[0])
        self._num_groups = self._stored.count_groups(self._rules)
        self._rank, self._num_ranks = rank, num_ranks
        self.epoch = 1
        self._step = 0
        self._used: set[str] = set()

    def __len__(self) -> int:
        """Return the number of batches of an epoch."""
        return -(-self._num_groups // self._rules.groups_per_batch)

    def __iter__(self) -> Iterator[RankBatch]:
        """Yield the rest of the epoch; its last batch may be smaller. Raises StoreError, SchemaError, QueryError."""
        planner = self._planner()
        with ThreadPoolExecutor(1, thread_name_prefix="ludic-read") as thread:
            coming = thread.submit(self._read, planner, self._step + 1)
            while (share := coming.result()) is not None:
                coming = thread.submit(self._read, planner, share.plan.step + 1)
                self._step = share.plan.step
                self._used.update(share.plan.rows["group_id"].to_pylist())
                yield share
        self.epoch, self._step, self._used = self.epoch + 1, 0, set()

    def state_dict(self) -> dict[str, Any]:
        """Return the position as JSON values."""
        return {"epoch": self.epoch, "step": self._step, "used": sorted(self._used)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the position that the next iteration starts from."""
        self.epoch, self._step, self._used = state["epoch"], state["step"], set(state["used"])

    def _planner(self) -> Planner:
        """Return a planner with each group marked as used once per earlier epoch, without groups used in this one."""
        groups = self._stored.rows["group_id"].unique().to_pylist()
        rules = replace(self._rules, max_uses=self.epoch)
        return self._stored.planner(rules, num_uses=dict.fromkeys(groups, self.epoch - 1), without=self._used)

    def _read(self, planner: Planner, step: int) -> RankBatch | None:
        plan = self._stored.plan(planner, step, attempt_id=0, trainer_version=0, cursor={})
        return read_rank_batch(self._root, self._config.batch, plan, self._rank, self._num_ranks) if plan else None
