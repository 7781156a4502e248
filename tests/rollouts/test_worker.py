"""The worker follows the policies, keeps to its budget, and loses nothing; all in one process."""

import itertools
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from statistics import fmean
from typing import Any
from uuid import uuid4

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from tiny_models import committed_rows, forward_logprobs, publish

import ludic.environments.toys
from ludic.errors import ConfigError, SlotTakenError, StoreError
from ludic.rollouts import weight_sync
from ludic.rollouts.worker import WorkerConfig, pauses_between_reads
from ludic.root.catalogue import WORKERS
from ludic.root.claims import claim_slot
from ludic.root.json_records import LatestPolicy, encode_record
from ludic.root.root import Root
from ludic.root.rows.files import list_files
from ludic.root.rows.tables import MetricsTail
from ludic.root.weights.policies import fetch_policy, latest_policy, point_latest
from ludic.run.config import RunConfig
from ludic.run.run_json import create_root

WaitUntil = Callable[[Callable[[], bool]], None]
Working = Callable[..., AbstractContextManager[WaitUntil]]
Work = Callable[..., int]

LARGE = 10**6
"""A budget that no test fills."""
TOKENS = ("prompt_tokens", "response_tokens", "response_logprobs", "policy_version")


def groups_by_version(root: Root) -> Counter[int]:
    groups = {row["group_id"]: row["policy_version"] for row in committed_rows(root, "group_id", "policy_version")}
    return Counter(groups.values())


