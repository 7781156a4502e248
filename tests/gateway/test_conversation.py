"""Prompts extend the stored tokens of earlier calls, and say what the chat templates of all families say."""

import asyncio
import json
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import call_templates
import numpy as np
import pytest
from chat_models import chat_tokenizer
from chat_templates import CHATML, FAMILIES, QWEN3, Family, Said, call_json, hermes
from gateway.scripted import ScriptedEngine, Turn, make_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import forward_logprobs

from ludic.agents.agent import Agent
from ludic.agents.tools.formats import likely_format, make_tool_format
from ludic.engines.engine import Completion, Engine, GenerationRequest, SamplingParams
from ludic.engines.transformers_engine import TransformersEngine
from ludic.errors import EngineError
from ludic.gateway.calls import CallRequest, Prompt, RefusedCallError, SampledCall, StoredCall
from ludic.gateway.conversation import EngineBackend
from ludic.gateway.dialects import DIALECTS
from ludic.gateway.matching import longest_known, tools_digest
from ludic.gateway.prompts import PromptMaker
from ludic.models.chat import render_text
from ludic.models.tiny import write_model
from ludic.records.rollout import Message, ToolCall


def schema(name: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]}
    return {"type": "function", "function": {"name": name, "description": "Look.", "parameters": parameters}}


LOOK, FIND = schema("look"), schema("find")


def coder(said: Said) -> str:
    """Qwen3-Coder's form of calls whose arguments are texts."""
    written = [
        f"<tool_call>\n<function={call.name}>\n"
        + "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in json.loads(call.arguments).items())
        + "</function>\n</tool_call>"
        for call in said.calls
    ]
    return "\n".join([*([said.content] if said.content else []), *written]) + "<|im_end|>"


def short(template: str, calls: Any, *, with_text: bool = False, special: Sequence[str] = ()) -> Family:
    """A family of tests/call_templates.py, whose template may lack the tokenizer's end token."""
    marks = ["<|im_start|>", "<|im_end|>", *special]
    return Family(template=template, write=calls, eos="<|im_end|>", special=marks, call_with_text=with_text)


SHORT = {
    "short qwen3": short(call_templates.QWEN3, lambda said: hermes(said) + "<|im_end|>", with_text=True),
    "short qwen3 coder": short(call_templates.QWEN3_CODER, coder, with_text=True),
    "short llama": short(
        call_templates.LLAMA,
        lambda said: (call_json(said.calls[0], "parameters") if said.calls else said.content) + "<|im_end|>",
    ),
    "short mistral": short(
        call_templates.MISTRAL,
        lambda said: (
            f"[TOOL_CALLS][{', '.join(call_json(each, id=each.id) for each in said.calls)}]<|im_end|>"
            if said.calls
            else f"{said.content}<|im_end|>"
        ),
        special=["[TOOL_CALLS]"],
    ),
    "short new mistral": short(
        call_templates.NEW_MISTRAL,
        lambda said: (
            "".join(f"[TOOL_CALLS]{each.name}[ARGS]{each.arguments}" for each in said.calls)
            + said.content * (not said.calls)
            + "<|im_end|>"
        ),
        special=["[TOOL_CALLS]", "[ARGS]"],
    ),
    "short glm": short(call_templates.GLM, lambda said: said.content + "<|im_end|>"),
    "short deepseek": short(call_templates.DEEPSEEK, lambda said: said.content + "<|im_end|>"),
}
ALL = {**FAMILIES, **SHORT}
WITH_CALLS = {
    *("chatml", "generation", "llama3", "mistral", "qwen3", "qwen3 thinking", "qwq", "short qwen3", "short llama"),
    *("short qwen3 coder", "short mistral", "short new mistral"),
}
"""Families whose tool calls ludic reads."""
ONE_CALL = {"llama3", "short llama"}
tokenizer_of = cache(lambda name: make_tokenizer(ALL[name]))


