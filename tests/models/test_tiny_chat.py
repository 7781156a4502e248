"""The tiny model that can be taught to call tools: its tokenizer, its chat template, its weights."""

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from ludic.agents.tools.formats import make_tool_format
from ludic.models.chat import render_text
from ludic.models.tiny import CHAT_END, make_tiny_chat_model, train_tokenizer
from ludic.records.rollout import Message, ToolCall

SCHEMA = {"type": "function", "function": {"name": "add", "description": "Add two numbers.", "parameters": {}}}
CALL = ToolCall(id="call_0", name="add", arguments='{"a": 12, "b": 30}')
CONVERSATION = [
    Message(role="user", content="12 + 30?"),
    Message(role="assistant", content="<think>Add.</think>", tool_calls=(CALL,)),
    Message(role="tool", content="42", name="add"),
    Message(role="assistant", content="It is 42."),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("tiny-chat"))
    make_tiny_chat_model(folder, [CONVERSATION] * 20, tools=[SCHEMA], vocab_size=512, hidden_size=64, num_layers=1)
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder: str) -> Any:
    return AutoTokenizer.from_pretrained(folder)


def test_the_template_shows_tools_calls_results_and_answers(tokenizer: Any) -> None:
    text = render_text(tokenizer, CONVERSATION, tools=[SCHEMA], add_generation_prompt=False)
    assert text == (
        '<|im_start|>system\nYou may call tools:\n{"type": "function", "function": {"name": "add", '
        '"description": "Add two numbers.", "parameters": {}}}<|im_end|>\n'
        "<|im_start|>user\n12 + 30?<|im_end|>\n"
        '<|im_start|>assistant\n<think>Add.</think>\n<tool_call>\n{"name": "add", "arguments": {"a": 12, "b": 30}}\n'
        "</tool_call><|im_end|>\n"
        "<|im_start|>user\n<tool_response>\n42\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\nIt is 42.<|im_end|>\n"
    )
    (call,) = make_tool_format("hermes").parse(text).calls
    assert (call.name, call.arguments) == (CALL.name, CALL.arguments)


def test_thinking_is_left_out_before_the_last_question_only(tokenizer: Any) -> None:
    thought = Message(role="assistant", content="<think>Hm.</think>\nYes.")
    question = Message(role="user", content="Sure?")
    text = render_text(tokenizer, [question, thought, question, thought], add_generation_prompt=False)
    assert text.count("<think>Hm.</think>") == 1
    assert text.index("Yes.") < text.index("<think>")


@pytest.mark.parametrize("text", ["It is 42.", "12345", "été 猫 🐈\n\n\t", '<tool_call>{"a": "\\n"}</tool_call>', ""])
def test_any_text_survives_encoding_and_decoding(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_digits_are_tokens_of_their_own_and_what_is_in_every_text_takes_few(tokenizer: Any) -> None:
    assert tokenizer.tokenize("12 + 30?")[:2] == ["1", "2"]
    with_tools, without = (render_text(tokenizer, CONVERSATION, tools=tools) for tools in ([SCHEMA], []))
    added = len(tokenizer(with_tools)["input_ids"]) - len(tokenizer(without)["input_ids"])
    assert 0 < added < (len(with_tools) - len(without)) / 8


def test_a_completion_ends_at_the_end_of_the_turn(folder: str, tokenizer: Any) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert tokenizer.convert_ids_to_tokens(model.generation_config.eos_token_id) == CHAT_END
    assert model.config.vocab_size % 64 == 0
    assert model.config.vocab_size >= len(tokenizer)


def test_the_same_conversations_give_the_same_model(folder: str, tmp_path: Path) -> None:
    make_tiny_chat_model(
        str(tmp_path), [CONVERSATION] * 20, tools=[SCHEMA], vocab_size=512, hidden_size=64, num_layers=1
    )
    for name in ("model.safetensors", "tokenizer.json"):
        assert (tmp_path / name).read_bytes() == (Path(folder) / name).read_bytes()


def test_a_tokenizer_of_no_texts_has_the_bytes_and_the_special_tokens() -> None:
    assert len(train_tokenizer((), vocab_size=0)) == 256 + 3
