"""Protocol of one agent in one environment: ask the agent, step the environment, until an end."""

from typing import TYPE_CHECKING, Any

from ludic.agents.environment_calls import reset, step
from ludic.agents.failures import EpisodeFailedError
from ludic.agents.player import Player

if TYPE_CHECKING:
    from ludic.agents.play import Play


async def single_agent(play: "Play") -> None:
    """Play one agent in one environment."""
    await play_alone(play.join(messages=reset(play.environment, play.request.example)), play.environment)


async def play_alone(player: Player, environment: Any) -> None:
    """Let a player act in an environment that was reset, until the episode is over.

    environment: has Environment.step. An error of it ends the episode.
    """
    while not player.is_over:
        action = await player.act()
        if action is None:
            continue
        try:
            player.take(step(environment, action))
        except EpisodeFailedError as error:
            return player.fail(str(error))
    return None
