"""Rows hold exactly what the engine sampled, whatever an episode does: turns, tools, refusals, rewritten contexts."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from chat_models import chat_tokenizer, hermes_call, scripted_agent
from episodes import EXAMPLE, Script, end, go_on, run_episode
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import forward_logprobs, make_model

from ludic.agents.agent import Agent
from ludic.agents.contexts import make_context
from ludic.agents.delegation import SubAgent
from ludic.agents.parsers import make_parser
from ludic.agents.tools.registry import function_tool
from ludic.agents.tools.toolbox import Toolbox
from ludic.engines.transformers_engine import TransformersEngine
from ludic.environments.environment import Example
from ludic.errors import ModelError
from ludic.models.chat import load_tokenizer
from ludic.models.decoding import decode
from ludic.records.rollout import Message, Rollout


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: One number.
        b: Another number.
    """
    return a + b


CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
DELEGATE = hermes_call("delegate", task="work")
TEXTS = st.sampled_from(
    ["a", "", "\n\n", "the answer is\n\n", "<think>\nhm\n</think>\n\nb", "🐈", CALL, f"{CALL}\n{CALL}", "<tool_call>{"]
) | st.text(max_size=8)
TURNS = st.lists(st.tuples(TEXTS, st.sampled_from(["stop", "stop", "stop", "length"])), min_size=12, max_size=12)
OBSERVATIONS = st.lists(st.sampled_from(["go on", "\n\nand on\n", "<|im_end|>"]) | st.text(max_size=8), min_size=12)


def check(rows: Sequence[Rollout], agent: Agent) -> None:
    """What was sampled is in the rows once, where the steps say, and nothing else is marked as sampled."""
    spans = [
        (row.response_tokens[step.start : step.end].tolist(), row.response_logprobs[step.start : step.end].tolist())
        for row in rows
        for step in row.agent_steps
    ]
    sampled = [(sample.tokens, sample.logprobs) for sample in agent.engine.log]
    assert sorted(spans) == sorted(sampled)
    prompts = {tuple(sample.request.prompt_tokens.tolist()) for sample in agent.engine.log}
    for row in rows:
        mask = np.zeros(row.response_length, np.bool_)
        for step in row.agent_steps:
            assert not mask[step.start : step.end].any()
            mask[step.start : step.end] = True
            before = np.concatenate([row.prompt_tokens, row.response_tokens[: step.start]])
            assert tuple(before.tolist()) in prompts
        assert mask.all() if row.action_mask is None else row.action_mask.tolist() == mask.tolist()
        assert not row.response_logprobs[~mask].any()
        assert [step.turn for step in row.agent_steps] == sorted(step.turn for step in row.agent_steps)
    assert len({row.episode_id for row in rows}) == 1
    for rows_of_one in split_by_agent(rows):
        for steps in ("agent_steps", "environment_steps"):
            turns = [step.turn for row in rows_of_one for step in getattr(row, steps)]
            assert sorted(turns) == list(range(len(turns)))
        assert [row.segment_index for row in rows_of_one] == list(range(len(rows_of_one)))


def split_by_agent(rows: Sequence[Rollout]) -> list[list[Rollout]]:
    """The rows of each agent of an episode; each begins with segment 0."""
    starts = [index for index, row in enumerate(rows) if row.segment_index == 0]
    return [list(rows[start:end]) for start, end in zip(starts, [*starts[1:], len(rows)], strict=True)]


def check_tree(rows: Sequence[Rollout], max_depth: int, max_children: int) -> None:
    """Each child belongs to a call of the row that it names, one level above it."""
    by_id = {row.rollout_id: row for row in rows}
    children = [row for row in rows if row.segment_index == 0 and row.parent_rollout_id is not None]
    assert len(children) <= max_children
    assert all(row.depth <= max_depth for row in rows)
    for parent_id, count in Counter(child.parent_rollout_id for child in children).items():
        calls = [call for step in by_id[parent_id].agent_steps for call in step.tool_calls if call.name == "delegate"]
        assert count <= len(calls)
    assert all(by_id[child.parent_rollout_id].depth == child.depth - 1 for child in children)
    for row in rows:
        for step in row.agent_steps:
            has_external = any(call.name == "delegate" for call in step.tool_calls)
            assert (step.action_target == "external") == (has_external and row.depth < max_depth)
            assert all((call.result is None) != (call.error is None) for call in step.tool_calls)


