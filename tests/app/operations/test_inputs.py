"""Data given as values: its name is its own, and its root finds it, wherever it is opened from."""

import json
import math
import os
import shutil
from collections.abc import Callable, Sequence
from datetime import UTC, date, datetime
from decimal import Decimal
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import fsspec
import msgspec
import polars as pl
import pyarrow as pa
import pytest

from ludic.app.operations.fit import _begun_rewards, _environment, _refuse_other_rows
from ludic.app.operations.fit_inputs import Inputs, write_questions
from ludic.environments.limits import NO_LIMIT
from ludic.errors import ConfigError, SchemaError, StoreError
from ludic.eval.config import EvalConfig
from ludic.eval.plan import environment_settings
from ludic.rollouts.sampler import open_code
from ludic.root.catalogue import IMPORTS, ImportName
from ludic.root.inputs import data_of
from ludic.root.json_records import ImportBegun, encode_record
from ludic.root.maintenance.verify import check_root
from ludic.root.root import Root
from ludic.run.code_uses import sampling_uses
from ludic.run.config import RunConfig
from ludic.run.run_json import create_root, located, run_of
from ludic.settings.consent import give_consent

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


@pytest.mark.parametrize(
    "name", ["", "../up", "a b", "words.jsonl", "words.py", "words.csv", "words.json", "words.jsonl.gz", "x" * 65, 3]
)
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
    for use in sampling_uses(run_of(old)):  # as whoever began the run did
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
    assert root.record.env == (ENV,)
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
        assert RunConfig(model="m", **settings(Inputs.of(url), moved)).differences(run_of(root)) == ""


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
    said = rf"run began with other rows \({ENV}\), and a run keeps its data set"
    with pytest.raises(ConfigError, match=said), inputs.kept_if_run(root):
        settings(inputs, root, ROWS[1:])
    assert root.list("inputs") == [f"inputs/{STORED['stored']}"]
    with pytest.raises(ConfigError, match=rf"calls this data set {ENV}, which stays; leave out name='words'"):
        settings(inputs, root, name="words")


def as_main_wrote_it(rows: Sequence[Any], url: str) -> Root:
    """A root that ludic has begun when it wrote values as msgspec does: its run.json and its file."""
    data = b"".join(msgspec.json.encode(row) + b"\n" for row in rows)
    name = f"inputs/questions-{sha256(data).hexdigest()[:16]}.jsonl"
    root = as_old(make_root(url), f"qa/{url}/{name}")
    root.delete("inputs")
    root.put(name, data)
    return root


QUESTION = {"question": "say red", "answer": "red"}
OF_TABLES = [{"a": 1, "b": None}, {"a": None, "b": "x"}]
VALUES: dict[str, Sequence[Any]] = {
    "NaN": [math.nan, 1.5],
    "date": [date(2026, 1, 2)],
    "datetime": [datetime(2026, 1, 2, 3, 4, 5)],
    "datetime with a zone": [datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)],
    "bytes": [b"\x00\xff"],
    "tuple": [(1, 2)],
    "Decimal": [Decimal("1.50")],
    "a null in a struct": OF_TABLES,
}
MAKERS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "list": (lambda rows: rows, lambda rows: rows),
    "Arrow": (pa.Table.from_pylist, lambda table: table.to_pylist()),
    "Polars": (pl.DataFrame, lambda table: pa.table(table).to_pylist()),
    "pandas": (
        lambda rows: pytest.importorskip("pandas").DataFrame(rows),
        lambda table: pa.table(table).to_pylist(),
    ),
    "datasets": (
        lambda rows: pytest.importorskip("datasets").Dataset.from_list(rows),
        lambda table: table.to_list(),
    ),
}


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("values", VALUES)
def test_a_root_of_before_goes_on_with_values_that_are_spelled_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, maker: str, values: str
) -> None:
    monkeypatch.chdir(tmp_path)
    make, as_main = MAKERS[maker]
    rows = make([{**QUESTION, "more": each} for each in VALUES[values]])
    root = as_main_wrote_it(as_main(rows), "run")
    before = root.list("inputs")
    inputs = Inputs.of("run")
    found = settings(inputs, root, rows)
    assert found == {"env": root.record.env, "env_options": {root.record.env[0]: {"scorer": "exact"}}}
    assert root.list("inputs") == before
    with pytest.raises(ConfigError, match="began with other rows"):
        settings(inputs, root, [{**QUESTION, "more": "else"}])


@pytest.mark.parametrize("is_older", [True, False])
def test_records_of_an_older_ludic_are_told_from_those_of_another_data_set(tmp_path: Path, is_older: bool) -> None:
    root = make_root(str(tmp_path / "run"))
    root = as_old(root, "sft") if is_older else root
    begun = ImportBegun(format="jsonl", env_name="sft", tokenizer="m", file="rows-0.jsonl", created_at="")
    root.put(IMPORTS.name(ImportName("0" * 16)), encode_record(begun))
    _refuse_other_rows(root, Path("rows-0.jsonl"))
    with pytest.raises(ConfigError, match=r"run holds the rows of another data set \(rows-0.jsonl\); choose") as caught:
        _refuse_other_rows(root, Path("rows-1.jsonl"))
    assert (f"`ludic train {root.url}` goes on with the rows that the root holds" in str(caught.value)) == is_older


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
    for content, said in (
        (b"{}", "its rows do not match the digest in its name"),
        (None, f"is missing, the rows of {ENV}"),
    ):
        root.delete(name) if content is None else root.put(name, content)
        (finding,) = check_root(root).findings
        assert (finding.check, finding.where) == ("data", name)
        assert said in finding.problem
        with pytest.raises(StoreError, match=r"do not match the digest in its name|the run's data set, is missing"):
            asked(root)


