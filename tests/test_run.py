"""Run: what its methods return, on a folder and on other filesystems; what they refuse; how results look."""

import io
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import polars as pl
import pytest
from strategies import make_batch, make_group
from tiny_models import publish
from tiny_runs import create_root, fill, make_model, train_here

import ludic
from ludic.app.show.lookup import UnknownIdError
from ludic.errors import ConfigError, MissingRootError, QueryError
from ludic.records.rollout import Message, RolloutBatch, RolloutGroup, RolloutMetadata
from ludic.root.attempts import start_attempt
from ludic.root.json_records import LatestPolicy
from ludic.root.root import Root
from ludic.root.rows.files import list_files
from ludic.root.rows.tombstones import read_tombstones
from ludic.root.rows.writer import RolloutWriter
from ludic.root.weights.policies import point_latest
from ludic.settings.table import SettingsError

REWARDS = [[1.0, 0.0, 0.5, 0.5], [1.0, 1.0, 0.0, 0.0]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def batch() -> RolloutBatch:
    return make_batch(worker_id="w0-test", rewards=REWARDS)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, model: str, batch: RolloutBatch) -> ludic.Run:
    """Two groups of four in version 0, trained on for one step; not to be changed."""
    root = create_root(str(tmp_path_factory.mktemp("run") / "mine"), model)
    with RolloutWriter(root, "w0-test") as writer:
        writer.append(batch)
    train_here(root, num_steps=1)
    return ludic.open(root.url)


@pytest.fixture
def own(run: ludic.Run, tmp_path: Path) -> ludic.Run:
    """A copy of it that a test may change."""
    return ludic.open(shutil.copytree(run.url, tmp_path / "own"))


@pytest.fixture
def started(tmp_path: Path, model: str) -> Root:
    """A run of which there is nothing but run.json."""
    return create_root(str(tmp_path / "started"), model)


@pytest.mark.slow
def test_opening_a_run_imports_nothing_slow(run: ludic.Run) -> None:
    code = f"""
import sys, ludic
ludic.open({run.url!r})
print(sorted({{"torch", "transformers", "duckdb", "polars", "rich"}} & {{*sys.modules}}))
"""
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "[]\n"


def test_a_folder_without_a_run_is_not_opened(tmp_path: Path) -> None:
    with pytest.raises(MissingRootError, match="holds no run"):
        ludic.open(tmp_path)


def test_a_run_knows_its_root(run: ludic.Run) -> None:
    assert (repr(run), run.config.group_size) == (f"ludic.open({run.url!r})", 4)


def test_stats_are_data_frames(run: ludic.Run) -> None:
    stats = run.watch(once=True).totals
    # (1 + 0 + .5 + .5 + 1 + 1 + 0 + 0) / 8
    assert stats.versions.select("version", "num_groups", "reward_mean").rows() == [(0, 2, 0.5)]
    assert stats.rollouts["num_rollouts"].to_list() == [8]
    assert dict(stats.folders.select("folder", "num_rows").rows())["rollouts"] == 8
    assert dict(stats.folders.select("folder", "num_rows").rows())["policies"] is None
    assert stats.attempts["on_chain"].to_list() == [True]
    assert (stats.drops.rows(), stats.evals.columns[:2]) == ([], ["policy_version", "env_name"])


@pytest.mark.slow
def test_sql_gives_a_frame_and_takes_values(run: ludic.Run) -> None:
    frame = run.sql(
        "select group_index, count(*) as n from rollouts where episode_reward > ? group by all order by 1", 0.5
    )
    assert isinstance(frame, pl.DataFrame)
    assert frame.rows() == [(0, 2), (1, 1)]
    assert run.sql("select $a + $b as c", {"a": 1, "b": 2}).item() == 3
    assert run.sql("select reward_components from rollouts limit 1").height == 1


@pytest.mark.slow
def test_a_connection_gives_a_stream_and_sql_reads_several_runs(run: ludic.Run, own: ludic.Run) -> None:
    with ludic.connect(run.url) as con:
        batches = con.sql("select range as a from range(25000)").to_arrow_reader(10_000)
        assert [batch.num_rows for batch in batches] == [10_000, 10_000, 5_000]
    assert run.sql("select count(*) from rollouts", also=[own.url]).item() == 16