@dataclass
class Talk:
    """The calls of one episode, with an engine that says what the test wants."""

    family: Family = CHATML
    keep_thinking: bool = False
    name: str = ""
    max_length: int = 1_000_000
    forgets: bool = False
    """Whether each call is read from the store, without what the backend keeps of it."""
    turns: list[str | Turn] = field(default_factory=list)
    calls: list[StoredCall] = field(default_factory=list)
    prompts: list[Prompt] = field(default_factory=list)

    def __post_init__(self) -> None:
        tokenizer = tokenizer_of(self.name) if self.name else make_tokenizer(self.family)
        self.engine = ScriptedEngine(
            lambda asked: self.turns[asked.number],
            family=self.family,
            tokenizer=tokenizer,
            max_length=self.max_length,
        )
        self.backend = make_backend(self.engine, tokenizer, len(tokenizer), keep_thinking=self.keep_thinking)

    def ask(self, messages: Sequence[Message], said: str | Turn, **options: Any) -> tuple[Prompt, SampledCall]:
        """Make a call, and store it."""
        params = options.pop("params", SamplingParams(max_tokens=500))
        request = CallRequest(dialect=options.pop("dialect", "chat"), messages=tuple(messages), **options)
        prompt = asyncio.run(self.backend.prepare(request, self.calls))
        self.turns.append(said)
        sampled = asyncio.run(self.backend.sample(request, prompt, params, len(self.calls)))
        self.calls.append(
            StoredCall(
                call_id=f"call-{len(self.calls)}",
                messages=request.messages,
                answer=sampled.message,
                tools_digest=tools_digest(request.tools),
                prompt_tokens=prompt.tokens,
                completion=sampled.completion,
                shown=None if self.forgets else prompt.shown,
            )
        )
        self.prompts.append(prompt)
        return prompt, sampled

    def text(self, tokens: Any) -> str:
        return self.engine.tokenizer.decode(np.asarray(tokens).tolist())


def make_backend(
    engine: Engine, tokenizer: Any, vocab_size: int | None = None, *, keep_thinking: bool = False
) -> EngineBackend:
    tool_format = make_tool_format(likely_format(tokenizer)[0])
    agent = Agent(engine=engine, tokenizer=tokenizer, model="m", vocab_size=vocab_size, tool_format=tool_format)
    return EngineBackend(agent, keep_thinking=keep_thinking)


def user(text: str) -> Message:
    return Message(role="user", content=text)


ARGUMENTS = [{"word": "cats"}, {"word": 'a "b" \\ é 🐈', "n": 1}, {}]
CONTENTS = ["done", "4 <b> 🐈", '{"a": 1}', "in\n\ntwo"]


@st.composite
def sayings(draw: st.DrawFn, name: str, with_tools: bool) -> Said:
    """What a model says in one turn."""
    family = ALL[name]
    number = 0
    if with_tools and name in WITH_CALLS:
        number = draw(st.integers(0, 1 if name in ONE_CALL else 2))
    texts = ["cats"] if name == "short qwen3 coder" else None
    calls = [
        ToolCall(
            id=f"said0000{index}",
            name=draw(st.sampled_from(["look", "find"])),
            arguments=json.dumps({"word": texts[0]} if texts else draw(st.sampled_from(ARGUMENTS)), ensure_ascii=False),
        )
        for index in range(number)
    ]
    content = draw(st.sampled_from(CONTENTS)) if not calls or family.call_with_text else ""
    thinks = family.thinks and (family.template.find("<think>\\n{% endif") > 0 or draw(st.booleans()))
    thinks = thinks or name in ("r1 distill", "qwen3 thinking", "qwq")
    return Said(content=content, reasoning="hm, so" if thinks else None, calls=tuple(calls))


@st.composite
def as_sent(draw: st.DrawFn, message: Message) -> Message:
    """An answer as a client sends it back."""
    way = draw(st.integers(0, 4))
    if way == 1:
        message = replace(message, reasoning=None, content=f"\n{message.content} ", name="agent")
    if way == 2 and message.reasoning:
        moved = f"<think>{message.reasoning}</think>{message.content}"
        message = replace(message, reasoning=None, content=moved)
    if way == 3:
        calls = [
            replace(call, arguments=json.dumps(json.loads(call.arguments), sort_keys=True, separators=(",", ":")))
            for call in message.tool_calls
        ]
        message = replace(message, tool_calls=tuple(calls))
    return message


def spelled(text: str, draw: st.DrawFn) -> str:
    """The same tool calls, with other blanks."""
    return text.replace('", "', '",  "') if "tool_call" in text and draw(st.booleans()) else text


