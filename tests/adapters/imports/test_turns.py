"""Answers of a file are trained as a worker's model would sample them: the same tokens, with the same mask.

The worker plays an episode whose engine says what a model of each family would; its conversation is read back.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from chat_templates import FAMILIES, Family, Said
from episodes import Script, end, go_on, run_episode
from transformers import PreTrainedTokenizerFast

from ludic.adapters.imports.episodes import Row, rows_of
from ludic.adapters.imports.formats import jsonl
from ludic.adapters.imports.forms import conversations
from ludic.adapters.imports.records import Record
from ludic.agents.agent import Agent
from ludic.agents.contexts import make_context
from ludic.agents.tools.formats import ParsedCalls
from ludic.agents.tools.registry import function_tool
from ludic.agents.tools.toolbox import Toolbox
from ludic.engines.engine import Completion, GenerationRequest
from ludic.environments.environment import Example
from ludic.records import Message, ToolCall, WeightSpan

CORPUS = ["\nassistant\n\nuser\n\n", "the answer is\n\n 42\n\n\n", " think </think>\n\n tool_call\n three.\n"] * 50
OBSERVATIONS = ("And 3 + 4?\n", "Thanks.")


def add(a: int, b: int) -> str:
    """Add two numbers.

    Args:
        a: One.
        b: The other.
    """
    return str(a + b)


def script_of(family: Family) -> list[Said]:
    """Turns of an episode with two questions and two calls of tools; calls have the ids that a worker gives them."""

    def said(content: str, reasoning: str, call: ToolCall | None = None, after_tool: bool = False) -> Said:
        calls = () if call is None or not family.has_tools else (call,)
        text = content if not calls or family.call_with_text else ""
        thinks = family.thinks and (family.thinks_after_tools or not after_tool)
        return Said(content=text, reasoning=reasoning if thinks else None, calls=calls)

    first, second = (
        ToolCall(id=f"c{turn:05d}000", name="add", arguments=f'{{"a": {a}, "b": {b}}}')
        for turn, a, b in ((0, 1, 2), (2, 3, 4))
    )
    script = [
        said("Let me see.", "I add\n1 and 2.", first),
        said("three.\n\nIt is < 4.", "That was the sum.", after_tool=True),
        said("", "Again.", second),
        said("7", "Seven.", after_tool=True),
        said("the answer is 42", "They thank me."),
    ]
    return script if family.has_tools else [script[1], script[3], script[4]]


@dataclass
class SaidEngine:
    """Says what the script holds, with its stop tokens."""

    family: Family
    tokenizer: PreTrainedTokenizerFast
    script: Sequence[Said]
    name: str = "scripted 1"
    max_length: int = 100_000
    policy_version: int = 0
    num_asked: int = 0

    async def generate(self, request: GenerationRequest) -> Completion:
        text = self.family.write(self.script[self.num_asked])
        self.num_asked += 1
        tokens = np.array(self.tokenizer(text, add_special_tokens=False)["input_ids"], np.int32)
        assert tokens[-1] in self.family.stop_tokens(self.tokenizer)
        return Completion(
            tokens=tokens,
            logprobs=np.full(len(tokens), -1.0, np.float32),
            finish_reason="stop",
            weight_versions=(WeightSpan(version=0, start=0, end=len(tokens)),),
        )

    def load_weights(self, folder: str, version: int) -> None:
        raise NotImplementedError


@dataclass
class SaidCalls:
    """Finds the calls of the script in what was said, whatever the family's markup is."""

    engine: SaidEngine
    calls_apart = True

    def parse(self, text: str) -> ParsedCalls:
        return ParsedCalls(calls=self.engine.script[self.engine.num_asked - 1].calls)


@dataclass
class AsMessages:
    """A view of answers as messages, which the template shows as it likes."""

    script: Sequence[Said]

    async def view(self, messages: Sequence[Message], ask: object) -> Sequence[Message]:
        said = iter(self.script)
        return [next(said).message if each.role == "assistant" else each for each in messages]


def first_messages(family: Family) -> tuple[Message, ...]:
    question = Message(role="user", content="1 + 2?\n")
    return (Message(role="system", content="Be brief."), question) if family.has_system else (question,)


