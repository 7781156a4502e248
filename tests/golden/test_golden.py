"""Stores that ludic wrote when a schema version was new read as their records were, in every way ludic reads."""

import io
import json
import shutil
from collections.abc import Iterator
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

import duckdb
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from golden.write_golden import FILES, as_json

import ludic
from ludic.app.show.status import draw
from ludic.app.show.watch import Watcher
from ludic.errors import SchemaError
from ludic.records.conversion import from_table, resolve_row
from ludic.records.tables import SCHEMA_VERSION, arrow_schema, rollouts_schema
from ludic.root.attempts import newest_attempt_id, read_attempt
from ludic.root.root import Root
from ludic.root.rows.ledger import read_ledger
from ludic.root.rows.parquet import read_columns, read_rows
from ludic.root.rows.reader import RolloutReader
from ludic.root.rows.tables import MetricsTail
from ludic.root.weights.policies import latest_policy, read_policy

HERE = Path(__file__).parent
SINCE_1_9: dict[str, Any] = {"example_columns": None}
SINCE_1_8: dict[str, Any] = {"capture": None, **SINCE_1_9}
SINCE_1_6: dict[str, Any] = {"experts": None, **SINCE_1_8}
SINCE_1_5: dict[str, Any] = {"wanted": None, "correct": None, "traceback": None, **SINCE_1_6}
SINCE_1_4: dict[str, Any] = {"trajectory_id": None, **SINCE_1_5}
SINCE_1_3: dict[str, Any] = {"engine": None, "kept_tokens": None, **SINCE_1_4}
SINCE_1_2: dict[str, Any] = {"parent_segment_index": None, "weight_versions": None, **SINCE_1_3}
STORES = {
    "v1.0": {"extra": {}, **SINCE_1_2},
    "v1.1": SINCE_1_2,
    "v1.2": SINCE_1_3,
    "v1.3": SINCE_1_4,
    "v1.4": SINCE_1_5,
    "v1.5": SINCE_1_6,
    "v1.6": SINCE_1_8,
    "v1.7": SINCE_1_8,
    "v1.8": SINCE_1_9,
    "v1.9": {},
}
"""What a Rollout of each version had not yet, as it reads now."""
STEPS_SINCE_1_2 = {"agent_steps": "parse_feedback", "environment_steps": "observation_hash"}
"""Fields of steps that are null before 1.2."""
MESSAGES_SINCE_1_7 = {"reasoning": None, "tool_call_id": None}
"""Fields of messages that are null before 1.7."""


@pytest.fixture(params=STORES)
def name(request) -> str:
    return request.param


@pytest.fixture
def root(name) -> Root:
    return Root.open(str(HERE / name))


@pytest.fixture
def expected(name) -> dict[str, Any]:
    """What write_golden.py put down beside the store."""
    found = json.loads((HERE / f"{name}.json").read_text(encoding="utf-8"))
    for row in rows_of(found, ""):
        row.update({field: value for field, value in STORES[name].items() if field not in row})
        for column, field in STEPS_SINCE_1_2.items():
            for step in row[column]:
                step.setdefault(field, None)
        row["messages"] = [MESSAGES_SINCE_1_7 | message for message in row["messages"]]
    return found


def rows_of(expected: dict[str, Any], folder: str) -> Iterator[dict[str, Any]]:
    for file, groups in expected["files"].items():
        if file.startswith(folder):
            yield from (row for group in groups for row in group["rollouts"])


