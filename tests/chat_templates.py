"""Chat templates of public model families, in short: where turns begin and end, how thinking and calls are shown.

A Family also writes what its models sample in one turn, by hand and not by the template: the tests compare the two.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from ludic.models.tiny import train_tokenizer
from ludic.records.rollout import Message, ToolCall


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """One turn of a model."""

    content: str = ""
    reasoning: str | None = None
    calls: tuple[ToolCall, ...] = ()

    @property
    def message(self) -> Message:
        return Message(role="assistant", content=self.content, reasoning=self.reasoning, tool_calls=self.calls)


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A chat template, its tokens, and how its models write."""

    template: str
    write: Callable[[Said], str]
    """What a model samples in a turn behind the prompt, with its stop token."""
    eos: str
    special: Sequence[str] = ()
    added: Sequence[str] = ()
    """Tokens that are not special."""
    stops: Sequence[str] = ()
    """Stop tokens of generation_config.json besides eos."""
    bos: str | None = None
    has_tools: bool = True
    has_system: bool = True
    thinks: bool = False
    thinks_after_tools: bool = True
    rewrites: bool = False
    """Whether it shows past turns otherwise than they were sampled."""
    calls_apart: bool = True
    call_with_text: bool = False
    """Whether it shows text and calls of one message."""

    def tokenizer(self, corpus: Sequence[str] = ()) -> PreTrainedTokenizerFast:
        """A tokenizer of bytes; a corpus makes tokens that merge across line breaks."""
        tokenizer = train_tokenizer(corpus, vocab_size=400 if corpus else 0, max_length=10_000)
        named = {name for name in (self.eos, self.bos) if name}
        tokenizer.add_special_tokens(
            {"eos_token": self.eos, "additional_special_tokens": [each for each in self.special if each not in named]}
            | ({} if self.bos is None else {"bos_token": self.bos})
        )
        tokenizer.add_tokens([AddedToken(name, normalized=False) for name in self.added])
        tokenizer.chat_template = self.template
        return tokenizer

    def stop_tokens(self, tokenizer: PreTrainedTokenizerFast) -> list[int]:
        return tokenizer.convert_tokens_to_ids([self.eos, *self.stops])


def call_json(call: ToolCall, arguments: str = "arguments", **also: Any) -> str:
    return json.dumps({"name": call.name, arguments: json.loads(call.arguments), **also}, ensure_ascii=False)


def hermes(said: Said) -> str:
    """Qwen's form of text and calls."""
    calls = [f"<tool_call>\n{call_json(call)}\n</tool_call>" for call in said.calls]
    return "\n".join([*([said.content] if said.content else []), *calls])


def thought(said: Said, opening: str = "<think>\n", gap: str = "\n") -> str:
    """Thinking before an answer, for a template whose prompt leaves out `opening`."""
    return f"{opening}{said.reasoning}{gap}</think>{gap}{gap}" if said.reasoning else ""


# --- Families that show a past turn as it was sampled --------------------------------------------------------

_SYSTEM_TOOLS = """\
{%- if tools %}<|im_start|>system
You may call tools:
{%- for tool in tools %}{{ '\\n' }}{{ tool | tojson }}{% endfor %}<|im_end|>{{ '\\n' }}
{%- endif %}"""
_HERMES_CALLS = """\
{%- for call in m.tool_calls or [] %}{{ '\\n' if content or not loop.first }}<tool_call>
{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}
</tool_call>{% endfor %}"""
_HERMES_RESULT = """\
{%- elif m.role == 'tool' %}<|im_start|>user
<tool_response>
{{ m.content }}
</tool_response><|im_end|>{{ '\\n' }}"""
_OTHER = """\
{%- else %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>{{ '\\n' }}
{%- endif %}"""
_CHATML_TOKENS: dict[str, Any] = {
    "eos": "<|im_end|>",
    "special": ["<|im_start|>", "<|im_end|>"],
    "stops": ["<|endoftext|>"],
    "added": ["<tool_call>", "</tool_call>", "<think>", "</think>"],
    "call_with_text": True,
}

