"""Play an episode by a protocol, an async function over the agents and the environment.

The protocol gets an Episode, lets agents join, asks them to act and steps the environment. Limits, errors and rows are
handled here, so a protocol contains only the game. Errors of the environment are stored in the rows, not raised.
"""

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial, wraps
from typing import Any

from ludic.agents import environment_calls as calls
from ludic.agents.agent import Agent
from ludic.agents.delegation import Delegate, SubAgent, SubTask, delegate_validators
from ludic.agents.episode_agent import EnvironmentTools, EpisodeAgent
from ludic.agents.requests import (
    ENGINE_ERRORS,
    Ending,
    EpisodeFailedError,
    EpisodeLimits,
    EpisodeRequest,
    LimitReachedError,
    TokenBudget,
    derive_seed,
    ending,
    fails_the_episode,
)
from ludic.agents.tools.registry import environment_tools
from ludic.agents.tools.toolbox import Tool, Toolbox
from ludic.agents.trajectory import TrajectoryKey
from ludic.environments import HeldEnvironment, LimitedEnvironments, Transition
from ludic.errors import ConfigError, LudicError, ToolError
from ludic.records import TRUNCATION_REASONS, Message, Rollout, new_id
from ludic.settings import GRACE_S, NO_FILES, PROTOCOL, Files, failure_of, find, python_file_of, without_place

MAX_STEPS = 32
"""Default steps of an episode, if the run and the environment set none."""

_NOTHING = HeldEnvironment(None, LimitedEnvironments("", lambda: None))  # type: ignore[arg-type,return-value]
"""Seconds before the environment is made."""

Protocol = Callable[["Episode"], Awaitable[None]]
"""Plays one episode to its end."""


async def run_episode(
    protocol: Protocol,
    agent: Agent,
    make_environment: Callable[[], Any],
    request: EpisodeRequest,
    limits: EpisodeLimits | None = None,
) -> list[Rollout]:
    """Run an episode and return its rows, at least one. Raises the engine's ModelError, ConfigError, EngineError."""
    limits = limits or EpisodeLimits()
    episode, early = Episode(agent, request, limits), ending.get() or Ending()
    try:
        async with asyncio.timeout(limits.timeout_s) as time_limit:
            early.watch(time_limit)
            try:
                if request.error is not None:
                    raise EpisodeFailedError(request.error, request.traceback)
                episode.held = await calls.make(make_environment)
                await protocol(episode)
            finally:
                await episode.stop_agents()
    except LimitReachedError as error:
        episode.end(error.reason, str(error))
    except EpisodeFailedError as error:
        episode.fail(str(error), error.traceback)
    except TimeoutError:
        if not time_limit.expired():
            raise
        if early.reason is not None:
            episode.fail(early.reason)
        else:
            episode.end("time_limit", f"the episode took more than {limits.timeout_s:g} s")
    finally:
        early.watch(None)
    if episode.engine_error is not None:
        raise episode.engine_error
    return episode.rollouts()