def check_random_conversations(data: st.DataObject) -> None:
    """Make calls that grow, branch, lose thinking, and come back written otherwise; check each prompt."""
    name = data.draw(st.sampled_from(sorted(ALL.keys() - {"harmony"})))  # ludic reads no answers of harmony
    family, tokenizer = ALL[name], tokenizer_of(name)
    talk = Talk(family, name=name, forgets=data.draw(st.booleans()))
    tools_of = [(), (LOOK, FIND), (FIND,)] if name in WITH_CALLS else [()]
    canonical: list[tuple[str, str]] = []  # of each prompt and completion, as the template spells them
    dialogues: list[tuple[Message, ...]] = []  # messages with answers as they were sampled
    for _ in range(data.draw(st.integers(2, 6))):
        base = data.draw(st.integers(-1, len(talk.calls) - 1))
        sent: list[Message] = []
        known: list[Message] = []
        tools = data.draw(st.sampled_from(tools_of))
        if base >= 0:
            call = talk.calls[base]
            same = [each for each in tools_of if digest(each) == call.tools_digest]
            tools = data.draw(st.sampled_from([tools, *same * 3]))
            known = [*dialogues[base], call.answer]
            sent = [data.draw(as_sent(each)) if each.role == "assistant" else each for each in known]
            new = [Message(role="tool", content="3 cats", tool_call_id=each.id) for each in call.answer.tool_calls]
            new = new or [user(data.draw(st.sampled_from(["more", "again"])))]
        else:
            new = [user(data.draw(st.sampled_from(["Find cats", "And dogs"])))]
        said = data.draw(sayings(name, bool(tools)))
        written = family.write(said)
        prompt, sampled = talk.ask([*sent, *new], spelled(written, data.draw), tools=tools)
        assert sampled.message.content.strip() == said.content
        assert sampled.message.reasoning == said.reasoning
        assert [(each.name, json.loads(each.arguments)) for each in sampled.message.tool_calls] == [
            (each.name, json.loads(each.arguments)) for each in said.calls
        ]
        dialogues.append((*known, *new))
        # The sampled ids are in the prompt as the engine gave them.
        extended = next((i for i, each in enumerate(talk.calls) if each.call_id == prompt.extends), None)
        text = talk.text(prompt.tokens)
        if extended is not None:
            of_base = [*talk.engine.log[extended].request.prompt_tokens, *talk.engine.log[extended].tokens]
            assert prompt.tokens[: len(of_base)].tolist() == of_base
            text = "".join(canonical[extended]) + talk.text(prompt.tokens[len(of_base) :])
        elif base >= 0 and not family.rewrites:
            assert digest(tools) != talk.calls[base].tools_digest
        # GLM's answers begin with a line break that its template writes itself.
        shown = dialogues[-1] if extended is None else [*map(stripped, dialogues[-1])]
        assert text == render_text(tokenizer, shown, tools=tools)
        shows_end = family.write(Said(content="x"))[1:] in render_text(tokenizer, [user("q"), *said_x, user("q")])
        end = talk.text(sampled.completion.tokens[-1:])
        for one, other in zip(said.calls, sampled.message.tool_calls, strict=True):
            written = written.replace(one.id, other.id)  # which Mistral's models write
        canonical.append((text, written if shows_end else written.removesuffix(end)))


def stripped(message: Message) -> Message:
    return replace(message, content=message.content.strip())


@settings(max_examples=10)
@given(data=st.data())
def test_prompts_of_random_conversations_extend_stored_tokens_and_say_what_the_template_says(
    data: st.DataObject,
) -> None:
    check_random_conversations(data)


@pytest.mark.slow
@settings(max_examples=400 if "LUDIC_SOAK" in os.environ else 100)
@given(data=st.data())
def test_prompts_of_many_random_conversations_extend_stored_tokens(data: st.DataObject) -> None:
    check_random_conversations(data)


said_x = [Message(role="assistant", content="x")]


def digest(tools: Sequence[Any]) -> str | None:
    return tools_digest(tools)


# --- Prompts -------------------------------------------------------------------------------------------------

QUESTION = (user("Find cats"),)


