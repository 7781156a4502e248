"""Plan, read and pack the next batch in a thread while the previous step trains.

`PlannedStream` is the trainer's. One thread on each rank makes a batch: on rank 0 it plans
(ludic.training.batches.source), writes the ledger and sends the plan to the other ranks as Arrow IPC; then each rank
reads the row groups of its own sequences and packs them (ludic.training.batches.reading). Memory holds the tokens of at
most two batches. `BatchStream` gives batches of stored rollouts to other training loops.
"""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import pyarrow as pa
import torch
import torch.distributed as dist

from ludic.base import bytes_from_main, num_ranks, rank, run_on_all, run_on_main, unlimited_group
from ludic.errors import ConfigError
from ludic.records import Routing
from ludic.root import Attempt, Root
from ludic.root.rows import ReferenceIndex, write_ledger
from ludic.root.sql import LossUnit, Planner
from ludic.run import run_of
from ludic.training.batches.config import BatchConfig, OfLoss
from ludic.training.batches.offline import StoredRollouts
from ludic.training.batches.reading import RankBatch, Vetting, attention_tokens, read_rank_batch, replayed_routing
from ludic.training.batches.source import BatchPlan, PlanSource, batch_rules

_CLOSE_S = 30.0

Result = TypeVar("Result")


class PlannedStream:
    """Batches in order of steps, each prepared in the background. Collective: every rank must call every method."""

    def __init__(
        self,
        root: Root,
        config: BatchConfig,
        source: PlanSource | None,
        attempt: Attempt | None,
        stop: threading.Event,
        computed: ReferenceIndex | None = None,
    ) -> None:
        """source: in the state of the previous step. attempt: the one whose ledger is written. Both are None on other
        ranks. computed: logprobs of rows without stored ones."""
        self._root, self._config, self._source, self._attempt, self._stop = root, config, source, attempt, stop
        self._computed = computed
        self._attention_tokens = run_on_main(partial(attention_tokens, root, config))
        self._routing = run_on_main(partial(replayed_routing, root, config), Routing | None)
        self._next: Future[RankBatch | None] | None = None
        self._tokens: pa.Table | None = None
        """Tokens of the newest plan that its source has read, on rank 0."""
        # A separate group: plans are sent while the step's collectives use others. rollout_timeout_s, or the end of
        # rank 0's process, ends the wait for a plan.
        self._group: dist.ProcessGroup | None = unlimited_group()

    def start_plan(self, step: int, trainer_version: int) -> None:
        """Begin to plan, read and pack a step that will start from the weights of `trainer_version`."""
        assert self._next is None, "the batch before was not taken"
        self._next = _in_background(partial(self._prepare, step, trainer_version))

    def next_batch(self) -> RankBatch | None:
        """Wait for the batch that was started, and return this rank's share, with counts summed over all ranks.

        Returns None if rank 0 was stopped or there are no more plans. Raises, on every rank, the source's errors,
        FencedError, and StoreError, SchemaError or InvalidBatchError if a rank can't read or train on a rollout.
        """
        assert self._next is not None, "no plan was started"
        coming, self._next = self._next, None
        share = run_on_all(coming.result)
        if share is None:
            return None
        counts = torch.tensor([share.num_action_tokens, share.num_tokens, share.num_truncated])
        dist.all_reduce(counts)
        num_action_tokens, num_tokens, num_truncated = counts.tolist()
        return replace(share, num_action_tokens=num_action_tokens, num_tokens=num_tokens, num_truncated=num_truncated)

    def close(self) -> None:
        """Abandon an unfinished batch. Waits for it at most 30 s: a rank that fails alone must not wait for rank 0."""
        if self._source is not None:
            self._source.close()
        if self._next is not None:
            wait([self._next], timeout=_CLOSE_S)
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None

    def _prepare(self, step: int, trainer_version: int) -> RankBatch | None:
        data = bytes_from_main(partial(self._plan, step, trainer_version), self._group)
        if not data:
            return None
        plan, self._tokens = replace(BatchPlan.from_bytes(data), tokens=self._tokens), None
        return read_rank_batch(
            self._root, self._config, plan, rank(), num_ranks(), self._attention_tokens, self._routing, self._computed
        )

    def _plan(self, step: int, trainer_version: int) -> bytes:
        """Plan a step and write its ledger, on rank 0; returns nothing if there is no plan."""
        assert self._source is not None
        assert self._attempt is not None
        if self._stop.is_set():
            return b""
        plan = self._source.plan(step, attempt_id=self._attempt.attempt_id, trainer_version=trainer_version)
        if plan is None:
            return b""
        write_ledger(self._root, self._attempt, step, plan.rows)
        self._tokens = plan.tokens
        return plan.to_bytes()