class Episode:
    """One episode: its request, its environment, and the agents in it."""

    def __init__(self, agent: Agent, request: EpisodeRequest, limits: EpisodeLimits) -> None:
        self.request, self.limits = request, limits
        self.held: HeldEnvironment = _NOTHING
        """Environment of this episode, and how it is called."""
        self._agent = agent
        self.engine_error: LudicError | None = None
        """Error of the engine in a delegated task, which no agent may read."""
        self._why = "the protocol ended before a model was called"
        self._traceback: str | None = None
        """Reason if there are no rows, and the traceback of the user's code that caused it."""
        self._episode_id = new_id()
        self._agents: list[EpisodeAgent] = []
        """Agents of the environment."""
        self._children: list[tuple[EpisodeAgent, EpisodeAgent | None]] = []
        """Sub-agents, each with the agent whose reward it gets if it has none of its own."""
        self._acting: set[asyncio.Task[Any]] = set()
        """Tasks in which an agent acts."""
        self._num_tasks = 0
        self._budget = None if limits.max_child_tokens is None else TokenBudget(limits.max_child_tokens)

    @property
    def environment(self) -> Any:
        """The user's environment of this episode; one with a question and a score is wrapped in a SingleTurn."""
        return self.held.environment

    async def reset(self) -> tuple[Message, ...]:
        """Begin the episode of the environment and return its first messages, in time. Raises EpisodeFailedError."""
        return await calls.reset(self.held, self.request.example)

    async def step(self, action: str) -> Transition:
        """Apply an action to the environment and return the transition, in time. Raises EpisodeFailedError."""
        return await calls.step(self.held, action)

    def join(self, agent_id: str = "agent", messages: Sequence[Message] | None = None) -> EpisodeAgent:
        """Let an agent join. messages: what it sees first; None is the example's.

        Raises EpisodeFailedError if the id is not a text or belongs to another agent, or if the environment's own
        max_steps is not a number of steps.
        """
        with fails_the_episode():
            calls.check_text("the id of an agent", agent_id or None)
            if any(agent_id == agent.key.agent_id for agent in self._agents):
                raise ValueError(f"an agent {agent_id!r} has joined already; each needs an id of its own")
        agent = self._new_agent(agent_id)
        agent.begin(self.request.example.messages if messages is None else messages)
        agent.max_steps = self.limits.max_steps or calls.own_max_steps(self.environment) or MAX_STEPS
        self._agents.append(self._with_tools(agent))
        return agent

    def _new_agent(self, agent_id: str = "agent") -> EpisodeAgent:
        request = self.request
        if self._agents:
            request = replace(request, seed=derive_seed(request.seed, 0, len(self._agents)))
        key = TrajectoryKey(episode_id=self._episode_id, agent_id=agent_id)
        return EpisodeAgent(self._agent, request, self.limits, key, acting=self._acting)

    def end(self, reason: str, explanation: str) -> None:
        """End the episode of all agents for which it is not over, by a limit.

        reason: a truncation_reason of docs/schemas.md; for any other one the episode fails.
        """
        if reason not in TRUNCATION_REASONS:
            self.fail(f"{reason!r} is not a truncation_reason of docs/schemas.md: {explanation}")
            return
        self._why = explanation
        for agent in self._all_agents():
            if not agent.is_over:
                agent.end(reason, explanation)

    def fail(self, error: str, traceback: str | None = None) -> None:
        """End the episode of all agents for which it is not over, with an error. traceback: of a user's code."""
        self._why, self._traceback = error, traceback
        for agent in self._all_agents():
            if not agent.is_over:
                agent.fail(error, traceback)

    async def stop_agents(self) -> None:
        """Stop the agents that still act, and wait until their answers are in their rows.

        An agent whose code ignores its cancellation is given up after GRACE_S.
        """
        try:
            if left := self._acting - {asyncio.current_task()}:
                for task in left:
                    task.cancel()
                await asyncio.wait(left, timeout=GRACE_S)
        finally:
            self.held.close()

    def rollouts(self) -> list[Rollout]:
        """Return the rows of all agents, at least one."""
        rows = [row for agent in self._agents for row in agent.rollouts()]
        if not rows:
            first = self._agents[0] if self._agents else self._new_agent()
            if first.error is None:
                first.fail(self._why, self._traceback)
            return [first.failed_rollout()]
        for child, root in self._children:
            if root is not None:
                child.share_reward_of(root)
            rows += child.rollouts()
        return rows

    def _all_agents(self) -> list[EpisodeAgent]:
        # A child ends before the agent that waits for it.
        return [*(child for child, _ in reversed(self._children)), *self._agents]

    # --- Delegation ------------------------------------------------------------------------------------------

    def _with_tools(self, agent: EpisodeAgent, root: EpisodeAgent | None = None) -> EpisodeAgent:
        """Give an agent the tools of the environment, if it is in it, and the tool to delegate tasks.

        root: the agent of the environment above it; None if the player is one itself. Raises ConfigError if two tools
        have the same name.
        """
        tools: list[Tool] = []
        validators: dict[str, Any] = {}
        if root is None:
            of_environment, validators = environment_tools(self.held)
            tools += of_environment
            if hasattr(self.environment, "run_tools") and (schemas := calls.tools_of(self.held)):
                agent.of_environment = EnvironmentTools(schemas=schemas, run=partial(calls.run_tools, self.held))
        if self._agent.sub_agents and agent.key.depth < self.limits.max_depth:

            async def delegate(task: str, sub_agent: SubAgent) -> str:
                return await self._run_child(agent, root or agent, task, sub_agent)

            tools.append(Delegate(self._agent.sub_agents, delegate))
            validators |= delegate_validators(self._agent.sub_agents)
        own = agent.of_environment.names if agent.of_environment is not None else ()
        twice = [name for name in (*own, *(tool.name for tool in tools)) if name in self._agent.toolbox]
        if twice:
            raise ConfigError(f"the environment and the run's tools have a tool {twice[0]!r} each; rename one")
        if tools:
            # Limits of time are those of the environment and of the episode.
            agent.external = Toolbox(tools, time_limit_s=None, validators=validators)
        return agent

    async def _run_child(self, parent: EpisodeAgent, root: EpisodeAgent, task: str, sub_agent: SubAgent) -> str:
        """Let an agent work on a task and return its answer. Raises ToolError, which the parent reads."""
        if self._num_tasks >= self.limits.max_children:
            raise ToolError(f"no more tasks can be handed on: {self._num_tasks} were, which is the limit")
        self._num_tasks += 1
        key = TrajectoryKey(
            episode_id=self._episode_id,
            agent_id=sub_agent.name,
            parent_rollout_id=parent.last_rollout_id,
            depth=parent.key.depth + 1,
        )
        request = replace(self.request, seed=derive_seed(parent.request.seed, self._num_tasks, key.depth))
        agent = sub_agent.equip(self._agent)
        child = EpisodeAgent(agent, request, self.limits, key, acting=self._acting, budget=self._budget)
        child.messages, child.max_steps = sub_agent.messages(task), sub_agent.max_steps
        environment = SubTask(self.held, sub_agent.name, task)
        self._children.append((self._with_tools(child, root), None if environment.has_score else root))
        try:
            return await _answer(child, environment)
        except ENGINE_ERRORS as error:
            self.engine_error = error
            raise


