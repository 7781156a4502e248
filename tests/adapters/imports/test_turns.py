"""Answers of a file are trained as a worker's model would sample them: the same tokens, with the same mask.

The worker plays an episode whose engine says what a model of each family would; its conversation is read back.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chat_templates import FAMILIES, Family, Said
from episodes import Script, end, go_on, run_episode
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from ludic.adapters.imports.episodes import ImportedEpisode, ImportedRow, Texts, rows_of
from ludic.adapters.imports.formats import jsonl
from ludic.adapters.imports.forms import conversations, pairs
from ludic.adapters.imports.importing import import_files, start_for_import
from ludic.adapters.imports.records import ImportRecord
from ludic.agents.agent import Agent
from ludic.agents.contexts import make_context
from ludic.agents.tools.formats import ParsedCalls
from ludic.agents.tools.registry import function_tool
from ludic.agents.tools.toolbox import Toolbox
from ludic.engines.engine import Completion, GenerationRequest
from ludic.environments.environment import Example
from ludic.errors import RefusedRecordError
from ludic.models.tiny import write_model
from ludic.records.rollout import Message, ToolCall, WeightSpan
from ludic.root.rows.files import list_files
from ludic.root.rows.parquet import read_columns

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
            columns={"response_logprobs": np.full(len(tokens), -1.0, np.float32)},
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

    def parse(self, text: str, tools: Sequence[Mapping[str, Any]] = ()) -> ParsedCalls:
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
) -> list[ImportedRow]:
    """Rows that `ludic.sft` makes of a conversation. Raises why it can't be used."""
    (record,) = conversations([{"messages": messages, "tools": [*tools] or None}], "dataset").records
    episode = jsonl(ImportRecord({**record, **columns}, set()))
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


# --- What answers may hold ----------------------------------------------------------------------------------


def asked(content: str, **also: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": "1 + 2?"}, {"role": "assistant", "content": content, **also}]


def said_text(family: Family, messages: Sequence[Any], **columns: Any) -> str:
    """The trained text of a conversation with one answer, with special tokens."""
    tokenizer = family.tokenizer()
    (row,) = imported(family, tokenizer, messages, **columns)
    assert row.action_mask is None
    return str(tokenizer.decode(row.response_tokens.tolist()))


@pytest.mark.parametrize("name", FAMILIES)
def test_names_of_tokens_that_an_answer_quotes_are_text(name: str):
    family = FAMILIES[name]
    tokenizer = family.tokenizer()
    plain = tokenizer.apply_chat_template([*asked("yes"), *asked("")[:1]], tokenize=False)
    quoted = [each for each in {*family.special, family.eos, family.bos, *family.stops} if each and each in plain]
    quoted += [each for each in (family.eos, *family.stops) if each not in quoted]
    quoted = [each for each in quoted if f"'{each}' in m.content" not in family.template]  # which it refuses
    content = f"A turn of {name} has {', '.join(sorted(quoted))} in it, and goes on."
    before, after = family.write(Said(content="ANSWER")).split("ANSWER")
    if name == "alpaca":
        before, after = "", family.eos
    text = tokenizer(content, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    tokenizer.backend_tokenizer.encode_special_tokens = False
    ends = [tokenizer(each, add_special_tokens=False)["input_ids"] for each in (before, after)]
    response = imported(family, tokenizer, [*asked(content), *asked("no")])[0].response_tokens.tolist()
    if not name.startswith("qwen3"):  # which begin answers without thinking with an empty one
        assert response[: len(ends[0] + text + ends[1])] == ends[0] + text + ends[1]
    # A later prompt shows it as it was said, and has no more tokens that end turns than after another answer.
    prompt, of_other = (
        last_prompt(imported(family, tokenizer, [*asked(each), *asked("no")])) for each in (content, "a")
    )
    assert content in tokenizer.decode(prompt)
    stops = family.stop_tokens(tokenizer)
    assert sum(token in stops for token in prompt) == sum(token in stops for token in of_other)


def last_prompt(rows: Sequence[ImportedRow]) -> list[int]:
    """Tokens before the last answer."""
    row = rows[-1]
    steps = row.agent_steps or ()
    return [*row.prompt_tokens.tolist(), *row.response_tokens.tolist()[: steps[-1].start]]


@pytest.mark.parametrize("name", ["mistral", "deepseek v3", "phi", "command r"])
def test_marks_of_tool_calls_in_the_text_of_an_answer_are_tokens(name: str):
    family = FAMILIES[name]
    tokenizer = family.tokenizer()
    call = Said(calls=(ToolCall(id="c00000000", name="add", arguments='{"a": 1, "b": 2}'),))
    written = family.write(call)
    (row,) = imported(family, tokenizer, asked(written))  # as other programs record it, with its end
    marks = {token for token in tokenizer(written, add_special_tokens=False)["input_ids"] if token >= 256}
    assert marks <= {*row.response_tokens.tolist()}
    assert sum(token in family.stop_tokens(tokenizer) for token in row.response_tokens.tolist()) == 1


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.thinks and name != "harmony"])
def test_thinking_in_the_text_is_trained_like_thinking_beside_it(name: str):
    family = FAMILIES[name]
    wanted = family.write(Said(content="3", reasoning="1 and 2"))
    assert said_text(family, asked("3", reasoning_content="1 and 2")) == wanted
    assert said_text(family, asked("<think>\n1 and 2\n</think>\n\n3")) == wanted
    if not wanted.startswith("<think>"):  # as a model says it behind the prompt
        assert said_text(family, asked("1 and 2\n</think>\n\n3")) == wanted


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("r1 distill", "3<｜end▁of▁sentence｜>"),
        ("qwq", "3<|im_end|>"),
        ("qwen3", "<think>\n\n</think>\n\n3<|im_end|>"),
        ("qwen3 thinking", "\n</think>\n\n3<|im_end|>"),
        ("harmony", "<|channel|>final<|message|>3<|return|>"),
    ],
)
def test_an_answer_without_thinking_is_what_the_template_shows_and_ends(name: str, wanted: str):
    assert said_text(FAMILIES[name], asked("3")) == wanted