def worker_rows(family: Family, tokenizer: PreTrainedTokenizerFast) -> tuple[list[Any], Sequence[Message], list[Any]]:
    """Rows of a worker's episode, all messages of the dialogue, and the schemas of its tools."""
    script = script_of(family)
    engine = SaidEngine(family, tokenizer, script)
    toolbox = Toolbox([function_tool(add)] if family.has_tools else [])
    agent = Agent(
        engine=engine,
        tokenizer=tokenizer,
        model="scripted",
        toolbox=toolbox,
        tool_format=SaidCalls(engine),
        make_context=(lambda: AsMessages(script)) if family.rewrites else make_context("full"),
    )
    environment = Script([*(go_on(text) for text in OBSERVATIONS), end()])
    example = Example(example_id="q", messages=first_messages(family))
    rows = run_episode(agent, environment, example=example, max_tokens=1000)
    assert [row.error for row in rows] == [None] * len(rows)
    assert engine.num_asked == len(script)
    return rows, rows[-1].messages, [*toolbox.schemas]


def as_file(messages: Sequence[Message], script: Sequence[Said]) -> list[dict[str, Any]]:
    """Messages as a person has them in a file."""
    said, found = iter(script), []
    call_ids: list[str] = []
    for message in messages:
        if message.role != "assistant":
            of_tool = {"name": message.name, "tool_call_id": call_ids.pop(0)} if message.role == "tool" else {}
            found.append({"role": message.role, "content": message.content, **of_tool})
            continue
        each = next(said)
        functions = [{"name": call.name, "arguments": call.arguments} for call in each.calls]
        call_ids = [call.id for call in each.calls]
        named = zip(call_ids, functions, strict=True)
        calls = [{"id": call_id, "type": "function", "function": function} for call_id, function in named]
        found.append(
            {"role": "assistant", "content": each.content}
            | ({"tool_calls": calls} if calls else {})
            | ({"reasoning_content": each.reasoning} if each.reasoning else {})
        )
    return found


def imported(
    family: Family,
    tokenizer: PreTrainedTokenizerFast,
    messages: Sequence[Any],
    tools: Sequence[Any] = (),
    **columns: Any,
) -> list[Row]:
    """Rows that `ludic.sft` makes of a conversation. Raises why it can't be used."""
    (record,) = conversations([{"messages": messages, "tools": [*tools] or None}], "dataset").records
    episode = jsonl(Record({**record, **columns}, set()))
    (rows,) = rows_of([episode], lambda: tokenizer, lambda: family.stop_tokens(tokenizer))
    if isinstance(rows, Exception):
        raise rows
    return rows


def told(rows: Sequence[Any], tokenizer: PreTrainedTokenizerFast) -> list[Any]:
    """Tokens, mask and text of rows."""
    found = []
    for row in rows:
        mask = np.ones(len(row.response_tokens), bool) if row.action_mask is None else row.action_mask
        text = [tokenizer.decode(ids.tolist()) for ids in (row.prompt_tokens, row.response_tokens)]
        found.append([*text, row.prompt_tokens.tolist(), row.response_tokens.tolist(), mask.tolist()])
    return found


@pytest.mark.parametrize("name", FAMILIES)
def test_a_conversation_is_trained_as_a_worker_samples_it(name: str):
    family = FAMILIES[name]
    tokenizer = family.tokenizer(() if family.rewrites else CORPUS)
    rows, messages, tools = worker_rows(family, tokenizer)
    found = imported(family, tokenizer, as_file(messages, script_of(family)), tools)
    assert told(found, tokenizer) == told(rows, tokenizer)
    assert len(found) == 1 or family.rewrites
    assert [[(step.start, step.end) for step in row.agent_steps] for row in found] == [
        [(step.start, step.end) for step in row.agent_steps] for row in rows
    ]
    assert [step.action for row in found for step in row.agent_steps] == [each.content for each in script_of(family)]


