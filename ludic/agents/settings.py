"""Give an agent the parser, context and tools that a run's settings name."""

from dataclasses import replace
from typing import Any

from ludic.agents.agent import Agent
from ludic.agents.contexts import make_context
from ludic.agents.delegation import DELEGATE, make_sub_agents
from ludic.agents.limits import EpisodeLimits
from ludic.agents.parsers import make_parser
from ludic.agents.protocols import make_protocol
from ludic.agents.tools.formats import make_tool_format
from ludic.agents.tools.registry import check_tools, make_tools
from ludic.agents.tools.toolbox import Toolbox
from ludic.code.files import NO_FILES, Files, python_file_of
from ludic.errors import ConfigError
from ludic.run_config import RunConfig


def check_agent(run: RunConfig, files: Files = NO_FILES) -> None:
    """Raise ConfigError if a part of the agent can't be made. Runs users' files, and starts no servers of tools."""
    _make_parts(run, files)
    make_protocol(run.protocol, files)
    check_tools(run.tools, files)
    make_tools([name for name in run.tools if python_file_of(name)], files)


def equip(agent: Agent, run: RunConfig, files: Files = NO_FILES) -> Agent:
    """Return the agent with what the run's settings name; starts the servers of its tools.

    files: users' files to run instead of those on disk. Raises ConfigError if a part can't be made.
    """
    toolbox = Toolbox(make_tools(run.tools, files))
    if run.sub_agents and DELEGATE in toolbox:
        raise ConfigError(f"a tool is named {DELEGATE!r}, as is the tool of sub_agents; rename it")
    return replace(agent, **_make_parts(run, files), toolbox=toolbox)


def limits_of(run: RunConfig, timeout_s: float | None = None) -> EpisodeLimits:
    """Return the limits of a run's episodes. timeout_s: of an episode; None is no limit."""
    return EpisodeLimits(
        max_steps=run.max_steps,
        max_seq_len=run.max_sequence_tokens,
        max_observation_characters=run.max_observation_characters,
        accept_incomplete=run.accept_incomplete,
        timeout_s=timeout_s,
        max_depth=run.max_depth,
        max_children=run.max_children,
        max_child_tokens=run.max_child_tokens,
    )


def _make_parts(run: RunConfig, files: Files) -> dict[str, Any]:
    return {
        "parser": make_parser(run.parser, format_reward=run.format_reward, files=files),
        "make_context": make_context(run.context, files=files),
        "tool_format": make_tool_format(run.tool_format),
        "sub_agents": make_sub_agents(run.sub_agents, files),
    }
