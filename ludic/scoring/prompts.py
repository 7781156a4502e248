"""Prompts of a judge: a template in which {prompt}, {response} and {messages} are replaced by a rollout's texts.

Other braces stay as they are, so that a template may show JSON. Raises ConfigError for a template without any of them.
"""

import re
from collections.abc import Sequence

from ludic.errors import ConfigError
from ludic.paths import local_path
from ludic.records import Message, Rollout

_FIELDS = re.compile(r"\{(prompt|response|messages)\}")
_MOST_BYTES = 1_000_000


def read_template(path: str) -> str:
    """Return the template in a file. Raises ConfigError if it can't be read or has nothing to replace."""
    file = local_path(path, "judge_prompt")
    try:
        if file.stat().st_size > _MOST_BYTES:
            raise ConfigError(f"judge_prompt {file} has more than {_MOST_BYTES:,} bytes; wanted the text of a prompt")
        template = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"judge_prompt {file} can't be read: {error}") from error
    if not _FIELDS.search(template):
        raise ConfigError(f"judge_prompt {file} has none of {{prompt}}, {{response}} and {{messages}}; add one of them")
    return template


def fill(template: str, rollout: Rollout) -> str:
    """Return the template with the rollout's texts.

    prompt: the messages before the model's first one. response: the model's message, or all messages from its first
    one on. messages: all. Several messages have their roles in front. Raises ValueError for a rollout without messages.
    """
    messages = rollout.messages
    if not messages:
        raise ValueError("the rollout has no messages, which the judge's prompt needs")
    first = next((index for index, each in enumerate(messages) if each.role == "assistant"), len(messages))
    texts = {
        "prompt": _as_text(messages[:first]),
        "response": _as_text(messages[first:]),
        "messages": _with_roles(messages),
    }
    return _FIELDS.sub(lambda match: texts[match[1]], template)


def _as_text(messages: Sequence[Message]) -> str:
    return messages[0].content if len(messages) == 1 and not messages[0].tool_calls else _with_roles(messages)


def _with_roles(messages: Sequence[Message]) -> str:
    return "\n\n".join("\n".join([f"{each.role}: {each.content}", *_tool_lines(each)]) for each in messages)


def _tool_lines(message: Message) -> list[str]:
    return [f"tool call {call.name}: {call.arguments}" for call in message.tool_calls]
