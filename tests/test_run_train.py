"""ludic.create, and what a Run starts: work, train, launch; in this process, as a notebook does it."""

import shutil
import signal
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from forks import Forked

import ludic
from ludic.engines.transformers_engine import TransformersEngine
from ludic.environments.moar_cats import WORDS
from ludic.errors import ConfigError, ConsentError, MissingRootError, ModelError
from ludic.models.tiny import make_tiny_model
from ludic.records.rollout import RolloutBatch
from ludic.root.attempts import complete_checkpoints, newest_attempt_id, read_attempt
from ludic.settings.table import SettingsError
from ludic.training.config import TrainConfig

SIZES: dict[str, Any] = {"group_size": 2, "groups_per_batch": 2, "max_tokens": 4, "accept_incomplete": True}
QUICK: dict[str, Any] = {"device": "cpu", "rollout_timeout_s": 5.0, "max_off_policy_steps": None}


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("tiny") / "model")
    make_tiny_model(folder, WORDS)
    return folder


@pytest.fixture
def run(tmp_path: Path, tiny: str) -> ludic.Run:
    return ludic.create(str(tmp_path / "run"), model=tiny, env="moar_cats", **SIZES)


@pytest.fixture(scope="module")
def sampled(tmp_path_factory: pytest.TempPathFactory, tiny: str) -> ludic.Run:
    """Such a run with eight groups; not to be changed."""
    folder = tmp_path_factory.mktemp("sampled")
    run = ludic.create(str(folder / "run"), model=tiny, env="moar_cats", **SIZES)
    run.worker(8)
    return run


@pytest.fixture
def own(sampled: ludic.Run, tmp_path: Path) -> ludic.Run:
    """A copy of it that a test may change."""
    return ludic.open(shutil.copytree(sampled.url, tmp_path / "own"))


def ask(run: ludic.Run, query: str) -> list[tuple]:
    return ludic.connect(run.url).execute(query).fetchall()


def last_settings(run: ludic.Run) -> Mapping[str, Any]:
    return read_attempt(run.root, newest_attempt_id(run.root)).config


@pytest.mark.slow
def test_sampling_and_training_take_turns_in_one_process(run: ludic.Run) -> None:
    assert run.worker(4).num_groups == 4
    assert run.train(num_steps=2, **QUICK).step == 2
    assert run.worker(num_groups=2).num_groups == 2
    assert run.train(num_steps=3).step == 3
    assert run.verify().findings == []
    # The first model is published as version 0, then each attempt publishes what it starts from.
    assert ask(run, "select distinct attempt_id, step from batches order by all") == [(1, 1), (1, 2), (2, 3)]
    # Both calls sampled the schedule's next groups: 6 groups of 2 episodes.
    assert ask(run, "select list(request_index order by request_index) from rollouts") == [(list(range(12)),)]
    assert ask(run, "select distinct worker_id[:3] from rollouts") == [("w0-",)]


@pytest.mark.slow
def test_a_later_call_takes_over_the_settings_of_the_trainer_before(own: ludic.Run) -> None:
    run = own
    run.train(num_steps=1, algorithm="dapo", filters=("drop_errors",), learning_rate=1e-3, **QUICK)
    before = last_settings(run)
    assert (before["clip_high"], before["filters"], before["learning_rate"]) == (0.28, ["drop_errors"], 1e-3)
    run.train(num_steps=2, learning_rate=1e-4)
    assert last_settings(run) == {**before, "num_steps": 2, "learning_rate": 1e-4}


@pytest.mark.slow
def test_another_objective_drops_what_it_ignores_of_the_trainer_before(own: ludic.Run) -> None:
    run = own
    run.train(num_steps=1, objective="ppo_clip", clip_high=0.3, **QUICK)
    run.train(num_steps=2, objective="reinforce")
    assert last_settings(run)["objective"] == "reinforce"
    assert "clip_high" not in last_settings(run)
    with pytest.raises(ConfigError, match=r"clip_high is 0\.3, which reinforce ignores"):
        run.train(num_steps=3, clip_high=0.3)


@pytest.mark.slow
def test_a_config_gives_all_settings(own: ludic.Run) -> None:
    run = own
    run.train(num_steps=1, learning_rate=1e-3, **QUICK)
    config = TrainConfig.of(num_steps=2, rollout_timeout_s=5.0, device="cpu")
    run.train(config)
    assert last_settings(run)["learning_rate"] == 1e-6
    with pytest.raises(ConfigError, match="config gives all settings of the trainer"):
        run.train(config, num_steps=3)


@pytest.mark.parametrize("start", ["train", "run"])
@pytest.mark.parametrize(
    ("name", "hint"),
    [("learning_rat", "did you mean 'learning_rate'?"), ("zzz", "docs/settings.md and `--help all` list them")],
)
def test_an_unknown_setting_is_answered_with_the_likely_one(run: ludic.Run, start: str, name: str, hint: str) -> None:
    with pytest.raises(ConfigError) as refused:
        getattr(run, start)(**{name: 1})
    assert str(refused.value) == f"setting '{name}' is unknown; {hint}"


