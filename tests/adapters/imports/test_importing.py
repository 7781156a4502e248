"""Imports that are repeated, cut short, or of files that are not what they should be."""

import json
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import peers
import pyarrow.parquet as pq
import pytest
from forks import Forked
from hypothesis import given, settings
from strategies import as_plain, rollout_batches
from table_rows import stored_rows
from tiny_runs import create_root, query, train_here

import ludic
from ludic.adapters.imports.formats import load_format
from ludic.adapters.imports.importing import import_file
from ludic.app.operations.run import Run
from ludic.errors import ConfigError
from ludic.models.chat import load_tokenizer
from ludic.records.conversion import from_table
from ludic.records.rollout import Rollout, RolloutBatch, new_id
from ludic.records.tables import arrow_schema
from ludic.root.json_records import ImportReport, decode_json, encode_json
from ludic.root.maintenance.compaction import compact
from ludic.root.root import Root
from ludic.root.rows.files import list_files
from ludic.root.rows.parquet import encode, read_columns
from ludic.root.rows.reader import RolloutReader
from ludic.root.rows.writer import RolloutWriter
from ludic.run.config import RunConfig
from ludic.run.run_json import put_run

pytestmark = pytest.mark.slow

Import = Callable[..., ImportReport]

_NUM_GROUPS = 70
"""More than one file of an import holds."""


def bring_in(root: Root, path: Path, name: str = "verl", env_name: str = "cats") -> ImportReport:
    model = root.record.model
    return import_file(
        root,
        str(path),
        load_format(name),
        env_name=env_name,
        tokenizer=model,
        get_tokenizer=lambda: load_tokenizer(model),
    )


def new_root(url: str, model_folder: str) -> Root:
    return put_run(url, RunConfig(model=model_folder, env=("cats",), group_size=2))


@pytest.fixture
def verl_file(tmp_path: Path) -> Path:
    """Two records a group; a blank line is none."""
    records = [
        peers.verl_record(output, reward, prompt=f"aa {'bb ' * number}")
        for number in range(_NUM_GROUPS)
        for output, reward in (("cc", 1.0), ("dd", 0.0))
    ]
    return peers.write_verl(tmp_path, ["", *records])


def everything(root: Root) -> dict[str, bytes]:
    return {name: root.read(name) for folder in ("rollouts", "evals", "imports") for name in root.list(folder)}


def test_a_second_import_of_the_same_content_changes_nothing(model_folder: str, verl_file: Path, tmp_path: Path):
    root = new_root(str(tmp_path / "run"), model_folder)
    first = bring_in(root, verl_file)
    before = everything(root)
    copy = tmp_path / "copy" / verl_file.name
    copy.parent.mkdir()
    copy.write_bytes(verl_file.read_bytes())
    second = bring_in(root, copy)
    assert everything(root) == before
    assert (first.was_there, second.was_there) == (False, True)
    assert replace(second, file=first.file, was_there=False) == first


def test_an_import_of_an_older_ludic_says_less_of_how_it_was_read(tmp_path: Path, model_folder: str, verl_file: Path):
    root = new_root(str(tmp_path / "run"), model_folder)
    name = f"imports/{bring_in(root, verl_file).worker_id}.json"
    values = decode_json(root.read(name))
    del values["code_sha256"]
    root.put(name, encode_json(values | {"mapping_sha256": "0" * 64}))
    assert bring_in(root, verl_file).was_there
    assert [each for each in ludic.open(root.url).verify().findings if each.where == name] == []


def test_an_import_that_was_cut_short_is_finished_by_the_next(root_url: str, model_folder: str, verl_file: Path):
    root = new_root(root_url, model_folder)
    report = bring_in(root, verl_file)
    whole = everything(root)
    names = [file.name for file in list_files(root)]
    assert len(names) == 2
    # What a crash before the second file leaves behind.
    root.delete(names[1])
    root.delete(f"imports/{report.worker_id}.done.json")
    reader = RolloutReader(root, ["group_size"])
    rows = reader.poll(None)
    assert rows is not None
    assert rows.group_by("group_id").aggregate([([], "count_all")])["count_all"].to_pylist() == [2] * 64
    bring_in(root, verl_file)
    assert everything(root) == whole
    late = reader.poll(None)
    assert late is not None
    assert late.num_rows == 2 * (_NUM_GROUPS - 64)


def test_a_killed_import_leaves_whole_groups_and_can_be_repeated(tmp_path: Path, model_folder: str, verl_file: Path):
    root = new_root(str(tmp_path / "run"), model_folder)
    script = Path(__file__).with_name("import_until_killed.py")
    killed = Forked([script, root.url, verl_file], tmp_path / "log")
    assert killed.wait(300) == -9
    assert len(list_files(root)) == 1
    bring_in(root, verl_file)
    assert len(stored_rows(root)) == 2 * _NUM_GROUPS
    sizes = query(root, "select count(*), any_value(group_size) from rollouts group by group_id")
    assert sizes == [(2, 2)] * _NUM_GROUPS