def group_numbers(root: Root) -> list[int]:
    """In order; a group that is there twice is listed twice."""
    rows = committed_rows(root, "group_id", "group_size")
    return sorted({row["group_id"]: row["request_index"] // row["group_size"] for row in rows}.values())


def has(root: Root, **groups: int) -> Callable[[], bool]:
    """Whether so many groups of each version are there: has(root, v0=3)."""
    return lambda: all(groups_by_version(root)[int(name[1:])] >= count for name, count in groups.items())


# --- Versions --------------------------------------------------------------------------------------------


def test_the_worker_follows_latest_and_samples_with_the_weights_that_it_says(
    root: Root, working: Working, folder: str, other_folder: str, tmp_path: Path
) -> None:
    with working(root) as wait_until:
        publish(root, folder, budget=3)
        wait_until(has(root, v0=3))
        publish(root, other_folder, budget=5)
        wait_until(has(root, v1=2))
    assert groups_by_version(root) == {0: 3, 1: 2}
    assert group_numbers(root) == [0, 1, 2, 3, 4]
    for row in committed_rows(root, *TOKENS):
        weights = fetch_policy(root, row["policy_version"], tmp_path)
        expected = forward_logprobs(weights, row["prompt_tokens"], row["response_tokens"])
        assert row["response_logprobs"] == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("in_flight", [2, 4, 16, None])
def test_the_worker_stays_within_the_budget_until_that_is_raised(
    root: Root, working: Working, folder: str, in_flight: int | None
) -> None:
    publish(root, folder, budget=3)
    with working(root, in_flight=in_flight) as wait_until:
        wait_until(has(root, v0=3))
        point_latest(root, LatestPolicy(version=0, budget=5))
        wait_until(has(root, v0=5))
        publish(root, folder, budget=6)
        wait_until(has(root, v1=1))
    assert groups_by_version(root) == {0: 5, 1: 1}


def test_without_a_quota_the_worker_goes_on(root: Root, working: Working, folder: str) -> None:
    publish(root, folder, budget=1)
    with working(root, follow_budget=False, in_flight=4) as wait_until:
        wait_until(has(root, v0=9))


def test_a_worker_that_starts_before_the_first_policy_can_be_stopped(root: Root, working: Working) -> None:
    with working(root):
        pass
    assert list_files(root) == []


def test_a_worker_without_work_says_once_what_it_waits_for(
    root: Root, working: Working, folder: str, caplog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ludic.rollouts.worker._IDLE_S", 0.1)
    caplog.set_level("INFO", "ludic.rollouts.worker")
    waiting = "waiting for a policy that can be loaded; `ludic train` publishes policies"
    idle = (
        "nothing to sample: 0 groups are ready for the trainer, 2 of this worker are not read yet, and its budget is 2 "
        "for 1 worker; waiting for a new version"
    )
    with working(root) as wait_until:
        wait_until(lambda: waiting in caplog.messages)
        publish(root, folder, budget=2)
        wait_until(lambda: idle in caplog.messages)
    assert (caplog.messages.count(waiting), caplog.messages.count(idle)) == (1, 1)


def test_the_worker_never_goes_back_to_a_lower_version(
    root: Root, working: Working, folder: str, other_folder: str
) -> None:
    publish(root, folder, budget=0)
    publish(root, other_folder, budget=2)
    with working(root) as wait_until:
        wait_until(has(root, v1=2))
        # A trainer that was replaced may still write this.
        point_latest(root, LatestPolicy(version=0, budget=4))
        wait_until(has(root, v1=4))
    assert groups_by_version(root) == {1: 4}


@pytest.mark.parametrize(
    ("is_local", "num_workers", "waits_s"),
    [
        (False, 1, [0.01, 0.012, 0.0144]),
        (False, 1000, [0.5, 0.6, 0.72]),
        (False, 4096, [2.048, 2.048, 2.048]),
        (True, 1, [0.005, 0.0051, 0.005202]),
        (True, 1000, [0.5, 0.51, 0.5202]),
        (True, 4096, [2.048, 2.048, 2.048]),
    ],
)
def test_waiting_workers_read_latest_2000_times_a_second_at_most(
    tmp_path: Path, run_config: Callable[..., RunConfig], is_local: bool, num_workers: int, waits_s: list[float]
) -> None:
    url = str(tmp_path / "run") if is_local else f"memory://{uuid4()}"
    root = create_root(url, run_config(num_workers=num_workers))
    waits = list(itertools.islice(pauses_between_reads(root), 300))
    assert waits[:3] == pytest.approx(waits_s)
    assert waits[-1] == max(1.0, waits_s[0])


# --- Policies that can't be loaded -----------------------------------------------------------------------


def break_weights(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])


def remove_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def break_config(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": ')


@pytest.mark.parametrize("damage", [None, break_weights, remove_weights, break_config])
@pytest.mark.parametrize("is_first", [False, True])
def test_a_policy_that_cannot_be_loaded_is_survived_and_the_next_one_taken(
    root: Root,
    working: Working,
    folder: str,
    caplog: pytest.LogCaptureFixture,
    damage: Callable[[Path], None] | None,
    is_first: bool,
) -> None:
    if not is_first:
        publish(root, folder, budget=2)
    bad = 0 if is_first else 1
    with working(root) as wait_until:
        if not is_first:
            wait_until(has(root, v0=2))
        if damage is not None:
            source = Path(root.at("damaged"))
            shutil.copytree(folder, source)
            damage(source)
            publish(root, str(source), budget=4)
        else:
            # LATEST names what never came.
            root.put_if_absent(f"policies/version={bad}/policy.json", b"{}")
            point_latest(root, LatestPolicy(version=bad, budget=4))
        wait_until(lambda: f"policies/version={bad}" in caplog.text)
        if not is_first:  # its budget counts, so that the trainer is not left waiting
            wait_until(has(root, v0=4))
        publish(root, folder, budget=2 if is_first else 6)
        wait_until(lambda: groups_by_version(root)[bad + 1] == 2)
    assert set(groups_by_version(root)) == ({1} if is_first else {0, 2})


def test_a_broken_policy_is_not_read_again_at_every_look(
    root: Root, working: Working, folder: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks, reads = [], []
    monkeypatch.setattr(weight_sync, "latest_policy", lambda root: looks.append(1) or latest_policy(root))
    monkeypatch.setattr(weight_sync, "fetch_policy", lambda *args: reads.append(1) or fetch_policy(*args))
    publish(root, folder, budget=2)
    weights = Path(root.at("policies/version=0/model.safetensors"))
    weights.write_bytes(weights.read_bytes()[:500])
    with working(root) as wait_until:
        wait_until(lambda: len(looks) > 5)
    assert len(reads) == 1


def test_a_policy_that_becomes_whole_after_all_is_taken(
    root: Root, working: Working, folder: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_sync, "_REFUSED_S", 0.2)
    publish(root, folder, budget=2)
    weights = Path(root.at("policies/version=0/model.safetensors"))
    data = weights.read_bytes()
    weights.write_bytes(data[:500])
    with working(root) as wait_until:
        wait_until(lambda: "waiting for a policy" in caplog.text)
        weights.write_bytes(data)
        wait_until(has(root, v0=2))


# --- Ends and lives --------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_flight", [4, 16, None])
def test_the_worker_stops_after_num_groups(root: Root, work: Work, folder: str, in_flight: int | None) -> None:
    publish(root, folder, budget=LARGE)
    assert work(root, num_groups=5, in_flight=in_flight) == 5
    assert group_numbers(root) == [0, 1, 2, 3, 4]


def test_all_that_was_sampled_is_committed_when_the_worker_is_stopped(
    root: Root, working: Working, folder: str
) -> None:
    publish(root, folder, budget=LARGE)
    with working(root, in_flight=4) as wait_until:
        wait_until(has(root, v0=6))
    sampled = sum(row["num_groups"] for row in MetricsTail(root).poll())
    assert sampled == len(group_numbers(root)) >= 6


def lose_file(file: Path) -> None:
    file.unlink()


def lose_end_of_file(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-40])


@pytest.mark.parametrize("lose", [lose_file, lose_end_of_file])
def test_the_next_life_makes_first_what_was_never_committed_and_nothing_twice(
    root: Root, work: Work, folder: str, lose: Callable[[Path], None]
) -> None:
    publish(root, folder, budget=LARGE)
    for _ in range(3):
        work(root, num_groups=2, in_flight=4)
    before = committed_rows(root, *TOKENS)
    second_life = sorted({file.worker_id for file in list_files(root)})[1]
    lost = [Path(root.at(file.name)) for file in list_files(root) if file.worker_id == second_life]
    for file in lost:
        lose(file)
    work(root, num_groups=2, in_flight=4)
    for file in lost:
        file.unlink(missing_ok=True)
    # The lives sampled the groups 0 and 1, 2 and 3, 4 and 5. The same weights give the same tokens.
    after = committed_rows(root, *TOKENS)
    assert [row["response_tokens"] for row in after] == [row["response_tokens"] for row in before]
    work(root, num_groups=3, in_flight=4)
    assert group_numbers(root) == list(range(9))


def test_what_an_earlier_life_committed_is_open_until_the_trainer_has_read_it(
    root: Root, working: Working, folder: str
) -> None:
    publish(root, folder, budget=1)
    with working(root) as wait_until:
        wait_until(has(root, v0=1))
        point_latest(root, LatestPolicy(version=0, budget=3))
        wait_until(has(root, v0=3))
    (worker_id,) = {file.worker_id for file in list_files(root)}
    # It has read the first file. The other two groups are open, so two more of the budget of four are left.
    point_latest(root, LatestPolicy(version=0, budget=4, seen={worker_id: 0}))
    with working(root) as wait_until:
        wait_until(has(root, v0=5))
    assert groups_by_version(root) == {0: 5}


def test_a_file_that_the_trainer_passed_over_is_not_open_for_ever(root: Root, working: Working, folder: str) -> None:
    publish(root, folder, budget=2)
    with working(root) as wait_until:
        wait_until(has(root, v0=2))
        point_latest(root, LatestPolicy(version=0, budget=2, planned_step=1))
        publish(root, folder, budget=2)
        point_latest(root, LatestPolicy(version=1, budget=2, planned_step=3))
        wait_until(has(root, v1=2))
        # What is too old is not read.
        publish(root, folder, budget=2)
        point_latest(root, LatestPolicy(version=2, budget=2, planned_step=3, oldest_version=2))
        wait_until(has(root, v2=2))
        # A later trainer counts what it finds.
        publish(root, folder, budget=2)
        point_latest(root, LatestPolicy(version=3, budget=2, planned_step=3, attempt_id=2))
        wait_until(has(root, v3=2))
    assert groups_by_version(root) == {0: 2, 1: 2, 2: 2, 3: 2}


def test_workers_in_the_runs_slots_share_its_schedule_and_others_have_numbers_of_their_own(
    tmp_path: Path, run_config: Callable[..., RunConfig], work: Work, folder: str
) -> None:
    root = create_root(str(tmp_path), run_config(num_workers=2))
    publish(root, folder, budget=LARGE)
    work(root, slot=0, num_groups=3)
    work(root, slot=1, num_groups=3)
    assert group_numbers(root) == [0, 1, 2, 3, 4, 5]
    work(root, slot=None, num_groups=2)
    work(root, slot=None, num_groups=2)
    assert group_numbers(root)[:6] == [0, 1, 2, 3, 4, 5]
    assert len(set(group_numbers(root))) == 10


def test_a_worker_whose_slot_was_taken_ends_before_it_samples_more(root: Root, working: Working, folder: str) -> None:
    publish(root, folder, budget=2)

    def replace_worker() -> None:
        with working(root) as wait_until:
            wait_until(has(root, v0=2))
            claim_slot(root, 0, "w0-other")
            point_latest(root, LatestPolicy(version=0, budget=9))
            wait_until(lambda: False)

    with pytest.raises(SlotTakenError, match="another worker took slot 0"):
        replace_worker()
    assert groups_by_version(root) == {0: 2}


# --- What goes wrong outside -----------------------------------------------------------------------------

FAILING_ENVIRONMENT = '''
from ludic.environments.environment import Example, Score
from ludic.records.rollout import Message


class EveryOther:
    """Scores the questions with an even number and fails at the others."""

    def example(self, index, split):
        return Example(example_id=str(index), messages=(Message(role="user", content="what is 2"),))

    def score(self, example, answer):
        if int(example.example_id) % 2:
            raise ConnectionError("the judge is away")
        return Score(reward=1.0)
'''


def test_an_environment_that_fails_is_stored_with_its_error_and_stops_nobody(
    tmp_path: Path, run_config: Callable[..., RunConfig], work: Work, folder: str
) -> None:
    file = tmp_path / "every_other.py"
    file.write_text(FAILING_ENVIRONMENT)
    root = create_root(str(tmp_path / "run"), run_config(env=(f"{file}:EveryOther",), accept_incomplete=True))
    publish(root, folder, budget=LARGE)
    work(root, num_groups=4)
    rows = committed_rows(root, "env_example_id", "episode_reward", "error")
    outcomes = {(row["env_example_id"], row["episode_reward"], row["error"]) for row in rows}
    fault = "ConnectionError: the judge is away (every_other.py:14, in score)"
    assert outcomes == {("0", 1.0, None), ("1", None, fault), ("2", 1.0, None), ("3", None, fault)}


class Unsteady(MemoryFileSystem):
    """memory:// that fails at some of its writes below rollouts/."""

    def __init__(self, fails: Iterator[bool]) -> None:
        super().__init__()
        self.fails = fails
        self.num_failures = 0

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> None:
        if "/rollouts/" in path and next(self.fails, False):
            self.num_failures += 1
            raise OSError("503 Slow Down")
        super().pipe_file(path, value, mode=mode, **options)


def memory_root(run: RunConfig) -> Root:
    return create_root(f"memory://{uuid4().hex}", run)


def unsteady(root: Root, fails: Sequence[bool]) -> Root:
    # Not cached by fsspec, which would hand out the same one to every test.
    return replace(root, fs=Unsteady(iter(fails), skip_instance_cache=True))


def test_the_worker_runs_on_a_root_in_memory(run_config: Callable[..., RunConfig], work: Work, folder: str) -> None:
    root = memory_root(run_config())
    publish(root, folder, budget=LARGE)
    assert work(root, num_groups=5, in_flight=4) == 5
    assert group_numbers(root) == [0, 1, 2, 3, 4]


def test_a_filesystem_that_fails_now_and_then_costs_no_group(
    run_config: Callable[..., RunConfig], work: Work, folder: str
) -> None:
    root = memory_root(run_config())
    publish(root, folder, budget=LARGE)
    flaky = unsteady(root, [True, False, True, True, False] * 4)
    assert work(flaky, num_groups=8, in_flight=2) == 8
    assert flaky.fs.num_failures > 0
    assert group_numbers(root) == list(range(8))


def test_a_filesystem_that_fails_for_good_is_an_error_once_the_worker_is_stopped(
    run_config: Callable[..., RunConfig], working: Working, folder: str, caplog: pytest.LogCaptureFixture
) -> None:
    root = memory_root(run_config())
    publish(root, folder, budget=LARGE)
    with pytest.raises(StoreError, match="503 Slow Down"):
        with working(unsteady(root, [True] * LARGE), in_flight=2) as wait_until:
            wait_until(lambda: "trying again" in caplog.text)


# --- Metrics and settings --------------------------------------------------------------------------------


def test_what_is_appended_at_once_is_logged_as_a_row_an_environment(
    tmp_path: Path, run_config: Callable[..., RunConfig], work: Work, folder: str
) -> None:
    root = create_root(str(tmp_path), run_config(env=("addition", "opposites")))
    publish(root, folder, budget=LARGE)
    work(root, num_groups=6, in_flight=6)
    metrics, num_groups = MetricsTail(root).poll(), Counter()
    for row in metrics:
        num_groups[row["env_name"]] += row["num_groups"]
        assert row["num_rollouts"] == 2 * row["num_groups"]
    assert num_groups == {"addition": 3, "opposites": 3}
    flags = {"num_truncated": "truncated", "num_incomplete_completions": "incomplete_completion"}
    flags |= {"num_parse_errors": "parse_error"}
    rows = committed_rows(root, "episode_reward", "response_length", "env_name", "error", *flags.values())
    for env_name in ("addition", "opposites"):
        logged = [row for row in metrics if row["env_name"] == env_name]
        stored = [row for row in rows if row["env_name"] == env_name]
        assert sum(row["num_tokens"] for row in logged) == sum(row["response_length"] for row in stored)
        for column, flag in flags.items():
            assert sum(row[column] for row in logged) == sum(row[flag] for row in stored)
        assert sum(row["num_errors"] for row in logged) == sum(row["error"] is not None for row in stored)
        rewards = sum(row["reward_mean"] * row["num_rollouts"] for row in logged) / 6
        assert rewards == pytest.approx(fmean(row["episode_reward"] for row in stored))
    assert {(row["kind"], row["policy_version"]) for row in metrics} == {("worker", 0)}


def test_a_worker_whose_rollouts_all_fail_says_so_at_once(
    tmp_path: Path, run_config: Callable[..., RunConfig], work: Work, folder: str, caplog: pytest.LogCaptureFixture
) -> None:
    root = create_root(str(tmp_path), run_config(max_tokens=10**6))
    publish(root, folder, budget=LARGE)
    work(root, num_groups=2, in_flight=2)
    warnings = [record.getMessage() for record in caplog.records if "failed" in record.getMessage()]
    (warning,) = (text for text in warnings if text.startswith("every one"))
    assert warning.startswith("every one of 2 rollouts failed in addition; the first error: a prompt of ")


@pytest.mark.parametrize("name", ["in_flight", "num_groups"])
def test_settings_out_of_range_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is 0, wanted at least 1"):
        WorkerConfig(**{name: 0})


# --- Code ------------------------------------------------------------------------------------------------


def test_a_life_says_which_environments_scored_and_names_what_has_changed(
    root: Root, work: Work, folder: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    publish(root, folder, budget=10)
    work(root, num_groups=1)
    (record,) = WORKERS.read(root, 0, 1).code
    text = Path(ludic.environments.toys.__file__).read_bytes()
    assert (record["role"], record["name"], record["sha256"]) == ("environment", "addition", sha256(text).hexdigest())
    assert record["package"] == f"ludic-rl {version('ludic-rl')}"
    claim = replace(WORKERS.read(root, 0, 1), code=[{**record, "sha256": "a" * 64, "package": "ludic-rl 0"}])
    root.put(WORKERS.name_of(claim), encode_record(claim))
    work(root, num_groups=1)
    digests = f"sha256 aaaaaaaaaaaa then, {record['sha256'][:12]} now (ludic-rl 0 then, {record['package']} now)"
    assert f"environment 'addition' is not what life 1 of slot 0 ran: {digests}" in caplog.messages
