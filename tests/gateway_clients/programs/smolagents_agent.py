"""A tool-calling agent of smolagents, which requires a tool call at each step and ends with one."""

import os

from common import MODEL, STREAMS, TASK, TOOLS, finish
from smolagents import OpenAIModel, ToolCallingAgent, tool

model = OpenAIModel(MODEL, api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])
agent = ToolCallingAgent([tool(each) for each in TOOLS.values()], model, stream_outputs=STREAMS, verbosity_level=0)
finish(agent.run(TASK))
