"""A graph of LangGraph that goes between a model of langchain-openai and its tools."""

from common import MODEL, STREAMS, TASK, TOOLS, finish
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition

tools = [tool(each) for each in TOOLS.values()]
model = ChatOpenAI(model=MODEL, streaming=STREAMS, stream_usage=STREAMS).bind_tools(tools)


def agent(state: MessagesState) -> dict:
    return {"messages": [model.invoke([SystemMessage("You are careful."), *state["messages"]])]}


graph = StateGraph(MessagesState)
graph.add_node("agent", agent)
graph.add_node("tools", ToolNode(tools))
graph.add_edge(START, "agent")
graph.add_conditional_edges("agent", tools_condition)
graph.add_edge("tools", "agent")
finish(graph.compile().invoke({"messages": [HumanMessage(TASK)]})["messages"][-1].content)