@pytest.mark.slow
@given(
    turns=TURNS,
    observations=OBSERVATIONS,
    context=st.sampled_from(["full", "no_thinking", "window:1", "window:3", "summary:2"]),
    parser=st.sampled_from(["whole", "think", "regex:[a-z]"]),
    max_steps=st.integers(1, 6),
    has_tools=st.booleans(),
)
@settings(max_examples=60)
def test_rows_are_what_was_sampled(turns, observations, context, parser, max_steps, has_tools) -> None:
    agent = scripted_agent(
        turns * 20,
        make_context=make_context(context),
        parser=make_parser(parser),
        toolbox=Toolbox([function_tool(add)] if has_tools else []),
    )
    environment = Script([go_on(text) for text in observations])
    rows = run_episode(agent, environment, max_steps=max_steps, max_tool_rounds=2)
    check(rows, agent)
    if context == "full":
        assert len(rows) == 1


@pytest.mark.slow
@given(
    turns=st.lists(
        st.tuples(TEXTS | st.sampled_from([DELEGATE, f"{DELEGATE}\n{DELEGATE}"]), st.sampled_from(["stop", "length"])),
        min_size=12,
        max_size=12,
    ),
    observations=OBSERVATIONS,
    context=st.sampled_from(["full", "window:1", "summary:2"]),
    parser=st.sampled_from(["whole", "regex:[a-z]"]),
    max_depth=st.integers(0, 2),
    max_children=st.integers(1, 6),
    max_child_tokens=st.none() | st.integers(1, 200),
)
@settings(max_examples=60)
def test_rows_of_delegated_tasks_are_what_was_sampled(
    turns, observations, context, parser, max_depth, max_children, max_child_tokens
) -> None:
    agent = scripted_agent(
        turns * 100,
        make_context=make_context(context),
        parser=make_parser(parser),
        sub_agents=(SubAgent(name="helper", description="Helps.", context=context),),
    )
    rows = run_episode(
        agent,
        Script([go_on(text) for text in observations]),
        max_steps=3,
        max_tool_rounds=2,
        max_depth=max_depth,
        max_children=max_children,
        max_child_tokens=max_child_tokens,
        accept_incomplete=True,
    )
    check(rows, agent)
    check_tree(rows, max_depth, max_children)


def test_storage_grows_linearly_in_turns() -> None:
    def num_tokens(num_turns: int) -> int:
        agent = scripted_agent(["the answer is 42"] * num_turns)
        rows = run_episode(agent, Script([go_on()] * num_turns), max_steps=num_turns)
        return sum(row.prompt_length + row.response_length for row in rows)

    one, ten, twenty = map(num_tokens, (1, 10, 20))
    assert twenty - ten == pytest.approx((ten - one) * 10 / 9)


def test_a_rewritten_context_is_a_new_row_with_its_parent() -> None:
    # The window begins with "one", then with "two", then with "twofold", which has most in common with "two".
    agent = scripted_agent(["one", "two", "twofold", "four"], make_context=make_context("window:2"))
    rows = run_episode(agent, Script([go_on("x"), go_on("y"), go_on("z"), end()]))
    assert [row.parent_segment_index for row in rows] == [None, 0, 1]
    assert {row.episode_reward for row in rows} == {1.75}
    assert sum(row.token_rewards.sum() for row in rows) == 1.75


# As those of Mistral and Gemma.
ALTERNATING = """\
{%- for message in messages %}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}
{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- endfor %}
{{- '<|im_start|>assistant\n' if add_generation_prompt }}"""


def alternating(script: list[str], **options: object) -> Agent:
    agent = scripted_agent(script, **options)
    tokenizer = deepcopy(agent.tokenizer)
    tokenizer.chat_template = ALTERNATING
    return replace(agent, tokenizer=tokenizer)


@pytest.mark.parametrize("context", ["window:1", "window:2", "window:3", "summary:1", "summary:2", "summary:3"])
def test_a_template_that_wants_turns_to_alternate_takes_each_view(context: str) -> None:
    # Summaries are answers too, so there are more answers than steps.
    agent = alternating(list("abcdefghij"), make_context=make_context(context))
    rows = run_episode(agent, Script([go_on("x"), go_on("y"), go_on("z"), end()]))
    assert {row.error for row in rows} == {None}
    assert rows[0].episode_reward == 1.75