CHATML = Family(
    template=_SYSTEM_TOOLS
    + "{%- for m in messages %}{%- if m.role == 'assistant' %}{% set content = m.content %}<|im_start|>assistant\n"
    + "{{ content }}"
    + _HERMES_CALLS
    + "<|im_end|>{{ '\\n' }}"
    + _HERMES_RESULT
    + _OTHER
    + "{%- endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    write=lambda said: hermes(said) + "<|im_end|>",
    **_CHATML_TOKENS,
)

GENERATION = Family(
    template=CHATML.template.replace(
        "<|im_start|>assistant\n{{ content }}", "<|im_start|>assistant\n{% generation %}{{ content }}"
    ).replace("</tool_call>{% endfor %}<|im_end|>", "</tool_call>{% endfor %}<|im_end|>{% endgeneration %}"),
    write=CHATML.write,
    **_CHATML_TOKENS,
)

LLAMA3 = Family(
    template="""\
{{- bos_token }}
{%- for m in messages %}
{%- if m.role == 'system' or (loop.first and tools) %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' }}
{%- for tool in tools or [] %}{{ tool | tojson(indent=4) }}{{ '\\n\\n' }}{% endfor %}
{{- (m.content if m.role == 'system' else '') + '<|eot_id|>' }}
{%- endif %}
{%- if m.role == 'assistant' and m.tool_calls %}
{%- if m.tool_calls | length != 1 %}{{ raise_exception('only single tool-calls') }}{% endif %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{{- '{"name": "' + m.tool_calls[0].function.name + '", "parameters": ' }}
{{- m.tool_calls[0].function.arguments | tojson }}{{ '}<|eot_id|>' }}
{%- elif m.role == 'tool' %}
{{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + m.content | tojson + '<|eot_id|>' }}
{%- elif m.role != 'system' %}
{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + m.content | trim + '<|eot_id|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}""",
    write=lambda said: (call_json(said.calls[0], "parameters") if said.calls else said.content) + "<|eot_id|>",
    bos="<|begin_of_text|>",
    eos="<|eot_id|>",
    stops=["<|end_of_text|>", "<|eom_id|>"],
    special=[
        *("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>"),
        *("<|eot_id|>", "<|python_tag|>"),
    ],
)

GEMMA = Family(
    template="""\
{{- bos_token }}
{%- if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- for m in messages %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' }}
{{- m.content | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}""",
    write=lambda said: said.content + "<end_of_turn>",
    bos="<bos>",
    eos="<eos>",
    stops=["<end_of_turn>"],
    special=["<start_of_turn>", "<end_of_turn>"],
    has_tools=False,
    has_system=False,
)

MISTRAL = Family(
    template="""\
{{- bos_token }}
{%- set users = messages | selectattr('role', 'equalto', 'user') | list %}
{%- for m in messages %}
{%- if m.role == 'user' %}
{%- if tools and m == users[-1] %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif -%}
[INST] {{ m.content }}[/INST]
{%- elif m.tool_calls is defined %}[TOOL_CALLS] [
{%- for call in m.tool_calls %}
{%- if call.id | length != 9 %}{{ raise_exception('ids have length 9') }}{% endif %}
{{- (call.function | tojson)[:-1] }}, "id": "{{ call.id }}"}{{ ', ' if not loop.last }}
{%- endfor %}]</s>
{%- elif m.role == 'assistant' %} {{ m.content | trim }}</s>
{%- elif m.role == 'tool' %}[TOOL_RESULTS] {"content": {{ m.content }}, "call_id": "{{ m.tool_call_id }}"}
{{- '[/TOOL_RESULTS]' }}
{%- else %}{{ raise_exception('no role ' + m.role) }}
{%- endif %}
{%- endfor %}""",
    write=lambda said: (
        f"[TOOL_CALLS] [{', '.join(call_json(call, id=call.id) for call in said.calls)}]</s>"
        if said.calls
        else f" {said.content}</s>"
    ),
    bos="<s>",
    eos="</s>",
    special=[
        *("[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]", "[TOOL_RESULTS]"),
        "[/TOOL_RESULTS]",
    ],
    has_system=False,
    rewrites=True,  # it shows the tools before the last question
)

