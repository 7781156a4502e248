"""`ludic verify`: what is broken is found and named, and a sound run is called so."""

import json
import shutil
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from strategies import make_batch
from tiny_runs import fill, train_here

from ludic.records.conversion import to_table
from ludic.records.rollout import GroupEvent
from ludic.records.tables import conform
from ludic.root.catalogue import WORKERS
from ludic.root.claims import claim_slot
from ludic.root.code import keep_files
from ludic.root.json_records import encode_record
from ludic.root.maintenance.verify import Finding, VerifyReport, check_root, meaning_of
from ludic.root.root import Root
from ludic.root.rows.files import RolloutFile, list_files
from ludic.root.rows.parquet import encode
from ludic.root.rows.tables import encode_token_stats
from ludic.root.rows.writer import RolloutWriter
from ludic.root.sql.library import load_checks
from ludic.settings.user_files import read_user_file

pytestmark = pytest.mark.slow

Break = Callable[[Path], None]


def findings(path: Path) -> set[tuple[str, str]]:
    """check and where of what is found."""
    return {(finding.check, finding.where) for finding in found_in(path)}


def found_in(path: Path) -> list[Finding]:
    return check_root(Root.open(str(path))).findings


def rollout_file(path: Path, index: int = 0) -> str:
    return list_files(Root.open(str(path)))[index].name


def test_a_trained_run_is_sound(ludic, trained: Root) -> None:
    result = ludic("verify", trained.url)
    assert (result.code, result.out, result.err) == (0, f"{trained.url} is sound\n", "")
    assert json.loads(ludic("verify", trained.url, "--json").out)["sound"] is True


def test_a_run_that_has_only_begun_is_sound(started: Root) -> None:
    assert check_root(started).findings == []


def test_a_run_is_sound_on_every_filesystem(root_url: str, make_trained: Callable[[str], Root]) -> None:
    root = make_trained(root_url)
    assert check_root(root) == VerifyReport(root=root.url, findings=[], notes=[], repaired=[])
    torn = list_files(root)[0].name
    root.delete(torn)
    assert root.put_if_absent(torn, b"torn")
    assert (
        Finding(
            check="unreadable",
            where=torn,
            problem="Parquet file size is 4 bytes, smaller than the minimum file footer (8 bytes)",
        )
        in check_root(root).findings
    )


def test_findings_are_printed_and_counted_and_the_exit_code_is_1(ludic, breakable: Path) -> None:
    (breakable / "metrics/notes.txt").write_text("mine")
    result = ludic("verify", breakable)
    assert result.code == 1
    assert result.out.splitlines() == [
        "misnamed: a file whose name does not match its content",
        "  metrics/notes.txt: ludic writes no file of this name; move it out of the run",
    ]
    assert result.err == f"ludic: {breakable} is not sound: 1 misnamed\n"


def test_json_lists_findings(ludic, breakable: Path) -> None:
    (breakable / "metrics/notes.txt").write_text("mine")
    result = ludic("verify", breakable, "--json")
    assert result.code == 1
    printed = json.loads(result.out)
    assert printed["sound"] is False
    assert [(finding["check"], finding["where"]) for finding in printed["findings"]] == [
        ("misnamed", "metrics/notes.txt")
    ]


def test_files_of_requests_are_read_and_hold_the_rows_of_their_worker(breakable: Path) -> None:
    root = Root.open(str(breakable))
    events = [
        GroupEvent(
            event="started",
            group_id="group",
            group_number=0,
            env_name="moar_cats",
            env_example_id="prompt-1",
            group_size=2,
            policy_version=0,
            created_at=datetime.now(UTC),
        )
    ]
    with RolloutWriter(root, "w0-a") as writer:
        writer.append(None, events)
    assert findings(breakable) == set()
    file = breakable / "requests/w0-a-0.parquet"
    shutil.copy(file, breakable / "requests/w1-b-0.parquet")
    assert findings(breakable) == {("misnamed", "requests/w1-b-0.parquet")}
    file.write_bytes(file.read_bytes()[:-1])
    assert ("unreadable", "requests/w0-a-0.parquet") in findings(breakable)


def test_a_damaged_page_is_found_though_the_footer_is_whole(breakable: Path) -> None:
    path = breakable / rollout_file(breakable)
    metadata = pq.ParquetFile(path).metadata
    names = [metadata.schema.column(index).path for index in range(metadata.num_columns)]
    tokens = metadata.row_group(0).column(names.index("response_tokens.list.element"))
    content = bytearray(path.read_bytes())
    start = tokens.data_page_offset
    content[start : start + tokens.total_compressed_size] = bytes(tokens.total_compressed_size)
    path.write_bytes(content)
    assert ("unreadable", rollout_file(breakable)) in findings(breakable)


