"""`Run.eval` over a tiny model: what it stores, that it goes on where it was interrupted, and what it refuses."""

import logging
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ludic
from ludic.app.launch.evaluate import open_to_evaluate
from ludic.engines.config import EngineConfig
from ludic.engines.registry import EngineSetup, engine_maker
from ludic.engines.transformers_engine import TransformersEngine
from ludic.errors import ConfigError
from ludic.eval.config import EvalConfig
from ludic.eval.plan import missed_versions
from ludic.eval.sampling import evaluate
from ludic.records.rollout import RolloutBatch
from ludic.root.root import Root
from ludic.root.weights.policies import prune_policies, publish_policy
from ludic.run.config import RunConfig
from ludic.run.run_json import create_root
from ludic.settings.consent import CodeSettings

pytestmark = pytest.mark.slow

SMALL: dict[str, Any] = {"num_examples": 6, "n": 2, "examples_per_call": 4, "device": "cpu"}


def publish(root: Root, folder: str) -> int:
    """Publish a model as the next version."""

    def save(target: Path) -> None:
        shutil.copytree(folder, target, dirs_exist_ok=True)

    return publish_policy(root, save, step=0, attempt_id=0, parent_version=None)


def new_run(folder: Path, *models: str) -> ludic.Run:
    run = RunConfig(model=models[0], env=("addition",), group_size=2, max_tokens=8)
    root = create_root(str(folder / "run"), run)
    for each in models:
        publish(root, each)
    return ludic.Run(root)


@pytest.fixture
def run(tmp_path: Path, folder: str, other_folder: str) -> ludic.Run:
    """A run with two versions."""
    return new_run(tmp_path, folder, other_folder)


@pytest.fixture(scope="module")
def sampled(tmp_path_factory: pytest.TempPathFactory, folder: str, other_folder: str) -> ludic.Run:
    """Such a run with 12 samples of each version; not to be changed."""
    run = new_run(tmp_path_factory.mktemp("sampled"), folder, other_folder)
    run.eval("0,latest", **SMALL)
    return run


@pytest.fixture
def own(sampled: ludic.Run, tmp_path: Path) -> ludic.Run:
    """A copy of it that a test may change."""
    return ludic.open(shutil.copytree(sampled.url, tmp_path / "own"))


SAMPLES = """
    select version, env_example_id, request_index, response_tokens, episode_reward, seed, temperature
    from evals where version = 0 order by all
"""


def test_samples_of_each_example_are_stored_as_evals(sampled: ludic.Run) -> None:
    run, found = sampled, sampled.eval("0,latest", **SMALL)  # which stores nothing more
    assert found.samples.select("policy_version", "num_examples", "num_samples").rows() == [(0, 6, 12), (1, 6, 12)]
    rows = run.sql("select distinct purpose, group_size, env_name from evals").rows()
    assert rows == [("eval", 2, "addition")]
    (record,) = run.sql("select evaluation, env_name, settings from evaluations").to_dicts()
    assert record["evaluation"] == found.samples["evaluation"][0]
    assert '"seed":0' in record["settings"].replace(" ", "")
    assert run.sql("select count(*) as n from rollouts")["n"].item() == 0
    assert not run.verify().findings


def test_the_same_command_samples_nothing_again(own: ludic.Run) -> None:
    run = own
    stored = run.sql("select rollout_id from evals order by all")
    sampled: list[Any] = []
    run.eval(0, report=sampled.append, **SMALL)
    assert sampled == []
    assert run.sql("select rollout_id from evals order by all").equals(stored)


def test_more_examples_and_samples_add_to_what_is_there(own: ludic.Run, tmp_path: Path, folder: str) -> None:
    run = own
    before = set(run.sql("select rollout_id from evals")["rollout_id"])
    run.eval(0, **SMALL | {"num_examples": 9, "n": 3})
    assert before <= set(run.sql("select rollout_id from evals")["rollout_id"])
    other = create_root(str(tmp_path / "other"), RunConfig(model=folder, env=("addition",), group_size=4, max_tokens=8))
    at_once = ludic.Run(other)
    at_once.eval(0, **SMALL | {"num_examples": 9, "n": 3, "examples_per_call": 32})
    assert run.sql(SAMPLES).equals(at_once.sql(SAMPLES))


