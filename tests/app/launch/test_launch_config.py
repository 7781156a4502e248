"""Settings of `ludic run` that contradict each other."""

from typing import Any

import pytest
from command_settings import parsed

from ludic.adapters.ray.launcher import connected
from ludic.app.launch.config import LaunchConfig
from ludic.app.launch.local import worker_settings
from ludic.app.launch.process import config_args
from ludic.app.operations.start import worker
from ludic.errors import ConfigError
from ludic.rollouts.config import WorkerConfig


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"launcher": "ray", "worker_gpus": "0"}, "trainer_gpus and worker_gpus name GPUs of this machine"),
        ({"launcher": "ray", "trainer_gpus": ""}, "trainer_gpus and worker_gpus name GPUs of this machine"),
        ({"launcher": "slurm"}, "launcher 'slurm' is unknown; there are local, ray"),
        ({"eval_every": 0}, "eval_every is 0, wanted at least 1"),
        ({"eval_options": {"n": 4}}, "eval_options has no effect without eval_every"),
        (
            {"eval_every": 5, "eval_options": {"nn": 4}},
            "setting of an evaluation .* 'nn' is unknown; did you mean 'n'",
        ),
        ({"eval_every": 5, "eval_options": {"n": 0}}, "n is 0, wanted at least 1"),
        (
            {"eval_every": 5, "eval_options": {"versions": "3"}},
            "eval_options has versions, which follows from eval_every",
        ),
        ({"eval_every": 5, "launcher": "ray"}, "eval_every needs --launcher local"),
    ],
)
def test_settings_without_effect_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LaunchConfig(**settings)


def test_settings_of_ray_go_with_its_launcher() -> None:
    assert LaunchConfig(launcher="ray", local_workers=2).workers_of(4) == 2


def test_the_evaluation_has_the_limits_of_the_run_unless_it_gets_others() -> None:
    config = LaunchConfig(eval_every=5, env_timeout_s=3.0, eval_options={"env": "addition", "n": 4})
    settings = {"every": 5, "until_step": 90, "env": ("addition",), "n": 4, "env_timeout_s": 3.0}
    assert config.evaluation(until_step=90) == settings
    assert LaunchConfig().evaluation(until_step=90) is None


def test_workers_get_the_settings_of_their_episodes() -> None:
    settings = {"in_flight": 4, "swap": "episode", "env_timeout_s": 3.0, "episode_timeout_s": 9.0}
    args = config_args("worker-0", worker_settings(LaunchConfig(**settings), model=None))
    assert parsed(worker, "root", *args).worker == WorkerConfig(**settings)


def test_a_missing_ray_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ludic.base.installed.is_installed", lambda package: False)
    with pytest.raises(ConfigError, match=r"the package ray is not installed; pip install 'ludic-rl\[ray\]'"):
        with connected():
            pass