@pytest.mark.slow
def test_sql_only_reads_unless_told(run: ludic.Run, tmp_path: Path) -> None:
    query = f"copy (select 1 as a) to '{tmp_path}/made.csv'"
    with pytest.raises(QueryError, match=r"COPY is not a query.*unsafe=True"):
        run.sql(query)
    with pytest.raises(QueryError, match="reaches outside"):
        run.sql("from read_text('/etc/hostname')")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(SettingsError, match="format is csv, and out is None"):
        run.sql("select 1 as a", format="csv")
    assert run.sql("select 1 as a", out=tmp_path / "rows.csv").is_empty()
    assert (tmp_path / "rows.csv").read_text() == "a\n1\n"
    run.sql(query, unsafe=True)
    assert (tmp_path / "made.csv").read_text() == "a\n1\n"


def test_the_status_is_the_panel_of_watch(run: ludic.Run) -> None:
    status = run.watch(once=True)
    assert [row["step"] for row in status.steps] == [1]
    assert "attempt 1" in repr(status)
    assert "has ended" in repr(status)


@pytest.mark.parametrize("part", [slice(None), slice(12), slice(-12, None)])
def test_a_rollout_is_found_by_its_id_or_a_part_of_it(run: ludic.Run, batch: RolloutBatch, part: slice) -> None:
    wanted = batch.groups[1].rollouts[2]
    found = run.view(wanted.rollout_id[part], text=True)
    assert (found.kind, found.record.rollout_id, found.record.seed) == ("rollout", wanted.rollout_id, wanted.seed)
    assert found.record.response_tokens.tolist() == wanted.response_tokens.tolist()
    assert found.record.messages == tuple(wanted.messages)
    assert [use["step"] for use in found.uses] == [1]


def test_a_group_holds_its_rollouts_in_order(run: ludic.Run, batch: RolloutBatch) -> None:
    found = run.view(batch.groups[0].rollouts[0].group_id, text=True)
    assert [rollout.episode_reward for rollout in found.records] == REWARDS[0]
    assert repr(found).count("step 1") == 4
    assert found.tokens().group_by("rollout_id", maintain_order=True).len()["len"].to_list() == [16] * 4


@pytest.mark.slow
def test_a_group_is_no_rollout_and_an_unknown_id_is_neither(run: ludic.Run, batch: RolloutBatch) -> None:
    first = batch.groups[0].rollouts[0]
    with pytest.raises(UnknownIdError, match=r"is a group, wanted a rollout; `ludic view .* --text` shows it"):
        run.label(first.group_id, 1)
    with pytest.raises(UnknownIdError, match="has no rollout or group 'nothing'"):
        run.view("nothing", text=True)
    assert [run.view(id_, text=True).kind for id_ in (first.rollout_id, first.group_id)] == ["rollout", "group"]


def test_tokens_are_a_frame_with_the_logprobs_of_the_sampler(run: ludic.Run, batch: RolloutBatch) -> None:
    wanted = batch.groups[0].rollouts[0]
    tokens = run.view(wanted.rollout_id, text=True).tokens()
    assert tokens.columns == ["rollout_id", "index", "token_id", "text", "logprob", "reward", "sampled"]
    assert tokens["token_id"].to_list() == wanted.response_tokens.tolist()
    assert tokens["logprob"].to_list() == wanted.response_logprobs.tolist()
    assert tokens["index"].to_list() == list(range(16))


HOSTILE = "<script>alert('x')</script>&<img src=x onerror=y>\x1b[2J"