def _in_background(function: Callable[[], Result]) -> "Future[Result]":
    """Run the function in a daemon thread, which, unlike a pool's thread, does not keep the process alive."""
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="ludic-batch", daemon=True).start()
    return future


class BatchStream:
    """Iterator over batches of stored rollouts, for your own training loop: one epoch per iteration. Writes nothing.

    The next batch is read while the current one is used. Each rank makes the same plans from the same files in the same
    order, so ranks need not communicate.

    Like torchdata's nodes, it has `state_dict` and `load_state_dict`; the state is the one after the last batch
    returned. A new iteration continues an interrupted one. `epoch` counts from 1.
    """

    def __init__(
        self,
        *sources: str | Root,
        config: BatchConfig | None = None,
        groups_per_batch: int | None = None,
        seed: int | None = None,
        rank: int = 0,
        num_ranks: int = 1,
        loss_unit: LossUnit = "row",
        needs_logprobs: bool = True,
    ) -> None:
        """Read the scalars of all sources.

        config: settings that choose or pace online training are ignored. groups_per_batch, seed: None takes those of
        the first source's run. loss_unit: pair uses rows only in the pairs that the advantage makes, for dpo, ipo and
        orpo; episode weights rows so that episodes count alike. needs_logprobs: whether your loss takes a ratio to the
        sampler; if not, rollouts without stored logprobs are used too, with NaN for them.

        Raises ConfigError if there is nothing to train on, MissingRootError, StoreError, QueryError.
        """
        if not 0 <= rank < num_ranks:
            raise ConfigError(f"rank is {rank} of {num_ranks}, wanted 0 to {num_ranks - 1}")
        roots = [source if isinstance(source, Root) else Root.open(source) for source in sources]
        if not roots:
            raise ConfigError("BatchStream was given no root, wanted at least one")
        self._config, self._root = replace(config or BatchConfig(), offline=True), roots[0]
        if self._config.compute_logprobs:
            raise ConfigError(
                "compute_logprobs is set, and BatchStream runs no model to compute them with; leave it out, or train "
                "with `ludic train --offline --compute-logprobs`"
            )
        run = run_of(roots[0])
        groups_per_batch, seed = groups_per_batch or run.groups_per_batch, run.seed if seed is None else seed
        of_loss: OfLoss = {"loss_unit": loss_unit, "needs_logprobs": needs_logprobs}
        self._rules = batch_rules(self._config, groups_per_batch, seed, **of_loss)
        self._attention_tokens = attention_tokens(self._root, self._config)
        self._routing = replayed_routing(self._root, self._config)
        self._stored = StoredRollouts.read(roots, self._rules, own=roots[0])
        self._num_groups = self._stored.count_groups(self._rules)
        self._rank, self._num_ranks = rank, num_ranks
        self.epoch = 1
        self._step = 0
        self._used: set[str] = set()
        self._vetting = Vetting(self._root)

    def __len__(self) -> int:
        """Return the number of batches of an epoch, if all rollouts can be trained on."""
        return -(-self._num_groups // self._rules.groups_per_batch)

    def __iter__(self) -> Iterator[RankBatch]:
        """Yield the rest of the epoch; its last batch may be smaller. Raises StoreError, SchemaError, QueryError."""
        planner = self._planner()
        with ThreadPoolExecutor(1, thread_name_prefix="ludic-batch") as thread:
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
        plan = self._stored.plan(planner, self._vetting, step, attempt_id=0, trainer_version=0, cursor={})
        if not plan:
            return None
        return read_rank_batch(
            self._root, self._config, plan, self._rank, self._num_ranks, self._attention_tokens, self._routing
        )
