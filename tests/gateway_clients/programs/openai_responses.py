"""An agent's loop with the SDK of OpenAI (2.x and 3.x) over responses, which names the last one instead of all."""

import json

from common import MODEL, SCHEMAS, STREAMS, TASK, TOOLS, finish
from openai import OpenAI

client = OpenAI()
asked = {"model": MODEL, "tools": [{"type": "function", "strict": False, **each} for each in SCHEMAS]}
response_id, new = None, [{"role": "user", "content": TASK}]
while True:
    values = {"input": new, "previous_response_id": response_id, "instructions": "You are careful.", **asked}
    if STREAMS:
        values.pop("previous_response_id") if response_id is None else None
        with client.responses.stream(**values) as stream:
            for _ in stream:
                pass
            response = stream.get_final_response()
    else:
        response = client.responses.create(**values)
    response_id = response.id
    new = [
        {
            "type": "function_call_output",
            "call_id": item.call_id,
            "output": TOOLS[item.name](**json.loads(item.arguments)),
        }
        for item in response.output
        if item.type == "function_call"
    ]
    if not new:
        finish(response.output_text)
        break