DEEPSEEK_V3 = Family(
    template="""\
{{- bos_token }}
{%- for m in messages if m.role == 'system' %}{{ m.content }}{% endfor %}
{%- for tool in tools or [] %}{{ '\\n' }}{{ tool | tojson }}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'user' %}{{ '<｜User｜>' + m.content }}
{%- elif m.role == 'tool' %}
{{- '<｜tool▁outputs▁begin｜>' if messages[loop.index0 - 1].role != 'tool' }}
{{- '<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>' }}
{{- '<｜tool▁outputs▁end｜>' if loop.last or messages[loop.index0 + 1].role != 'tool' }}
{%- elif m.role == 'assistant' %}
{{- '<｜Assistant｜>' if messages[loop.index0 - 1].role != 'tool' }}{{ m.content or '' }}
{%- for call in m.tool_calls or [] %}
{{- '<｜tool▁calls▁begin｜>' if loop.first else '\\n' }}
{{- '<｜tool▁call▁begin｜>' + call.type + '<｜tool▁sep｜>' + call.function.name + '\\n```json\\n' }}
{{- call.function.arguments | tojson + '\\n```<｜tool▁call▁end｜>' }}{{ '<｜tool▁calls▁end｜>' if loop.last }}
{%- endfor %}{{ '<｜end▁of▁sentence｜>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt and messages[-1].role != 'tool' %}{{ '<｜Assistant｜>' }}{% endif %}""",
    write=lambda said: said.content + deepseek_calls(said) + "<｜end▁of▁sentence｜>",
    bos="<｜begin▁of▁sentence｜>",
    eos="<｜end▁of▁sentence｜>",
    special=[
        *("<｜User｜>", "<｜Assistant｜>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>"),
        *("<｜tool▁call▁end｜>", "<｜tool▁sep｜>", "<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>"),
        *("<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"),
    ],
    added=["<think>", "</think>"],
    call_with_text=True,
)


def deepseek_calls(said: Said) -> str:
    calls = [
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{call.name}\n```json\n{call.arguments}\n```<｜tool▁call▁end｜>"
        for call in said.calls
    ]
    return f"<｜tool▁calls▁begin｜>{chr(10).join(calls)}<｜tool▁calls▁end｜>" if calls else ""


# Ends with the tokenizer's eos where no answer is asked for, which is not the end of a turn.
PHI = Family(
    template="""\
{%- for m in messages %}
{%- if loop.first and tools %}{{ '<|system|>' + (m.content if m.role == 'system' else '') }}
{{- '<|tool|>' + tools | tojson + '<|/tool|><|end|>' }}
{%- endif %}
{%- if not (tools and m.role == 'system') %}{{ '<|' + m.role + '|>\\n' + m.content }}
{%- if m.tool_calls %}{{ '<|tool_call|>[' }}
{%- for call in m.tool_calls %}
{{- {'name': call.function.name, 'arguments': call.function.arguments} | tojson + (', ' if not loop.last else '') }}
{%- endfor %}{{ ']<|/tool_call|>' }}
{%- endif %}{{ '<|end|>\\n' }}{% endif %}
{%- endfor %}
{{- '<|assistant|>\\n' if add_generation_prompt else eos_token }}""",
    write=lambda said: (
        said.content
        + (f"<|tool_call|>[{', '.join(map(call_json, said.calls))}]<|/tool_call|>" if said.calls else "")
        + "<|end|>"
    ),
    eos="<|endoftext|>",
    stops=["<|end|>"],
    special=[
        *("<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|tool|>", "<|/tool|>", "<|tool_call|>"),
        "<|/tool_call|>",
    ],
    call_with_text=True,
)