@pytest.mark.slow
def test_hostile_text_is_only_text_in_a_notebook(started: Root) -> None:
    group = make_group(rewards=[1.0])
    messages = (Message(role="user", content=HOSTILE, name=HOSTILE), Message(role="assistant", content="fine"))
    rollout = replace(
        group.rollouts[0], messages=messages, metadata={HOSTILE: HOSTILE}, error=HOSTILE, env_example_id=HOSTILE
    )
    group = RolloutGroup(key="k", rollouts=(rollout,))
    with RolloutWriter(started, "w0") as writer:
        writer.append(RolloutBatch(groups=(group,), metadata=RolloutMetadata(worker_id="w0")))
    run = ludic.open(started.url)
    found = [run.view(each, text=True) for each in (rollout.rollout_id, rollout.group_id)]
    for shown in (*found, run.watch(once=True).totals, run.watch(once=True)):
        html = shown._repr_html_()
        assert html.startswith("<pre ")
        assert "<script" not in html
        assert "<img" not in html
        assert "\x1b" not in html + repr(shown)
    assert "&lt;script&gt;" in run.view(rollout.rollout_id, text=True)._repr_html_()


def test_a_notebook_shows_colours_that_plain_text_has_not(run: ludic.Run, batch: RolloutBatch) -> None:
    found = run.view(batch.groups[0].rollouts[0].rollout_id, text=True)
    assert 'style="color:' in found._repr_html_()
    assert "\x1b" not in repr(found)
    assert "used at step 1 of attempt 1" in repr(found)


def test_any_version_is_sampled(run: ludic.Run) -> None:
    first = run.sample("aa ab", n=2, version=0, max_tokens=4)
    assert [(answer.policy_version, len(answer.tokens), answer.logprobs.shape) for answer in first] == [
        (0, 4, (4,))
    ] * 2
    assert run.sample("aa ab", max_tokens=4)[0].policy_version == 1
    assert run.sample("aa ab", n=2, version=0, max_tokens=4)[1].tokens.tolist() == first[1].tokens.tolist()
    with pytest.raises(ConfigError, match="holds no weights of version 9; it has 2 from 0 to 1"):
        run.sample("aa", version=9)
    with pytest.raises(ConfigError, match="n is 0, wanted at least 1"):
        run.sample("aa", n=0)


def test_only_sealed_versions_are_compacted_unless_told(started: Root) -> None:
    run = ludic.open(started.url)
    for version in range(2):
        fill(started, num_files=2, groups_per_file=1, worker_id=f"w{version}-t", seed=version, policy_version=version)
    assert run.compact().before_version == 0
    start_attempt(started, config={"max_off_policy_steps": 1})
    point_latest(started, LatestPolicy(version=2, budget=1))
    assert [partition.num_files_before for partition in run.compact(dry_run=True).partitions] == [2]
    assert len(list_files(started)) == 4
    run.compact()
    assert len(list_files(started)) == 3
    run.compact(all_versions=True)
    assert len(list_files(started)) == 2
    with pytest.raises(ConfigError, match="give one of them"):
        run.compact(1, all_versions=True)


@pytest.mark.slow
def test_expiring_keeps_what_a_replay_needs_unless_told(own: ludic.Run) -> None:
    report = own.expire(where="true")
    assert (report.expired, [stored.file.version for stored in report.kept_to_replay]) == ([], [0])
    assert own.expire(where="true", break_replay=True, dry_run=True).expired[0].num_rows == 8
    assert (len(list_files(own.root)), read_tombstones(own.root)) == (1, [])
    own.expire(before=1, break_replay=True)
    assert list_files(own.root) == []
    assert [tombstone.rule for tombstone in read_tombstones(own.root)] == ["--before 1"]


def test_expiring_keeps_what_a_resumed_trainer_wants_unless_told(own: ludic.Run) -> None:
    fill(own.root, num_files=1, worker_id="w9-t", seed=9, policy_version=1)
    report = own.expire(before=9, break_replay=True)
    assert [stored.file.worker_id for stored in report.kept_to_resume] == ["w9-t"]
    assert [file.worker_id for file in list_files(own.root)] == ["w9-t"]
    own.expire(before=9, break_resume=True)
    assert list_files(own.root) == []