def test_an_import_that_another_version_began_is_refused_by_name(tmp_path: Path, model_folder: str, verl_file: Path):
    root = new_root(str(tmp_path / "run"), model_folder)
    bring_in(root, verl_file)
    name, *_ = root.list("rollouts")
    [done] = [name for name in root.list("imports") if name.endswith(".done.json")]
    root.delete(done)
    older = pq.read_table(f"{root.path}/{name}").drop_columns(["capture"])
    root.delete(name)
    root.put(name, encode(older))
    with pytest.raises(ConfigError, match="an import of it was interrupted, and this ludic writes other bytes"):
        bring_in(root, verl_file)


def test_a_file_that_an_older_ludic_imported_is_known(tmp_path: Path, model_folder: str, verl_file: Path):
    """Older files in imports/ have the digest of a mapping in TOML, and none of a user's code."""
    root = new_root(str(tmp_path / "run"), model_folder)
    name = f"imports/{bring_in(root, verl_file).worker_id}.json"
    how = decode_json(root.read(name))
    del how["code_sha256"]
    root.delete(name)
    root.put_if_absent(name, encode_json(how | {"mapping_sha256": "ab" * 32}))
    before = everything(root)
    assert bring_in(root, verl_file).was_there
    assert everything(root) == before


def test_nothing_comes_twice_when_the_first_import_was_compacted_or_expired(
    tmp_path: Path, model_folder: str, verl_file: Path
):
    root = new_root(str(tmp_path / "run"), model_folder)
    bring_in(root, verl_file)
    compact(root)
    rows = stored_rows(root)
    bring_in(root, verl_file)
    assert stored_rows(root) == rows
    root.delete("rollouts")
    bring_in(root, verl_file)
    assert list_files(root) == []


def test_the_same_file_read_in_another_way_is_refused(tmp_path: Path, model_folder: str, verl_file: Path):
    root = new_root(str(tmp_path / "run"), model_folder)
    bring_in(root, verl_file)
    with pytest.raises(
        ConfigError, match=r"was imported into .* before, with env_name 'cats', not 'dogs'; its rollouts"
    ):
        bring_in(root, verl_file, env_name="dogs")


def test_records_that_cannot_be_used_are_refused_one_by_one(tmp_path: Path, model_folder: str):
    root = new_root(str(tmp_path / "run"), model_folder)
    records = [
        peers.verl_record("cc", 1.0),
        '{"input": "aa", "outp',
        "[1, 2]",
        peers.verl_record("", 0.0),
        {"input": "aa", "score": 1.0, "step": 3},
        peers.verl_record("cc", float("nan")),
        peers.verl_record("cc", "high"),
        peers.verl_record("cc", 1e300),
        peers.verl_record("dd", 0.0),
        json.dumps(peers.verl_record("\ud83d", 1.0)),
        json.dumps(peers.verl_record("\U0001f600", 1.0)),  # as two halves
    ]
    report = bring_in(root, peers.write_verl(tmp_path, records))
    assert (report.num_records, report.num_rollouts) == (11, 4)  # an empty answer is the end token alone
    assert {refusal.line: refusal.reason for refusal in report.refused} == {
        2: "is not JSON: Invalid control character at character 22",
        3: "is [1, 2], wanted a JSON object with the columns as keys",
        5: "has no output",
        6: "score is nan, wanted a finite number",
        7: "score is 'high', wanted a finite number",
        8: "the reward is 1e+300, wanted a finite float32",
        10: r"holds half a character, \ud83d; wanted both halves, or the character itself",
    }
    # The group is as large as what is left of it.
    assert query(root, "select group_index, group_size from rollouts order by 1") == [(0, 4), (1, 4), (2, 4), (3, 4)]


def test_a_step_that_the_records_do_not_have_is_read_from_the_name_of_the_file(tmp_path: Path, model_folder: str):
    root = new_root(str(tmp_path / "run"), model_folder)
    record = peers.verl_record("cc", 1.0)
    del record["step"]
    bring_in(root, peers.write_verl(tmp_path, [record], step=17))
    assert query(root, "select policy_version from rollouts") == [(17,)]


def test_equal_files_of_two_steps_are_two_imports(tmp_path: Path, model_folder: str):
    root = new_root(str(tmp_path / "run"), model_folder)
    record = peers.verl_record("cc", 1.0)
    del record["step"]
    for step in (17, 18):
        bring_in(root, peers.write_verl(tmp_path, [record], step=step))
    assert query(root, "select policy_version from rollouts order by 1") == [(17,), (18,)]
    assert query(root, "select count(distinct rollout_id) from rollouts") == [(2,)]