def test_a_mistyped_choice_is_not_stored_for_later_trainers(run: ludic.Run) -> None:
    with pytest.raises(ConfigError, match="objective 'ppo' is unknown"):
        run.train(num_steps=1, objective="ppo", **QUICK)
    assert newest_attempt_id(run.root) == 0


def test_create_opens_the_same_run_again_and_refuses_another(run: ludic.Run, tiny: str) -> None:
    assert ludic.create(run.url, model=tiny, env=["moar_cats"], **SIZES).config == run.config
    with pytest.raises(ConfigError, match="group_size is 2 there, 3 was asked for"):
        ludic.create(run.url, model=tiny, env="moar_cats", **SIZES | {"group_size": 3})


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"env": "moar_cat"}, ConfigError, "environment 'moar_cat' is unknown; did you mean 'moar_cats'"),
        ({"group_sise": 2}, ConfigError, "setting of a run 'group_sise' is unknown; did you mean 'group_size'"),
        ({"model": "./none"}, ModelError, "./none: there is no such folder"),
        ({"model": None}, ConfigError, "missing: model"),
        ({"like": "somewhere"}, ConfigError, "like gives the settings of the run; leave out env"),
    ],
)
def test_a_run_that_could_not_start_is_not_made(tmp_path: Path, tiny: str, settings, error, message: str) -> None:
    with pytest.raises(error, match=message):
        ludic.create(str(tmp_path / "run"), **{"model": tiny, "env": "moar_cats"} | settings)
    with pytest.raises(MissingRootError):
        ludic.open(str(tmp_path / "run"))


@pytest.mark.slow
def test_offline_training_in_a_run_of_its_own(run: ludic.Run, tmp_path: Path) -> None:
    run.worker(4)
    offline = ludic.create(str(tmp_path / "offline"), like=run)
    assert offline.train(offline=True, sources=(run.url,), epochs=2, device="cpu").step == 4
    # The settings are those of the trainer before.
    assert offline.train(epochs=3).step == 6
    again = ludic.create(str(tmp_path / "again"), like=offline)
    assert again.train(replay_batches=offline.url).step == 6
    assert ask(again, "select loss from metrics order by step") == ask(
        offline, "select loss from metrics order by step"
    )


# --- Engines -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_an_engine_is_a_name_an_object_or_a_function(run: ludic.Run, tiny: str, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "from ludic.engines.transformers_engine import make_engine\n"
        "def own(folder, *, version, setup):\n    return make_engine(folder, version=version, setup=setup)\n"
    )
    made = []

    def make(folder: str, version: int) -> TransformersEngine:
        made.append(version)
        return TransformersEngine(folder, device="cpu", version=version)

    for engine in ("transformers", f"{tmp_path}/own.py:own", TransformersEngine(tiny, device="cpu", version=-1), make):
        assert run.worker(1, engine=engine, device="cpu").num_groups == 1
    assert made == [0]
    assert ask(run, "select count(*), max(policy_version) from rollouts") == [(8, 0)]


def test_an_unknown_engine_starts_nothing(run: ludic.Run) -> None:
    for start in (lambda: run.worker(1, engine="vlm"), lambda: run.run(num_steps=1, engine="vlm")):
        with pytest.raises(ConfigError, match="engine 'vlm' is unknown; did you mean 'vllm'"):
            start()
    assert not run.root.list("attempts")
    assert not run.root.list("workers")


# --- Ctrl-C --------------------------------------------------------------------------------------------------------


def interrupt(*args: object) -> None:
    signal.raise_signal(signal.SIGINT)


@pytest.mark.slow
def test_ctrl_c_ends_work_with_everything_stored_and_the_next_call_goes_on(run: ludic.Run) -> None:
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(KeyboardInterrupt):
        run.worker(1000, in_flight=4, report=interrupt)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers
    ((num_groups,),) = ask(run, "select count(*) from groups")
    assert 0 < num_groups < 1000
    assert run.worker(2).num_groups == 2
    # What was given up is sampled first, and nothing is there twice.
    ((indexes,),) = ask(run, "select list(request_index order by request_index) from rollouts")
    assert len(set(indexes)) == len(indexes) == 2 * (num_groups + 2)
    assert indexes[0] == 0


@pytest.mark.slow
def test_ctrl_c_ends_training_with_a_checkpoint_and_the_next_call_goes_on(own: ludic.Run) -> None:
    run = own
    with pytest.raises(KeyboardInterrupt):
        run.train(num_steps=4, report=lambda step, row: interrupt() if step == 1 else None, **QUICK)
    (checkpoint,) = complete_checkpoints(run.root)
    assert checkpoint.step in (1, 2)  # the next batch was read already
    assert run.train().step == 4
    steps = [(1 if step <= checkpoint.step else 2, step) for step in (1, 2, 3, 4)]
    assert ask(run, "select distinct attempt_id, step from batches order by all") == steps


