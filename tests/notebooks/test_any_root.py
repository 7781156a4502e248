"""The notebooks' cells run, and answer, on roots of every kind."""

from pathlib import Path

import ludic
import peers
import pytest
from notebook_cells import names_of
from tiny_runs import create_root, fill, make_model, train_here

from ludic.adapters.imports.formats import load_format
from ludic.adapters.imports.importing import import_file
from ludic.models.chat import load_tokenizer
from ludic.root.root import Root
from ludic.training.presets import load_algorithm
from ludic.run.run_json import run_of

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def filled(tmp_path: Path, model: str) -> Root:
    root = create_root(str(tmp_path / "run"), model)
    fill(root, num_files=2)
    return root


@pytest.mark.parametrize("algorithm", ["grpo", "reinforce_pp", "dpo"])
def test_a_trained_root_shows_the_advantages_that_the_ledger_holds(
    filled: Root, model: str, algorithm: str, monkeypatch: pytest.MonkeyPatch
):
    train_here(filled, num_steps=2, **load_algorithm(algorithm) | ({"reference": model} if algorithm == "dpo" else {}))
    names = names_of("rollouts", filled.url, monkeypatch)
    assert names["trained"].startswith("2 gradient steps used ")
    group = names["group"].drop_nulls("advantage_in_the_ledger")
    assert (group["advantage_in_the_ledger"] - group["computed_now"]).abs().max() < 1e-9


def test_advantages_by_token_are_shown_by_their_mean(filled: Root, monkeypatch: pytest.MonkeyPatch):
    train_here(filled, num_steps=2, advantage="token_returns")
    group = names_of("rollouts", filled.url, monkeypatch)["group"]
    assert (group["advantage_in_the_ledger"] - group["computed_now"]).abs().max() < 1e-6  # float32


def test_a_root_trained_offline_shows_the_rollouts_of_its_source(
    filled: Root, tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch
):
    root = create_root(str(tmp_path / "offline"), model)
    train_here(root, num_steps=2, offline=True, sources=(filled.url,), objective="sft")
    names = names_of("rollouts", root.url, monkeypatch)
    assert names["trained"].startswith("2 gradient steps used ")
    assert names["lineage"].height == 1
    assert names["group"]["reward"].len() == run_of(root).group_size


@pytest.fixture
def imported(tmp_path: Path, model: str) -> Root:
    """A root with one group of two rollouts, which another program sampled."""
    root = create_root(str(tmp_path / "run"), model)
    records = [peers.verl_record(output, reward) for output, reward in (("cc", 1.0), ("dd", 0.0))]
    path = str(peers.write_verl(tmp_path, records))
    options = {"env_name": "cats", "tokenizer": model, "get_tokenizer": lambda: load_tokenizer(model)}
    import_file(root, path, load_format("verl"), **options)
    return root


def test_an_imported_root_has_rewards_and_no_steps(imported: Root, monkeypatch: pytest.MonkeyPatch):
    names = names_of("rollouts", imported.url, monkeypatch)
    assert names["sampled"].startswith("Mean reward is 0.50, all of policy version")
    assert names["trained"] == "no gradient step was taken"
    for name in ("evaluation", "mismatch"):
        assert names_of(name, imported.url, monkeypatch)["answer"].startswith(NOTHING[name])
    names = names_of("credit", imported.url, monkeypatch)
    assert names["answer"].startswith(NOTHING["credit"])
    # Rewards 1 and 0: each minus the other.
    assert dict(names["rows"].select("reward", "rloo").rows()) == {1.0: 1.0, 0.0: -1.0}


NOTHING = {
    "evaluation": "There are no two versions to compare",
    "mismatch": "No numbers by token are stored here",
    "offline_replay": "No rollout with a reward is stored here",
    "credit": "No task was handed on in this root",
}


def test_a_root_that_was_just_started_says_that_nothing_is_there(
    tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch
):
    root = create_root(str(tmp_path / "run"), model)
    names = names_of("rollouts", root.url, monkeypatch)
    assert names["sampled"] == "0 rollouts are here, none with a reward"
    assert names["trained"] == "no gradient step was taken"
    for name, answer in NOTHING.items():
        assert names_of(name, root.url, monkeypatch)["answer"].startswith(answer)


def test_credit_compares_those_who_worked_on_tasks_with_each_other(
    delegated: ludic.Run, monkeypatch: pytest.MonkeyPatch
):
    rows = names_of("credit", delegated.url, monkeypatch)["rows"]
    for depth in (0, 1):
        some = rows.filter(rows["depth"] == depth)
        deviation = some["reward"].std() or 1.0
        expected = (some["reward"] - some["reward"].mean()) / deviation
        assert some["grpo_by_agent"].to_list() == pytest.approx(expected.to_list(), abs=1e-4)