def test_an_answer_may_be_cut_inside_its_thinking():
    assert said_text(FAMILIES["qwq"], asked("<think>\nlet me"), finish_reason="length") == "let me"


@pytest.mark.parametrize("name", FAMILIES)
def test_an_answer_that_was_cut_off_has_no_end(name: str):
    family = FAMILIES[name]
    tokenizer = family.tokenizer()
    (row,) = imported(family, tokenizer, [*asked("yes"), *asked("no and")], finish_reason="length")[-1:]
    assert tokenizer.decode(row.response_tokens.tolist()).endswith("no and")
    (whole,) = imported(family, tokenizer, [*asked("yes"), *asked("no and")])[-1:]
    assert whole.response_tokens.tolist()[: len(row.response_tokens)] == row.response_tokens.tolist()
    assert whole.response_tokens[-1] in family.stop_tokens(tokenizer)


@pytest.mark.parametrize("name", FAMILIES)
def test_an_end_token_at_the_end_of_a_recorded_answer_is_its_end(name: str):
    family = FAMILIES[name]
    for end_token in {family.eos, *family.stops}:
        assert said_text(family, asked(f"yes{end_token}\n")) == said_text(family, asked("yes"))


def test_both_sides_of_a_pair_end_with_the_end_of_a_turn():
    for family in FAMILIES.values():
        tokenizer = family.tokenizer()
        for record in pairs([{"prompt": "1 + 2?", "chosen": "3", "rejected": "4"}], "dataset").records:
            (rows,) = rows_of(
                [jsonl(ImportRecord({**record}, set()))],
                lambda t=tokenizer: t,
                lambda f=family, t=tokenizer: f.stop_tokens(t),
            )
            assert not isinstance(rows, Exception)
            (row,) = rows
            assert row.action_mask is None
            assert row.response_tokens[-1] in family.stop_tokens(tokenizer)
            assert sum(token in family.stop_tokens(tokenizer) for token in row.response_tokens.tolist()) == 1


# --- What is refused ----------------------------------------------------------------------------------------

CHATML_TURNS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NO_CALL = "the chat template does not show the call of add in message 1, so it can't be trained on; take a model"
SECOND_CALL = [{"id": "c2", "function": {"name": "add", "arguments": {"a": 2}}}]
CALLING = asked("", tool_calls=[{"id": "c1", "function": {"name": "add", "arguments": {"a": 1}}}])


@pytest.mark.parametrize(
    ("template", "messages", "reason"),
    [
        (
            CHATML_TURNS,
            CALLING,
            NO_CALL,
        ),
        (
            CHATML_TURNS,
            [CALLING[0], {**CALLING[1], "content": "I add them."}],
            NO_CALL,
        ),
        (
            FAMILIES["llama3"].template,
            [CALLING[0], {**CALLING[1], "content": "Let me see."}],
            "the chat template leaves out the text of message 1, 'Let me see.', beside its tool calls",
        ),
        (
            CHATML_TURNS.replace("<|im_start|>assistant\n{%", "<|im_start|>assistant\nSure: {%"),
            asked("3"),
            r"the chat template asks for an answer with '<\|im_start\|>assistant\\nSure: ' and shows message 1 without",
        ),
        (
            CHATML_TURNS.replace("<|im_start|>assistant\n{%", "BOT:{%"),
            asked("3"),
            "the chat template asks for an answer with 'BOT:' and shows message 1 without that",
        ),
        (
            CHATML_TURNS.replace("{{ m.content }}", "..."),
            asked("3"),
            "the chat template leaves out the text of message 1, '3'",
        ),
        (
            CHATML_TURNS,
            asked("3")[1:],
            "messages begins with an answer of the model, wanted what it answers before that",
        ),
        (
            CHATML_TURNS.replace("{{ m.content }}", "{% generation %}{% endgeneration %}{{ m.content }}"),
            asked("3"),
            "messages has no turn of the assistant to train on, in the chat template's {% generation %}",
        ),
    ],
)
def test_an_answer_that_the_template_does_not_tell_is_refused_in_one_line(template: str, messages: Any, reason: str):
    families = [family for family in FAMILIES.values() if family.template == template]
    tokenizer = (families or [FAMILIES["chatml"]])[0].tokenizer()
    tokenizer.chat_template = template
    with pytest.raises(RefusedRecordError, match=reason) as refused:
        imported(FAMILIES["chatml"], tokenizer, messages)
    assert "\n" not in str(refused.value)