COMMAND_R = Family(
    template="""\
{{- bos_token }}
{%- if tools %}{{ '<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|># Available Tools\\n' + tools | tojson }}
{{- '<|END_OF_TURN_TOKEN|>' }}{% endif %}
{%- for m in messages %}
{%- set name = {'user': 'USER', 'assistant': 'CHATBOT', 'system': 'SYSTEM', 'tool': 'SYSTEM'}[m.role] %}
{{- '<|START_OF_TURN_TOKEN|><|' + name + '_TOKEN|>' }}
{%- if m.role == 'tool' %}{{ '<|START_TOOL_RESULT|>' + m.content + '<|END_TOOL_RESULT|>' }}
{%- elif m.tool_calls %}{{ '<|START_ACTION|>[' }}
{%- for call in m.tool_calls %}
{{- '\\n' + {'tool_name': call.function.name, 'parameters': call.function.arguments} | tojson }}
{{- ',' if not loop.last }}
{%- endfor %}{{ '\\n]<|END_ACTION|>' }}
{%- elif m.role == 'assistant' %}{{ '<|START_RESPONSE|>' + m.content + '<|END_RESPONSE|>' }}
{%- else %}{{ m.content }}{% endif %}{{ '<|END_OF_TURN_TOKEN|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}{% endif %}""",
    write=lambda said: (
        (
            "<|START_ACTION|>["
            + ",".join(
                "\n" + json.dumps({"tool_name": call.name, "parameters": json.loads(call.arguments)})
                for call in said.calls
            )
            + "\n]<|END_ACTION|>"
            if said.calls
            else f"<|START_RESPONSE|>{said.content}<|END_RESPONSE|>"
        )
        + "<|END_OF_TURN_TOKEN|>"
    ),
    bos="<BOS_TOKEN>",
    eos="<|END_OF_TURN_TOKEN|>",
    special=[
        *("<|START_OF_TURN_TOKEN|>", "<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>", "<|SYSTEM_TOKEN|>", "<|START_ACTION|>"),
        *("<|END_ACTION|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TOOL_RESULT|>", "<|END_TOOL_RESULT|>"),
    ],
)

VICUNA = Family(
    template="""\
{{- bos_token }}
{%- for m in messages %}
{%- if m.role == 'assistant' %}{{ 'ASSISTANT: ' + m.content + eos_token }}
{%- else %}{{ ('USER: ' if m.role == 'user' else '') + m.content + ' ' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ 'ASSISTANT: ' }}{% endif %}""",
    write=lambda said: said.content + "</s>",
    bos="<s>",
    eos="</s>",
    has_tools=False,
)

# No token ends a turn.
ALPACA = Family(
    template="""\
{%- for m in messages %}{{ '### ' + m.role + ':\\n' + m.content + '\\n\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '### assistant:\\n' }}{% endif %}""",
    write=lambda said: said.content + "</s>",
    eos="</s>",
    has_tools=False,
)

