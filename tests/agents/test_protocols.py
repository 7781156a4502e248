"""Protocols by name, and a user's own."""

from pathlib import Path

import pytest
from chat_models import hermes_call, scripted_agent
from episodes import Script, end, go_on, run_episode, without_place

from ludic.agents.episode import make_protocol
from ludic.errors import ConfigError

OWN = """\
from ludic.agents.tools.registry import function_tool
from ludic.agents.tools.toolbox import Toolbox
from ludic.environments.environment import SpanReward, Transition


async def refine(play):
    environment = play.environment
    player = play.join(messages=environment.reset(play.request.example))
    await player.act()
    player.take(Transition(observation="Find a mistake, and answer again.", reward=0.0, terminated=False))
    answer = await player.act()
    player.take(environment.step(answer))


async def fails(play):
    player = play.join()
    await player.act()
    raise KeyError("own mistake")


async def nothing(play):
    pass


async def two_drafts(play):
    player = play.join()
    await player.act()
    await player.act()
    player.take(play.environment.step("both"))


async def with_secret(play):
    def secret() -> str:
        'Tell the secret of this episode.'
        return f"seed {play.request.seed}"

    player = play.join()
    player.external = Toolbox([function_tool(secret)])
    player.take(play.environment.step(await player.act()))


async def bad_reward(play):
    player = play.join()
    await player.act()
    player.take(Transition(observation=None, reward=None, terminated=True))


async def nameless(play):
    await play.join("").act()


async def resigns(play):
    player = play.join()
    await player.act()
    play.end("resigned", "no more")


async def takes_twice(play):
    player = play.join()
    await player.act()
    for reward in (1.0, 2.0):
        spans = (SpanReward(start=0, end=1, reward=reward),)
        player.take(Transition(observation=None, reward=0.0, span_rewards=spans, terminated=True))


def blocks(play):
    pass
"""


@pytest.fixture
def own(tmp_path: Path) -> str:
    (tmp_path / "own.py").write_text(OWN)
    return str(tmp_path / "own.py")


def test_a_protocol_of_ones_own_plays_the_episode(own: str) -> None:
    environment = Script([end(1.0)])
    (row,) = run_episode(scripted_agent(["draft", "better"]), environment, make_protocol(f"{own}:refine"))
    assert environment.actions == ["better"]
    assert [message.content for message in row.messages] == [
        "begin",
        "draft",
        "Find a mistake, and answer again.",
        "better",
    ]
    assert [(step.action, step.reward) for step in row.environment_steps] == [("draft", 0.0), ("better", 1.0)]
    assert (row.episode_reward, row.terminated, row.error) == (1.0, True, None)


def test_its_mistake_fails_the_episode_and_keeps_the_tokens(own: str) -> None:
    (row,) = run_episode(scripted_agent(["draft"]), Script([]), make_protocol(f"{own}:fails"))
    assert (without_place(row.error), row.episode_reward, row.num_turns) == ("KeyError: 'own mistake'", None, 1)
    assert row.action_length > 0


def test_a_protocol_without_a_call_gives_a_row_that_says_so(own: str) -> None:
    (row,) = run_episode(scripted_agent([]), Script([]), make_protocol(f"{own}:nothing"))
    assert row.error == "the protocol ended before a model was called"


def test_an_action_without_a_step_belongs_to_the_next(own: str) -> None:
    (row,) = run_episode(scripted_agent(["one", "two"]), Script([end()]), make_protocol(f"{own}:two_drafts"))
    (step,) = row.environment_steps
    assert step.agent_steps == (0, 1)


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("bad_reward", "TypeError: "),
        ("nameless", "TypeError: the id of an agent is None, wanted a str"),
        ("resigns", "'resigned' is not a truncation_reason of docs/schemas.md: no more"),
    ],
)
def test_what_can_not_be_stored_fails_the_episode(own: str, name: str, error: str) -> None:
    (row,) = run_episode(scripted_agent(["draft"]), Script([]), make_protocol(f"{own}:{name}"))
    assert (row.error or "").startswith(error)
    assert row.episode_reward is None


def test_rewards_of_spans_add_up(own: str) -> None:
    (row,) = run_episode(scripted_agent(["draft"]), Script([]), make_protocol(f"{own}:takes_twice"))
    assert (row.episode_reward, row.token_rewards.sum()) == (3.0, 3.0)


def test_a_protocol_may_have_tools_of_its_own(own: str) -> None:
    agent = scripted_agent([hermes_call("secret"), "done"])
    (row,) = run_episode(agent, Script([end()]), make_protocol(f"{own}:with_secret"))
    call, act = row.agent_steps
    assert (call.action_target, act.action_target) == ("external", "env")
    assert call.tool_calls[0].result == "seed 5"


def test_limits_hold_in_every_protocol(own: str) -> None:
    (row,) = run_episode(scripted_agent(["one", "two"]), Script([go_on()]), make_protocol(f"{own}:refine"), max_steps=1)
    assert (row.truncation_reason, row.num_turns) == ("max_steps", 1)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("single_agnt", "did you mean 'single_agent'"),
        ("{own}:nobody", "has no class or function 'nobody'"),
        ("{own}:blocks", "wanted a function that begins with `async def`"),
        ("none.py:play", "there is no file"),
    ],
)
def test_a_wrong_name_is_answered_with_what_there_is(own: str, name: str, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        make_protocol(name.format(own=own))
    assert message in str(refused.value)
