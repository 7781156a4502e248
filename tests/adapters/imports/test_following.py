"""Folders that are followed: each file once, when it is whole, over restarts and deaths."""

import json
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import fsspec
import peers
import pytest
from forks import Forked
from table_rows import stored_rows
from tiny_runs import query

import ludic
from ludic.adapters.imports.following import Follower, _stored
from ludic.adapters.imports.importing import importer
from ludic.errors import ConfigError
from ludic.root.json_records import ImportReport
from ludic.root.root import Root
from ludic.root.rows.reader import RolloutReader
from ludic.root.sql.planner import BatchRules, Planner
from ludic.run.config import RunConfig
from ludic.run.run_json import put_run


@pytest.fixture
def root(tmp_path: Path, model_folder: str) -> Root:
    return put_run(str(tmp_path / "run"), RunConfig(model=model_folder, env=("cats",), group_size=2))


@dataclass
class Following:
    """A follower with a clock of its own, which goes on by 2 s at each look."""

    root: Root
    folder: str
    name: str
    seconds: float = 0.0
    never: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        fmt, import_one = importer(self.root, self.name)
        self.follower = Follower(
            root=self.root,
            folders=[self.folder],
            format=fmt,
            import_one=import_one,
            rest_s=600.0,
            clock=lambda: self.seconds,
        )
        self.follower.stored.update(_stored(self.root))

    def look(self, times: int = 1) -> list[str]:
        """Look as many times; return the names of the files that were imported."""
        reports: list[ImportReport] = []
        for _ in range(times):
            self.seconds += 2
            reports += self.follower.poll(self.never)[0]
        return [Path(report.file).name for report in reports]


@pytest.fixture
def follow(root: Root, tmp_path: Path) -> Callable[..., Following]:
    def make(name: str = "verl", folder: Path = tmp_path / "theirs") -> Following:
        return Following(root, str(folder), name)

    return make


def verl_lines(step: int, words: str = "cc dd") -> list[dict]:
    """A group of two for each prompt."""
    return [
        peers.verl_record(word, score, prompt=prompt, step=step)
        for prompt in ("aa", "bb")
        for word, score in zip(words.split(), (1.0, 0.0), strict=True)
    ]


def write_verl(folder: Path, step: int, words: str = "cc dd") -> Path:
    return peers.write_lines(folder / "theirs" / f"{step}.jsonl", verl_lines(step, words))


def group_sizes(root: Root) -> list[int]:
    return [size for (size,) in query(root, "select count(*) from rollouts group by group_id")]


def test_a_file_is_imported_once_when_two_looks_find_it_the_same(follow, root: Root, tmp_path: Path):
    following = follow()
    assert following.look(2) == []  # there is no folder yet
    path = write_verl(tmp_path, 1)
    assert following.look() == []
    with path.open("a") as file:
        file.writelines(json.dumps(peers.verl_record("cc", 1.0, prompt="dd")) + "\n" for _ in range(2))
    write_verl(tmp_path, 2)
    (tmp_path / "theirs" / "notes.txt").write_text("mine")
    assert following.look() == []
    assert following.look(3) == ["1.jsonl", "2.jsonl"]
    assert group_sizes(root) == [2] * 5


def test_a_restart_knows_what_was_imported_without_reading_it(follow, root: Root, tmp_path: Path):
    path = write_verl(tmp_path, 1)
    assert follow().look(2) == ["1.jsonl"]
    before, text = path.stat(), path.read_text()
    path.write_text(text.replace('"cc"', '"dd"'))  # as long, and under the same time: only reading it tells
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert follow().look(3) == []
    os.utime(path)
    path.write_text(text)  # what was imported, at another time: its digest is known
    assert follow().look(3) == []
    assert group_sizes(root) == [2, 2]