# A turn ends with the token that begins the next one.
GLM = Family(
    template="""\
{{- '[gMASK]<sop>' }}
{%- if tools %}{{ '<|system|>\\n# Tools' }}{% for tool in tools %}{{ '\\n' + tool | tojson }}{% endfor %}{% endif %}
{%- for m in messages %}
{%- if m.role == 'tool' %}
{{- '<|observation|>' if messages[loop.index0 - 1].role != 'tool' }}
{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
{%- elif m.role == 'assistant' %}{{ '<|assistant|>' }}{{ '\\n' + m.content if m.content }}
{%- for call in m.tool_calls or [] %}{{ '\\n<tool_call>' + call.function.name }}
{%- for key, value in call.function.arguments.items() %}
{{- '\\n<arg_key>' + key + '</arg_key>\\n<arg_value>' + value | tojson + '</arg_value>' }}
{%- endfor %}{{ '\\n</tool_call>' }}
{%- endfor %}
{%- else %}{{ '<|' + m.role + '|>\\n' + m.content }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}""",
    write=lambda said: (
        (f"\n{said.content}" if said.content else "")
        + "".join(
            f"\n<tool_call>{call.name}"
            + "".join(
                f"\n<arg_key>{key}</arg_key>\n<arg_value>{json.dumps(value)}</arg_value>"
                for key, value in json.loads(call.arguments).items()
            )
            + "\n</tool_call>"
            for call in said.calls
        )
        + ("<|observation|>" if said.calls else "<|user|>")
    ),
    eos="<|endoftext|>",
    stops=["<|user|>", "<|observation|>"],
    special=["[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"],
    added=["<tool_call>", "</tool_call>", "<think>", "</think>"],
    call_with_text=True,
)

# --- Families that leave past thinking out -------------------------------------------------------------------

_LAST_USER = """\
{%- set last = namespace(user=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set last.user = loop.index0 %}{% endif %}{% endfor %}"""
_SPLIT = """\
{%- set content = m.content %}{% set reasoning = m.reasoning_content or '' %}
{%- if '</think>' in content %}
{%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}"""

QWEN3 = Family(
    template=_SYSTEM_TOOLS
    + _LAST_USER
    + "{%- for m in messages %}{%- if m.role == 'assistant' %}"
    + _SPLIT
    + """{{ '<|im_start|>assistant\\n' }}
{%- if loop.index0 > last.user and (loop.last or reasoning) %}
{{- '<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
{%- else %}{{ content }}{% endif %}"""
    + _HERMES_CALLS
    + "<|im_end|>{{ '\\n' }}"
    + _HERMES_RESULT
    + _OTHER
    + "{%- endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    write=lambda said: thought(said) + hermes(said) + "<|im_end|>",
    thinks=True,
    rewrites=True,
    **_CHATML_TOKENS,
)

# Its prompts begin the thinking, and so do its last answers.
QWEN3_THINKING = Family(
    template=QWEN3.template.replace(
        "{% if add_generation_prompt %}<|im_start|>assistant\n",
        "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n",
    ),
    write=lambda said: thought(said, "") + hermes(said) + "<|im_end|>",
    thinks=True,
    rewrites=True,
    **_CHATML_TOKENS,
)

# Its prompts begin the thinking, and its answers never show any.
QWQ = Family(
    template=_SYSTEM_TOOLS
    + "{%- for m in messages %}{%- if m.role == 'assistant' %}"
    + "{% set content = m.content.split('</think>')[-1].lstrip('\\n') %}{{ '<|im_start|>assistant\\n' + content }}"
    + _HERMES_CALLS
    + "<|im_end|>{{ '\\n' }}"
    + _HERMES_RESULT
    + _OTHER
    + "{%- endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}",
    write=lambda said: thought(said, "") + hermes(said) + "<|im_end|>",
    thinks=True,
    rewrites=True,
    **_CHATML_TOKENS,
)

R1_DISTILL = Family(
    template=DEEPSEEK_V3.template.replace(
        "{{ m.content or '' }}", "{{ (m.content or '').split('</think>')[-1] }}"
    ).replace("{{ '<｜Assistant｜>' }}{% endif %}", "{{ '<｜Assistant｜><think>\\n' }}{% endif %}"),
    write=lambda said: thought(said, "") + said.content + deepseek_calls(said) + "<｜end▁of▁sentence｜>",
    bos=DEEPSEEK_V3.bos,
    eos=DEEPSEEK_V3.eos,
    special=DEEPSEEK_V3.special,
    added=DEEPSEEK_V3.added,
    thinks=True,
    thinks_after_tools=False,
    rewrites=True,
    call_with_text=True,
)