def test_a_later_prompt_that_the_template_refuses_fails_the_episode() -> None:
    class Twice:
        async def view(self, messages: Sequence[Message], ask: object) -> Sequence[Message]:
            return messages if len(messages) == 1 else [messages[0], messages[-1]]

    (row,) = run_episode(alternating(["a", "b"], make_context=Twice), Script([go_on("x"), end()]))
    assert row.error is not None
    assert row.error.startswith("ModelError: ")
    assert "refuses a conversation of user, user: Conversation roles must alternate" in row.error
    assert (row.num_turns, row.episode_reward) == (1, None)


def test_a_first_prompt_that_the_template_refuses_stops_the_worker() -> None:
    start = Example(example_id="s", messages=(Message(role="system", content="s"), Message(role="user", content="u")))
    with pytest.raises(ModelError, match="refuses a conversation of system, user"):
        run_episode(alternating(["a"]), Script([end()]), example=start)


def test_a_summary_is_sampled_stored_and_shown_to_the_model() -> None:
    script = ["one", "two", "SUMMARY", "three"]
    agent = scripted_agent(script, make_context=make_context("summary:3"))
    rows = run_episode(agent, Script([go_on("x"), go_on("y"), end()]))
    assert [[step.action_target for step in row.agent_steps] for row in rows] == [["env", "env", "internal"], ["env"]]
    assert [[step.action for step in row.agent_steps] for row in rows] == [["one", "two", "SUMMARY"], ["three"]]
    assert "SUMMARY" in decode(agent.tokenizer, rows[1].prompt_tokens)
    check(rows, agent)


def test_tools_are_run_and_their_results_are_not_trained_on() -> None:
    agent = scripted_agent([CALL, "<think>\nthree\n</think>\n\n3"], toolbox=Toolbox([function_tool(add)]))
    (row,) = run_episode(agent, Script([end()]))
    calling, acting = row.agent_steps
    assert (calling.action_target, acting.action_target) == ("internal", "env")
    (call,) = calling.tool_calls
    assert (call.name, call.result, call.error) == ("add", "3", None)
    assert (calling.action, acting.action) == (CALL, row.messages[-1].content)
    assert row.environment_steps[0].agent_steps == (0, 1)
    between = row.response_tokens[calling.end : acting.start]
    assert "<tool_response>\n3\n</tool_response>" in chat_tokenizer().decode(between.tolist())
    assert not row.action_mask[calling.end : acting.start].any()
    assert [message.role for message in row.messages] == ["user", "assistant", "tool", "assistant"]


def test_a_forward_pass_over_the_row_gives_the_samplers_logprobs(tmp_path: Path) -> None:
    folder = make_model(tmp_path, seed=1)
    agent = Agent(engine=TransformersEngine(folder, device="cpu"), tokenizer=load_tokenizer(folder), model="tiny")
    (row,) = run_episode(
        agent, Script([go_on("what is two"), go_on("the sum of two"), end()]), max_tokens=16, accept_incomplete=True
    )
    assert row.num_turns == 3
    expected = forward_logprobs(folder, row.prompt_tokens, row.response_tokens)
    mask = row.action_mask
    assert row.response_logprobs[mask] == pytest.approx(expected[mask], abs=1e-4)


def test_weights_that_change_between_turns_are_told_apart() -> None:
    agent = scripted_agent(["one", "two"])

    class Swapping(Script):
        def step(self, action: str):
            agent.engine.policy_version += 1
            return super().step(action)

    (row,) = run_episode(agent, Swapping([go_on(), end()]))
    first, second = row.agent_steps
    assert (row.policy_version, row.policy_version_last) == (3, 4)
    assert [(s.version, s.start, s.end) for s in row.weight_versions] == [
        (3, first.start, first.end),
        (4, second.start, second.end),
    ]


def test_hashes_tell_equal_observations() -> None:
    agent = scripted_agent(["a", "b", "c"])
    (row,) = run_episode(agent, Script([go_on("left"), go_on("left"), end()]))
    start, left, again = (step.observation_hash for step in row.environment_steps)
    assert start != left == again


def test_each_call_has_a_seed_of_its_own_and_the_first_the_requests() -> None:
    agent = scripted_agent(["a", "b", "c"])
    run_episode(agent, Script([go_on(), go_on(), end()]))
    seeds = [sample.request.seed for sample in agent.engine.log]
    assert seeds[0] == 5
    assert len(set(seeds)) == 3


