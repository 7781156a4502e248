"""Data given as values: its name is its own, and its root finds it, wherever it is opened from."""

import json
import shutil
from collections.abc import Callable
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import fsspec
import polars as pl
import pyarrow as pa
import pytest

from ludic.code.consent import give_consent, sampling_uses
from ludic.code.kept import create_root
from ludic.environments.limits import NO_LIMIT
from ludic.errors import ConfigError, SchemaError, StoreError
from ludic.eval.config import EvalConfig
from ludic.eval.plan import environment_settings
from ludic.maintenance.verify import check_root
from ludic.operations.fit import _begun_rewards, _environment
from ludic.operations.fit_inputs import Inputs, write_questions
from ludic.rollouts.sampler import open_code
from ludic.run_config import RunConfig
from ludic.store import Root
from ludic.store.inputs import data_of, located

ROWS = [{"question": f"say {word}", "answer": word} for word in ("red", "blue", "green", "pink", "black", "brown")]
TEXT = "".join(f'{{"question":"say {row["answer"]}","answer":"{row["answer"]}"}}\n' for row in ROWS).encode()
DIGEST = sha256(TEXT).hexdigest()
ENV = f"qa/questions-{DIGEST[:8]}"
STORED = {"stored": f"questions-{DIGEST[:16]}.jsonl", "sha256": DIGEST}


def named(name: str | None, builder: str | None = "parquet", split: str | None = None) -> Any:
    """The rows as a datasets.Dataset that says of itself what one of load_dataset says."""
    datasets = pytest.importorskip("datasets", reason="datasets is in the extra datasets")
    info = datasets.DatasetInfo(dataset_name=name, builder_name=builder)
    return datasets.Dataset.from_list(ROWS, info=info, split=split)


@pytest.mark.parametrize(
    ("dataset", "options", "env"),
    [
        (ROWS, {}, ENV),
        (pl.DataFrame(ROWS), {}, ENV),
        (pa.Table.from_pylist(ROWS), {}, ENV),
        (ROWS, {"name": "words"}, "qa/words"),
        (partial(named, "gsm8k"), {}, f"qa/gsm8k-{DIGEST[:8]}"),
        (partial(named, "gsm8k", split="train"), {}, f"qa/gsm8k-train-{DIGEST[:8]}"),
        (partial(named, "gsm8k"), {"name": "mine"}, "qa/mine"),
        # The name of a file's format is no name of the data.
        (partial(named, "json", "json"), {}, ENV),
        (partial(named, None, None), {}, ENV),
        (partial(named, "a/b"), {}, ENV),
    ],
)
def test_data_has_its_own_name_in_every_root(tmp_path: Path, dataset: Any, options: dict, env: str) -> None:
    dataset = dataset() if callable(dataset) else dataset
    for root in ("lr1", "lr2"):
        found = write_questions(Inputs.of(str(tmp_path / root)), dataset, options)
        assert (found.env, found.stored) == (env, STORED)
        assert (tmp_path / root / "inputs" / STORED["stored"]).read_bytes() == TEXT


@pytest.mark.parametrize("name", ["", "../up", "a b", "words.jsonl", "words.py", "x" * 65, 3])
def test_a_name_that_could_be_a_file_is_refused(tmp_path: Path, name: Any) -> None:
    with pytest.raises(ConfigError, match=r"dataset_options has name=.*, wanted at most 64 letters, digits"):
        write_questions(Inputs.of(str(tmp_path)), ROWS, {"name": name})


def test_a_file_is_its_own_name(tmp_path: Path) -> None:
    (tmp_path / "q.jsonl").write_bytes(TEXT)
    with pytest.raises(ConfigError, match=r"dataset_options has name, which is for rows given as values; .*q.jsonl is"):
        write_questions(Inputs.of(str(tmp_path)), str(tmp_path / "q.jsonl"), {"name": "words"})


# --- Where a root is opened from -------------------------------------------------------------------------------------


def settings(inputs: Inputs, existing: Root | None = None, rows: Any = ROWS, **options: Any) -> dict[str, Any]:
    """What ludic.fit puts into run.json for these rows and the reward `exact`."""
    return _environment(inputs, rows, "exact", options, {}, existing)


