"""`ludic push`: the folders that it writes, what they leave out, what a Hub gets; the data set is a run."""

import json
import re
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import yaml
from adapters.exports.hub_server import Hub, serve_hub
from evaluations import store_evaluation
from readers.conftest import mixed
from strategies import make_batch
from tiny_runs import create_root, fill, make_model, query, train_here

import ludic
from ludic.adapters.exports.cards import escape
from ludic.app.operations.run import Run
from ludic.errors import ConfigError, StoreError
from ludic.root.rows.writer import RolloutWriter

SCRIPT = '<script>alert(1)</script>|**x** [y](javascript:z) www.evil.org\n# "q": \x1b[2J'
HOME = "/home/ann/secret/cats.py"
EVALUATED = {"a": [1.0, 0.0], "b": [1.0, 1.0], "c": [0.0, 0.0], "d": [1.0, 0.0], "e": [0.0, 1.0]}
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two steps, evaluated, with hostile names and texts; not to be changed."""
    folder = tmp_path_factory.mktemp("push")
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret-of-s3")
        root = create_root(str(folder / "cats"), make_model(folder / "model"), env=("moar_cats", SCRIPT))
        fill(root, num_files=2)
        with RolloutWriter(root, "w9-test") as writer:
            batch = make_batch(worker_id="w9-test", seed=7, env_name=SCRIPT, rewards=[[1.0, 0.0, 0.5, None]])
            (group,) = batch.groups
            rollouts = (
                *group.rollouts[:3],
                replace(group.rollouts[3], traceback=f'File "{HOME}", line 1', model=root.record.model),
            )
            writer.append(replace(batch, groups=(replace(group, rollouts=rollouts),)))
        train_here(root, num_steps=2, where="env_name <> 'secret-of-s3'", checkpoint_every=2)
        store_evaluation(root, EVALUATED, version=2, env_name="moar_cats")
        store_evaluation(root, EVALUATED, version=2, env_name=SCRIPT, evaluation="f" * 16)
    return ludic.open(root.url)


@pytest.fixture(scope="module")
def pushed(run: Run, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    folder = tmp_path_factory.mktemp("pushed") / "out"
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret-of-s3")
        monkeypatch.setattr(socket.socket, "connect", None)  # nothing goes to a network
        return run.push("ann/cats", to=folder, license="mit"), folder


def head_of(card: Path) -> dict[str, Any]:
    _, head, _ = card.read_text().split("---\n", 2)
    return yaml.safe_load(head)


def test_the_model_loads_and_its_card_has_the_evaluations_with_their_intervals(run, pushed) -> None:
    report, folder = pushed
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(folder / "model")
    assert (report.version, report.folder, [row["url"] for row in report.sent]) == (2, str(folder), [None, None])
    head = head_of(folder / "model" / "README.md")
    assert (head["license"], head["datasets"]) == ("mit", ["ann/cats-rollouts"])
    assert "base_model" not in head  # a folder of this machine
    (index,) = head["model-index"]
    results = {
        (result["dataset"]["name"], metric["type"]): metric
        for result in index["results"]
        for metric in result["metrics"]
    }
    (wanted,) = run.eval(stored=True, env="moar_cats", measures=("mean_reward",)).to_dict()["measures"]
    found = results["moar_cats", "mean_reward"]
    assert found["value"] == wanted["estimate"] == pytest.approx(0.5)  # (.5 + 1 + 0 + .5 + .5) / 5
    assert (found["args"]["low"], found["args"]["high"]) == (wanted["low"], wanted["high"])
    text = (folder / "model" / "README.md").read_text()
    assert "| 2 | moar_cats | 0123456789abcdef | mean_reward | 0.5 |" in text
    assert (folder / "model" / "reward.png").read_bytes().startswith(b"\x89PNG")


def test_datasets_reads_the_rollouts_with_the_step_and_the_advantage_that_the_ledger_has(run, pushed, tmp_path) -> None:
    datasets = pytest.importorskip("datasets")
    _, folder = pushed
    tables = {
        table: datasets.load_dataset(str(folder / "dataset"), table, split="train", cache_dir=str(tmp_path))
        for table in ("answers", "rollouts", "batches", "evals")
    }
    stored = {row[0]: row[1:] for row in query(run.root, "select rollout_id, episode_reward, run_id from rollouts")}
    assert {row["rollout_id"]: (row["reward"], row["run_id"]) for row in tables["answers"]} == stored
    tokens = dict(query(run.root, "select rollout_id, response_tokens from rollouts"))
    assert {row["rollout_id"]: row["response_tokens"] for row in tables["rollouts"]} == tokens
    used = dict(query(run.root, "select rollout_id, (step, advantage) from batches where used"))
    assert len(used) > 8
    found = {
        row["rollout_id"]: (row["step"], row["advantage"]) for row in tables["answers"] if row["rollout_id"] in used
    }
    assert found == used
    assert tables["batches"].num_rows == query(run.root, "select count(*) from batches")[0][0]
    assert tables["evals"].num_rows == 20


def test_the_data_set_is_a_run_that_is_viewed_queried_reported_and_sound(run, pushed, tmp_path) -> None:
    dataset = ludic.open(pushed[1] / "dataset")
    (rollout_id, answer), *_ = query(run.root, "select rollout_id, messages[-1].content from rollouts")
    assert answer in repr(dataset.view(rollout_id, text=True))
    assert dataset.verify().failure is None
    dataset.report(output=tmp_path / "report.html")
    assert "Reward" in (tmp_path / "report.html").read_text()
    tables = ("rollouts", "evals", "batches", "metrics", "attempts", "policies")
    counts = ", ".join(f"(select count(*) from {table})" for table in tables)  # noqa: S608
    assert query(dataset.root, f"select {counts}") == query(run.root, f"select {counts}")
    assert dataset.root.run_id == run.root.run_id


def test_nothing_of_a_hostile_run_is_markup_and_what_is_private_is_left_out(run, pushed) -> None:
    report, folder = pushed
    for card in folder.glob("*/README.md"):
        head, body = card.read_text().split("---\n", 2)[1:]
        assert yaml.safe_load(head)
        assert "\x1b" not in head + body
        shown = re.sub(r"</?(details|summary)>", "", body)
        assert "<" not in shown
        assert "javascript:" not in shown
        assert "www.evil" not in shown
        rows = [line for line in body.splitlines() if line.startswith("|")]
        assert {row.count("|") for row in rows} == {3, 4, 8}  # tables of two, three and seven columns
    written = {file.relative_to(folder).as_posix(): file.read_bytes() for file in folder.rglob("*") if file.is_file()}
    below = {name.split("/")[1] for name in written if name.startswith("dataset/")}
    assert not below & {"workers", "code", "checkpoints", "logs", "inputs", "imports", "quarantine", ".tmp"}
    assert not [name for name in written if name.startswith("dataset/") and "safetensors" in name]
    assert b"secret-of-s3" not in b"".join(written.values())
    texts = b"".join(data for name, data in written.items() if not name.endswith(".parquet"))
    assert str(Path(run.root.path).parent).encode() not in texts  # of the root and of the model
    places = {(row["found"], row["where"]): row["num_places"] for row in report.personal}
    assert places["a home folder", "traceback of rollouts"] == 1
    assert places["the folder of the model", "model of rollouts"] == 1


def test_a_card_shows_a_text_as_it_is_and_says_how_long_a_cut_one_was() -> None:
    assert escape("a*b") == "a&#42;b"
    assert (escape("- 1"), escape("12. x"), escape(0.5)) == ("&#45; 1", "&#49;2. x", "0.5")
    assert escape("x" * 600) == "x" * 500 + " ... &#40;600 characters&#41;"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with serve_hub() as hub:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_TOKEN", "hf_abcdefghijklmnopqrstuvwxyz")
        yield hub


def test_a_hub_gets_what_the_folder_has_in_private_repositories(run, pushed, hub, monkeypatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret-of-s3")
    report = run.push("ann/cats", license="mit")
    assert hub.repos == {"model/ann/cats": True, "dataset/ann/cats-rollouts": True}
    assert hub.tokens == {"Bearer hf_abcdefghijklmnopqrstuvwxyz"}
    _, folder = pushed
    for kind, repo in (("model", "ann/cats"), ("dataset", "ann/cats-rollouts")):
        wanted = {
            file.relative_to(folder / kind).as_posix(): file.read_bytes()
            for file in (folder / kind).rglob("*")
            if file.is_file()
        }
        found = hub.files[f"{kind}/{repo}"]
        assert {*found} == {*wanted}
        assert found["README.md"] == wanted["README.md"]
        assert b"hf_abc" not in b"".join(found.values())
    assert [row["url"] for row in report.sent] == [f"{hub.url}/ann/cats", f"{hub.url}/datasets/ann/cats-rollouts"]
    assert "hf_abc" not in repr(report) + json.dumps(report.to_dict())


def test_nothing_is_public_by_accident_and_a_hub_that_refuses_is_named_without_the_token(
    tmp_path, hub, monkeypatch
) -> None:
    root = mixed(str(tmp_path / "run"))
    with RolloutWriter(root, "w9-test") as writer:
        (group,) = make_batch(worker_id="w9-test", seed=7, rewards=[[None]]).groups
        named = replace(group, rollouts=(replace(group.rollouts[0], error=f'File "{HOME}", line 1'),))
        writer.append(replace(make_batch(worker_id="w9-test", seed=7, rewards=[[None]]), groups=(named,)))
    old = ludic.open(root.url)
    with pytest.raises(ConfigError, match=r"a public push would show a home folder in error of .*--personal sends it"):
        old.push("ann/cats", public=True, parts="rollouts")
    assert hub.repos == {}
    with pytest.raises(ConfigError, match="version chooses the weights, and parts is rollouts"):
        old.push("ann/cats", version=1, parts="rollouts")
    old.push("ann/cats", public=True, personal=True, parts="rollouts")
    assert hub.repos == {"dataset/ann/cats-rollouts": False}
    with pytest.raises(ConfigError, match=r"dataset ann/cats-rollouts is public already; --public says that this is m"):
        old.push("ann/cats", parts="rollouts")
    hub.refused = True
    with pytest.raises(StoreError, match=r"the Hub refused \(403\).*Bearer \*\*\* may not write"):
        old.push("ann/others", parts="rollouts")
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(StoreError, match="the Hub can't be reached"):
        old.push("ann/others", parts="rollouts")


@pytest.mark.parametrize("repo", ["cats", "a/b/c", "../x", "ann/-x", f"ann/{'x' * 90}", "ann/x y", "ann/"])
def test_a_name_that_the_hub_does_not_take_is_refused(run, repo: str, tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"repo is .*(does not take|OWNER/NAME)"):
        run.push(repo, to=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_root_of_files_of_several_schemas_is_read_by_datasets(tmp_path) -> None:
    datasets = pytest.importorskip("datasets")
    root = mixed(str(tmp_path / "run"))
    ludic.open(root.url).push("ann/old", to=tmp_path / "out", parts="rollouts")
    for table in ("answers", "rollouts"):
        rows = datasets.load_dataset(str(tmp_path / "out/dataset"), table, split="train", cache_dir=str(tmp_path / "c"))
        assert {*rows["rollout_id"]} == {row[0] for row in query(root, "select rollout_id from rollouts")}
    with pytest.raises(ConfigError, match="exists and is not an empty folder"):
        ludic.open(root.url).push("ann/old", to=tmp_path / "out", parts="rollouts")