def test_a_file_of_another_table_is_unreadable(breakable: Path) -> None:
    shutil.copy(breakable / "batches/attempt=1/step=1.parquet", breakable / "metrics/train-x-0.parquet")
    found = found_in(breakable)
    assert found == [
        Finding(
            check="unreadable", where="metrics/train-x-0.parquet", problem="holds the table batches, wanted metrics"
        )
    ]


def test_a_file_that_was_moved_says_where_it_belongs(breakable: Path) -> None:
    home = rollout_file(breakable)
    names = (
        "rollouts/version=7/env=moar_cats/w0-test-0.parquet",
        "rollouts/version=0/env=opposites/w0-test-0.parquet",
        "rollouts/version=0/env=moar_cats/w1-test-0.parquet",
        "rollouts/version=0/env=moar_cats/w0-test-5.parquet",
    )
    content = (breakable / home).read_bytes()
    (breakable / home).unlink()
    for name in names:
        (breakable / name).parent.mkdir(parents=True, exist_ok=True)
        (breakable / name).write_bytes(content)
    problems = {finding.where: finding.problem for finding in found_in(breakable)}
    assert {name: problems[name] for name in names} == dict.fromkeys(names, f"holds rows that belong in {home}")


def test_a_ledger_under_another_step_says_where_it_belongs(breakable: Path) -> None:
    ledger = breakable / "batches/attempt=1/step=1.parquet"
    ledger.rename(ledger.with_name("step=2.parquet"))
    problems = {finding.where: finding.problem for finding in found_in(breakable)}
    assert problems["batches/attempt=1/step=2.parquet"] == "holds rows that belong in batches/attempt=1/step=1.parquet"


def test_rollouts_of_another_run_are_found(breakable: Path) -> None:
    batch = make_batch(worker_id="w9", num_groups=1, seed=9)
    file = RolloutFile(0, "moar_cats", "w9", 0)
    (breakable / file.name).write_bytes(encode(to_table(batch, run_id="other-run", sequence=0)))
    assert found_in(breakable) == [
        Finding(check="misnamed", where=file.name, problem="holds rows that belong in another run (other-run)")
    ]


def delete_weights(path: Path) -> None:
    (path / "policies/version=1/model.safetensors").unlink()


def delete_the_tokenizer(path: Path) -> None:
    (path / "policies/version=1/tokenizer.json").unlink()


def cut_weights(path: Path) -> None:
    weights = path / "policies/version=1/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])


def garble_weights(path: Path) -> None:
    (path / "policies/version=1/model.safetensors").write_bytes(b"\xff" * 100)


def lose_a_shard(path: Path) -> None:
    folder = path / "policies/version=1"
    (folder / "digests.json").unlink()  # it lists the one file that these weights had
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    shards = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (delete_weights, "model.safetensors is missing"),
        (delete_the_tokenizer, "tokenizer.json is missing, though digests.json lists it"),
        (cut_weights, "its header says"),
        (garble_weights, "its header alone needs"),
        (lose_a_shard, "model-00002-of-00002.safetensors is missing"),
    ],
)
def test_published_weights_that_are_not_whole_are_found(breakable: Path, damage: Break, problem: str) -> None:
    damage(breakable)
    (finding,) = found_in(breakable)
    assert (finding.check, finding.where) == ("policy", "policies/version=1")
    assert problem in finding.problem


def test_latest_must_name_complete_weights(breakable: Path) -> None:
    (breakable / "policies/LATEST").write_text('{"version": 5, "groups_per_worker": 1}')
    assert findings(breakable) == {("policy", "policies/LATEST")}
    (breakable / "policies/LATEST").write_text("5")
    assert findings(breakable) == {("policy", "policies/LATEST")}