def test_hundreds_of_episodes_run_at_the_same_time() -> None:
    async def run() -> float:
        from ludic.agents.episode import run_episode, single_agent
        from ludic.agents.requests import EpisodeRequest, repeat
        from ludic.engines.engine import SamplingParams

        agent = scripted_agent(["a"] * 200, delay_s=0.05)
        request = EpisodeRequest(
            env_name="script",
            example=EXAMPLE,
            params=SamplingParams(),
            seed=0,
            group_id="group",
            request_index=0,
        )
        episodes = [run_episode(single_agent, agent, lambda: Script([end()]), each) for each in repeat(request, 200, 0)]
        return len(await asyncio.gather(*episodes))

    assert asyncio.run(asyncio.wait_for(run(), 5)) == 200  # 10 s one after the other


def targets(said: str, template: str | None = None) -> list[str]:
    """What a completion is for, and those that follow it."""
    agent = scripted_agent([said, "3"], toolbox=Toolbox([function_tool(add)]))
    if template is not None:
        agent = replace(agent, tokenizer=deepcopy(agent.tokenizer))
        agent.tokenizer.chat_template = template
    (row,) = run_episode(agent, Script([end()]))
    return [step.action_target for step in row.agent_steps]


def test_a_call_that_is_only_thought_of_is_not_run() -> None:
    assert targets(f"<think>{CALL}</think>\n\n3") == ["env"]
    assert targets(f"<think>\nmaybe {CALL} no") == ["env"]


def test_a_call_is_only_thought_of_if_the_prompt_begins_the_thinking() -> None:
    opening = "<|im_start|>assistant\n"
    template = chat_tokenizer().chat_template.replace(opening + "{% endif", opening + "<think>\n{% endif")
    assert targets(f"maybe {CALL} no", template) == ["env"]
    assert targets(f"maybe {CALL} no</think>\n3", template) == ["env"]
    assert targets(f"so</think>{CALL}", template) == ["internal", "env"]


@pytest.mark.parametrize("before", ["", "<think>a</think>"])
def test_an_argument_may_hold_the_end_of_thinking(before: str) -> None:
    def repeat_text(text: str) -> str:
        """Repeat.

        Args:
            text: What.
        """
        return text

    call = '<tool_call>{"name": "repeat_text", "arguments": {"text": "</think>"}}</tool_call>'
    agent = scripted_agent([before + call, "3"], toolbox=Toolbox([function_tool(repeat_text)]))
    (row,) = run_episode(agent, Script([end()]))
    assert [call.result for call in row.agent_steps[0].tool_calls] == ["</think>"]


def test_only_the_first_calls_of_a_completion_are_run() -> None:
    agent = scripted_agent([CALL * 5, "3"], toolbox=Toolbox([function_tool(add)]))
    (row,) = run_episode(agent, Script([end()]), max_tool_calls=2)
    found = [call.result or call.error for call in row.agent_steps[0].tool_calls]
    assert found == ["3", "3"] + ["not run: only the first 2 calls of an answer are run"] * 3
    assert [message.content for message in row.messages if message.role == "tool"][2].startswith("Error: not run: ")


def test_an_agent_that_only_calls_tools_is_told_to_answer() -> None:
    agent = scripted_agent([CALL, CALL, CALL, "3"], toolbox=Toolbox([function_tool(add)]))
    (row,) = run_episode(agent, Script([end()]), max_tool_rounds=2)
    assert [step.action_target for step in row.agent_steps] == ["internal", "internal", "env", "env"]
    assert row.agent_steps[2].parse_feedback == "You have called tools too often. Answer now, without tools."
    assert [step.agent_steps for step in row.environment_steps] == [(0, 1, 2), (3,)]


def test_a_step_that_fails_is_marked_in_the_row_that_it_belongs_to() -> None:
    """The second call sees something else; the third goes on with the first row."""

    class Sidestep:
        num_views = 0

        async def view(self, messages: Sequence[Message], ask: object) -> Sequence[Message]:
            self.num_views += 1
            return [Message(role="user", content="else")] if self.num_views == 2 else [*messages[:3], *messages[5:]]

    agent = scripted_agent(["one", "two", "three"], make_context=Sidestep)
    first, second = run_episode(agent, Script([go_on("x"), go_on("y"), ValueError("broken")]))
    assert [len(row.agent_steps) for row in (first, second)] == [2, 1]
    assert [step.reward for step in first.environment_steps] == [0.25, None]
    assert [step.reward for step in second.environment_steps] == [0.25]