def calls_look(number: int = 1) -> Said:
    calls = [ToolCall(id="", name="look", arguments=f'{{"word": "cats{i}"}}') for i in range(number)]
    return Said(content="I look", reasoning="hm", calls=tuple(calls))


def results(answer: Message, content: str = "3 cats") -> list[Message]:
    return [Message(role="tool", content=content, tool_call_id=call.id) for call in answer.tool_calls]


def thinks(family: Family = QWEN3, **options: bool) -> tuple[Talk, list[Prompt]]:
    """A tool loop, a question, and another tool loop: Qwen3's template leaves the thinking of the first loop out."""
    talk = Talk(family, **options)
    sent = list(QUESTION)
    for said in (calls_look(), Said(content="3", reasoning="so"), calls_look(), Said(content="4", reasoning="well")):
        _, sampled = talk.ask(sent, family.write(said), tools=(LOOK,))
        sent.append(replace(sampled.message, reasoning=None))
        sent += results(sampled.message) or [user("And dogs?")]
    return talk, talk.prompts


@pytest.mark.parametrize("forgets", [False, True])
def test_a_template_that_leaves_thinking_out_begins_a_new_segment_there(forgets: bool) -> None:
    talk, prompts = thinks(forgets=forgets)
    assert [(each.made, each.extends) for each in prompts] == [
        ("whole", None),
        ("extended", "call-0"),  # the client dropped the thinking, which the template would show
        ("whole", None),
        ("extended", "call-2"),
    ]
    assert [(each.messages_extend, each.num_known_messages) for each in prompts] == [
        (None, 0),
        ("call-0", 2),
        ("call-1", 4),
        ("call-2", 6),
    ]
    assert "hm" in talk.text(prompts[1].tokens)
    assert "think" not in talk.text(prompts[2].tokens)


def test_thinking_that_is_kept_stays_in_one_segment() -> None:
    talk, prompts = thinks(keep_thinking=True)
    assert [each.extends for each in prompts] == [None, "call-0", "call-1", "call-2"]
    sampled = [talk.text(each.tokens) for each in talk.engine.log]
    first = talk.text(prompts[0].tokens)
    assert talk.text(prompts[2].tokens) == (
        f"{first}{sampled[0]}\n<|im_start|>user\n<tool_response>\n3 cats\n</tool_response><|im_end|>\n"
        f"<|im_start|>assistant\n{sampled[1]}\n<|im_start|>user\nAnd dogs?<|im_end|>\n<|im_start|>assistant\n"
    )


IN_LOOPS = QWEN3.template.replace(" and (loop.last or reasoning)", "")  # Qwen 3.5 shows empty thinking in tool loops
EMPTY_THINKING = CHATML.template.replace("assistant\n{{ content }}", "assistant\n<think></think>{{ content }}")


@pytest.mark.parametrize(
    "family",
    [
        FAMILIES["qwen3 thinking"],
        FAMILIES["qwq"],
        replace(QWEN3, template=IN_LOOPS),
        replace(QWEN3, template=EMPTY_THINKING),
    ],
)
def test_thinking_is_kept_where_the_prompt_begins_it_or_the_template_shows_it_empty(family: Family) -> None:
    _, prompts = thinks(family, keep_thinking=True)
    assert [each.extends for each in prompts] == [None, "call-0", "call-1", "call-2"]


@pytest.mark.parametrize("keep_thinking", [False, True])
def test_thinking_in_other_markup_is_seen_where_the_template_leaves_it_out(keep_thinking: bool) -> None:
    template = CHATML.template.replace("{{ content }}", "{{ content.split('</thought>')[-1] }}")
    talk = Talk(replace(CHATML, template=template), keep_thinking=keep_thinking)
    _, sampled = talk.ask(QUESTION, "<thought>hm</thought>4")
    prompt, _ = talk.ask([*QUESTION, sampled.message, user("more")], "5")
    assert prompt.made == ("extended" if keep_thinking else "whole")
    assert ("hm" in talk.text(prompt.tokens)) == keep_thinking


def test_an_answer_to_which_the_template_adds_an_empty_thinking_is_not_what_was_sampled() -> None:
    talk = Talk(replace(CHATML, template=EMPTY_THINKING))
    _, sampled = talk.ask(QUESTION, "4")
    prompt, _ = talk.ask([*QUESTION, sampled.message, user("more")], "5")
    assert prompt.extends is None
    assert "<think></think>4<|im_end|>" in talk.text(prompt.tokens)