def test_an_interrupted_evaluation_ends_as_an_unbroken_one(run: ludic.Run, tmp_path: Path, folder: str) -> None:
    stop, many = threading.Event(), SMALL | {"num_examples": 8, "examples_per_call": 1}
    run.eval(0, report=lambda batch: stop.set(), stop=stop, in_flight=1, **many)
    assert 0 < run.sql("select count(*) as n from evals")["n"].item() < 16
    assert run.root.list("evaluators") == []
    again = run.eval(0, **many)
    other = ludic.Run(create_root(str(tmp_path / "other"), RunConfig(model=folder, env=("addition",), max_tokens=8)))
    unbroken = other.eval(0, **many)
    assert again.to_dict() | {"root": ""} == unbroken.to_dict() | {"root": ""}


def test_two_evaluators_at_once_count_each_sample_once(run: ludic.Run) -> None:
    loading = threading.Lock()

    def make_engine(folder: str, version: int) -> TransformersEngine:
        with loading:  # transformers can't load two models at the same time in one process
            return TransformersEngine(folder, device="cpu", version=version)

    def evaluate(**options: Any) -> None:
        run.eval(0, engine=make_engine, stop=threading.Event(), report=lambda batch: None, **SMALL | options)

    others = [{}, {"n": 3}, {"num_examples": 5}]
    threads = [threading.Thread(target=evaluate, kwargs=options) for options in others]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    counted = run.sql("select request_index, count(*) as n from eval_episodes group by all")
    assert set(counted["n"]) == {1}
    assert len(counted) == 18
    assert not run.verify().findings


def test_compacted_samples_are_not_sampled_again(own: ludic.Run) -> None:
    own.compact(all_versions=True)
    own.eval("0,1", report=lambda batch: pytest.fail("was stored"), **SMALL)
    assert own.sql("select count(*) as n from evals")["n"].item() == 24


def test_other_settings_are_another_evaluation(own: ludic.Run) -> None:
    run, first = own, own.eval(0, stored=True)
    second = run.eval(0, temperature=0, **SMALL)
    assert first.samples["evaluation"].item() != second.samples["evaluation"].item()
    assert run.eval(0, stored=True).samples["num_samples"].to_list() == [12, 12]
    assert run.sql("select count(distinct response_tokens) as n from evals where temperature = 0")["n"].item() <= 6


def test_version_0_is_the_first_model_also_without_a_trainer(tmp_path: Path, folder: str) -> None:
    config = EvalConfig(env=("addition",), run={"max_tokens": 8})
    run = ludic.Run(open_to_evaluate(str(tmp_path / "new"), config, folder, CodeSettings()))
    assert run.eval(**SMALL, max_tokens=8).samples["policy_version"].to_list() == [0]


def test_stored_samples_are_reported_without_weights(own: ludic.Run) -> None:
    run = own
    for name in run.root.list("policies/version=1"):
        run.root.delete(name)
    assert run.eval(1, **SMALL).samples["num_samples"].to_list() == [12]
    with pytest.raises(ConfigError, match="holds no weights of version 1; it has 1 from 0 to 0"):
        run.eval(1, **SMALL | {"n": 3})


@pytest.mark.parametrize(("versions", "missing"), [("0,1,7", "version 7"), ("0,7,1,9", "versions 7, 9")])
def test_versions_without_weights_are_refused_before_any_is_sampled(
    run: ludic.Run, versions: str, missing: str, tmp_path: Path
) -> None:
    suite = tmp_path / "suite.toml"
    entry = '[[entries]]\nname = "{}"\nenv = "addition"\n'
    suite.write_text(f"num_examples = 2\n{entry.format('one')}{entry.format('two')}")
    for settings in (SMALL, {"suite": str(suite)}):
        with pytest.raises(ConfigError, match=f"holds no weights of {missing}; it has 2 from 0 to 1$"):
            run.eval(versions, **settings)
    assert not run.root.list("evals")
    assert not run.root.list("evaluations")


