"""Exactly once, whatever the order of writes, polls, uses, checkpoints and crashes."""

import itertools
import json
import uuid

import pyarrow as pa
import pyarrow.compute as pc
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from strategies import make_batch

from ludic.records.conversion import to_table
from ludic.root.rows.files import RolloutFile
from ludic.root.rows.parquet import encode
from ludic.root.rows.reader import Cursor, RolloutReader
from ludic.run.config import RunConfig
from ludic.run.run_json import put_run

WORKERS = ("w0", "w1", "w1-2")
VERSIONS = st.integers(0, 2)


class Delivery(RuleBasedStateMachine):
    """Workers commit files, some late; a trainer polls, uses groups, checkpoints, and crashes back to a checkpoint.

    What the model holds beside the store: groups committed, groups delivered and not yet used, and the
    history of uses, which a crash takes back to what it was at the checkpoint.
    """

    @initialize()
    def start(self) -> None:
        self.root = put_run(f"memory://{uuid.uuid4()}", RunConfig(model="m", env=("moar_cats",)))
        self.sequences = {worker: itertools.count() for worker in WORKERS}
        self.seeds = itertools.count()
        self.late: list[tuple[str, bytes, list[str]]] = []
        self.committed: list[str] = []
        self.broken: set[str] = set()
        self.history: list[str] = []
        self.checkpoint_state = (json.dumps(Cursor().to_dict()), [])
        self.begin_life(Cursor())

    def begin_life(self, cursor: Cursor) -> None:
        self.reader = RolloutReader(self.root, ["rollout_id"], cursor)
        self.pending: dict[str, pa.Table] = {}

    @rule(worker=st.sampled_from(WORKERS), version=VERSIONS, num_groups=st.integers(1, 3), is_late=st.booleans())
    def write(self, worker: str, version: int, num_groups: int, is_late: bool) -> None:
        batch = make_batch(
            worker_id=worker,
            num_groups=num_groups,
            group_size=2,
            response_length=1,
            policy_version=version,
            seed=next(self.seeds),
        )
        sequence = next(self.sequences[worker])
        name = RolloutFile(version, "moar_cats", worker, sequence).name
        data = encode(to_table(batch, run_id=self.root.run_id, sequence=sequence))
        self.late.append((name, data, [group.rollouts[0].group_id for group in batch.groups]))
        if not is_late:
            self.commit(len(self.late) - 1)

    @precondition(lambda self: self.late)
    @rule(index=st.integers(0, 100))
    def commit(self, index: int) -> None:
        """A file appears, perhaps after later ones of its worker."""
        name, data, group_ids = self.late.pop(index % len(self.late))
        assert self.root.put_if_absent(name, data)
        self.committed += group_ids

    @rule(worker=st.sampled_from(WORKERS), version=VERSIONS, data=st.sampled_from([b"", b"PAR1", b"PAR1 and no more"]))
    def break_a_file(self, worker: str, version: int, data: bytes) -> None:
        name = RolloutFile(version, "moar_cats", worker, next(self.sequences[worker])).name
        self.root.put(name, data)
        self.broken.add(name)

    @rule(versions=st.none() | st.builds(lambda start, length: range(start, start + length), VERSIONS, VERSIONS))
    def poll(self, versions: range | None) -> None:
        rows = self.reader.poll(versions)
        for group_id in [] if rows is None else dict.fromkeys(rows.column("group_id").to_pylist()):
            assert group_id in self.committed, "a group that nobody wrote"
            assert group_id not in self.pending, "delivered twice in one life"
            assert group_id not in self.history, "delivered after it was used"
            self.pending[group_id] = rows.filter(pc.equal(rows.column("group_id"), group_id))
            assert self.pending[group_id].num_rows == 2, "a group in pieces"

    @rule(data=st.data(), is_checkpointed=st.booleans())
    def use(self, data: st.DataObject, is_checkpointed: bool) -> None:
        """Some groups of what is there, in any order, perhaps in part of a file."""
        self.poll(None)
        used = data.draw(st.lists(st.sampled_from(sorted(self.pending)), unique=True)) if self.pending else []
        if used:
            self.reader.consume(pa.concat_tables([self.pending.pop(group_id) for group_id in used]))
        self.history += used
        if is_checkpointed:
            self.checkpoint_state = json.dumps(self.reader.cursor.to_dict()), list(self.history)

    @rule()
    def crash(self) -> None:
        state, history = self.checkpoint_state
        self.history = list(history)
        self.begin_life(Cursor.from_dict(json.loads(state)))

    def teardown(self) -> None:
        if not hasattr(self, "reader"):
            return
        while self.late:
            self.commit(0)
        self.poll(None)
        if self.pending:
            self.reader.consume(pa.concat_tables(self.pending.values()))
        assert sorted([*self.history, *self.pending]) == sorted(self.committed)
        assert set(self.reader.broken_files) == self.broken
        assert self.reader.poll(None) is None
        assert RolloutReader(self.root, ["rollout_id"], self.reader.cursor).poll(None) is None
        self.root.delete("")


TestDelivery = Delivery.TestCase
TestDelivery.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