def test_of_equal_calls_the_one_with_the_same_tools_is_extended() -> None:
    talk = Talk()
    _, sampled = talk.ask(QUESTION, "4", tools=(LOOK,))
    talk.ask(QUESTION, "4", tools=(FIND,))
    prompt, _ = talk.ask([*QUESTION, sampled.message, user("more")], "5", tools=(LOOK,))
    assert (prompt.extends, prompt.messages_extend) == ("call-0", "call-1")


def test_a_stored_prompt_that_the_template_does_not_render_is_not_extended() -> None:
    """Such as one of a run with another template, or whose stored messages had a secret masked."""
    talk = Talk(forgets=True)
    _, sampled = talk.ask(QUESTION, "4")
    following = [*QUESTION, sampled.message, user("more")]
    assert talk.ask(following, "5")[0].extends == "call-0"
    other = np.append(talk.calls[0].prompt_tokens, 5)
    talk.calls = [replace(talk.calls[0], prompt_tokens=other)]
    talk.turns = talk.turns[:1] * 3
    assert talk.ask(following, "5")[0].made == "whole"


CUT_TOOLS = CHATML.template.replace(
    "{{ m.content }}\n</tool", "{{ m.content if loop.revindex < 3 else 'gone' }}\n</tool"
)
NO_OLD_CALLS = CHATML.template.replace("in m.tool_calls or []", "in (m.tool_calls or []) if messages|length < 4")
COUNTS = CHATML.template.replace("{%- for m in", "{{ messages | length }}{%- for m in")


@pytest.mark.parametrize("template", [CUT_TOOLS, NO_OLD_CALLS, COUNTS])
def test_a_template_that_shows_earlier_turns_otherwise_begins_a_new_segment(template: str) -> None:
    talk = Talk(replace(CHATML, template=template))
    sent = list(QUESTION)
    for said in (calls_look(), Said(content="3"), Said(content="4")):
        prompt, sampled = talk.ask(sent, CHATML.write(said), tools=(LOOK,))
        known = [sampled.message, *(results(sampled.message) or [user("And dogs?")])]
        shown = render_text(talk.engine.tokenizer, sent, tools=[LOOK])
        sent += known
    assert prompt.extends is None
    assert talk.text(prompt.tokens) == shown


def test_several_calls_of_a_template_that_shows_one_stay_as_they_were_sampled() -> None:
    name = "short llama"
    talk = Talk(ALL[name], name=name)
    written = '{"name": "look", "parameters": {}}; {"name": "look", "parameters": {}}<|im_end|>'
    _, sampled = talk.ask(QUESTION, written, tools=(LOOK,))
    prompt, _ = talk.ask([*QUESTION, sampled.message, *results(sampled.message)], "4", tools=(LOOK,))
    assert written in talk.text(prompt.tokens)
    assert prompt.extends == "call-0"


@pytest.mark.parametrize(
    ("said", "wanted"),
    [
        ("4", "4<|im_end|>\n<|im_start|>user"),
        ("<think>\nhm", "<think>\nhm\n</think>\n\n<|im_end|>\n<|im_start|>user"),
        ("<think>\nhm<|im_end|>", "<think>\nhm<|im_end|>\n<|im_start|>user"),
        (CHATML.write(calls_look()).removesuffix("<|im_end|>"), "</tool_call><|im_end|>\n<|im_start|>user"),
    ],
)
def test_an_answer_that_was_cut_off_gets_the_end_that_it_lacks(said: str, wanted: str) -> None:
    talk = Talk(QWEN3)
    _, sampled = talk.ask(QUESTION, Turn(text=said, finish_reason="length"), tools=(LOOK,))
    assert sampled.finish_reason == ("stop" if said.endswith("<|im_end|>") else "length")
    following = results(sampled.message) or [Message(role="tool", content="Briefer.")]
    prompt, _ = talk.ask([*QUESTION, sampled.message, *following], "4", tools=(LOOK,))
    assert prompt.extends == "call-0"
    assert wanted in talk.text(prompt.tokens)