def of_transformers(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages as `apply_chat_template` wants them: arguments are objects, thinking has the templates' names."""
    return [
        {
            **message,
            **({"thinking": message["reasoning_content"]} if "reasoning_content" in message else {}),
            **(
                {
                    "tool_calls": [
                        call | {"function": call["function"] | {"arguments": json.loads(call["function"]["arguments"])}}
                        for call in message["tool_calls"]
                    ]
                }
                if "tool_calls" in message
                else {}
            ),
        }
        for message in messages
    ]


@pytest.mark.parametrize("name", FAMILIES)
def test_prompts_and_answers_are_those_of_transformers(name: str):
    family = FAMILIES[name]
    tokenizer = family.tokenizer()
    _, dialogue, tools = worker_rows(family, tokenizer)
    messages = as_file(dialogue, script_of(family))
    plain = of_transformers(messages)

    def rendered(end: int, **options: Any) -> list[int]:
        return tokenizer.apply_chat_template(plain[:end], tools=tools or None, return_dict=True, **options)["input_ids"]

    answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    rows = imported(family, tokenizer, messages, tools)
    turns = [(row, step) for row in rows for step in row.agent_steps]
    shown = set()
    for index, (row, step) in zip(answers, turns, strict=True):
        tokens = [*row.prompt_tokens.tolist(), *row.response_tokens.tolist()]
        start, end = (len(row.prompt_tokens) + place for place in (step.start, step.end))
        if name != "alpaca":  # its turns end with a token that it does not write
            assert tokens[:start] == rendered(index, add_generation_prompt=True)
        assert tokens[end - 1] in family.stop_tokens(tokenizer)
        whole = rendered(index + 1)
        if whole[: end - 1] == tokens[: end - 1]:
            shown.add(index)
            assert tokenizer.decode(whole[end:]).strip() in ("", family.eos)
    if name != "alpaca" and name not in ("qwq", "r1 distill"):  # which never show thinking
        assert shown >= {*answers} - ({4, 8} if name == "harmony" else set())  # it leaves out thinking before them


MARKS = {
    "the end is not marked": (
        "{% generation %}{{ m.content }}{% endgeneration %}<|im_end|>",
        "<think>\nhm\n</think>\n\nyes<|im_end|>",
    ),
    "what follows the end is marked, too": (
        "{% generation %}{{ m.content }}<|im_end|>\n{% endgeneration %}",
        "<think>\nhm\n</think>\n\nyes<|im_end|>",
    ),
    "the answer alone": (
        "{{ m.content.split('</think>')[0] }}</think>{% generation %}{{ m.content.split('</think>')[-1] }}<|im_end|>"
        "{% endgeneration %}",
        "\n\nyes<|im_end|>",
    ),
    "thinking alone": (
        "{% generation %}{{ m.content.split('</think>')[0] }}{% endgeneration %}</think>"
        "{{ m.content.split('</think>')[-1] }}<|im_end|>",
        "<think>\nhm\n",
    ),
    "two parts": (
        "{% generation %}<think>{% endgeneration %}{{ m.content[7:].split('</think>')[0] }}"
        "{% generation %}</think>{{ m.content.split('</think>')[-1] }}{% endgeneration %}<|im_end|>",
        "<think></think>\n\nyes<|im_end|>",
    ),
    "the last answer": (
        "{% if loop.last %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}"
        "<|im_end|>{% endif %}",
        "<think>\nhm\n</think>\n\nyes<|im_end|>",
    ),
}


@pytest.mark.parametrize("name", MARKS)
def test_marks_say_which_parts_are_trained_and_the_end_of_the_turn_where_they_end(name: str):
    answer, trained = MARKS[name]
    tokenizer = FAMILIES["chatml"].tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}{{ '\\n' }}{% if m.role == 'assistant' %}"
        + answer
        + "{% else %}{{ m.content }}<|im_end|>{% endif %}{{ '\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    messages = [
        *({"role": "user", "content": "sure?"}, {"role": "assistant", "content": "<think>\nhm\n</think>\n\nyes"}),
    ]
    (row,) = imported(FAMILIES["chatml"], tokenizer, messages * 2)
    times = 1 if "loop.last" in answer else 2
    mask = np.ones(len(row.response_tokens), bool) if row.action_mask is None else row.action_mask
    assert tokenizer.decode(row.response_tokens[mask].tolist()) == trained * times
    plain = tokenizer.apply_chat_template(messages * 2, return_dict=True, return_assistant_tokens_mask=True)
    tokens = [*row.prompt_tokens.tolist(), *row.response_tokens.tolist()]
    assert tokens == plain["input_ids"][: len(tokens)]
    ours = [*np.zeros(len(row.prompt_tokens), bool).tolist(), *mask.tolist()]
    theirs = [bool(each) for each in plain["assistant_masks"][: len(tokens)]]
    ends = {i for i, token in enumerate(tokens) if token == tokenizer.eos_token_id}
    differ = {i for i, (mine, other) in enumerate(zip(ours, theirs, strict=True)) if mine != other}
    assert differ <= ends | {i + 1 for i in ends}  # an end that they leave out, and what follows it
