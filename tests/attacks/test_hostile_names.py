"""Names and texts in a root that somebody else made: none becomes a path outside of it, or a terminal's command."""

import json
from dataclasses import replace
from pathlib import Path

import boto3
import pytest
from strategies import make_group

import ludic as package
from ludic.errors import ConfigError, SchemaError
from ludic.records.rollout import Message, RolloutBatch, RolloutMetadata
from ludic.root.catalogue import ATTEMPTS, AttemptName, parse_number
from ludic.root.maintenance.verify import check_root
from ludic.root.root import Root
from ludic.root.rows.files import list_versions, parse_source, read_partition_plans
from ludic.root.rows.writer import RolloutWriter
from ludic.root.storage.s3 import S3, ObstoreS3
from ludic.root.weights.policies import fetch_policy, policy_versions, stored_versions
from ludic.run.config import RunConfig
from ludic.run.run_json import create_root

ESCAPE, TURNED, TAG = "\x1b]0;owned\x07", "\u202egnp.exe", "\U000e0041"


@pytest.mark.parametrize("run_id", ["../../..", "/tmp/x", "a/b", "", "a" * 65, 7, None, "a\x00b", "..", "ä"])
def test_a_run_id_that_would_be_a_path_is_refused(breakable: Path, run_id: object) -> None:
    values = json.loads((breakable / "run.json").read_text()) | {"run_id": run_id}
    (breakable / "run.json").write_text(json.dumps(values))
    with pytest.raises(ConfigError, match=r"is not a run\.json that ludic can read: .*run_id"):
        Root.open(str(breakable))


def test_a_deeply_nested_run_json_is_refused(breakable: Path) -> None:
    (breakable / "run.json").write_text("[" * 100_000)
    with pytest.raises(ConfigError, match=r"is not a run\.json that ludic can read"):
        Root.open(str(breakable))


@pytest.mark.parametrize("name", ["../x", "rollouts/../../x", "rollouts/..", "a\x00b"])
def test_a_name_that_leads_out_of_the_root_is_never_touched(started: Root, name: str) -> None:
    for operation in (started.read, started.exists, started.list, started.delete, started.open_file):
        with pytest.raises(SchemaError, match="leads out of the run"):
            operation(name)
    with pytest.raises(SchemaError, match="leads out of the run"):
        started.put(name, b"x")


def test_numbers_in_names_are_those_that_ludic_writes() -> None:
    assert [parse_number(text) for text in ("0", "17", "9" * 18)] == [0, 17, 10**18 - 1]
    assert {parse_number(text) for text in ("", "-1", "+1", "01", " 1", "1_0", "²", "٣", "9" * 19)} == {None}
    assert ATTEMPTS.parse(f"attempts/{2**31 - 1}.json") == AttemptName(2**31 - 1)
    assert ATTEMPTS.parse(f"attempts/{2**31}.json") is None


@pytest.mark.parametrize("number", ["²", "٣", "-1", "9" * 30])
def test_folders_of_foreign_numbers_are_passed_over(breakable: Path, number: str) -> None:
    for folder in ("rollouts", "policies"):
        (breakable / folder / f"version={number}").mkdir()
    root = Root.open(str(breakable))
    assert list_versions(root) == [0, 1]
    assert policy_versions(root) == [0, 1]


@pytest.mark.parametrize(
    "source", [["../../x", 0], ["a/b", 0], ["", 0], ["w0", -1], ["w0", "1"], [None, 0], ["w0", 1.5]]
)
def test_a_source_that_no_worker_commits_is_refused(source: list) -> None:
    with pytest.raises(ValueError):
        parse_source(*source)


@pytest.mark.parametrize(
    "output",
    [
        {"name": "rollouts/version=0/env=a/compacted.0-0.parquet", "sources": [["../../../x", 0]]},
        {"name": "rollouts/version=1/env=a/compacted.0-0.parquet", "sources": [["w0", 0]]},
        {"name": "rollouts/version=0/env=a/w0-0.parquet", "sources": [["w0", 0]]},
        {"name": "../run.json", "sources": [["w0", 0]]},
        ["not", "an", "object"],
    ],
)
def test_a_hostile_compaction_plan_plans_nothing(started: Root, output: object) -> None:
    partition = "rollouts/version=0/env=a"
    started.put(f"compactions/{partition}/0.json", json.dumps({"outputs": [output]}).encode())
    (plan,) = read_partition_plans(started, partition)
    assert plan.outputs == ()