def test_a_prompt_that_does_not_fit_is_refused_and_an_answer_ends_where_the_context_ends() -> None:
    # Of bytes: <|im_start|>, "user\n", 50 x, <|im_end|>, "\n", <|im_start|> and "assistant\n" are 69 tokens.
    talk = Talk(max_length=70)
    prompt, sampled = talk.ask([user("x" * 50)], "yes")
    assert (len(prompt.tokens), sampled.text, sampled.finish_reason) == (69, "y", "length")
    with pytest.raises(RefusedCallError, match=r"prompt is too long: 70 tokens > 69 maximum") as error:
        talk.ask([user("x" * 51)], "yes")
    assert (error.value.reason, error.value.field) == ("too_long", "messages")
    assert json.loads(DIALECTS["chat"].error(error.value))["error"]["code"] == "context_length_exceeded"


def test_what_the_template_refuses_is_the_clients_mistake() -> None:
    talk = Talk(FAMILIES["gemma"], name="gemma")
    with pytest.raises(RefusedCallError, match="roles must alternate"):
        talk.ask([user("a"), user("b")], "4")
    with pytest.raises(RefusedCallError, match="there is no message"):
        talk.ask([], "4")


def test_completions_get_their_tokens_unchanged_and_texts_without_template() -> None:
    talk = Talk()
    request = {"dialect": "completions"}
    prompt, sampled = talk.ask((), "<think>a</think>b", prompt="Cats", **request)
    assert (talk.text(prompt.tokens), prompt.made) == ("Cats", "given")
    assert (sampled.text, sampled.message.content) == ("<think>a</think>b", "<think>a</think>b")
    ids = np.append(talk.calls[0].tokens, 7)
    longer, _ = talk.ask((), "c", prompt=ids, **request)
    assert (longer.tokens.tolist(), longer.extends) == (ids.tolist(), "call-0")
    with pytest.raises(RefusedCallError, match=r"token ids from -1 to 1, wanted 0 to \d+"):
        talk.ask((), "c", prompt=np.array([-1, 1]), **request)
    with pytest.raises(RefusedCallError, match="has no tokens"):
        talk.ask((), "c", prompt="", **request)


def test_tokens_are_counted_as_the_template_shows_them() -> None:
    talk = Talk()
    request = CallRequest(dialect="messages", messages=QUESTION, tools=(LOOK,))
    assert asyncio.run(talk.backend.count(request)) == len(talk.ask(QUESTION, "4", tools=(LOOK,))[0].tokens)


# --- Answers -------------------------------------------------------------------------------------------------


def test_a_clients_stop_text_ends_the_answer_and_what_was_sampled_behind_it_is_not_delivered() -> None:
    # A token a byte: "one STOP two" and the end are 13 tokens, 8 of them up to the stop text.
    talk = Talk()
    params = SamplingParams(max_tokens=500, top_k=3, return_mask=True, return_experts=True)
    turn = Turn(text="one STOP two", new_weights_at=10)
    prompt, sampled = talk.ask(QUESTION, turn, stop=("two", "STOP", "TOP"), params=params)
    log = talk.engine.log[0]
    assert (sampled.text, sampled.message.content) == ("one ", "one ")
    assert (sampled.stop_sequence, sampled.finish_reason) == ("STOP", "stop")
    assert [*sampled.completion.tokens, *sampled.undelivered] == log.tokens
    assert len(sampled.completion.tokens) == 8
    assert sampled.completion.logprobs.tolist() == log.logprobs[:8]
    assert len(sampled.completion.columns["kept_tokens"]) == 8
    assert len(sampled.completion.columns["experts"]) == len(prompt.tokens) + 7
    assert [(each.start, each.end) for each in sampled.completion.weight_versions] == [(0, 8)]
    # The end that it lacks follows.
    following, _ = talk.ask([*QUESTION, sampled.message, user("more")], "4")
    assert "one STOP<|im_end|>\n<|im_start|>user\nmore" in talk.text(following.tokens)


def test_the_engine_stops_at_a_stop_text_of_one_token() -> None:
    talk = Talk()
    _, sampled = talk.ask(QUESTION, "one\ntwo", stop=("\n",))
    assert talk.text(talk.engine.log[0].tokens) == "one\n"
    assert (sampled.text, sampled.stop_sequence, sampled.undelivered) == ("one", "\n", None)
    following, _ = talk.ask([*QUESTION, sampled.message, user("more")], "4")
    assert "one\n<|im_end|>\n<|im_start|>user\nmore" in talk.text(following.tokens)


