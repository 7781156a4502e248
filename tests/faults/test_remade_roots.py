"""A root that was deleted, or made again, is not the run that a process opened: it stops, and writes nothing.

The old run and the new one have the same URL, the same attempt 1, and the same slot 0.
"""

import ast
import asyncio
import inspect
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from strategies import make_batch

import ludic
from ludic.app.launch.local import predecessor, worker_process
from ludic.errors import ReplacedRootError, SchemaError
from ludic.records.tables import arrow_schema
from ludic.rollouts.weight_sync import WeightSync
from ludic.root import claims
from ludic.root.attempts import (
    MARKER,
    check_not_fenced,
    check_not_replaced,
    checkpoint_to_resume,
    folder_of,
    prune_checkpoints,
    read_attempt,
    record_attempt,
    start_attempt,
)
from ludic.root.catalogue import WORKERS
from ludic.root.claims import claim, claim_free_slot, claim_slot, held, held_slot, read_lease
from ludic.root.gateways import claim_episode, claim_life
from ludic.root.json_records import CheckpointInfo, LatestPolicy, encode_json, encode_record
from ludic.root.root import Root
from ludic.root.rows.calls import CallLog
from ludic.root.rows.evaluations import BlockClaims
from ludic.root.rows.ledger import write_ledger
from ludic.root.rows.tables import MetricsLog, ScoreLog, TokenStatsLog, to_token_stats
from ludic.root.rows.writer import RolloutWriter
from ludic.root.weights.policies import latest_policy, point_latest, publish_policy
from ludic.run.run_json import create_root, run_of
from ludic.training.publisher import Publisher

Act = Callable[[], object]
CHECKS = {"check_same_run", "check_claim", "check_not_replaced", "check_not_fenced", "_check_own"}
"""The functions that compare what a process opened with what is stored now."""


def remake(old: Root) -> Root:
    """Delete a root and start another run in its place, which has a trainer, a worker and a published version."""
    old.fs.rm(old.path, recursive=True)
    new = create_root(old.url, run_of(old))
    start_attempt(new)
    claim_slot(new, 0, "w0-new")
    point_latest(new, LatestPolicy(version=0, budget=1))
    return new


def contents(root: Root) -> dict[str, bytes]:
    found = (path for path in root.fs.find(root.path) if "/.tmp/" not in path)
    return {path: root.fs.cat_file(path) for path in found}


# What a process of the old run does after it began: each function prepares it, and returns what it then tries.


def save(folder: Path) -> None:
    (folder / "config.json").write_text("{}")


def renewing(root: Root) -> Act:
    return partial(claims._replace, root, claim(root, 0))


def recording(root: Root) -> Act:
    return partial(record_attempt, root, claim(root, 0), None, {})


def checking(check: Callable[[Root, object], None], root: Root) -> Act:
    return partial(check, root, start_attempt(root))


def planning(root: Root) -> Act:
    return partial(write_ledger, root, start_attempt(root), 1, arrow_schema("batches").empty_table())


def publisher(root: Root, act: Callable[[Publisher], object]) -> Act:
    """Of a trainer that has published version 0."""
    made = Publisher(root, start_attempt(root), keep=None)
    made.publish(save, step=0)
    return partial(act, made)


def asks(made: Publisher) -> None:
    for _ in range(2):  # all groups asked for have to be there, or the wait to be long
        made.note_wait(0, 10_000, 1e9, version=0)


def writes(made: Publisher) -> None:
    made._write(save, 1, 0)


def following(root: Root) -> Act:
    return WeightSync(root, Path("unused"), None, {}, None).follow  # type: ignore[arg-type]


def appending(root: Root, open_log: Callable[[Root], object], append: Callable[[object], None]) -> Act:
    log = open_log(root)

    def act() -> None:
        append(log)
        log.close()  # type: ignore[attr-defined]

    return act


def calling(root: Root) -> Act:
    """Of a gateway that serves an episode."""
    log = CallLog(root, claim_life(root))
    names = dict.fromkeys(("episode_id", "call_id", "request_digest"), "a")
    row = {**names, "attempt": 1, "event": "intent", "dialect": "chat", "path": "/v1/chat/completions"}

    def act() -> None:
        try:
            asyncio.run(log.append(row))
        finally:
            log.close()

    return act


