"""An agent's loop over litellm."""

import json
import os

import litellm
from common import MODEL, SCHEMAS, STREAMS, TASK, TOOLS, finish

litellm.telemetry = False
messages = [{"role": "system", "content": "You are careful."}, {"role": "user", "content": TASK}]
while True:
    response = litellm.completion(
        model=f"openai/{MODEL}",
        api_base=os.environ["OPENAI_BASE_URL"],
        messages=messages,
        tools=[{"type": "function", "function": each} for each in SCHEMAS],
        stream=STREAMS,
    )
    if STREAMS:
        response = litellm.stream_chunk_builder(list(response))
    message = response.choices[0].message
    messages.append(message)
    for call in message.tool_calls or []:
        result = TOOLS[call.function.name](**json.loads(call.function.arguments))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    if not message.tool_calls:
        finish(message.content)
        break