CALL = '<tool_call>\n{"name": "look", "arguments": {"word": "cats"}}\n</tool_call>'


@pytest.mark.parametrize(
    ("family", "said", "content", "reasoning", "names", "reason"),
    [
        ("chatml", "Look.\n" + CALL, "Look.", None, ["look"], "tool_calls"),
        ("chatml", "<think>\nhm " + CALL + "</think>\n\nNo.", "No.", "hm " + CALL, [], "stop"),
        ("chatml", "<tool_call>\n{broken", "<tool_call>\n{broken", None, [], "stop"),
        ("chatml", CALL + "<tool_call>{broken", "<tool_call>{broken", None, ["look"], "tool_calls"),
        ("qwq", "hm\n</think>\n\n4", "4", "hm", [], "stop"),
        ("qwq", "hm, and on", "", "hm, and on", [], "stop"),
        ("short mistral", '[TOOL_CALLS][{"name": "look", "arguments": {}}]', "", None, ["look"], "tool_calls"),
        ("short mistral", "[TOOL_CALLS]nothing", "nothing", None, [], "stop"),
    ],
)
def test_an_answer_is_told_apart_into_text_thinking_and_calls(
    family: str, said: str, content: str, reasoning: str | None, names: list[str], reason: str
) -> None:
    _, sampled = Talk(ALL[family], name=family).ask(QUESTION, said, tools=(LOOK,))
    message = sampled.message
    assert (message.content, message.reasoning, sampled.finish_reason) == (content, reasoning, reason)
    assert [call.name for call in message.tool_calls] == names
    assert all(len(call.id) == 9 and call.id.isalnum() for call in message.tool_calls)


def test_a_stop_text_ends_an_answer_with_special_tokens() -> None:
    talk = Talk(ALL["short mistral"], name="short mistral")
    _, sampled = talk.ask(QUESTION, "[TOOL_CALLS]no STOP at all", tools=(LOOK,), stop=("STOP",))
    assert (sampled.message.content, sampled.text) == ("no ", "no ")


def test_logprobs_come_with_the_text_of_each_token() -> None:
    _, sampled = Talk().ask(QUESTION, "no", asks_logprobs=True)
    assert sampled.token_texts == ("n", "o", "<|im_end|>")


def test_an_engine_that_breaks_its_contract_is_not_believed() -> None:
    talk = Talk()
    talk.backend = make_backend(_Stray(["4"], tokenizer=talk.engine.tokenizer), talk.engine.tokenizer, 300)
    with pytest.raises(EngineError, match="broke its contract"):
        talk.ask(QUESTION, "4")


class _Stray(ScriptedEngine):
    async def generate(self, request: GenerationRequest) -> Completion:
        said = await super().generate(request)
        return replace(said, tokens=said.tokens + 100_000)


# --- Earlier calls -------------------------------------------------------------------------------------------


def stored(call_id: str, answer: Message, *messages: Message) -> StoredCall:
    return StoredCall(
        call_id=call_id,
        messages=messages or QUESTION,
        answer=answer,
        tools_digest=None,
        prompt_tokens=None,
        completion=None,
    )


def answer(content: str = "", arguments: str | None = None, **options: Any) -> Message:
    calls = () if arguments is None else (ToolCall(id=options.pop("id", "a"), name="look", arguments=arguments),)
    return Message(role="assistant", content=content, tool_calls=calls, **options)