A_SCORE = {"rollout_id": "r", "name": "score", "value": 1.0, "scorer_version": "0", "created_at": datetime.now(UTC)}


def one_row_of_token_stats() -> pa.Table:
    one = np.zeros(1, np.float32)
    lists = {"trainer_logprobs": one, "entropy": one, "weight": one, "clipped": np.zeros(1, np.bool_)}
    return to_token_stats(attempt_id=1, step=1, rollout_ids=["r"], lengths=np.ones(1, np.int32), **lists)


ACTS: dict[str, Callable[[Root], Act]] = {
    "app.launch.local._args": lambda root: worker_process(root, 0, {}, {}).args,
    "app.launch.local.predecessor": lambda root: partial(predecessor, root),
    "rollouts.weight_sync.WeightSync.follow": following,
    "root.attempts.check_not_fenced": partial(checking, check_not_fenced),
    "root.attempts.check_not_replaced": partial(checking, check_not_replaced),
    "root.attempts.record_attempt": recording,
    "root.attempts.prune_checkpoints": lambda root: partial(prune_checkpoints, root, start_attempt(root), 1),
    "root.rows.evaluations.BlockClaims._change": lambda root: partial(BlockClaims(root).take, "evaluations/a-block"),
    "root.claims._replace": renewing,
    "root.claims.claim": lambda root: partial(claim, root, 0),
    "root.rows.ledger.write_ledger": planning,
    "root.rows.tables.MetricsLog": lambda root: appending(
        root, lambda root: MetricsLog(root, "train", "1"), lambda log: log.write(policy_version=0, step=1)
    ),
    "root.weights.policies.latest_policy": lambda root: partial(latest_policy, root),
    "root.weights.policies.publish_policy": lambda root: partial(
        publish_policy, root, save, step=0, attempt_id=0, parent_version=None, budget=0
    ),
    "root.rows.tables.ScoreLog": lambda root: appending(
        root, lambda root: ScoreLog(root, "judge"), lambda log: log.append(A_SCORE)
    ),
    "root.gateways.claim_life": lambda root: partial(claim_life, root),
    "root.gateways.claim_episode": lambda root: partial(
        claim_episode, claim_life(root), episode_id="e", attempt=1, key_digest="0" * 64
    ),
    "root.rows.calls.CallLog._check_run": calling,
    "root.claims.claim_slot": lambda root: partial(claim_slot, root, 0, "w0-old"),
    "root.claims.claim_free_slot": lambda root: partial(claim_free_slot, root, "recorder-old"),
    "root.rows.tables.TokenStatsLog": lambda root: appending(
        root, lambda root: TokenStatsLog(root, 0), lambda log: log.append(one_row_of_token_stats)
    ),
    "root.rows.writer.RolloutWriter": lambda root: appending(
        root,
        lambda root: RolloutWriter(root, "w0-old"),
        lambda writer: writer.append(make_batch(worker_id="w0-old", num_groups=1)),
    ),
    "training.publisher.Publisher._write": lambda root: publisher(root, writes),
    "training.publisher.Publisher.note_wait": lambda root: publisher(root, asks),
    "training.publisher.Publisher.begin": lambda root: publisher(
        root, lambda made: made.begin(save, step=0, num_ready_groups=0)
    ),
    "training.publisher.Publisher.repair_latest": lambda root: publisher(root, Publisher.repair_latest),
    "training.publisher.Publisher.start": lambda root: publisher(root, lambda made: made.start(save, step=1)),
}
READS = {"root.weights.policies.latest_policy", "rollouts.weight_sync.WeightSync.follow"}
"""Functions that compare only what they read; where nothing is, they find nothing."""
ELSEWHERE = {
    "root.rows.writer.BackgroundAppender._write": "by every class that has an appender, above",
    "root.rows.tables.TableLog": "by the log of each table, above",
    "root.claims.check_claim": "by `renewing`, `recording` and `checking`, above",
    "root.claims.change_claim": "by test_the_end_of_a_worker..., which raises nothing",
    **dict.fromkeys(
        [f"run.recording.life.RecorderLife.{name}" for name in ("_attempt_for", "put_numbers", "put_rows")],
        "by tests/run/recording/test_failing_stores.py, which raises nothing",
    ),
    "training.trainer._Trainer._own_attempt": "by tests/integration/test_remade_root.py, with real processes",
    "training.trainer._Trainer._write": "by test_a_checkpoint...",
}
"""Functions that compare, and that another test tries."""