# --- Texts --------------------------------------------------------------------------------------------------


def text_row(family: Family, tokenizer: PreTrainedTokenizerFast, **values: Any) -> ImportedRow:
    is_raw = isinstance(values["prompt"], str)
    episode = jsonl(ImportRecord(values, set())) if is_raw else ImportedEpisode(rows=[Texts(**values)], columns={})
    (rows,) = rows_of([episode], lambda: tokenizer, lambda: family.stop_tokens(tokenizer))
    assert not isinstance(rows, Exception)
    return rows[0]


def test_texts_begin_and_end_as_the_tokenizer_has_it():
    family = FAMILIES["gemma"]
    tokenizer = family.tokenizer()

    def told_texts(**values: Any) -> list[str]:
        row = text_row(family, tokenizer, **values)
        return [tokenizer.decode(each.tolist()) for each in (row.prompt_tokens, row.response_tokens)]

    assert told_texts(prompt="2 + 2 =", completion=" 4") == ["2 + 2 =", " 4<eos>"]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", tokenizer.bos_token_id)]
    )
    assert told_texts(prompt="2 + 2 =", completion=" 4") == ["<bos>2 + 2 =", " 4<eos>"]
    assert told_texts(prompt="<bos>2 + 2 =", completion=" 4<eos>") == ["<bos>2 + 2 =", " 4<eos>"]
    assert told_texts(prompt="2 + 2 =", completion="") == ["<bos>2 + 2 =", "<eos>"]
    assert told_texts(prompt="2 + 2 =", completion=" 4", finish_reason="length") == ["<bos>2 + 2 =", " 4"]
    assert told_texts(prompt="2 + 2 =", completion=" 4", error="it failed") == ["<bos>2 + 2 =", " 4"]
    # With the chat template, the end of its turns.
    prompt = [{"role": "user", "content": "2 + 2?"}]
    wanted = "<bos><start_of_turn>user\n2 + 2?<end_of_turn>\n<start_of_turn>model\n"
    assert told_texts(prompt=prompt, completion="4") == [wanted, "4<end_of_turn>"]
    assert told_texts(prompt=prompt, completion="4<end_of_turn>") == [wanted, "4<end_of_turn>"]
    quoting = text_row(family, tokenizer, prompt=prompt, completion="a <end_of_turn> b").response_tokens
    assert tokenizer.decode(quoting.tolist()) == "a <end_of_turn> b<end_of_turn>"
    assert np.count_nonzero(quoting == quoting[-1]) == 1


def test_a_completion_does_not_begin_the_thinking_that_its_prompt_begins():
    family = FAMILIES["qwq"]
    tokenizer = family.tokenizer()
    for completion in ("1\n</think>\n\n3", "<think>\n1\n</think>\n\n3<|im_end|>\n"):
        row = text_row(family, tokenizer, prompt=asked("")[:1], completion=completion)
        assert tokenizer.decode(row.prompt_tokens.tolist()).endswith("<|im_start|>assistant\n<think>\n")
        assert tokenizer.decode(row.response_tokens.tolist()) == "1\n</think>\n\n3<|im_end|>"


def test_the_tokens_at_which_a_model_stops_are_read_beside_its_tokenizer(tmp_path: Path):
    """A template of GLM writes no end of a turn; that the next role's token is one stands in generation_config.json."""
    family, folder = FAMILIES["glm"], tmp_path / "model"
    tokenizer = family.tokenizer()
    write_model(str(folder), tokenizer, seed=0, hidden_size=64, num_layers=1)
    config = json.loads((folder / "generation_config.json").read_text())
    stops = {"eos_token_id": family.stop_tokens(tokenizer)}
    (folder / "generation_config.json").write_text(json.dumps(config | stops))
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"messages": asked("3"), "episode_reward": 1.0}) + "\n")
    for source in (None, str(folder)):
        root = start_for_import(str(tmp_path / f"root {source is None}"), str(folder), "jsonl")
        import_files(root, [str(file)], "jsonl", tokenizer=source)
        (tokens,) = read_columns(root, list_files(root)[0].name, ["response_tokens"])["response_tokens"].to_pylist()
        assert tokenizer.decode(tokens) == "\n3<|user|>"