@pytest.mark.parametrize(
    ("sampled", "sent", "is_same"),
    [
        (answer("4", reasoning="hm"), answer(" 4\n"), True),
        (answer("4", reasoning="hm"), answer("<think>\nhm\n</think>\n\n4"), True),
        (answer("4", reasoning="hm"), answer("4", reasoning="ha"), False),
        (answer("4"), answer("4", name="agent"), True),
        (answer("4"), answer("5"), False),
        (answer("", '{"a": 1.0, "b": "é"}'), answer("", '{"b":"\\u00e9","a":1}', id="other"), True),
        (answer("", '{"a": 12345678901234567890}'), answer("", '{"a": 12345678901234567000}'), True),
        (answer("", '{"a": true}'), answer("", '{"a": 1}'), False),
        (answer("", "{}"), answer("", ""), True),
        (answer("", "not JSON"), answer("", "not JSON "), True),
        (answer("", "[" * 100_000), answer("", "[" * 100_000), True),
        (answer("I look", "{}"), answer("", "{}"), False),
    ],
)
def test_answers_are_compared_without_what_clients_change(sampled: Message, sent: Message, is_same: bool) -> None:
    known = longest_known([*QUESTION, sent, user("more")], [stored("one", sampled)])
    assert (known is not None) == is_same


def test_a_prompt_with_many_tools_is_made_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    talk, whole, in_loop = Talk(), PromptMaker.whole, []

    def noted(*args: Any) -> Prompt:
        in_loop.append(threading.current_thread() is threading.main_thread())
        return whole(*args)

    monkeypatch.setattr(PromptMaker, "whole", noted)
    for length in (10, 30_000):
        tools = ({**LOOK, "function": {**LOOK["function"], "description": "d" * length}},)
        asyncio.run(talk.backend.prepare(CallRequest(dialect="chat", messages=QUESTION, tools=tools), ()))
    assert in_loop == [True, False]


def test_questions_are_compared_exactly_and_results_by_the_call_that_they_answer() -> None:
    assert longest_known([user("Find cats "), answer("4")], [stored("one", answer("4"))]) is None
    calls = replace(answer("", "{}"), tool_calls=tuple(ToolCall(id=i, name="look", arguments="{}") for i in "ab"))
    told = [Message(role="tool", content="3", tool_call_id=each) for each in "ab"]
    one = stored("one", answer("4"), *QUESTION, calls, *told)
    assert longest_known([*QUESTION, calls, *told, answer("4")], [one]) == (one, 5)
    assert longest_known([*QUESTION, calls, *reversed(told), answer("4")], [one]) is None


def test_of_equal_calls_the_one_with_the_same_ids_is_continued_else_the_newest() -> None:
    first, second = (stored(each, answer("", "{}", id=each)) for each in ("first", "second"))
    earlier = [first, second, stored("other", answer("5"))]
    assert longest_known([*QUESTION, answer("", "{}", id="first")], earlier) == (first, 2)
    assert longest_known([*QUESTION, answer("", "{}", id="changed")], earlier) == (second, 2)
    longer = stored("longer", answer("6"), *QUESTION, first.answer, user("more"))
    assert longest_known([*longer.messages, answer("6"), user("?")], [longer, *earlier]) == (longer, 4)


@pytest.mark.slow
def test_a_forward_pass_repeats_the_logprobs_of_a_conversation_with_a_real_model(tmp_path: Path) -> None:
    folder = str(tmp_path)
    write_model(folder, chat_tokenizer(), seed=1, hidden_size=64, num_layers=2, initializer_range=0.3)
    engine, tokenizer = TransformersEngine(folder, device="cpu", version=1), chat_tokenizer()
    backend = make_backend(engine, tokenizer, keep_thinking=True)  # the model samples "</think>", too
    calls: list[StoredCall] = []
    messages: tuple[Message, ...] = (user("2 + 2?"),)
    for number in range(4):
        request = CallRequest(dialect="chat", messages=messages, stop=("z",))
        prompt = asyncio.run(backend.prepare(request, calls))
        sampled = asyncio.run(backend.sample(request, prompt, SamplingParams(max_tokens=20), number))
        completion = sampled.completion
        assert completion is not None
        assert number == 0 or prompt.tokens[: len(calls[-1].tokens)].tolist() == calls[-1].tokens.tolist()
        logprobs = forward_logprobs(folder, prompt.tokens, completion.tokens)
        assert completion.logprobs == pytest.approx(logprobs, abs=1e-4)
        assert completion.logprobs.min() < -1  # it is not sure of all
        calls.append(
            StoredCall(
                call_id=str(number),
                messages=messages,
                answer=sampled.message,
                tools_digest=None,
                prompt_tokens=prompt.tokens,
                completion=completion,
            )
        )
        messages = (*messages, replace(sampled.message, content=f" {sampled.message.content}"), user("more"))
