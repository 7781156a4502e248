"""A worker runs episodes of several steps with the parser and context of run.json, and stores all their rows."""

from collections.abc import Callable
from pathlib import Path
from threading import Event

import pytest
from tiny_models import committed_rows, publish

from ludic.consent import CodeSettings
from ludic.errors import ConfigError
from ludic.launch.roots import create_run
from ludic.launch.work import work as launch_work
from ludic.rollouts.config import WorkerConfig
from ludic.store import Root, RunConfig
from ludic.training.config import TrainConfig

PARSER = """\
from ludic.agents.parsers import Parsed


class FirstWord:
    def parse(self, text):
        words = text.split()
        return Parsed(action=words[0]) if words else Parsed(action=None, feedback="say something")
"""


def test_rows_of_several_steps_and_segments_are_stored_whole(
    tmp_path: Path, run_config: Callable[..., RunConfig], work: Callable[..., int], folder: str
) -> None:
    file = tmp_path / "first_word.py"
    file.write_text(PARSER)
    run = run_config(
        env=("guess_number",),
        env_options={"guess_number": {"max_steps": 4}},
        parser=f"{file}:FirstWord",
        context="window:1",
        accept_incomplete=True,
    )
    root = create_run(str(tmp_path / "run"), run, TrainConfig(), CodeSettings())
    file.unlink()  # the root's copy runs
    publish(root, folder, groups_per_worker=10**6)
    work(root, num_groups=3)
    names = ("episode_id", "segment_index", "parent_segment_index", "episode_reward", "token_rewards")
    rows = committed_rows(root, *names, "agent_steps", "messages", "terminated", "truncation_reason", "group_size")
    episodes: dict[str, list[dict]] = {}
    for row in rows:
        episodes.setdefault(row["episode_id"], []).append(row)
    assert len(episodes) == 6
    assert {row["group_size"] for row in rows} == {2}
    assert max(map(len, episodes.values())) > 1
    for segments in episodes.values():
        assert sorted(row["segment_index"] for row in segments) == list(range(len(segments)))
        (reward,) = {row["episode_reward"] for row in segments}
        assert sum(sum(row["token_rewards"]) for row in segments) == pytest.approx(reward)
        assert {row["terminated"] or row["truncation_reason"] == "max_steps" for row in segments} == {True}
    steps = [step for row in rows for step in row["agent_steps"]]
    assert all(" " not in (step["action"] or "") for step in steps)


def test_a_setting_that_names_nothing_makes_no_root(tmp_path: Path, run_config: Callable[..., RunConfig]) -> None:
    untyped = tmp_path / "untyped.py"
    untyped.write_text("def find(query):\n    return query\n")
    for options, message in (
        ({"parser": "tags:answer"}, "did you mean 'tag:NAME'"),
        ({"context": "windows:3"}, "did you mean 'window:N'"),
        ({"tools": ("calculater",)}, "did you mean calculator"),
        ({"tool_format": "hermess"}, "tool format 'hermess' is unknown"),
        ({"tools": ("nowhere.py:find",)}, "nowhere.py"),
        ({"tools": (f"{untyped}:find",)}, "no schema could be made"),
    ):
        with pytest.raises(ConfigError, match=message):
            create_run(str(tmp_path / "run"), run_config(**options), TrainConfig(), CodeSettings())
        assert not (tmp_path / "run").exists()


def test_a_parser_that_does_not_load_is_not_kept(
    tmp_path: Path, run_config: Callable[..., RunConfig], work: Callable[..., int], folder: str
) -> None:
    file = tmp_path / "first_word.py"
    file.write_text(PARSER)
    root = create_run(str(tmp_path / "run"), run_config(parser=f"{file}:FirstWord"), TrainConfig(), CodeSettings())
    publish(root, folder, groups_per_worker=10**6)
    kept = sorted(root.fs.ls(root.at("code"), detail=False))
    file.write_text("raise KeyError('words')")
    with pytest.raises(ConfigError, match="KeyError: 'words'"):
        launch_work(root, WorkerConfig(slot=0, num_groups=1), Event(), code=CodeSettings(update_code=True))
    assert sorted(root.fs.ls(root.at("code"), detail=False)) == kept
    assert work(root, num_groups=1) == 1


def test_a_run_of_before_schema_1_2_keeps_one_step() -> None:
    golden = Path(__file__).parents[1] / "golden"
    assert Root.open(str(golden / "v1.1")).run.max_steps == 1
    assert Root.open(str(golden / "v1.2")).run.max_steps is None
