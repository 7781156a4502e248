"""Protocol of one agent in one environment: ask the agent, step the environment, until an end."""

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from ludic.agents.failures import EpisodeFailedError
from ludic.agents.player import Player
from ludic.environments.environment import Transition

if TYPE_CHECKING:
    from ludic.agents.play import Play


async def single_agent(play: "Play") -> None:
    """Play one agent in one environment."""
    await play_alone(play.join(messages=await play.reset()), play.step)


async def play_alone(player: Player, step: Callable[[str], Awaitable[Transition]]) -> None:
    """Let a player act in an environment that was reset, until the episode is over.

    step: applies an action. An error of it ends the episode.
    """
    while not player.is_over:
        action = await player.act()
        if action is None:
            continue
        try:
            player.take(await step(action))
        except EpisodeFailedError as error:
            return player.fail(str(error))
    return None
