"""Tools with a chat template of Mistral's rules: turns that alternate, calls apart from the text, ids of nine signs."""

from copy import deepcopy
from functools import cache

import pytest
from chat_models import chat_tokenizer
from episodes import Script, end, go_on, run_episode
from gateway.scripted import ScriptedEngine
from transformers import PreTrainedTokenizerFast

from ludic.agents.agent import Agent
from ludic.agents.contexts import make_context
from ludic.agents.tools.calculator import calculator
from ludic.agents.tools.formats import make_tool_format
from ludic.agents.tools.registry import function_tool
from ludic.agents.tools.toolbox import Toolbox

SPECIAL = ("</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]", "[TOOL_RESULTS]")
SPECIAL += ("[/TOOL_RESULTS]",)

# The rules of the template of Mistral-7B-Instruct-v0.3, in other words.
TEMPLATE = """\
{%- set turns = namespace(count=0) %}
{%- set users = messages | selectattr('role', 'equalto', 'user') | list %}
{%- for message in messages if message.role != 'tool' and message.tool_calls is not defined %}
{%- if (message.role == 'user') != (turns.count % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{%- set turns.count = turns.count + 1 %}
{%- endfor %}
{%- for message in messages %}
{%- if message.role == 'user' %}
{%- if tools and message == users[-1] %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif -%}
[INST] {{ message.content }}[/INST]
{%- elif message.tool_calls is defined %}[TOOL_CALLS] [
{%- for call in message.tool_calls %}
{%- if call.id | length != 9 %}{{ raise_exception('ids have length 9') }}{% endif %}
{{- call.function | tojson }}, "id": "{{ call.id }}"{{ ', ' if not loop.last }}
{%- endfor %}]</s>
{%- elif message.role == 'assistant' %} {{ message.content | trim }}</s>
{%- elif message.role == 'tool' %}
{%- if message.tool_call_id is not defined or message.tool_call_id | length != 9 %}
{{- raise_exception('ids have length 9') }}{% endif -%}
[TOOL_RESULTS] {"content": {{ message.content }}, "call_id": "{{ message.tool_call_id }}"}[/TOOL_RESULTS]
{%- endif %}
{%- endfor %}"""


@cache
def mistral_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = deepcopy(chat_tokenizer())
    tokenizer.add_special_tokens({"eos_token": "</s>", "additional_special_tokens": list(SPECIAL[1:])})
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def agent_of(script: list[str], context: str = "full") -> Agent:
    return Agent(
        engine=ScriptedEngine(script, tokenizer=mistral_tokenizer()),
        tokenizer=mistral_tokenizer(),
        model="mistral",
        make_context=make_context(context),
        toolbox=Toolbox([function_tool(calculator)]),
        tool_format=make_tool_format("mistral"),
    )


def call(expression: str) -> str:
    return f'[TOOL_CALLS] [{{"name": "calculator", "arguments": {{"expression": "{expression}"}}}}]'


SCRIPT = [call("1 + 1"), call("2 + 2"), "it is 4", call("3 + 3"), "it is 6"]


def test_calls_and_results_of_several_turns_extend_one_row() -> None:
    agent = agent_of(SCRIPT)
    (row,) = run_episode(agent, Script([go_on("and three more?"), end()]), max_tokens=200)
    assert [message.role for message in row.messages] == [
        *("user", "assistant", "tool", "assistant", "tool", "assistant"),
        *("user", "assistant", "tool", "assistant"),
    ]
    results = [call.result for step in row.agent_steps for call in step.tool_calls]
    assert results == ["2", "4", "6"]
    # The calls stand apart from the text in the messages, so the text is in the step alone.
    assert [step.action for step in row.agent_steps] == [said.removeprefix("[TOOL_CALLS]") for said in SCRIPT]
    ids = [call.id for message in row.messages for call in message.tool_calls]
    assert len(set(ids)) == 3
    assert {len(each) for each in ids} == {9}
    text = mistral_tokenizer().decode(row.response_tokens.tolist())
    assert f'{SCRIPT[0]}</s>[TOOL_RESULTS] {{"content": 2, "call_id": ' in text
    assert row.action_length == sum(len(sample.tokens) for sample in agent.engine.log)  # type: ignore[attr-defined]


@pytest.mark.parametrize("context", ["window:2", "summary:3"])
def test_rewritten_contexts_show_calls_as_the_template_writes_them(context: str) -> None:
    script = [*SCRIPT[:3], "SUMMARY", *SCRIPT[3:], "end", "end"] if context == "summary:3" else [*SCRIPT, "end"]
    rows = run_episode(agent_of(script, context), Script([go_on("and three more?"), end()]), max_tokens=200)
    assert {row.error for row in rows} == {None}
    assert len(rows) > 1
