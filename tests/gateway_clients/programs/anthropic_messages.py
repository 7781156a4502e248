"""An agent's loop with the SDK of Anthropic."""

from anthropic import Anthropic
from common import MODEL, SCHEMAS, STREAMS, TASK, TOOLS, finish

client = Anthropic()
messages = [{"role": "user", "content": TASK}]
tools = [
    {"name": each["name"], "description": each["description"], "input_schema": each["parameters"]} for each in SCHEMAS
]
asked = {"model": MODEL, "max_tokens": 4_000, "tools": tools, "system": "You are careful."}
counted = client.messages.count_tokens(
    model=MODEL, messages=messages, tools=tools, system="You are careful."
).input_tokens
while True:
    if STREAMS:
        with client.messages.stream(messages=messages, **asked) as stream:
            for _ in stream:
                pass
            message = stream.get_final_message()
    else:
        message = client.messages.create(messages=messages, **asked)
    if len(messages) == 1:
        assert message.usage.input_tokens == counted, (message.usage, counted)
    messages.append({"role": "assistant", "content": message.content})
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": TOOLS[block.name](**block.input)}
        for block in message.content
        if block.type == "tool_use"
    ]
    if not results:
        finish("".join(block.text for block in message.content if block.type == "text"))
        break
    messages.append({"role": "user", "content": results})