async def _answer(child: EpisodeAgent, environment: SubTask) -> str:
    try:
        await play_alone(child, environment.step)
    except LimitReachedError as error:
        child.end(error.reason, str(error))
        raise ToolError(f"the agent gave no answer: {error}") from error
    except EpisodeFailedError as error:
        child.fail(str(error), error.traceback)
    except Exception as error:
        failure = failure_of(error)
        child.fail(failure.error, failure.traceback)
        raise
    if child.error is not None:
        raise ToolError(f"the agent failed: {without_place(child.error)}")
    assert environment.answer is not None, "the task is over"
    return environment.answer


# --- Protocols by name -----------------------------------------------------------------------------------
# single_agent, several_agents, or a function of your own in path/to/file.py:name. Without a name, the environment
# decides. Every failure raises ConfigError.


async def by_environment(episode: Episode) -> None:
    """Play the protocol that fits the environment."""
    has_several = hasattr(episode.environment, "next_agents")  # isinstance of a Protocol is slow
    await (several_agents if has_several else single_agent)(episode)


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
    async def guarded(episode: Episode) -> None:
        with fails_the_episode(unless=ENGINE_ERRORS):
            await own(episode)

    return guarded


# --- One agent in one environment: ask the agent, step the environment, until an end ---------------------


async def single_agent(episode: Episode) -> None:
    """Play one agent in one environment."""
    await play_alone(episode.join(messages=await episode.reset()), episode.step)


async def play_alone(agent: EpisodeAgent, step: Callable[[str], Awaitable[Transition]]) -> None:
    """Let an agent act in an environment that was reset, until the episode is over.

    step: applies an action. An error of it ends the episode.
    """
    while not agent.is_over:
        action = await agent.act()
        if action is None:
            continue
        try:
            agent.take(await step(action))
        except EpisodeFailedError as error:
            return agent.fail(str(error), error.traceback, error.components)
    return None


# --- Several agents in one environment -------------------------------------------------------------------
# The agents whose turn it is act at the same time, then the environment is stepped.


async def several_agents(episode: Episode) -> None:
    """Play all agents of a MultiAgentEnvironment, each with the run's model and a dialogue of its own."""
    first = await calls.reset_agents(episode.held, episode.request.example)
    agents = {agent_id: episode.join(agent_id, messages) for agent_id, messages in first.items()}
    while playing := [agent_id for agent_id, agent in agents.items() if not agent.is_over]:
        acting = await calls.next_agents(episode.held, playing)
        actions = await _act_together([agents[agent_id] for agent_id in acting])
        try:
            transitions = await calls.step_agents(episode.held, dict(zip(acting, actions, strict=True)), agents)
            for agent_id, transition in transitions.items():
                agent = agents[agent_id]
                (agent.take if agent_id in acting else agent.observe)(transition)
        except EpisodeFailedError as error:
            return episode.fail(str(error), error.traceback)
    return None


async def _act_together(agents: Sequence[EpisodeAgent]) -> list[str]:
    """Ask agents at the same time. If one can't act, the others are stopped."""
    tasks = [asyncio.ensure_future(_act(agent)) for agent in agents]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


async def _act(agent: EpisodeAgent) -> str:
    """Ask an agent until it acts."""
    while (action := await agent.act()) is None:
        pass
    return action
