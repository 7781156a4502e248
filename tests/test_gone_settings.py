"""Settings that ludic has no more: refused by name, and read in the attempts of older trainers."""

import logging
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from command_settings import parsed as parsed_of

from ludic.app.launch.config import LaunchConfig
from ludic.app.operations.start import run
from ludic.errors import ConfigError
from ludic.root.attempts import start_attempt
from ludic.root.root import Root
from ludic.run.config import RunConfig
from ludic.run.run_json import put_run
from ludic.settings.renamed import GONE, JOINED
from ludic.settings.table import convert, given
from ludic.training.config import TrainConfig
from ludic.training.inherited_settings import next_config


@pytest.fixture
def root(tmp_path: Path) -> Root:
    return put_run(str(tmp_path / "run"), RunConfig(model="m", env=("moar_cats",)))


@pytest.mark.parametrize("name", GONE)
def test_a_setting_that_is_gone_is_refused_in_flags_files_and_python(name: str, tmp_path: Path, capsys: Any) -> None:
    answer = f"is gone: {GONE[name].instead}"
    with pytest.raises(SystemExit) as ended:
        parsed_of(run, "root", f"--{name.replace('_', '-')}", "3")
    assert (ended.value.code, f"--{name.replace('_', '-')} {answer}" in capsys.readouterr().err) == (2, True)
    (tmp_path / "a.toml").write_text(f"{name} = 3\n")
    with pytest.raises(ConfigError) as caught:
        parsed_of(run, "root", "--config", str(tmp_path / "a.toml"))
    assert str(caught.value) == f"{tmp_path / 'a.toml'}: setting {name!r} {answer}"
    for owner in (TrainConfig, LaunchConfig):
        with pytest.raises(ConfigError) as caught:
            convert(owner, {name: 3})
        assert str(caught.value) == f"setting {name!r} {answer}"


def test_an_older_trainer_goes_on_and_what_it_did_otherwise_is_said(root: Root, caplog: Any) -> None:
    caplog.set_level(logging.WARNING, "ludic.training.inherited_settings")
    as_now = {name: gone.as_now for name, gone in GONE.items() if name not in {*chain(*JOINED.values())}}
    start_attempt(root, config={**TrainConfig().flat(), **as_now, "learning_rate": 0.5})
    assert next_config(root.url, {}).optimizer.learning_rate == 0.5
    assert caplog.messages == []
    start_attempt(root, config={**TrainConfig().flat(), **as_now, "tracker_project": "mine"})
    assert next_config(root.url, {}).flat().keys() == TrainConfig().flat().keys()
    (said,) = (text for text in caplog.messages if "gone" in text)
    answer = GONE["tracker_project"].instead
    assert said == f"the last trainer of {root.url} had tracker_project 'mine', which is gone: {answer}"


def test_checkpoints_that_an_older_trainer_kept_are_not_deleted_unasked(root: Root) -> None:
    start_attempt(root, config={**TrainConfig().flat(), "keep_checkpoints_every": 100})
    with pytest.raises(
        ConfigError, match=r"had keep_checkpoints_every 100, which is gone: .*; set keep_checkpoints, so"
    ):
        next_config(root.url, {})
    assert next_config(root.url, {"keep_checkpoints": None}).checkpoint.keep_checkpoints is None


def test_two_former_settings_are_one_list(root: Root) -> None:
    config = TrainConfig.of(objective="sapo").flat() | {"sapo_tau_positive": 2.0, "sapo_tau_negative": 3.0}
    del config["sapo_tau"]
    start_attempt(root, config=config)
    assert next_config(root.url, {}).flat()["sapo_tau"] == (2.0, 3.0)
    assert convert(TrainConfig, given({"on_stop": "finish"}, "a root", "stored")) == TrainConfig()