COMMANDS = (
    ("watch", "--totals"),
    ("verify",),
    ("sql", "select * from rollouts"),
    ("sql", "select * from rollouts", "--format", "json"),
    ("view", "ID"),
    ("view", "GROUP"),
    ("view", "ID", "--json"),
    ("view", "no-such-id" + ESCAPE + TURNED),
    ("watch", "--once"),
    ("compact", "--dry-run"),
    ("expire", "--keep-versions", "1", "--dry-run"),
)


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> tuple[Root, str, str]:
    """A run in which every text that a model, an environment or a stranger chose would command a terminal."""
    evil = f"evil{ESCAPE}{TURNED}{TAG}"
    url = str(tmp_path_factory.mktemp("hostile") / "run")
    root = create_root(url, RunConfig(model=evil, env=(evil,)))
    group = make_group(rewards=[1.0, None])
    messages = (Message(role=evil, name=evil, content=evil),)
    rollouts = tuple(
        replace(r, env_name=evil, env_example_id=evil, model=evil, messages=messages, metadata={evil: evil})
        for r in group.rollouts
    )
    rollouts = (rollouts[0], replace(rollouts[1], error=evil))
    with RolloutWriter(root, "w0-test") as writer:
        writer.append(
            RolloutBatch(
                groups=(replace(group, key=evil, rollouts=rollouts),), metadata=RolloutMetadata(worker_id="w0-test")
            )
        )
    torn = Path(root.path, "rollouts", "version=0", f"env={evil}", "w1-0.parquet")  # not as ludic spells it
    torn.parent.mkdir()
    torn.write_bytes(b"torn")
    return root, rollouts[0].rollout_id, group.rollouts[0].group_id


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: " ".join(command)[:30])
def test_no_command_prints_what_would_command_a_terminal(ludic, hostile: tuple[Root, str, str], command: tuple) -> None:
    root, rollout_id, group_id = hostile
    name, *args = [{"ID": rollout_id, "GROUP": group_id}.get(arg, arg) for arg in command]
    result = ludic(name, root.url, *args)
    printed = result.out + result.err
    assert "evil" in printed or name in ("compact", "expire") or "no-such-id" in printed
    assert not {"\x1b", "\x07", "\u202e", TAG} & set(printed)


BACKSLASHES = ("\\.parquet", "\\'.parquet", "a\\b.json", "\\.json")


@pytest.mark.slow
def test_a_backslash_in_a_name_stops_no_command_and_verify_names_the_file(ludic, breakable: Path) -> None:
    """DuckDB takes a backslash for a separator."""
    folders = sorted({path.parent for path in breakable.rglob("*") if path.is_file()} | {breakable / "labels"})
    (breakable / "labels").mkdir()
    names = [(folder / name).relative_to(breakable).as_posix() for folder in folders for name in BACKSLASHES]
    for name in names:
        (breakable / name).write_bytes(b"{}")
    queries = [("sql", f"from {view}") for view in ("metrics", "all_batches", "policies", "workers")]
    commands = [command for command in COMMANDS if command[0] != "view"]
    for name, *args in (*commands, *queries, ("report", "--output", str(breakable.with_name("report.html")))):
        result = ludic(name, breakable, *args)
        assert result.code == (1 if name == "verify" else 0), result.err
        assert "Traceback" not in result.err
    found = {finding.where for finding in check_root(Root.open(str(breakable))).findings}
    assert set(names) <= found


@pytest.mark.parametrize("filesystem", ["obstore", "s3fs"])
def test_markers_of_folders_in_a_bucket_are_no_files(
    s3_bucket: str, s3_server: str, tmp_path: Path, run_config: RunConfig, filesystem: str
) -> None:
    """Consoles of object stores make empty objects whose keys end in a slash."""
    fs = S3(use_listings_cache=False) if filesystem == "s3fs" else None
    root = create_root(f"{s3_bucket}/markers-{filesystem}", run_config, fs=fs)
    assert isinstance(root.fs, ObstoreS3) == (filesystem == "obstore")
    client = boto3.client("s3", endpoint_url=s3_server)
    bucket, _, prefix = root.path.partition("/")
    names = ["policies/version=60/config.json", "policies/version=60/policy.json"]
    for name in (
        "",
        "policies/",
        "policies/version=60/",
        "rollouts/",
        "evals/version=3/",
        "metrics/train-a-0.parquet/",
    ):
        client.put_object(Bucket=bucket, Key=f"{prefix}/{name}", Body=b"")
    for name in names:
        root.put(name, b"{}")
    root.put("policies/empty", b"")
    assert root.list("") == ["policies/empty", *names, "run.json"] == list(root.sizes(""))
    assert [root.list(name) for name in ("policies/version=60", "rollouts", "evals", "metrics")] == [names, [], [], []]
    folder = fetch_policy(root, 60, tmp_path)
    assert sorted(path.name for path in Path(folder).iterdir()) == ["config.json", "policy.json"]
    assert stored_versions(root) == policy_versions(root) == [60]


def test_python_sees_the_texts_as_they_are(hostile: tuple[Root, str, str]) -> None:
    ((name,),) = package.connect(hostile[0].url).sql("select distinct env_name from rollouts").fetchall()
    assert name == f"evil{ESCAPE}{TURNED}{TAG}"
