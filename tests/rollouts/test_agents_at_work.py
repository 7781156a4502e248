"""A worker runs episodes of several steps with the parser and context of run.json, and stores all their rows."""

import shutil
from collections.abc import Callable
from pathlib import Path
from threading import Event

import pytest
from tiny_models import committed_rows, publish

from ludic.app.launch.roots import create_run
from ludic.app.launch.sample import work as launch_work
from ludic.errors import ConfigError
from ludic.rollouts.config import WorkerConfig
from ludic.root.root import Root
from ludic.run.config import RunConfig
from ludic.run.run_json import run_of
from ludic.settings.consent import CodeSettings
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
    publish(root, folder, budget=10**6)
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
        ({"tools": ("calculater",)}, "did you mean 'calculator'"),
        ({"tool_format": "hermess"}, "tool format 'hermess' is unknown"),
        ({"tools": ("nowhere.py:find",)}, "nowhere.py"),
        ({"tools": (f"{untyped}:find",)}, "no schema could be made"),
        ({"protocol": "single_agnt"}, "did you mean 'single_agent'"),
        ({"sub_agents": ("helpr",)}, "did you mean 'helper'"),
        ({"sub_agents": (f"{untyped}:find",)}, "could not be built without arguments"),
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
    publish(root, folder, budget=10**6)
    kept = sorted(root.fs.ls(root.at("code"), detail=False))
    file.write_text("raise KeyError('words')")
    with pytest.raises(ConfigError, match="KeyError: 'words'"):
        launch_work(root, WorkerConfig(slot=0, num_groups=1), Event(), code=CodeSettings(update_code=True))
    assert sorted(root.fs.ls(root.at("code"), detail=False)) == kept
    assert work(root, num_groups=1) == 1


PROTOCOL = """\
async def twice(play):
    player = play.join()
    await player.act()
    await player.act()
"""
SUB_AGENT = """\
from ludic.agents.delegation import SubAgent


def solver():
    return SubAgent(name="solver", description="Solves.")
"""


def test_a_protocol_and_sub_agents_of_ones_own_run_from_the_root(
    tmp_path: Path, run_config: Callable[..., RunConfig], work: Callable[..., int], folder: str
) -> None:
    files = tmp_path / "twice.py", tmp_path / "solver.py"
    for file, text in zip(files, (PROTOCOL, SUB_AGENT), strict=True):
        file.write_text(text)
    run = run_config(protocol=f"{files[0]}:twice", sub_agents=(f"{files[1]}:solver",), accept_incomplete=True)
    root = create_run(str(tmp_path / "run"), run, TrainConfig(), CodeSettings())
    for file in files:
        file.unlink()
    with_tools = shutil.copytree(folder, tmp_path / "with_tools")
    with (with_tools / "chat_template.jinja").open("a") as template:
        template.write("{% for tool in tools %}{{ tool.function.name }}{% endfor %}")
    publish(root, str(with_tools), budget=10**6)
    work(root, num_groups=2)
    assert {row["num_turns"] for row in committed_rows(root, "num_turns")} == {2}


def test_several_agents_have_rows_of_their_own(
    tmp_path: Path, run_config: Callable[..., RunConfig], work: Callable[..., int], folder: str
) -> None:
    run = run_config(env=("tic_tac_toe_self_play",), accept_incomplete=True)
    root = create_run(str(tmp_path / "run"), run, TrainConfig(), CodeSettings())
    publish(root, folder, budget=10**6)
    work(root, num_groups=3)
    rows = committed_rows(root, "episode_id", "agent_id", "error", "episode_reward", "terminated")
    assert {row["error"] for row in rows} == {None}
    assert {row["agent_id"] for row in rows} <= {"x", "o"}
    assert all(row["terminated"] for row in rows)


def test_a_run_of_before_schema_1_2_keeps_one_step() -> None:
    golden = Path(__file__).parents[1] / "golden"
    assert run_of(Root.open(str(golden / "v1.1"))).max_steps == 1
    assert run_of(Root.open(str(golden / "v1.2"))).max_steps is None