APPENDERS = {"BackgroundAppender", "TableLog"}


def comparing_functions() -> Iterator[str]:
    """Functions of ludic that call one of CHECKS, and classes that append through one of APPENDERS."""
    package = Path(inspect.getfile(ludic)).parent
    for file in package.rglob("*.py"):
        module, text = ".".join(file.relative_to(package).with_suffix("").parts), file.read_text()
        for node in ast.parse(text).body if any(name in text for name in (*CHECKS, *APPENDERS)) else ():
            if isinstance(node, ast.ClassDef):
                if APPENDERS & called(node):
                    yield f"{module}.{node.name}"
                functions = [
                    (f"{node.name}.{part.name}", part) for part in node.body if isinstance(part, ast.FunctionDef)
                ]
            else:
                functions = [(node.name, node)] if isinstance(node, ast.FunctionDef) else []
            for name, function in functions:
                if CHECKS & called(function):
                    yield f"{module}.{name}"


def called(node: ast.AST) -> set[str]:
    """Names that occur in a part of the code, whether they are called there or passed on."""
    names = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
    return names | {part.attr for part in ast.walk(node) if isinstance(part, ast.Attribute)}


def test_every_function_that_compares_is_tried():
    assert sorted(comparing_functions()) == sorted(ACTS.keys() | ELSEWHERE.keys())


@pytest.mark.parametrize("name", ACTS)
def test_a_process_of_the_old_run_leaves_the_new_one_as_it_is(root, name):
    act = ACTS[name](root)
    before = contents(remake(root))
    with pytest.raises(ReplacedRootError, match="was deleted and created again"):
        act()
    assert contents(root) == before


@pytest.mark.parametrize("name", sorted(ACTS.keys() - READS))
def test_a_process_does_not_bring_a_deleted_root_back(tmp_path, run_config, name):
    root = create_root(str(tmp_path / "run"), run_config)
    act = ACTS[name](root)
    root.fs.rm(root.path, recursive=True)
    with pytest.raises(ReplacedRootError, match="was deleted"):
        act()
    assert contents(root) == {}


def test_a_lease_that_another_trainer_holds_is_not_renewed_or_released(root, caplog):
    fenced = threading.Event()
    with held(root, claim(root, 0, lease_s=2.4), on_fenced=fenced.set, also=lambda: None):
        new = remake(root)
        before = contents(new)
        assert fenced.wait(60)
    assert "was deleted and created again: attempt 1 is of" in caplog.text
    assert contents(new) == before
    assert read_lease(new, 1).claim_id == read_attempt(new, 1).claim_id


def test_a_damaged_lease_is_renewed_by_its_owner(root):
    with held(root, claim(root, 0, lease_s=0.3), on_fenced=lambda: None, also=lambda: None):
        root.put("attempts/1.lease", b"{")
    assert read_lease(root, 1).released


def test_the_end_of_a_worker_does_not_touch_the_claim_of_another(root):
    with held_slot(root, 0, "w0-old"):
        before = contents(remake(root))
    assert contents(root) == before
    assert WORKERS.read(root, 0, 1).worker_id == "w0-new"


def test_latest_of_a_run_that_is_gone_is_no_version_of_this_one(root):
    old_id, new = root.run_id, remake(root)
    new.put("policies/LATEST", encode_json({"version": 7, "groups_per_worker": 9, "run_id": old_id}))
    with pytest.raises(SchemaError, match=f"is of run {old_id}, wanted {new.run_id}; the next publish replaces it"):
        latest_policy(new)


def test_a_checkpoint_of_a_run_that_is_gone_is_passed_over(root, caplog):
    """A trainer puts the marker right after it compared; if the root is remade in between, the marker is there."""
    old_id, new = root.run_id, remake(root)
    facts = {"policy_version": 0, "cursor": {}, "config": {}, "num_ranks": 1}
    for step, run_id in ((7, old_id), (3, new.run_id), (2, None)):
        info = CheckpointInfo(attempt_id=1, step=step, run_id=run_id, **facts)
        new.put(f"{folder_of(info)}/{MARKER}", encode_record(info))
    assert checkpoint_to_resume(new, read_attempt(new, 1)).step == 3
    assert f"checkpoints/attempt=1/step=7 is of run {old_id}, which was deleted here" in caplog.text