@pytest.mark.parametrize("rule", [{}, {"before": 1, "where": "true"}, {"older_than": "a week"}, {"keep_versions": 0}])
def test_a_wrong_rule_deletes_nothing(own: ludic.Run, rule: dict) -> None:
    with pytest.raises(ConfigError):
        own.expire(**rule, break_resume=True, break_replay=True)
    assert len(list_files(own.root)) == 1


@pytest.mark.slow
def test_findings_name_the_broken_file_and_repair_moves_it(own: ludic.Run) -> None:
    assert own.verify().findings == []
    name = "rollouts/version=1/env=moar_cats/w7-test-0.parquet"
    own.root.put(name, b"torn")
    assert [(finding.check, finding.where) for finding in own.verify().findings] == [("unreadable", name)]
    report = own.verify(repair=True)
    assert ([finding.where for finding in report.repaired], report.findings) == ([name], [])


@pytest.mark.slow
def test_rows_are_exported_and_imported_with_their_tokens(run: ludic.Run, started: Root, tmp_path: Path) -> None:
    report = run.export("jsonl", tmp_path / "rows.jsonl", where="group_index < 2")
    assert (report.num_rows, report.location) == (4, str(tmp_path / "rows.jsonl"))
    with pytest.raises(ConfigError, match="exists; choose another target"):
        run.export("jsonl", tmp_path / "rows.jsonl")
    into = ludic.open(started.url)
    (imported,) = into.import_(tmp_path / "rows.jsonl", "jsonl")
    assert (imported.num_rollouts, imported.refused) == (4, [])
    assert into.import_([tmp_path / "rows.jsonl"], "jsonl")[0].was_there
    tokens = "select response_tokens::varchar as t from rollouts where group_index < 2 order by t"
    assert into.sql(tokens).equals(run.sql(tokens))


def test_an_export_goes_into_an_open_file_and_weights_into_a_folder(run: ludic.Run, tmp_path: Path) -> None:
    file = io.BytesIO()
    assert run.export("jsonl", file, sql="select 1 as a").num_rows == 1
    assert file.getvalue() == b'{"a": 1}\n'
    assert run.export("hf", tmp_path / "weights", version=0).source == "policies/version=0"
    assert (tmp_path / "weights/config.json").exists()


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"format": "delta", "where": "true"}, "where does not apply to format delta"),
        ({"format": "hf"}, "format hf needs out: a folder or URL"),
        ({"format": "hf", "out": "x", "step": 1, "version": 1}, "step and version both choose the weights"),
        ({"format": "iceberg", "out": io.BytesIO()}, "format iceberg needs out: a folder or URL"),
    ],
)
def test_options_that_do_not_fit_the_format_are_refused(own: ludic.Run, options: dict, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        own.export(**options)


def test_progress_is_told_to_who_asks(own: ludic.Run) -> None:
    told: list[tuple[int, str]] = []

    def track(items, total: int, description: str):
        told.append((total, description))
        return items

    own.watch(totals=True, track=track)
    own.expire(before=1, break_replay=True, track=track)
    assert {"files read", "files deleted"} <= {description for _, description in told}


def test_a_run_works_on_every_filesystem(root_url: str, model: str, tmp_path: Path) -> None:
    root = create_root(root_url, model)
    publish(root, model, budget=1)
    groups = fill(root, num_files=2, groups_per_file=1)
    run = ludic.open(root_url)
    (rollout_id,) = run.sql("select rollout_id from rollouts order by episode_reward desc limit 1")["rollout_id"]
    assert run.view(rollout_id, text=True).record.group_id in groups
    assert run.watch(once=True).totals.rollouts["num_rollouts"].item() == 8
    assert run.watch(once=True).policy.version == 0
    assert len(run.sample("aa", max_tokens=2)[0].tokens) == 2
    run.compact(all_versions=True)
    assert [file.is_compacted for file in list_files(root)] == [True]
    assert run.export("jsonl", tmp_path / "rows.jsonl").num_rows == 8
    assert run.expire(where="true").expired[0].num_rows == 8
    # `publish` wrote the weights of an attempt that never began.
    assert [finding.check for finding in run.verify().findings] == ["unknown_attempts"]