@pytest.mark.slow
def test_an_event_stops_work_in_another_thread(run: ludic.Run) -> None:
    stop, made = threading.Event(), []

    def report(batch: RolloutBatch) -> None:
        stop.set()

    thread = threading.Thread(target=lambda: made.append(run.worker(1000, in_flight=4, stop=stop, report=report)))
    thread.start()
    thread.join(60)
    assert 0 < made[0].num_groups < 1000
    assert ask(run, "select count(*) from groups") == [(made[0].num_groups,)]


# --- Code that came from elsewhere ---------------------------------------------------------------------------------

SCORER = """
from ludic.environments.moar_cats import MoarCats
class Cats(MoarCats): ...
"""


@pytest.fixture
def foreign(tmp_path: Path, tiny: str, monkeypatch: pytest.MonkeyPatch) -> ludic.Run:
    """A run of another user, whose environment lies in the root."""
    (tmp_path / "cats.py").write_text(SCORER)
    run = ludic.create(str(tmp_path / "run"), model=tiny, env=f"{tmp_path}/cats.py:Cats", **SIZES)
    run.worker(1)
    monkeypatch.setenv("LUDIC_CONFIG_DIR", str(tmp_path / "me"))
    return ludic.open(run.url)


@pytest.mark.parametrize("start", [lambda run: run.worker(1), lambda run: run.run(num_steps=1)])
def test_code_of_a_foreign_root_does_not_run(foreign: ludic.Run, start) -> None:
    with pytest.raises(ConsentError, match=r"names code that this user has not agreed to run: environment '.*cats\.py"):
        start(foreign)


def test_trust_code_agrees_for_this_and_later_calls(foreign: ludic.Run) -> None:
    assert foreign.worker(1, trust_code=True).num_groups == 1
    assert foreign.worker(1).num_groups == 1


def test_a_run_like_a_foreign_one_needs_consent_too(foreign: ludic.Run, tmp_path: Path) -> None:
    with pytest.raises(ConsentError, match="trust_code=True"):
        ludic.create(tmp_path / "like", like=foreign).worker(1)
    assert ludic.create(tmp_path / "like", like=foreign, trust_code=True).worker(1).num_groups == 1


def test_creating_a_foreign_run_again_is_no_consent(foreign: ludic.Run, tiny: str) -> None:
    settings = {"model": tiny, "env": foreign.config.env, **SIZES}
    with pytest.raises(ConsentError):
        ludic.create(foreign.url, **settings)
    assert ludic.create(foreign.url, **settings, trust_code=True).worker(1).num_groups == 1


@pytest.mark.slow
def test_an_advantage_of_a_foreign_trainer_does_not_run(own: ludic.Run, tmp_path: Path, monkeypatch) -> None:
    run = own
    column = "append_column('advantage', rollouts['episode_reward'])"
    (tmp_path / "adv.py").write_text(f"def f(rollouts):\n    return rollouts.select(['rollout_id']).{column}\n")
    run.train(num_steps=1, advantage=f"{tmp_path}/adv.py:f", **QUICK)
    monkeypatch.setenv("LUDIC_CONFIG_DIR", str(tmp_path / "me"))
    with pytest.raises(ConsentError, match=r"advantage '.*adv\.py:f'"):
        run.train(num_steps=2)
    assert run.train(num_steps=2, trust_code=True).step == 2


# --- Processes -----------------------------------------------------------------------------------------------------


def test_launch_refuses_what_is_no_run(run: ludic.Run) -> None:
    with pytest.raises(ConfigError, match="trains on rollouts that its workers sample"):
        run.run(TrainConfig.of(offline=True))
    with pytest.raises(ConfigError, match=r"local_workers is 2, wanted 0 to num_workers \(1\)"):
        run.run(local_workers=2)
    with pytest.raises(ConfigError, match="in_flight is 0, wanted at least 1"):
        run.run(in_flight=0, num_steps=1)
    with pytest.raises(SettingsError, match="ranks is 2, wanted 1 in Python"):  # torchrun would replace this process
        run.train(ranks=2)
    with pytest.raises(ConfigError, match="like gives the settings of the run"):
        run.run(like=run, env=("addition",))


@pytest.mark.slow
def test_launch_samples_and_trains_in_processes_and_continues(run: ludic.Run, tmp_path: Path) -> None:
    launches = ("num_steps=2, learning_rate=1e-3, device='cpu'", "num_steps=3", "")
    lines = [f"print(run.run({settings}).step)" for settings in launches]
    (tmp_path / "launch.py").write_text("\n".join(["import ludic", f"run = ludic.open({run.url!r})", *lines]))
    launcher = Forked([tmp_path / "launch.py"], tmp_path / "err", out=tmp_path / "out")
    printed, log = launcher.communicate(500)
    assert (launcher.returncode, printed.split()) == (0, ["2", "3", "3"]), log
    assert last_settings(run)["learning_rate"] == 1e-3
    assert ask(run, "select distinct attempt_id, step from batches order by all") == [(1, 1), (1, 2), (2, 3)]