@pytest.mark.parametrize(
    ("versions", "settings", "message"),
    [
        (7, {}, "holds no weights of version 7; it has 2 from 0 to 1"),
        ("5-9", {}, "holds no weights of versions 5 to 9; it has 2 from 0 to 1"),
        ("newest", {}, "versions has 'newest', wanted a number, latest, or a range such as 10-20"),
        ("3-1", {}, "versions has '3-1', whose end is before its begin"),
        (0, {"env": "additon"}, "environment 'additon' is unknown; did you mean 'addition'"),
        (0, {"env_options": {"other": {}}}, r"env_options has options of 'other', which is not in env \(addition\)"),
        (0, {"n": 0}, "n is 0, wanted at least 1"),
        (0, {"temprature": 1}, "setting 'temprature' is unknown; did you mean 'temperature'"),
    ],
)
def test_a_wrong_setting_is_explained(run: ludic.Run, versions: Any, settings: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run.eval(versions, **SMALL | settings)
    assert not run.root.list("evals")


def test_another_environment_than_the_runs(run: ludic.Run) -> None:
    found = run.eval(0, env="opposites", **SMALL)
    assert found.samples["env_name"].to_list() == ["opposites"]


def test_comparing_versions_that_are_one_finds_no_difference(sampled: ludic.Run) -> None:
    found = sampled.compare(0, 0)
    row = found.differences.row(0, named=True)
    assert (row["difference"], row["p_value"], row["num_examples"]) == (0.0, 1.0, 6)
    assert found.warnings == []


def test_a_version_that_is_pruned_before_it_is_evaluated_is_skipped_and_told(
    run: ludic.Run, other_folder: str, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(3):
        publish(run.root, other_folder)
    taken: list[int] = []

    def versions() -> Iterator[int]:
        for version in (0, 2, 4):
            if version == 2:  # as the trainer does while version 0 is evaluated
                prune_policies(run.root, keep=1, latest_version=4)
            taken.append(version)
            yield version

    config = EvalConfig(num_examples=2)
    make = engine_maker(EngineSetup(config=EngineConfig(), device="cpu"))
    evaluate(run.root, {"": config}, make, threading.Event(), versions=versions())
    assert taken == [0, 2, 4]
    assert f"skipped version 2: {run.url} holds no weights of version 2; it has 1 from 4 to 4" in caplog.messages
    assert run.sql("select distinct policy_version from evals order by all")["policy_version"].to_list() == [0, 4]
    assert missed_versions(run.root, 2) == [2]
    with pytest.raises(ConfigError, match="holds no weights of version 2"):
        run.eval("2,4", **SMALL)


def test_following_a_run_evaluates_its_versions_until_it_is_stopped(
    run: ludic.Run, caplog: pytest.LogCaptureFixture
) -> None:
    stop = threading.Event()
    with caplog.at_level(logging.INFO):
        found = run.eval(every=1, stop=stop, report=lambda batch: stop.set() if seen(batch) == 1 else None, **SMALL)
    assert found.samples["policy_version"].to_list() == [0, 1]
    assert any(message.startswith("version 0 of addition: mean reward 0") for message in caplog.messages)


def seen(batch: RolloutBatch) -> int:
    return batch.groups[0].rollouts[0].policy_version


GROUPED = """\
from ludic.environments.environment import Example, Score
from ludic.records.rollout import Message


class Grouped:
    def example(self, index, split):
        return Example(example_id=f"{split}-{index}", messages=(Message(role="user", content="?"),))

    def score(self, example, answer):
        return Score(reward=0.0)

    async def score_group(self, example, answers):
        return [10.0 * len(answers) + each.group_index for each in answers]
"""


def test_the_samples_of_an_example_are_scored_together_and_more_samples_are_another_evaluation(
    tmp_path: Path, folder: str
) -> None:
    file = tmp_path / "grouped.py"
    file.write_text(GROUPED)
    run = RunConfig(model=folder, env=(f"{file}:Grouped",), group_size=4, max_tokens=8, accept_incomplete=True)
    root = create_root(str(tmp_path / "run"), run)
    publish(root, folder)
    run_ = ludic.Run(root)
    ids = []
    for n in (2, 3):
        found = run_.eval(0, **SMALL | {"n": n, "num_examples": 5})
        ids.append(found.samples["evaluation"][0])
        query = "select distinct episode_reward from evals where group_size = ? order by all"
        assert [reward for (reward,) in run_.sql(query, n).rows()] == [10.0 * n + index for index in range(n)]
    assert ids[0] != ids[1]