@pytest.mark.parametrize("is_older", [True, False])
def test_damaged_data_is_not_read_from_a_root_of_any_kind(root_url: str, is_older: bool) -> None:
    root = make_root(root_url)
    root = as_old(root, f"qa/old/inputs/{STORED['stored']}") if is_older else root
    root.put(f"inputs/{STORED['stored']}", TEXT.replace(b"red", b"rad"))
    for copy in [] if root.is_local else Path(os.environ["LUDIC_CACHE_DIR"]).rglob(STORED["stored"]):
        copy.unlink()
    with pytest.raises(
        StoreError, match=rf"/inputs/{STORED['stored']} is damaged: its rows do not match the digest in its name"
    ):
        located(run_of(root), root)


def test_a_copy_that_is_killed_on_the_way_is_repaired_by_the_same_command(
    root_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    like = make_root(str(tmp_path / "like"))

    def killed(*args: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("ludic.run.run_json.copy_code", killed)
        with pytest.raises(KeyboardInterrupt):
            create_root(root_url, run_of(like), like=like)
    other = create_root(root_url, run_of(like), like=like)
    shutil.rmtree(like.path)
    assert asked(other) == ALL


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"sha256": "0" * 64}, rf"sha256='0{{64}}', and the rows have {DIGEST}; leave it out"),
        ({"stored": STORED["stored"]}, "dataset_options has stored, which ludic sets; give the rows themselves"),
    ],
)
def test_options_that_ludic_sets_are_compared_or_refused(tmp_path: Path, options: Any, said: str) -> None:
    inputs = Inputs.of(str(tmp_path / "run"))
    with pytest.raises(ConfigError, match=said):
        settings(inputs, **options)
    assert settings(inputs, sha256=DIGEST)["env_options"] == {ENV: {"scorer": "exact", **STORED}}


@pytest.mark.parametrize("stored", ["../../etc/passwd", "/etc/passwd", "reward.py", "questions-1.jsonl", 7])
def test_only_data_of_the_root_has_such_a_name(tmp_path: Path, stored: Any) -> None:
    run = RunConfig(model="m", env=("qa/x",), env_options={"qa/x": {"stored": stored}})
    root = create_root(str(tmp_path / "run"), run)
    with pytest.raises(ConfigError, match=r"environment qa/x: stored is .*, wanted the name of a file in inputs/"):
        located(run_of(root), root)


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
    other = create_root(str(tmp_path / "other"), run_of(like), like=like)
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


def fail_to_start(inputs: Inputs, rows: Any = ROWS, existing: Root | None = None) -> None:
    with inputs.kept_if_run(existing):
        write_questions(inputs, rows, {})
        raise ValueError("no start")


def test_nothing_is_left_of_a_start_that_fails(root_url: str) -> None:
    with pytest.raises(ValueError, match="no start"):
        fail_to_start(Inputs.of(root_url))
    fs, path = fsspec.core.url_to_fs(root_url, use_listings_cache=False)
    assert not fs.exists(path) or not fs.find(path)


def test_a_start_that_fails_leaves_the_files_of_another_one(root_url: str) -> None:
    other = Inputs.of(root_url)
    found = settings(other)
    with pytest.raises(ValueError, match="no start"):
        fail_to_start(Inputs.of(root_url))
    root = create_root(root_url, RunConfig(model="m", **found))
    assert asked(root) == ALL


def test_data_that_a_failed_start_took_along_is_written_again(root_url: str) -> None:
    first, other = Inputs.of(root_url), Inputs.of(root_url)
    settings(first)
    found = settings(other)  # finds the file of the first call
    with pytest.raises(ValueError, match="no start"):
        fail_to_start(first)
    root = create_root(root_url, RunConfig(model="m", **found))
    assert not root.exists(f"inputs/{STORED['stored']}")
    other.put_data_again()
    assert root.read(f"inputs/{STORED['stored']}") == TEXT
    assert asked(root) == ALL


@pytest.mark.parametrize("is_known", [True, False])
def test_rows_that_a_root_does_not_have_are_deleted_after_any_error(root_url: str, is_known: bool) -> None:
    root = make_root(root_url)
    before = root.list("inputs")
    for rows in (ROWS, ROWS[1:]):
        with pytest.raises(ValueError, match="no start"):
            fail_to_start(Inputs.of(root_url), rows, root if is_known else None)
        assert root.list("inputs") == before


def test_a_root_of_another_environment_holds_no_rows_of_a_refused_call(tmp_path: Path) -> None:
    root = create_root(str(tmp_path / "run"), RunConfig(model="m", env=("addition",)))
    with pytest.raises(ConfigError, match="other settings"), (inputs := Inputs.of(root.url)).kept_if_run(root):
        create_root(root.url, RunConfig(model="m", **settings(inputs, root)))
    assert root.list("inputs") == []
