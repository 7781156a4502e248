"""Protocols by name: `single_agent`, `several_agents`, or a function of your own in path/to/file.py:name.

Without a name, the environment decides. Every failure raises ConfigError.
"""

import inspect
from functools import wraps

from ludic.agents.failures import ENGINE_ERRORS, fails_the_episode
from ludic.agents.play import Play, Protocol
from ludic.agents.several_agents import several_agents
from ludic.agents.single_agent import single_agent
from ludic.code.files import NO_FILES, Files, python_file_of
from ludic.code.kinds import PROTOCOL, find
from ludic.errors import ConfigError


async def by_environment(play: Play) -> None:
    """Play the protocol that fits the environment."""
    has_several = hasattr(play.environment, "next_agents")  # isinstance of a Protocol is slow
    await (several_agents if has_several else single_agent)(play)


def make_protocol(name: str | None, files: Files = NO_FILES) -> Protocol:
    """Return a protocol; runs a user's file. An error of the user's function fails the episode, not the worker.

    files: files to run instead of those on disk, by path as in the name.
    """
    if name is None:
        return by_environment
    own: Protocol = find(PROTOCOL, name, files)
    if python_file_of(name) is None:
        return own
    if not inspect.iscoroutinefunction(own):
        raise ConfigError(f"protocol {name}: wanted a function that begins with `async def`")

    @wraps(own)
    async def guarded(play: Play) -> None:
        with fails_the_episode(unless=ENGINE_ERRORS):
            await own(play)

    return guarded
