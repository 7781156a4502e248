"""docs/guide.md: its files are what ludic reads, and its queries run on a root."""

import re
import tomllib
from pathlib import Path

import pytest
from command_settings import parsed, train_settings
from tiny_runs import fill, train_here

from ludic.app.operations.start import run, train, worker
from ludic.environments.registry import make_environment
from ludic.errors import ConfigError
from ludic.root.root import Root
from ludic.root.sql.connection import connect
from ludic.root.sql.library import run_query

GUIDE = (Path(__file__).parents[3] / "docs/guide.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", GUIDE, re.DOTALL)


@pytest.fixture
def experiment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the guide's two files, which is the working directory."""
    (environment,), (settings,) = blocks("python"), blocks("toml")
    (tmp_path / "praise.py").write_text(environment)
    (tmp_path / "praise.toml").write_text(settings)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_one_file_holds_the_whole_experiment(experiment: Path) -> None:
    settings = parsed(run, "runs/praise", "--config", "praise.toml", "--num-steps", "50")
    told = tomllib.loads((experiment / "praise.toml").read_text())
    assert (settings.run.env, settings.run.max_tokens) == (("praise.py:Praise",), told["max_tokens"])
    assert settings.algorithm == told["algorithm"]
    assert (settings.train.keep_token_stats, settings.train.num_steps) == (True, 50)


def test_the_file_serves_the_commands_that_take_a_part_of_it(experiment: Path) -> None:
    args = ["runs/praise", "--config", "praise.toml"]
    assert parsed(worker, *args).worker.slot is None
    trained = train_settings(*args)
    assert (trained.batch.advantage, trained.loss.objective.name, trained.num_steps) == ("grpo", "ppo_clip", 40)
    (experiment / "praise.toml").write_text("group_sise = 8")
    with pytest.raises(ConfigError, match="setting 'group_sise' is unknown"):
        parsed(train, *args)


def test_the_environment_scores_praise_and_format(experiment: Path) -> None:
    options = tomllib.loads((experiment / "praise.toml").read_text())["env_options"]["praise.py:Praise"]
    environment = make_environment("praise.py:Praise", options)()
    example = environment.example(0, "train")
    assert [message.role for message in example.messages] == ["system", "user"]
    environment.reset(example)
    step = environment.step("love my cats")
    assert (step.reward, step.reward_components) == (1.5, {"praise": 1.0, "format": 1.0})


@pytest.mark.slow
def test_the_six_queries_run(started: Root) -> None:
    fill(started, num_files=2, groups_per_file=2)
    train_here(started, num_steps=2, keep_token_stats=True)
    queries = blocks("sql")
    assert [query[:5] for query in queries] == [f"-- {number}." for number in range(1, 7)]
    con = connect(started)
    tables = [run_query(con, query).to_pylist() for query in queries]
    assert all(tables)
    assert all("env_name" in row for rows in tables for row in rows)
    assert [row["rollouts"] for row in tables[1]] == [8, 8]
    assert [row["step"] for row in tables[4]] == [1, 2]
    # Rollouts of version 0 alone: the first step has 0 off-policy steps, the second 1.
    assert [row["off_policy_steps"] for row in tables[5]] == [0, 1]
