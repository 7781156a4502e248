"""Three questions in one conversation with the SDK of OpenAI, for a model that calls no tools."""

from common import MODEL, STREAMS, TASK, finish
from openai import OpenAI

client = OpenAI()
messages = []
for number in range(3):
    messages.append({"role": "user", "content": f"{TASK} {number}"})
    if STREAMS:
        # The SDK's helper refuses an answer that was cut.
        chunks = client.chat.completions.create(model=MODEL, messages=messages, stream=True)
        answer = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    else:
        answer = client.chat.completions.create(model=MODEL, messages=messages).choices[0].message.content
    messages.append({"role": "assistant", "content": answer})
finish(answer)