@pytest.mark.parametrize(
    ("content", "name", "message"),
    [
        (b"", "verl", "none of 0 records can be used as format verl$"),
        (b"PAR1", "verl", "is not a Parquet file that can be read: "),
        (b'{"a": 1}\n', "verl", "the first, at 1: has no input and no output"),
        (b'{"a": 1}\n', "art", "the first, at 1: has no messages"),
        (b'{"traces": 3}\n', "prime-rl", "does not fit format prime-rl: TypeError"),
    ],
)
def test_a_foreign_file_is_refused_and_leaves_nothing(
    tmp_path: Path, model_folder: str, content: bytes, name: str, message: str
):
    root = new_root(str(tmp_path / "run"), model_folder)
    path = tmp_path / "foreign"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        bring_in(root, path, name)
    assert everything(root) == {}


def test_a_file_that_is_not_there_is_named(tmp_path: Path, model_folder: str):
    root = new_root(str(tmp_path / "run"), model_folder)
    with pytest.raises(ConfigError, match=r"missing\.jsonl can't be read: No such file or directory"):
        bring_in(root, tmp_path / "missing.jsonl")


def test_own_columns_of_the_run_take_the_fields_of_their_names(tmp_path: Path, model_folder: str):
    run = RunConfig(model=model_folder, env=("cats",), extra_columns={"x_judge": "string", "x_spans": "list<int64>"})
    root = put_run(str(tmp_path / "run"), run)
    records = [
        peers.verl_record("cc", 1.0, x_judge="fine", x_spans=[1, 2]),
        peers.verl_record("dd", 1.0, x_judge=4),
    ]
    report = bring_in(root, peers.write_verl(tmp_path, records))
    table = pq.read_table(root.at(list_files(root)[0].name), columns=["x_judge", "x_spans"])
    assert table.to_pylist() == [{"x_judge": "fine", "x_spans": [1, 2]}]
    assert report.refused[0].reason == "x_judge is 4, wanted str"


@settings(max_examples=20, deadline=None)
@given(batch=rollout_batches())
def test_what_ludic_exports_as_jsonl_comes_back_bit_for_bit(batch: RolloutBatch):
    metadata = replace(batch.metadata, worker_id="w0-test")
    with tempfile.TemporaryDirectory() as folder:
        origin, root = (put_run(f"memory://{new_id()}", RunConfig(model="none", env=("cats",))) for _ in range(2))
        with RolloutWriter(origin, "w0-test") as writer:
            writer.append(replace(batch, metadata=metadata))
        lines = Path(folder) / "rows.jsonl"
        Run(origin).export("jsonl", lines)
        report = bring_in(root, lines, "jsonl")
        assert report.refused == []
        wanted = [row for group in batch.groups for row in group.rollouts]
        assert by_old_id(root) == {row.rollout_id: what_comes_back(row, row.metadata) for row in wanted}


def by_old_id(root: Root) -> dict[str, Any]:
    """What was imported, by the rollout_id that it had."""
    names = arrow_schema("rollouts").names
    files = [file for folder in ("rollouts", "evals") for file in list_files(root, None, folder)]
    batches = [batch for file in files for batch in from_table(read_columns(root, file.name, names))]
    rows = [row for batch in batches for group in batch.groups for row in group.rollouts]
    return {row.metadata["rollout_id"]: what_comes_back(row, row.metadata) for row in rows}


_COME_BACK = """
env_name env_example_id purpose agent_id policy_version policy_version_last model temperature top_p top_k max_tokens
seed episode_reward reward_components truncated truncation_reason finish_reason error messages weight_versions engine
capture
"""


def what_comes_back(row: Rollout, metadata: Mapping[str, str]) -> dict[str, Any]:
    mask = np.ones(row.response_length, np.bool_) if row.action_mask is None else row.action_mask
    own = {name: value for name, value in metadata.items() if name not in _IDS}
    values = {name: getattr(row, name) for name in _COME_BACK.split()}
    values["capture"] = row.capture or "sampler"  # which is the same
    return as_plain({**values, **row.columns, "action_mask": mask, "metadata": own})


_IDS = ("rollout_id", "episode_id", "group_key", "parent_rollout_id")
"""Kept as metadata, since an import gives new ones."""


def test_a_trainer_takes_a_step_on_imported_rollouts(tmp_path: Path, model_folder: str):
    root = create_root(str(tmp_path / "run"), model_folder)
    episodes = []
    for group in range(2):
        for index in range(4):
            nodes = [
                peers.trace_node("user", "aa bb", [30, 31, 32]),
                peers.trace_node("assistant", "cc", [33, 34 + index, 40 + group], parent=0, num_sampled=2),
            ]
            traces = [peers.trace(nodes, {"r": {"score": float(index)}})]
            episodes.append(peers.episode(traces, group=f"g{group}", id=f"e{group}{index}"))
    bring_in(root, peers.write_prime_rl(tmp_path, episodes), "prime-rl")
    train_here(root, num_steps=1)
    # Rewards 0, 1, 2, 3: reward minus the mean of the other three.
    advantages = query(root, "select distinct round(advantage, 4) from batches where used order by 1")
    assert advantages == [(-2.0,), (-0.6667,), (0.6667,), (2.0,)]
