"""Three questions in one conversation with the SDK of OpenAI, for a model that calls no tools."""

from common import MODEL, STREAMS, TASK, finish
from openai import OpenAI

client = OpenAI()
messages = []
for number in range(3):
    messages.append({"role": "user", "content": f"{TASK} {number}"})
    if STREAMS:
        with client.chat.completions.stream(model=MODEL, messages=messages) as stream:
            for _ in stream:
                pass
        answer = stream.get_final_completion().choices[0].message.content
    else:
        answer = client.chat.completions.create(model=MODEL, messages=messages).choices[0].message.content
    messages.append({"role": "assistant", "content": answer})
finish(answer)