def make_root(url: str, **options: Any) -> Root:
    return create_root(url, RunConfig(model="m", **settings(Inputs.of(url), **options)))


def as_old(root: Root, path: str) -> Root:
    """The root as an older ludic made it, whose environment is the path of its data."""
    values = json.loads(root.read("run.json"))
    del values["example_ids"], values["digest"]
    values["env"], values["env_options"] = [path], {path: {"scorer": "exact"}}
    root.put("run.json", json.dumps(values).encode())
    old = Root.open(root.url)
    for use in sampling_uses(old.run):  # as whoever began the run did
        give_consent(use, {}, root=old.url, run_id=old.run_id)
    return old


def asked(root: Root) -> set[str]:
    """The questions of a worker, and of an evaluation."""
    made, _, _ = open_code(root, NO_LIMIT)
    (environments,) = made.values()
    splits = ("train", "heldout")
    return {environments().example(index, split).messages[-1].content for index in range(6) for split in splits}


ALL = {row["question"] for row in ROWS}


def test_each_kind_of_root_holds_its_data_and_finds_it_from_another_machine(
    root_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = make_root(root_url)
    assert root.run.env == (ENV,)
    assert root.read(f"inputs/{STORED['stored']}") == TEXT
    monkeypatch.setenv("LUDIC_CACHE_DIR", str(tmp_path / "cache of another machine"))
    for _ in range(2):  # the second time from the cache
        assert asked(Root.open(root_url)) == ALL
    for copy in (tmp_path / "cache of another machine").rglob(STORED["stored"]):
        copy.write_bytes(b"half of")
    assert asked(root) == ALL
    assert check_root(root).findings == []


def test_a_root_that_was_moved_is_opened_from_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    root = make_root("runs/lr1")
    (tmp_path / "elsewhere").mkdir()
    shutil.move(tmp_path / "runs", tmp_path / "elsewhere" / "kept")
    monkeypatch.chdir(tmp_path / "elsewhere")
    for url in ("kept/lr1", str(tmp_path / "elsewhere/kept/lr1"), f"file://{tmp_path}/elsewhere/kept/lr1"):
        moved = Root.open(url)
        assert asked(moved) == ALL
        # The same call goes on with the run.
        assert RunConfig(model="m", **settings(Inputs.of(url), moved)).differences(root.run) == ""


@pytest.mark.parametrize("place", ["runs/lr1/", "/home/user/.cache/ludic/"])
def test_a_root_of_before_finds_its_data_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = "inputs/" if place == "runs/lr1/" else "inputs/0123456789abcdef/"
    old = f"qa/{place}{folder}{STORED['stored']}"
    root = as_old(make_root("moved"), old)
    assert root.example_ids == "question"
    assert asked(root) == ALL
    found = settings(Inputs.of("moved"), root)
    assert found == {"env": (old,), "env_options": {old: {"scorer": "exact"}}}


def test_other_rows_and_another_name_are_no_continuation(tmp_path: Path) -> None:
    inputs = Inputs.of(str(tmp_path / "run"))
    root = make_root(inputs.url)
    with pytest.raises(ConfigError, match=rf"run began with other rows \({ENV}\), and a run keeps its data set"):
        settings(inputs, root, ROWS[1:])
    assert root.list("inputs") == [f"inputs/{STORED['stored']}"]
    with pytest.raises(ConfigError, match=rf"calls this data set {ENV}, which stays; leave out name='words'"):
        settings(inputs, root, name="words")


def test_rewards_keep_the_name_that_the_run_began_with() -> None:
    begun = {"scorer": {"exact": 1.0, "runs/lr1/inputs/reward.py:ludic_score": 1.0}}
    now = {"scorer": {"exact": 1.0, "/mnt/lr1/inputs/reward.py:ludic_score": 1.0}, "question": "prompt"}
    assert _begun_rewards(begun, now) == {**begun, "question": "prompt"}
    begun = {
        name: f"lr1/inputs/reward.py:{function}"
        for name, function in (("scorer", "ludic_score"), ("group_scorer", "ludic_score_group"))
    }
    now = {name: each.replace("lr1", "/mnt/lr1") for name, each in begun.items()}
    assert _begun_rewards(begun, now) == begun
    # A scorer of the user's own has the name that the user gives.
    assert _begun_rewards({"scorer": "mine/reward.py:score"}, {"scorer": "reward.py:score"}) == {
        "scorer": "reward.py:score"
    }


# --- What may be wrong ------------------------------------------------------------------------------------------------


def test_data_that_is_gone_or_damaged_is_named(tmp_path: Path) -> None:
    root = make_root(str(tmp_path / "run"))
    name = f"inputs/{STORED['stored']}"
    for content, said in ((b"{}", "does not hold the rows that its name says"), (None, f"is gone, the rows of {ENV}")):
        root.delete(name) if content is None else root.put(name, content)
        (finding,) = check_root(root).findings
        assert (finding.check, finding.where) == ("data", name)
        assert said in finding.problem
        with pytest.raises((ConfigError, StoreError), match=r"has sha256 .*, wanted|the run's data set, is gone"):
            asked(root)


@pytest.mark.parametrize("stored", ["../../etc/passwd", "/etc/passwd", "reward.py", "questions-1.jsonl", 7])
def test_only_data_of_the_root_has_such_a_name(tmp_path: Path, stored: Any) -> None:
    run = RunConfig(model="m", env=("qa/x",), env_options={"qa/x": {"stored": stored}})
    root = create_root(str(tmp_path / "run"), run)
    with pytest.raises(ConfigError, match=r"environment qa/x: stored is .*, wanted the name of a file in inputs/"):
        located(root.run, root)


def test_data_behind_a_link_that_leads_out_is_not_read(tmp_path: Path) -> None:
    root = make_root(str(tmp_path / "run"))
    path = tmp_path / "run/inputs" / STORED["stored"]
    shutil.move(path, tmp_path / "mine.jsonl")
    path.symlink_to(tmp_path / "mine.jsonl")
    with pytest.raises(SchemaError, match="is a symbolic link that leads out"):
        asked(root)


def test_a_class_in_a_folder_qa_is_no_data(tmp_path: Path) -> None:
    env = "qa/mine.py:Mine"
    run = RunConfig(model="m", env=(env,), env_options={env: {"stored": "x"}})
    assert located(run, Inputs.of(str(tmp_path)).storage) == run
    assert data_of(env, {"stored": STORED["stored"]}) is None


# --- Roots made from roots, and other options ------------------------------------------------------------------------


@pytest.mark.parametrize("make", [lambda root: root, lambda root: as_old(root, f"qa/old/inputs/{STORED['stored']}")])
def test_a_root_like_another_has_its_data_and_its_identities(tmp_path: Path, make: Callable[[Root], Root]) -> None:
    like = make(make_root(str(tmp_path / "one")))
    other = create_root(str(tmp_path / "other"), like.run, like=like)
    shutil.rmtree(tmp_path / "one")
    assert asked(other) == ALL
    assert other.example_ids == Root.open(other.url).example_ids == like.example_ids


def test_other_options_of_an_evaluation_are_of_the_same_data(tmp_path: Path) -> None:
    root = make_root(str(tmp_path / "run"))
    options = {ENV: {"scorer": "exact", "system_prompt": "Be brief."}}
    (run,) = environment_settings(root, EvalConfig(env_options=options))
    assert run.env_options[ENV] == {**STORED, **options[ENV]}
    made, _, code = open_code(root, NO_LIMIT, run)
    assert made[ENV]().example(0, "heldout").messages[0].content == "Be brief."
    assert [each.sha256 for each in code if each.role == "environment"] == [DIGEST]


def fail_to_start(inputs: Inputs) -> None:
    with inputs.kept_if_run():
        write_questions(inputs, ROWS, {})
        raise ValueError("no start")


def test_nothing_is_left_of_a_start_that_fails(root_url: str) -> None:
    with pytest.raises(ValueError, match="no start"):
        fail_to_start(Inputs.of(root_url))
    fs, path = fsspec.core.url_to_fs(root_url, use_listings_cache=False)
    assert not fs.exists(path) or not fs.find(path)