def test_a_half_written_file_is_named_when_it_stays_so_and_imported_when_it_is_whole(
    follow, root: Root, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    path = write_verl(tmp_path, 1)
    text = path.read_text()
    path.write_text(text[:-9])
    following = follow()
    assert following.look(4) == []
    assert following.follower.left == {}
    assert following.look(9) == []
    assert [record.getMessage() for record in caplog.records] == [
        f"{path}: its last line is cut; it is imported when its program has written the rest"
    ]
    path.write_text(text)
    assert following.look(2) == ["1.jsonl"]
    assert (following.follower.left, group_sizes(root)) == ({}, [2, 2])


def test_a_table_without_its_footer_is_left_for_later(follow, tmp_path: Path):
    path = peers.write_trl(tmp_path / "theirs", {"prompt": ["aa"], "completion": ["cc"], "accuracy": [1.0]})
    whole = path.read_bytes()
    path.write_bytes(whole[:-5])
    following = follow("trl")
    assert (following.look(4), following.follower.left) == ([], {})
    assert following.look(9) == []
    assert "its Parquet footer is absent" in following.follower.left[str(path)]
    path.write_bytes(whole)
    assert following.look(2) == [path.name]


def test_links_and_pipes_are_named_and_never_read(follow, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    secret = peers.write_lines(tmp_path / "secret.jsonl", verl_lines(1))
    folder = write_verl(tmp_path, 2).parent
    (folder / "1.jsonl").symlink_to(secret)
    (folder / "all").symlink_to(tmp_path)
    os.mkfifo(folder / "3.jsonl")
    following = follow()
    assert following.look(9) == ["2.jsonl"]
    assert [Path(each).name for each in following.follower.left] == ["1.jsonl", "3.jsonl"]
    assert ["is a link, a pipe or a device" in each.getMessage() for each in caplog.records] == [True, True]


def test_the_content_of_another_file_is_named_and_not_stored_twice(follow, root: Root, tmp_path: Path):
    tokens = {"prompt_tokens": [2, 3], "response_tokens": [4, 5], "episode_reward": 1.0}
    first, second = (peers.write_lines(tmp_path / "theirs" / f"{name}.jsonl", [tokens]) for name in "ab")
    for path in (first, second):
        os.utime(path, (0, 0))
    following = follow("jsonl")
    assert following.look(9) == ["a.jsonl"]
    assert following.follower.left == {
        str(second): f"its content is that of {first}, which was imported; it is not imported again"
    }
    assert group_sizes(root) == [1]


def prime_rl_lines(names: Sequence[str]) -> str:
    """Two episodes of each group."""
    node = [peers.trace_node("user", "aa", [2, 3])]
    node += [peers.trace_node("assistant", "bb", [4, 5], parent=0, num_sampled=2)]
    traces = [peers.trace(node, {"accuracy": {"score": 1.0, "weight": 1.0}})]
    episodes = [peers.episode(traces, group=name, id=f"{name}{number}") for name in names for number in range(2)]
    return "".join(json.dumps(episode) + "\n" for episode in episodes)


def traces_of(folder: Path, step: int) -> Path:
    path = folder / "theirs" / "traces" / f"step_{step}" / "train" / "traces.jsonl"
    path.parent.mkdir(parents=True)
    return path


@pytest.mark.slow
def test_a_file_that_is_appended_to_is_imported_when_that_of_the_next_step_begins(
    follow, root: Root, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    following = follow("prime-rl")
    first = traces_of(tmp_path, 1)
    first.write_text(prime_rl_lines(["a"]))
    assert following.look(200) == []  # 400 s
    with first.open("a") as file:
        file.write(prime_rl_lines(["b"]))
    assert following.look(2) == []
    second = traces_of(tmp_path, 2)
    second.write_text(prime_rl_lines(["c"]))
    assert following.look(1) == ["traces.jsonl"]
    assert group_sizes(root) == [2, 2]
    assert following.look(298) == []
    assert following.look(4) == ["traces.jsonl"]  # the last step has rested
    with first.open("a") as file:
        file.write(prime_rl_lines(["d"]))
    for each in (following, follow("prime-rl")):
        assert each.look(2) == []
        each.seconds += 600  # it was written last, so there may be more to come
        assert each.look(1) == []
    assert group_sizes(root) == [2, 2, 2]
    assert "grew by" in following.follower.left[str(first)]
    assert len([record for record in caplog.records if "grew by" in record.getMessage()]) == 2  # each start names it


def test_a_file_that_grew_after_a_death_in_its_import_is_not_stored_twice(follow, root: Root, tmp_path: Path):
    path = write_verl(tmp_path, 1)
    assert follow().look(2) == ["1.jsonl"]
    [name] = [name for name in root.list("imports") if name.endswith(".done.json")]
    root.delete(name)
    assert (follow().look(2), group_sizes(root)) == (["1.jsonl"], [2, 2])  # a new start finishes it
    root.delete(name)
    with path.open("a") as file:
        file.write(json.dumps(peers.verl_record("cc", 1.0, prompt="dd")) + "\n")
    following = follow()
    assert (following.look(3), group_sizes(root)) == ([], [2, 2])
    assert "that was interrupted; the rest of it is not imported" in following.follower.left[str(path)]


def test_a_root_in_the_folder_does_not_import_itself(follow, root: Root, tmp_path: Path):
    tokens = {"prompt_tokens": [2, 3], "response_tokens": [4, 5], "episode_reward": 1.0}
    os.utime(peers.write_lines(tmp_path / "mine.jsonl", [tokens]), (0, 0))
    following = follow("jsonl", tmp_path)
    assert following.look(4) == ["mine.jsonl"]
    following.seconds += 1000
    assert (following.look(2), group_sizes(root)) == ([], [1])


def test_an_old_file_counts_as_rested_at_the_first_start(follow, tmp_path: Path):
    path = traces_of(tmp_path, 1)
    path.write_text(prime_rl_lines(["a"]))
    os.utime(path, (time.time() - 601, time.time() - 601))
    assert follow("prime-rl").look(2) == ["traces.jsonl"]


def test_steps_that_are_sampled_again_wait_for_the_next_one_beside_files_of_later_steps(follow, tmp_path: Path):
    for step in (1, 2, 3):
        path = traces_of(tmp_path, step)
        path.write_text(prime_rl_lines([f"a{step}"]))
        os.utime(path, (step, step))
    following = follow("prime-rl")
    assert len(following.look(2)) == 3
    second = path.parents[2] / "step_2" / "train" / "traces.jsonl"
    second.write_text(prime_rl_lines(["b"]))  # as of a trainer that goes on from step 1
    assert following.look(9) == []
    with second.open("a") as file:
        file.write(prime_rl_lines(["c"]))
    third = path
    third.write_text(prime_rl_lines(["d"]))
    assert following.look(9) == ["traces.jsonl"]
    assert following.follower.left == {}


def test_a_file_that_was_seen_to_change_rests_by_the_followers_own_clock(follow, tmp_path: Path):
    path = traces_of(tmp_path, 1)
    path.write_text(prime_rl_lines(["a"]))
    following = follow("prime-rl")
    assert following.look(3) == []
    path.write_text(prime_rl_lines(["a", "b"]))
    os.utime(path, (time.time() - 3600, time.time() - 3600))  # the machine's time jumped, or the disk's is another
    assert following.look(9) == []


def test_the_effective_rollouts_of_prime_rl_are_not_taken_besides_all(follow, tmp_path: Path):
    for subset in ("all", "effective"):
        path = tmp_path / "theirs" / "step_1" / "train" / subset / "traces.jsonl"
        path.parent.mkdir(parents=True)
        path.write_text(prime_rl_lines(["a"]))
        os.utime(path, (0, 0))
    following = follow("prime-rl")
    assert following.look(2) == ["traces.jsonl"]
    assert [path.split("/")[-2] for path in following.follower.files] == ["all"]


def test_a_step_that_is_sampled_again_is_imported_again(follow, root: Root, tmp_path: Path):
    following = follow()
    write_verl(tmp_path, 1)
    assert following.look(2) == ["1.jsonl"]
    write_verl(tmp_path, 1, "dddd eeee")
    assert following.look(2) == ["1.jsonl"]
    assert group_sizes(root) == [2] * 4
    assert follow().look(3) == []


def test_a_bad_file_is_named_once_and_the_others_go_on(
    follow, root: Root, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    bad = peers.write_lines(tmp_path / "theirs" / "1.jsonl", [{"text": "aa"}])
    write_verl(tmp_path, 2)
    following = follow()
    assert following.look(9) == ["2.jsonl"]
    [warning] = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert str(bad) in warning.getMessage()
    assert "has no input and no output" in following.follower.left[str(bad)]
    write_verl(tmp_path, 1)
    assert following.look(2) == ["1.jsonl"]
    assert following.follower.left == {}


def test_a_file_that_changes_while_it_is_read_leaves_nothing(root: Root, tmp_path: Path):
    path = write_verl(tmp_path, 1)
    fmt, import_one = importer(root, "verl")
    read = fmt.read

    def read_while_it_grows(url: str) -> Iterator:
        with path.open("a") as file:
            file.write(json.dumps(peers.verl_record("cc", 1.0)) + "\n")
        return read(url)

    object.__setattr__(fmt, "read", read_while_it_grows)
    with pytest.raises(ConfigError, match=r"1\.jsonl changed while it was read"):
        import_one(str(path), lambda items, total, description: items)
    assert (root.list("rollouts"), root.list("imports")) == ([], [])


@pytest.mark.slow
def test_the_operation_ends_when_nothing_has_changed_and_says_what_came(root: Root, tmp_path: Path):
    write_verl(tmp_path, 1)
    write_verl(tmp_path, 2)
    bad = peers.write_lines(tmp_path / "theirs" / "3.jsonl", [{"text": "aa"}])
    run = ludic.open(root.url)
    imported = run.import_(tmp_path / "theirs", "verl", follow=True, interval_s=0.02, until_idle_s=0.1)
    assert [Path(report.file).name for report in imported] == ["1.jsonl", "2.jsonl"]
    assert [*imported.left] == [str(bad)]
    assert str(imported).splitlines()[0].startswith("2 files of ")
    assert f"{bad}: " in imported.remarks[0]
    again = run.import_(tmp_path / "theirs", "verl", follow=True, interval_s=0.02, until_idle_s=0.1)
    assert (len(again), len(stored_rows(root))) == (0, 8)


@pytest.mark.slow
def test_texts_say_by_which_tokenizer_and_no_policy_gradient_trains_on_them(
    follow, root: Root, model_folder: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    write_verl(tmp_path, 1)
    write_verl(tmp_path, 2)
    caplog.set_level(logging.INFO)
    following = follow()
    assert following.look(2) == ["1.jsonl", "2.jsonl"]
    said = [record.getMessage() for record in caplog.records]
    assert [f"; texts were tokenised by the tokenizer of {model_folder}" in each for each in said] == [True, True]
    [report] = ludic.open(root.url).import_(tmp_path / "theirs" / "2.jsonl", "verl")
    assert (report.tokenizer, report.num_from_text, report.was_there) == (model_folder, 4, True)
    assert query(root, "select distinct capture from rollouts") == [("text",)]
    ratios, none = (Planner(BatchRules(groups_per_batch=4, needs_logprobs=needs)) for needs in (True, False))
    for planner in (ratios, none):
        planner.add(RolloutReader(root, planner.columns).poll(None))
    assert none.plan(step=1, attempt_id=1, trainer_version=2)["used"].to_pylist() == [True] * 8
    assert ratios.plan(step=1, attempt_id=1, trainer_version=2) is None
    shortage = ratios.shortage(step=1, trainer_version=2).describe()
    assert "filters drop 8 of 8 rollouts, text_capture most (8)" in shortage


def test_times_without_follow_are_refused(root: Root, tmp_path: Path):
    with pytest.raises(ConfigError, match="until_idle_s applies to follow alone"):
        ludic.open(root.url).import_(write_verl(tmp_path, 1), "verl", until_idle_s=1.0)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["s3", "memory"])
def test_a_prefix_of_a_url_is_followed_over_restarts(request, root: Root, tmp_path: Path, where: str):
    folder = "memory://theirs" if where == "memory" else f"{request.getfixturevalue('s3_bucket')}/theirs"
    text = write_verl(tmp_path, 1).read_text()
    following = Following(root, folder, "verl")
    assert following.look() == []
    for step in (1, 2):
        with fsspec.open(f"{folder}/{step}.jsonl", "w") as file:
            file.write(text)
    assert following.look(3) == ["1.jsonl", "2.jsonl"]
    again = Following(root, folder, "verl")
    assert again.look(2) == []
    assert all(file.is_settled and file.num_polls == 2 for file in again.follower.files.values())
    assert [file.state for file in again.follower.stored.values()] == [
        file.state for file in again.follower.files.values()
    ]  # no digest was needed


@pytest.mark.slow
def test_a_follower_that_dies_in_a_file_stores_nothing_twice_and_sigterm_ends_it_well(root: Root, tmp_path: Path):
    """70 groups in the first file: more than one file of rollouts holds."""
    lines = [peers.verl_record(word, 1.0, prompt=f"aa {'bb ' * n}", step=1) for n in range(70) for word in ("cc", "dd")]
    peers.write_lines(tmp_path / "theirs" / "1.jsonl", lines)
    write_verl(tmp_path, 2)
    script = Path(__file__).with_name("import_until_killed.py")
    killed = Forked([script, root.url, tmp_path / "theirs", "follow"], tmp_path / "log")
    assert killed.wait(300) == -9
    assert len(group_sizes(root)) == 64
    out = tmp_path / "out.json"
    words = ["ludic", "import", root.url, "--from", "verl", "--follow", tmp_path / "theirs", "--interval-s", "0.1"]
    follower = Forked([*words, "--json"], tmp_path / "log2", out=out)
    deadline = time.monotonic() + 60
    while len(root.list("imports")) < 4 and time.monotonic() < deadline:
        time.sleep(0.05)
    follower.send_signal(signal.SIGTERM)
    assert follower.wait(60) == 0
    imported = json.loads(out.read_text())
    assert [Path(report["file"]).name for report in imported["files"]] == ["1.jsonl", "2.jsonl"]
    assert group_sizes(root) == [2] * 72
    assert "2.jsonl: 4 rollouts in 2 groups, of 4 records" in (tmp_path / "log2").read_text()
