"""Protocol of several agents in one environment: those whose turn it is act at the same time, then it is stepped."""

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ludic.agents.environment_calls import next_agents, reset_agents, step_agents
from ludic.agents.failures import EpisodeFailedError
from ludic.agents.player import Player

if TYPE_CHECKING:
    from ludic.agents.play import Play


async def several_agents(play: "Play") -> None:
    """Play all agents of a MultiAgentEnvironment, each with the run's model and a dialogue of its own."""
    first = await reset_agents(play.held, play.request.example)
    players = {agent_id: play.join(agent_id, messages) for agent_id, messages in first.items()}
    while playing := [agent_id for agent_id, player in players.items() if not player.is_over]:
        acting = await next_agents(play.held, playing)
        actions = await _act_together([players[agent_id] for agent_id in acting])
        try:
            transitions = await step_agents(play.held, dict(zip(acting, actions, strict=True)), players)
            for agent_id, transition in transitions.items():
                player = players[agent_id]
                (player.take if agent_id in acting else player.hear)(transition)
        except EpisodeFailedError as error:
            return play.fail(str(error))
    return None


async def _act_together(players: Sequence[Player]) -> list[str]:
    """Ask players at the same time. If one can't act, the others are stopped."""
    tasks = [asyncio.ensure_future(_act(player)) for player in players]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


async def _act(player: Player) -> str:
    """Ask a player until it acts."""
    while (action := await player.act()) is None:
        pass
    return action
