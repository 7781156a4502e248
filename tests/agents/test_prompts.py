"""Prompts of a growing conversation extend the tokens that were sampled, and say what the template says."""

import numpy as np
import pytest
from chat_models import chat_tokenizer

from ludic.agents.prompts import PromptBuilder
from ludic.engines.engine import Completion
from ludic.models.chat import render_prompt, render_text
from ludic.models.tiny_chat import END
from ludic.records import Message, WeightSpan

QUESTION = [Message(role="system", content="Be brief."), Message(role="user", content="2 + 2?")]


def completion(text: str, *, is_cut_off: bool = False) -> Completion:
    tokenizer = chat_tokenizer()
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    if not is_cut_off:
        ids.append(tokenizer.eos_token_id)
    span = WeightSpan(version=0, start=0, end=len(ids))
    return Completion(
        tokens=np.array(ids, np.int32),
        logprobs=np.zeros(len(ids), np.float32),
        finish_reason="length" if is_cut_off else "stop",
        weight_versions=(span,),
    )


def after(builder: PromptBuilder, messages: list[Message], said: Completion, text: str) -> list[Message]:
    """Let the model say a text, and return the dialogue with it."""
    answer = Message(role="assistant", content=text)
    builder.complete(messages, builder.build(messages), said, answer)
    return [*messages, answer]


@pytest.mark.parametrize("text", ["4", "4\n\n", "\n\n", "", "<think>\nwell\n</think>\n\n4", "4 🐈"])
@pytest.mark.parametrize("role", ["user", "tool"])
def test_a_prompt_extends_the_sampled_tokens_and_reads_as_the_template_says(text: str, role: str) -> None:
    builder = PromptBuilder(chat_tokenizer())
    said = completion(text)
    first = builder.build(QUESTION)
    dialogue = [*after(builder, QUESTION, said, text), Message(role=role, content="And 3 + 3?")]
    prompt = builder.build(dialogue)
    sampled = [*first.tolist(), *said.tokens.tolist()]
    assert prompt[: len(sampled)].tolist() == sampled
    # The template removes thinking from earlier turns; what was sampled stays as it is.
    answer = dialogue[2].content
    wanted = render_text(chat_tokenizer(), [*QUESTION, Message(role="assistant", content="ANSWER"), dialogue[3]])
    assert chat_tokenizer().decode(prompt.tolist()) == wanted.replace("ANSWER", answer)


def test_a_completion_that_was_cut_off_gets_the_end_that_it_lacks() -> None:
    builder = PromptBuilder(chat_tokenizer())
    dialogue = after(builder, QUESTION, completion("4 is", is_cut_off=True), "4 is")
    text = chat_tokenizer().decode(builder.build([*dialogue, Message(role="user", content="Briefer.")]).tolist())
    assert f"4 is{END}\n<|im_start|>user\nBriefer.{END}" in text


def test_tokens_never_merge_across_the_end_of_a_completion() -> None:
    """Rendered as one text, the line breaks of an answer and of the template would become one token."""
    builder = PromptBuilder(chat_tokenizer())
    said = completion("the answer is\n\n", is_cut_off=True)
    first = builder.build(QUESTION)
    dialogue = after(builder, QUESTION, said, "the answer is\n\n")
    prompt = builder.build([*dialogue, Message(role="user", content="?")])
    assert prompt[len(first) : len(first) + len(said.tokens)].tolist() == said.tokens.tolist()


def test_a_rewritten_conversation_is_rendered_as_a_whole() -> None:
    builder = PromptBuilder(chat_tokenizer())
    after(builder, QUESTION, completion("<think>hm</think>4"), "<think>hm</think>4")
    rewritten = [*QUESTION, Message(role="assistant", content="4"), Message(role="user", content="Sure?")]
    assert builder.build(rewritten).tolist() == render_prompt(chat_tokenizer(), rewritten).tolist()


def test_tools_are_in_every_prompt() -> None:
    schema = {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {}}}
    builder = PromptBuilder(chat_tokenizer(), [schema])
    first = builder.build(QUESTION)
    assert '"name": "add"' in chat_tokenizer().decode(first.tolist())
    dialogue = after(builder, QUESTION, completion("4"), "4")
    assert builder.build([*dialogue, Message(role="user", content="?")])[: len(first)].tolist() == first.tolist()
