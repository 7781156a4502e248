"""Run an episode by a protocol: an async function over the agents and the environment.

The protocol gets a Play, lets agents join, asks them to act and steps the environment. Limits, errors and rows are
handled here, so a protocol holds nothing but the game. Errors of the environment are stored in the rows, not raised.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

from ludic.agents.agent import Agent
from ludic.agents.delegation import Delegate, SubAgent, SubTask, delegate_validators
from ludic.agents.environment_calls import check_text, make, own_max_steps
from ludic.agents.episode import Part
from ludic.agents.failures import EpisodeFailedError, LimitReachedError, fails_the_episode
from ludic.agents.limits import EpisodeLimits, TokenBudget
from ludic.agents.player import Player
from ludic.agents.requests import EpisodeRequest, derive_seed
from ludic.agents.single_agent import play_alone
from ludic.agents.tools.toolbox import Toolbox
from ludic.errors import ConfigError, ModelError, ToolError
from ludic.printable import storable
from ludic.records import Message, Rollout, new_id
from ludic.schema.validation import TRUNCATION_REASONS
from ludic.user_code import describe

MAX_STEPS = 32
"""Steps of an episode if neither the run nor the environment says."""

Protocol = Callable[["Play"], Awaitable[None]]
"""Plays one episode to its end."""


async def run_episode(
    protocol: Protocol,
    agent: Agent,
    make_environment: Callable[[], Any],
    request: EpisodeRequest,
    limits: EpisodeLimits | None = None,
) -> list[Rollout]:
    """Run an episode and return its rows, at least one. Raises ModelError and ConfigError of the engine."""
    limits = limits or EpisodeLimits()
    play = Play(agent, request, limits)
    try:
        async with asyncio.timeout(limits.timeout_s) as time_limit:
            play.environment = make(make_environment)
            await protocol(play)
    except LimitReachedError as error:
        play.end(error.reason, str(error))
    except EpisodeFailedError as error:
        play.fail(str(error))
    except TimeoutError:
        if not time_limit.expired():
            raise
        play.end("time_limit", f"the episode took more than {limits.timeout_s:g} s")
    if play.engine_error is not None:
        raise play.engine_error
    return play.rollouts()


class Play:
    """One episode: its request, its environment, and the agents in it."""

    def __init__(self, agent: Agent, request: EpisodeRequest, limits: EpisodeLimits) -> None:
        self.request, self.limits = request, limits
        self.environment: Any = None
        """Environment of this episode; the protocol resets it."""
        self._agent = agent
        self.engine_error: ModelError | ConfigError | None = None
        """Error of the engine in a task that was handed on, which is not the agent's to read."""
        self._why = "the protocol ended before a model was called"
        """Why there are no rows, should there be none."""
        self._episode_id = new_id()
        self._players: list[Player] = []
        """Agents of the environment."""
        self._children: list[tuple[Player, Player | None]] = []
        """Agents that work for others, each with the player whose reward counts for it, if it has none of its own."""
        self._num_tasks = 0
        self._budget = None if limits.max_child_tokens is None else TokenBudget(limits.max_child_tokens)

    def join(self, agent_id: str = "agent", messages: Sequence[Message] | None = None) -> Player:
        """Let an agent join. messages: what it sees first; None is the example's.

        Raises EpisodeFailedError if the id is no text, or the environment's own max_steps no number of steps.
        """
        with fails_the_episode():
            check_text("the id of an agent", agent_id or None)
        player = self._new_player(agent_id)
        if messages is not None:
            player.messages = list(messages)
        player.max_steps = self.limits.max_steps or own_max_steps(self.environment) or MAX_STEPS
        self._players.append(self._with_delegation(player))
        return player

    def _new_player(self, agent_id: str = "agent") -> Player:
        request = self.request
        if self._players:
            request = replace(request, seed=derive_seed(request.seed, 0, len(self._players)))
        return Player(self._agent, request, self.limits, Part(episode_id=self._episode_id, agent_id=agent_id))

    def end(self, reason: str, explanation: str) -> None:
        """End the episode of all agents for which it is not over, by a limit.

        reason: a truncation_reason of docs/schemas.md; for any other one the episode fails.
        """
        if reason not in TRUNCATION_REASONS:
            self.fail(f"{reason!r} is no truncation_reason of docs/schemas.md: {explanation}")
            return
        self._why = explanation
        for player in self._all_players():
            if not player.is_over:
                player.end(reason, explanation)

    def fail(self, error: str) -> None:
        """End the episode of all agents for which it is not over, with an error."""
        self._why = error
        for player in self._all_players():
            if not player.is_over:
                player.fail(error)

    def rollouts(self) -> list[Rollout]:
        """Return the rows of all agents, at least one."""
        rows = [row for player in self._players for row in player.rollouts()]
        if not rows:
            first = self._players[0] if self._players else self._new_player()
            first.fail(first.error or self._why)
            return [first.failed_rollout()]
        for child, root in self._children:
            if root is not None:
                child.share_reward_of(root)
            rows += child.rollouts()
        return rows

    def _all_players(self) -> list[Player]:
        # A child ends before the agent that waits for it.
        return [*(child for child, _ in reversed(self._children)), *self._players]

    # --- Delegation ------------------------------------------------------------------------------------------

    def _with_delegation(self, player: Player, root: Player | None = None) -> Player:
        """Give a player the tool with which it hands on tasks. root: the agent of the environment above it."""
        if self._agent.sub_agents and player.part.depth < self.limits.max_depth:

            async def delegate(task: str, sub_agent: SubAgent) -> str:
                return await self._run_child(player, root or player, task, sub_agent)

            # Its limit of time is the episode's.
            sub_agents = self._agent.sub_agents
            validators = delegate_validators(sub_agents)
            player.external = Toolbox([Delegate(sub_agents, delegate)], time_limit_s=None, validators=validators)
        return player

    async def _run_child(self, parent: Player, root: Player, task: str, sub_agent: SubAgent) -> str:
        """Let an agent work on a task and return its answer. Raises ToolError, which the parent reads."""
        if self._num_tasks >= self.limits.max_children:
            raise ToolError(f"no more tasks can be handed on: {self._num_tasks} were, which is the limit")
        self._num_tasks += 1
        part = Part(
            episode_id=self._episode_id,
            agent_id=sub_agent.name,
            parent_rollout_id=parent.last_rollout_id,
            depth=parent.part.depth + 1,
        )
        request = replace(self.request, seed=derive_seed(parent.request.seed, self._num_tasks, part.depth))
        child = Player(sub_agent.equip(self._agent), request, self.limits, part, budget=self._budget)
        child.messages, child.max_steps = sub_agent.messages(task), sub_agent.max_steps
        environment = SubTask(self.environment, sub_agent.name, task)
        self._children.append((self._with_delegation(child, root), None if environment.has_score else root))
        try:
            return await _answer(child, environment)
        except (ModelError, ConfigError) as error:
            self.engine_error = error
            raise


async def _answer(child: Player, environment: SubTask) -> str:
    try:
        await play_alone(child, environment)
    except LimitReachedError as error:
        child.end(error.reason, str(error))
        raise ToolError(f"the agent gave no answer: {error}") from error
    except EpisodeFailedError as error:
        child.fail(str(error))
    except Exception as error:
        child.fail(storable(describe(error)))
        raise
    if child.error is not None:
        raise ToolError(f"the agent failed: {child.error}")
    assert environment.answer is not None, "the task is over"
    return environment.answer
