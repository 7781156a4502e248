"""Long observations are cut, and the rows say so; long prompts are tokenised beside the event loop."""

import asyncio
import threading
from typing import Any

import numpy as np
import pytest
from chat_models import chat_tokenizer, scripted_agent
from episodes import Script, end, go_on, run_episode

from ludic.agents.agent import PromptBuilder, make_render
from ludic.agents.episode import Episode
from ludic.base.defaults import MAX_OBSERVATION_CHARACTERS
from ludic.engines.engine import Completion, SamplingParams
from ludic.environments.environment import Example
from ludic.eval.plan import settings_of
from ludic.models.decoding import decode
from ludic.records.rollout import Message, WeightSpan
from ludic.rollouts.sampler import limits_of
from ludic.run.config import RunConfig

LONG = "cats " * 5000


def user(text: str) -> Message:
    return Message(role="user", content=text)


def test_an_observation_is_cut_and_the_step_says_how_much() -> None:
    script = Script([go_on("abcdefgh", info={"own": "1"}), go_on("abcde"), end()])
    (row,) = run_episode(scripted_agent(["1", "2", "3"]), script, max_observation_characters=5)
    assert [message.content for message in row.messages if message.role == "user"] == [
        "begin",
        "abcde\n[cut: 3 more characters]",
        "abcde",
    ]
    first, second, _ = row.environment_steps
    assert first.info == {"own": "1", "observation_cut": "3"}
    assert first.next_observation == second.observation == "abcde\n[cut: 3 more characters]"
    assert (second.info, row.metadata) == ({}, {})
    shown = decode(chat_tokenizer(), np.concatenate([row.prompt_tokens, row.response_tokens]))
    assert "abcde\n[cut: 3 more characters]" in shown
    assert "abcdef" not in shown


def test_the_first_observation_is_cut_and_the_row_says_how_much() -> None:
    example = Example(example_id="e", messages=(Message(role="system", content="short"), user("x" * 1_234)))
    (row,) = run_episode(scripted_agent(["1"]), Script([end()]), example=example, max_observation_characters=34)
    assert [message.content for message in row.messages[:2]] == ["short", f"{'x' * 34}\n[cut: 1,200 more characters]"]
    assert row.metadata == {"observation_cut": "1200"}


def test_without_a_limit_nothing_is_cut() -> None:
    (row,) = run_episode(scripted_agent(["1", "2"]), Script([go_on(LONG), end()]), max_observation_characters=None)
    assert row.messages[2].content == LONG
    assert row.environment_steps[0].info == {}


@pytest.mark.slow
def test_an_observation_of_ten_megabytes_is_cut_by_default() -> None:
    agent = scripted_agent(["1", "2"], max_length=10**8)
    (row,) = run_episode(agent, Script([go_on("x" * 10_000_000), end()]))
    assert row.error is None
    assert row.environment_steps[0].info == {"observation_cut": "9000000"}
    assert len(row.messages[2].content) < MAX_OBSERVATION_CHARACTERS + 50


def test_the_limit_is_a_setting_of_the_run() -> None:
    run = RunConfig(model="m", env=("addition",), max_observation_characters=77)
    assert limits_of(run).max_observation_characters == 77
    assert limits_of(RunConfig(model="m", env=("addition",))).max_observation_characters == MAX_OBSERVATION_CHARACTERS


def test_an_evaluation_has_the_limit_in_its_settings_only_if_it_was_set() -> None:
    def settings(**options: Any) -> dict[str, object]:
        return settings_of(RunConfig(model="m", env=("addition",), **options), SamplingParams())

    assert "max_observation_characters" not in settings()
    assert settings(max_observation_characters=None)["max_observation_characters"] is None


# --- Beside the event loop --------------------------------------------------------------------------------------------


def test_a_long_prompt_is_made_while_the_event_loop_goes_on() -> None:
    may_end, began = threading.Event(), threading.Event()

    def render(messages: tuple[Message, ...]) -> np.ndarray:
        began.set()
        assert may_end.wait(20), "the event loop stood still"
        return np.arange(3, dtype=np.int32)

    async def main() -> None:
        building = asyncio.create_task(PromptBuilder(chat_tokenizer(), render=render).build_beside([user(LONG)]))
        while not began.is_set():
            await asyncio.sleep(0.001)
        may_end.set()
        assert (await building).tolist() == [0, 1, 2]

    asyncio.run(main())


def test_episodes_of_one_example_make_one_long_prompt() -> None:
    num_made = 0
    tokenizer = chat_tokenizer()
    render_in_fact = make_render(tokenizer)

    def render(messages: tuple[Message, ...]) -> np.ndarray:
        nonlocal num_made
        before = render_in_fact.cache_info().misses  # type: ignore[attr-defined]
        prompt = render_in_fact(messages)
        num_made += render_in_fact.cache_info().misses - before  # type: ignore[attr-defined]
        return prompt

    async def main() -> None:
        builders = [PromptBuilder(tokenizer, render=render) for _ in range(8)]
        prompts = await asyncio.gather(*(builder.build_beside([user(LONG)]) for builder in builders))
        assert all(np.array_equal(prompt, prompts[0]) for prompt in prompts)

    asyncio.run(main())
    assert num_made == 1


@pytest.mark.parametrize("text", ["short", LONG])
def test_prompts_are_the_same_as_in_the_event_loop(text: str) -> None:
    tokenizer = chat_tokenizer()
    tokens = np.array([*tokenizer("ok", add_special_tokens=False)["input_ids"], tokenizer.eos_token_id], np.int32)
    completion = Completion(
        tokens=tokens,
        columns={"response_logprobs": np.zeros(len(tokens), np.float32)},
        finish_reason="stop",
        weight_versions=(WeightSpan(version=0, start=0, end=len(tokens)),),
    )
    answer, then = Message(role="assistant", content="ok"), user(text)

    def builder() -> PromptBuilder:
        made = PromptBuilder(tokenizer)
        made.complete([user("?")], made.build([user("?")]), completion, answer)
        return made

    dialogue = [user("?"), answer, then]
    assert np.array_equal(builder().build(dialogue), asyncio.run(builder().build_beside(dialogue)))


def test_a_protocol_that_lets_an_agent_join_with_no_text_fails_its_episode() -> None:
    async def wrong(play: Episode) -> None:
        await play.join(messages=[Message(role="user", content=None)]).act()  # type: ignore[arg-type]

    (row,) = run_episode(scripted_agent(["1"]), Script([end()]), wrong)
    assert "TypeError" in str(row.error)
