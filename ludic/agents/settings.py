"""Give an agent the parser, context and tools that a run's settings name."""

from dataclasses import replace

from ludic.agents.agent import Agent
from ludic.agents.contexts import check_context, make_context
from ludic.agents.parsers import check_parser, make_parser
from ludic.agents.tools.formats import make_tool_format
from ludic.agents.tools.registry import check_tools, make_tools
from ludic.agents.tools.toolbox import Toolbox
from ludic.run_config import RunConfig
from ludic.user_files import NO_FILES, Files


def check_agent(run: RunConfig) -> None:
    """Raise ConfigError if a setting names no parser, context, tool or tool format; runs no user's code."""
    check_parser(run.parser)
    check_context(run.context)
    check_tools(run.tools)
    make_tool_format(run.tool_format)


def equip(agent: Agent, run: RunConfig, files: Files = NO_FILES) -> Agent:
    """Return the agent with what the run's settings name.

    files: users' files to run instead of those on disk. Raises ConfigError if one of them can't be made.
    """
    return replace(
        agent,
        parser=make_parser(run.parser, format_reward=run.format_reward, files=files),
        make_context=make_context(run.context, files=files),
        toolbox=Toolbox(make_tools(run.tools, files=files)),
        tool_format=make_tool_format(run.tool_format),
    )
