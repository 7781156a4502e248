"""An agent's loop with the SDK of OpenAI (2.x and 3.x) over chat completions."""

import json

from common import MODEL, SCHEMAS, STREAMS, TASK, TOOLS, finish
from openai import OpenAI

client = OpenAI()
messages = [{"role": "system", "content": "You are careful."}, {"role": "user", "content": TASK}]
asked = {"model": MODEL, "tools": [{"type": "function", "function": each} for each in SCHEMAS], "temperature": 0.3}


def answer() -> dict:
    if not STREAMS:
        return client.chat.completions.create(messages=messages, **asked).choices[0].message.model_dump()
    with client.chat.completions.stream(messages=messages, stream_options={"include_usage": True}, **asked) as stream:
        for _ in stream:
            pass
    completion = stream.get_final_completion()
    assert completion.usage.completion_tokens > 0
    return completion.choices[0].message.model_dump(exclude={"parsed": True})


while True:
    message = answer()
    # As programs do: absent keys and nulls do not come back as they were, and arguments are written again.
    calls = message.get("tool_calls") or []
    for call in calls:
        call["function"] = {
            "name": call["function"]["name"],
            "arguments": json.dumps(json.loads(call["function"]["arguments"]), indent=1),
        }
    messages.append({"role": "assistant", "content": message["content"]} | ({"tool_calls": calls} if calls else {}))
    for call in calls:
        result = TOOLS[call["function"]["name"]](**json.loads(call["function"]["arguments"]))
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
    if not calls:
        finish(message["content"])
        break
