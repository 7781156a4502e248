"""An episode with a value that does not fit the schema fails; the others of its batch are stored."""

from pathlib import Path
from typing import Any

import pytest
from chat_models import scripted_agent
from episodes import Script, end

from ludic.environments.environment import Transition
from ludic.environments.limits import LimitedEnvironments
from ludic.records.rollout import Rollout
from ludic.records.validation import validate
from ludic.rollouts.sampler import GroupSampler, episodes_of_run
from ludic.run.config import RunConfig


def rows_of_three(second: Transition, **settings: Any) -> list[Rollout]:
    """Rows of three episodes, which the store takes; the environment gives the transition in the second."""
    num_resets = 0

    class Flawed(Script):
        def __init__(self) -> None:
            super().__init__([end(extra={"x_judge": "good"})])

        def reset(self, example: Any) -> Any:
            nonlocal num_resets
            num_resets += 1
            if num_resets == 2:
                self.transitions = [second]
            return super().reset(example)

    run = RunConfig(
        model="m", env=("flawed",), group_size=3, max_tokens=8, extra_columns={"x_judge": "string"}, **settings
    )
    episodes = episodes_of_run(run, scripted_agent(["a"] * 3))
    batch = GroupSampler(
        run=run, run_episode=episodes, environments={"flawed": LimitedEnvironments("flawed", Flawed)}
    ).sample([0], "worker")
    validate(batch, run.extra_columns)
    return list(batch.groups[0].rollouts)


@pytest.mark.parametrize(
    ("extra", "error"),
    [
        (
            {"x_other": 1},
            "x_other is not a column of this run, whose extra_columns are x_judge; declare it in a new run",
        ),
        ({"x_judge": 1}, "x_judge is 1, wanted str"),
        ({1: 1}, "1 is not a column of this run, whose extra_columns are x_judge; declare it in a new run"),
    ],
)
def test_a_value_that_is_not_the_runs_fails_its_episode_only(extra: dict[Any, Any], error: str) -> None:
    rows = rows_of_three(end(extra=extra))
    assert [row.error for row in rows] == [None, error, None]
    assert [row.extra for row in rows] == [{"x_judge": "good"}, {}, {"x_judge": "good"}]
    assert (rows[1].episode_reward, rows[1].terminated, rows[1].response_length) == (None, False, 2)


def test_a_protocols_reward_that_is_no_number_fails_its_episode_only(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "async def own(play):\n"
        "    player = play.join(messages=play.environment.reset(play.request.example))\n"
        "    await player.act()\n"
        "    player.take(play.environment.step('a'))\n"
    )
    rows = rows_of_three(end(float("nan")), protocol=f"{tmp_path}/own.py:own")
    assert [row.error is None for row in rows] == [True, False, True]
    assert rows[1].error == "ValueError: the reward that step returned is nan, wanted a finite float32"