# Its answers do not think, and prompts and answers both say so.
DEEPSEEK_V3_1 = Family(
    template=DEEPSEEK_V3.template.replace("'<｜Assistant｜>'", "'<｜Assistant｜></think>'"),
    write=DEEPSEEK_V3.write,
    bos=DEEPSEEK_V3.bos,
    eos=DEEPSEEK_V3.eos,
    special=DEEPSEEK_V3.special,
    added=DEEPSEEK_V3.added,
    call_with_text=True,
)

# Thinking is shown until an answer follows; the last answer ends with another token than past ones, calls with a third.
HARMONY = Family(
    template="""\
{{- '<|start|>system<|message|>Current date: 2025-06-28<|end|>' }}
{%- if messages[0].role == 'system' or tools %}{{ '<|start|>developer<|message|>' }}
{{- messages[0].content if messages[0].role == 'system' }}
{%- for tool in tools or [] %}{{ '\\n' + tool | tojson }}{% endfor %}{{ '<|end|>' }}
{%- endif %}
{%- set called = namespace(name=none) %}
{%- for m in messages if m.role != 'system' %}
{%- if m.role == 'assistant' and m.tool_calls %}
{%- if m.content and m.thinking %}{{ raise_exception('content and thinking beside a call') }}{% endif %}
{%- set later = namespace(final=false) %}
{%- for each in messages[messages.index(m):] if each.role == 'assistant' and not each.tool_calls %}
{%- set later.final = true %}{% endfor %}
{%- if m.thinking and not later.final %}
{{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}
{%- endif %}
{%- set called.name = m.tool_calls[0].function.name %}
{{- '<|start|>assistant to=functions.' + called.name + '<|channel|>commentary <|constrain|>json<|message|>' }}
{{- m.tool_calls[0].function.arguments | tojson + '<|call|>' }}
{%- elif m.role == 'assistant' %}
{%- if '<|channel|>' in m.content %}{{ raise_exception('channels in the content') }}{% endif %}
{%- if m.thinking and loop.last and not add_generation_prompt %}
{{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}
{%- endif %}
{{- '<|start|>assistant<|channel|>final<|message|>' + m.content }}
{{- '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}
{%- elif m.role == 'tool' %}
{%- if called.name is none %}{{ raise_exception('no tool call before the result') }}{% endif %}
{{- '<|start|>functions.' + called.name + ' to=assistant<|channel|>commentary<|message|>' + m.content | tojson }}
{{- '<|end|>' }}
{%- else %}{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}""",
    write=lambda said: (
        (f"<|channel|>analysis<|message|>{said.reasoning}<|end|><|start|>assistant" if said.reasoning else "")
        + (
            f" to=functions.{said.calls[0].name}<|channel|>commentary <|constrain|>json<|message|>"
            f"{said.calls[0].arguments}<|call|>"
            if said.calls
            else f"<|channel|>final<|message|>{said.content}<|return|>"
        )
    ),
    eos="<|return|>",
    stops=["<|call|>"],
    special=["<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|call|>"],
    thinks=True,
    rewrites=True,
)

FAMILIES: Mapping[str, Family] = {
    "chatml": CHATML,
    "generation": GENERATION,
    "llama3": LLAMA3,
    "gemma": GEMMA,
    "mistral": MISTRAL,
    "deepseek v3": DEEPSEEK_V3,
    "deepseek v3.1": DEEPSEEK_V3_1,
    "phi": PHI,
    "command r": COMMAND_R,
    "vicuna": VICUNA,
    "alpaca": ALPACA,
    "glm": GLM,
    "qwen3": QWEN3,
    "qwen3 thinking": QWEN3_THINKING,
    "qwq": QWQ,
    "r1 distill": R1_DISTILL,
    "harmony": HARMONY,
}
