"""`ludic run --create-only`: a root for workers and trainers elsewhere, and nothing started."""

import json
from pathlib import Path

import pytest

from ludic.root.root import Root
from ludic.run.config import RunConfig
from ludic.run.run_json import create_root, run_of


def test_a_root_is_made_and_nothing_is_started(ludic, tmp_path: Path, model_folder: str) -> None:
    url = tmp_path / "run"
    result = ludic("run", "--create-only", url, "--model", model_folder, "--env", "moar_cats", "--num-workers", "3")
    assert (result.code, result.err) == (0, "")
    assert result.out == f"{url} is ready; `ludic worker {url}` samples for it, `ludic train {url}` trains\n"
    run = run_of(Root.open(str(url)))
    assert (run.env, run.num_workers) == (("moar_cats",), 3)
    assert not (url / "attempts").exists()


def test_the_same_settings_open_it_again_and_others_are_named(ludic, tmp_path: Path, model_folder: str) -> None:
    settings = ["--model", model_folder, "--env", "moar_cats"]
    assert ludic("run", "--create-only", tmp_path / "run", *settings).code == 0
    again = ludic("run", "--create-only", tmp_path / "run", *settings)
    assert again.code == 0
    assert "is ready" in again.out
    result = ludic("run", "--create-only", tmp_path / "run", *settings, "--group-size", "5")
    assert result.code == 1
    assert "group_size is 8 there, 5 was asked for" in result.err


def test_what_no_worker_could_use_is_refused(ludic, tmp_path: Path, model_folder: str) -> None:
    result = ludic("run", "--create-only", tmp_path / "run", "--model", model_folder, "--env", "moar_cat")
    assert result.code == 1
    assert "environment 'moar_cat' is unknown; did you mean 'moar_cats'?" in result.err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("name", "hint"),
    [("moar_cat", "did you mean 'moar_cats'? There are moar_cats, addition"), ("zzz", "there are moar_cats, addition")],
)
def test_options_of_an_environment_that_is_not_in_the_run_are_refused(
    ludic, tmp_path: Path, model_folder: str, name: str, hint: str
) -> None:
    options = json.dumps({name: {"max_digits": 2}})
    env = ["--env", "moar_cats", "addition", "--env-options", options]
    result = ludic("run", "--create-only", tmp_path / "run", "--model", model_folder, *env)
    assert (result.code, result.err) == (
        1,
        f"ludic: env_options: environment '{name}' is unknown; {hint}\n",
    )
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_run_that_is_there_with_such_options_still_opens(ludic, tmp_path: Path, model_folder: str) -> None:
    create_root(str(tmp_path / "run"), RunConfig(model=model_folder, env=("moar_cats",), env_options={"zzz": {"n": 1}}))
    env = ["--env", "moar_cats", "--env-options", '{"zzz": {"n": 1}}']
    assert ludic("run", "--create-only", tmp_path / "run", "--model", model_folder, *env).code == 0
    assert ludic("watch", tmp_path / "run", "--totals").code == 0


def test_an_advantage_that_is_no_file_is_answered_with_what_was_looked_for(
    ludic, tmp_path: Path, model_folder: str, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = ludic("run", "here", "--model", model_folder, "--env", "moar_cats", "--advantage", "nope.sql")
    assert result.code == 1
    assert result.err.startswith(f"ludic: advantage nope.sql: there is no file {tmp_path}/nope.sql")
    assert result.err.count("\n") == 1


def test_more_local_workers_than_the_schedule_has_is_wrong_usage(ludic, tmp_path: Path, model_folder: str) -> None:
    args = ["--model", model_folder, "--env", "moar_cats", "--num-workers", "2", "--local-workers", "3"]
    result = ludic("run", tmp_path / "run", *args)
    assert result.code == 2
    assert "local_workers is 3, wanted 0 to num_workers (2)" in " ".join(result.err.replace("│", "").split())