def by_id(rows: Iterator[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {row["rollout_id"]: row for row in rows}


def test_a_new_golden_store_would_get_records_of_the_same_form():
    stored = json.loads((HERE / f"v{SCHEMA_VERSION}.json").read_text(encoding="utf-8"))["files"]
    assert json.dumps(as_json(FILES)) == json.dumps(stored)


def test_every_record_comes_back_bit_for_bit(root, expected):
    for file, groups in expected["files"].items():
        (batch,) = from_table(read_columns(root, file, rollouts_schema(root.extra_columns).names))
        assert batch.metadata.timestamp == datetime.fromisoformat(expected["created_at"])
        assert as_json(batch.groups) == groups


def test_a_record_is_read_without_the_declaration_of_its_own_columns(root, expected):
    for file, groups in expected["files"].items():
        (batch,) = from_table(pq.read_table(io.BytesIO(root.read(file))))
        assert as_json(batch.groups) == groups


def test_the_reader_delivers_each_row_once_with_the_address_that_reads_it(root, expected):
    reader = RolloutReader(root, ["rollout_id", "group_id", "policy_version", "env_name"])
    rows = reader.poll(None).to_pylist()
    wanted = by_id(rows_of(expected, "rollouts"))
    assert sorted(row["rollout_id"] for row in rows) == sorted(wanted)
    assert reader.poll(None) is None
    assert reader.broken_files == {}
    for row in rows:
        (read,) = read_rows(root, row["file"], [(row["row_group"], row["row"])], ["response_logprobs"]).to_pylist()
        assert read["response_logprobs"] == wanted[row["rollout_id"]]["response_logprobs"]


@cache
def connected(url: str) -> duckdb.DuckDBPyConnection:
    """Nothing changes a root here once it is asked, and to connect takes longer than to ask."""
    return ludic.connect(url)


def ask(root: Root, query: str) -> list[dict[str, Any]]:
    cursor = connected(root.url).execute(query)
    names = [column[0] for column in cursor.description]
    return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]


@pytest.mark.parametrize("view", ["rollouts", "evals"])
def test_sql_sees_every_column(root, expected, view):
    rows = ask(root, f"from {view}")
    wanted = by_id(rows_of(expected, view))
    assert sorted(row["rollout_id"] for row in rows) == sorted(wanted)
    for row in map(resolve_row, rows):
        record = wanted[row["rollout_id"]]
        flat = {name: value for name, value in record.items() if name != "extra"} | record["extra"]
        # As SQL has it: DuckDB's float is the row's float32, and not the decimal that was set.
        assert {name: row[name] for name in flat} == flat | {"temperature": row["temperature"], "top_p": row["top_p"]}
        assert (row["temperature"], row["top_p"]) == pytest.approx((record["temperature"], record["top_p"]))


def test_sql_sees_the_steps_with_their_texts(root, expected):
    found = ask(root, "from steps order by rollout_id, kind, step_index")
    rows = sorted(rows_of(expected, "rollouts"), key=lambda row: row["rollout_id"])
    kinds = ("agent", "environment")
    wanted = [(row["rollout_id"], kind, step) for row in rows for kind in kinds for step in row[f"{kind}_steps"]]
    assert len(found) == len(wanted)
    for step, (rollout_id, kind, record) in zip(found, wanted, strict=True):
        assert (step["rollout_id"], step["kind"]) == (rollout_id, kind)
        assert {name: step[name] for name in record} == record


@pytest.mark.slow
def test_sql_sees_what_the_trainer_wrote(root, expected):
    ledger = ask(root, "select step, rollout_id, advantage, used, reason from batches")
    assert {(str(row.pop("step")), row.pop("rollout_id")): list(row.values()) for row in ledger} == {
        (step, rollout_id): rest for step, rows in expected["ledger"].items() for rollout_id, rest in rows.items()
    }
    (metrics,) = ask(root, "from metrics")
    assert {name: metrics[name] for name in expected["metrics"]} == expected["metrics"]
    assert ask(root, "select version, attempt_id from policies") == [{"version": 3, "attempt_id": 1}]
    assert ask(root, "select attempt_id, owner from attempts") == [{"attempt_id": 1, "owner": "host-3"}]
    assert latest_policy(root).version == 3
    assert read_attempt(root, newest_attempt_id(root)).owner == "host-3"


def test_polars_sees_every_column(root, expected):
    frame = ludic.scan(root).collect()
    assert isinstance(frame, pl.DataFrame)
    wanted = by_id(rows_of(expected, "rollouts"))
    assert sorted(frame["rollout_id"]) == sorted(wanted)
    for row in map(resolve_row, frame.to_dicts()):
        record = wanted[row["rollout_id"]]
        for name in ("response_tokens", "response_logprobs", "action_mask", "agent_steps", "messages", "error"):
            assert row[name] == record[name]
        assert {name: row[name] for name in record["extra"]} == record["extra"]


# --- Versions to come --------------------------------------------------------------------------------------


def rewritten(tmp_path: Path, name: str, version: str) -> Root:
    """A copy of a store whose rollouts say this schema version, with a column and a field that we do not know."""
    folder = shutil.copytree(HERE / name, tmp_path / name)
    for path in folder.glob("rollouts/**/*.parquet"):
        table = pq.ParquetFile(path).read()
        metadata = {**table.schema.metadata, b"ludic.schema_version": version.encode()}
        table = table.append_column("mood", pa.array(["calm"] * table.num_rows))
        column = table.schema.get_field_index("messages")
        message = table.schema.field("messages").type.value_type
        type_ = pa.list_(pa.struct([pa.field("mood", pa.string()), *message]))
        table = table.set_column(column, "messages", table["messages"].cast(type_))
        # Without the digests, which other programs do not write.
        metadata = {key: value for key, value in metadata.items() if key in (b"ludic.table", b"ludic.schema_version")}
        pq.write_table(table.replace_schema_metadata(metadata), path)
    return Root.open(str(folder))


def test_a_newer_minor_version_reads_the_same(tmp_path, name, expected):
    root = rewritten(tmp_path, name, "1.99")
    reader = RolloutReader(root, ["rollout_id", "group_id"])
    assert reader.poll(None).num_rows == len(list(rows_of(expected, "rollouts")))
    for file, groups in expected["files"].items():
        (batch,) = from_table(read_columns(root, file, rollouts_schema(root.extra_columns).names))
        assert as_json(batch.groups) == groups
    test_sql_sees_every_column(root, expected, "rollouts")
    test_polars_sees_every_column(root, expected)


def test_a_newer_major_version_is_refused_by_name(tmp_path, name):
    root = rewritten(tmp_path, name, "2.0")
    file = "rollouts/version=4/env=moar_cats/host-1-2.parquet"
    message = f"{file}: rollouts schema 2.0 is newer than this ludic, which reads {SCHEMA_VERSION}; upgrade ludic"
    with pytest.raises(SchemaError, match=message):
        read_columns(root, file, ["rollout_id"])
    reader = RolloutReader(root, ["rollout_id", "group_id"])
    assert reader.poll(None) is None
    assert message in reader.broken_files[file]


@pytest.mark.parametrize("name", ["v1.0", "v1.1"])
def test_a_ledger_of_an_older_schema_reads_with_nulls_for_what_it_lacks(name):
    rows = read_ledger(Root.open(str(HERE / name)), 1, 1)
    assert rows.schema.equals(arrow_schema("batches"))
    assert rows.num_rows > 0
    assert rows["rollout_id"].null_count == 0
    for column in ("token_advantages", "num_uses", "seq_len_truncated", "truncation_reason"):
        assert rows[column].null_count == rows.num_rows


def test_the_ledger_says_which_rows_were_truncated_since_batches_1_4(root, name):
    rows = read_ledger(root, 1, 2)
    truncated = dict(zip(rows["rollout_id"].to_pylist(), rows["truncated"].to_pylist(), strict=True))
    wanted = {"mixed-r0": False, "mixed-r1": True, "mixed-r2": False}
    assert truncated == (wanted if name >= "v1.4" else dict.fromkeys(wanted))


def test_views_of_groups_and_evaluations_have_wanted_answers_since_rollouts_1_5(root, name):
    groups = {row["group_id"]: (row["wanted"], row["accuracy"]) for row in ask(root, "from groups")}
    (episode,) = ask(root, "select wanted, correct from eval_episodes")
    if name < "v1.5":
        assert set(groups.values()) == {(None, None)}
        assert episode == {"wanted": None, "correct": None}
        return
    # of three answers one is right, one wrong and one unknown; the failed episode is unknown, and a sub-agent is none
    assert groups == {
        "single": ("cat\nnumber 0 🐈", 0.5),
        "turns": ("6", 1.0),
        "mixed": (None, None),
        "newer": (None, None),
    }
    assert episode == {"wanted": "", "correct": False}


def test_each_trajectory_is_one_in_sql(root):
    # the child is known by its second row alone; the failed episode is a trajectory, too
    rows = ask(root, "select group_id, agent_id, peers, reward, num_rows, action_length from trajectories order by all")
    turns = [row for row in rows if row["group_id"] == "turns"]
    assert len(rows) == 10
    assert turns == [
        {"group_id": "turns", "peers": "environment", "num_rows": 1, **rest}
        | ({"peers": "helper, depth 1"} if rest["agent_id"] == "helper" else {})
        for rest in (
            {"agent_id": "agent", "reward": 0.5, "action_length": 4},
            {"agent_id": "agent", "reward": None, "action_length": 0},
            {"agent_id": "helper", "reward": 0.5, "action_length": 5},
        )
    ]


METRICS_1_1 = (
    *("read_s", "pack_s", "reference_s", "forward_s", "backward_s", "collectives_s", "optimizer_s", "checkpoint_s"),
    *("model_flops", "mfu", "num_truncated", "num_parse_errors", "num_errors"),
)
"""Columns that metrics 1.0 had not yet."""
METRICS_1_2 = ("token_imbalance", "preference_margin", "preference_accuracy")
METRICS_1_3 = ("num_incomplete_completions", "num_zero_variance_groups", "first_error")
# v1.3, v1.4 and v1.5 were written with metrics 1.4; its row leaves them null, too.
METRICS_1_4 = ("sampler_kl_k1", "ratio_p01", "ratio_p99")
METRICS_1_8 = {"lag_mean": "off_policy_steps_mean", "lag_max": "off_policy_steps_max"}
"""Columns that have other names since metrics 1.8. All stores are older."""
METRICS_1_6 = ("router_balance_loss", "router_z_loss", "expert_imbalance")
METRICS_1_9 = ("memory_bytes",)
NEWER = (*METRICS_1_1, *METRICS_1_2, *METRICS_1_3, *METRICS_1_4, *METRICS_1_6, *METRICS_1_9)


def test_metrics_of_an_older_schema_read_with_nulls_for_what_they_lack(root, expected):
    (tailed,), (asked,) = MetricsTail(root).poll(), ask(root, "from metrics")
    names = arrow_schema("metrics").names
    assert (list(tailed), list(asked)) == (names, [*names, "root"])
    for row in (tailed, asked):
        found = {name: row[METRICS_1_8.get(name, name)] for name in expected["metrics"]}
        found |= {name: dict(found[name]) for name in ("other",) if name in found}  # pyarrow has pairs for a map
        assert found == expected["metrics"]
        assert {row[name] for name in NEWER} == {None}


def test_a_run_of_an_older_schema_can_be_watched(root):
    status = Watcher(root.url).poll()
    assert [step["step"] for step in status.steps] == [1]
    assert (status.trainer.owner, status.policy) == ("host-3", read_policy(root, 3))
    draw(status)


def test_the_rows_of_an_older_schema_are_verified(root):
    # The stores have records of a policy, without its weights.
    assert {finding.check for finding in ludic.open(root.url).verify().findings} == {"policy", "unknown_policies"}