def test_pruned_weights_and_claims_without_weights_are_sound(breakable: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (breakable / "policies/version=0" / name).unlink()
    claim = json.loads((breakable / "policies/version=1/policy.json").read_text()) | {"version": 2}
    (breakable / "policies/version=2").mkdir()
    (breakable / "policies/version=2/policy.json").write_text(json.dumps(claim))
    (breakable / "policies/version=2/model.safetensors").write_bytes(b"half of it")
    assert findings(breakable) == set()


def test_a_broken_policy_or_attempt_is_named_and_the_other_checks_go_on(breakable: Path) -> None:
    (breakable / "policies/version=0/policy.json").write_text("{")
    (breakable / "attempts/1.json").write_text("{")
    (breakable / rollout_file(breakable)).rename(breakable / "rollouts/version=0/env=moar_cats/w0-test-9.parquet")
    found = findings(breakable)
    assert ("policy", "policies/version=0/policy.json") in found
    assert ("attempt", "attempts/1.json") in found
    assert ("misnamed", "rollouts/version=0/env=moar_cats/w0-test-9.parquet") in found


def test_a_checkpoint_with_a_marker_must_be_whole(breakable: Path) -> None:
    folder = breakable / "checkpoints/attempt=1/step=1"
    (folder / "optimizer.safetensors").unlink()
    (finding,) = found_in(breakable)
    assert finding == Finding(
        check="checkpoint", where="checkpoints/attempt=1/step=1", problem="optimizer.safetensors is missing"
    )
    (folder / "checkpoint.json").unlink()  # without it this is a torso, which nobody reads
    assert findings(breakable) == set()


def test_a_checkpoint_under_another_step_is_found(breakable: Path) -> None:
    (breakable / "checkpoints/attempt=1/step=1").rename(breakable / "checkpoints/attempt=1/step=3")
    (finding,) = found_in(breakable)
    assert finding.problem == "checkpoint.json belongs in checkpoints/attempt=1/step=1"


def test_data_checks_show_the_first_rows_and_count_the_rest(breakable: Path) -> None:
    (breakable / rollout_file(breakable, 1)).unlink()
    # What the ledger holds of version 1: the four rollouts of a group. Version 0 is older than that.
    lost = [finding for finding in found_in(breakable) if finding.check == "lost_rollouts"]
    assert len(lost) == 4
    copied = make_batch(worker_id="w9", num_groups=2, seed=9, group_size=4)
    for sequence in range(2):
        file = RolloutFile(0, "moar_cats", "w9", sequence)
        table = to_table(copied, run_id=Root.open(str(breakable)).run_id, sequence=sequence)
        (breakable / file.name).write_bytes(encode(table))
    doubled = [finding for finding in found_in(breakable) if finding.check == "duplicate_rollouts"]
    assert len(doubled) == 6
    assert doubled[-1].problem == "and 3 more rows like these"


def test_every_check_says_what_it_looks_for() -> None:
    for check in (*load_checks(), "unreadable", "misnamed", "attempt", "policy", "checkpoint"):
        meaning = meaning_of(check)
        assert len(meaning) > 20, check
        assert not meaning.startswith(f"{check}:"), check
        assert "grain" not in meaning, check


def test_claims_of_workers_are_read_and_compared_with_their_names(breakable: Path) -> None:
    root = Root.open(str(breakable))
    claims = [claim_slot(root, slot, f"w{slot}-a") for slot in (0, 1)]
    assert found_in(breakable) == []
    root.put(WORKERS.name_of(claims[0]), b"{}")
    root.put("workers/slot=1/2.json", encode_record(claims[1]))
    root.put("workers/notes.json", b"{}")
    root.put("workers/slot=1/\N{SUPERSCRIPT TWO}.json", b"{}")
    assert findings(breakable) == {
        ("worker", "workers/slot=0/1.json"),
        ("misnamed", "workers/slot=1/2.json"),
        ("misnamed", "workers/notes.json"),
        ("misnamed", "workers/slot=1/\N{SUPERSCRIPT TWO}.json"),
    }


def test_token_stats_that_are_renamed_or_of_other_lengths_are_named(started: Root) -> None:
    fill(started, num_files=1, groups_per_file=2)
    train_here(started, num_steps=1, keep_token_stats=True)
    path = Path(started.path)
    assert findings(path) == set()
    (name,) = started.list("token_stats")
    moved = name.replace("step=1-", "step=2-")
    (path / name).rename(path / moved)
    assert findings(path) == {("misnamed", moved)}
    table = pq.read_table(path / moved)
    index, field = table.schema.get_field_index("response_length"), table.schema.field("response_length")
    table = table.set_column(index, field, pc.multiply(table["response_length"], 2).cast(field.type))
    (path / name).write_bytes(encode_token_stats(conform(table, "token_stats")))
    (path / moved).unlink()
    assert {check for check, _ in findings(path)} == {"unequal_token_stats"}


def test_a_copy_of_a_users_file_is_the_text_that_its_name_says(started: Root, tmp_path: Path) -> None:
    (tmp_path / "mine.sql").write_text("select 1")
    keep_files(started, {"mine.sql": read_user_file(tmp_path / "mine.sql")})
    path = Path(started.path)
    assert findings(path) == set()
    (name,) = [name for name in started.list("code") if name.endswith(".sql")]
    (path / name).write_text("select 2")
    (path / "code" / "2.json").write_text("[]")
    (path / "code" / "notes.txt").write_text("mine")
    assert findings(path) == {
        ("code", name),
        ("code", "code/1.json"),
        ("code", "code/2.json"),
        ("misnamed", "code/notes.txt"),
    }
