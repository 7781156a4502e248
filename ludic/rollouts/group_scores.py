"""Score the answers to one example together: give them to the environment's score_group, and its scores to the rows.

Touches no files. A score replaces what the environment had given: the difference is added to the last step, and at the
last token of its completion, so that the sums over steps and tokens stay those of the episode. An error of score_group
fails all episodes of the group.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ludic.agents import environment_calls as calls
from ludic.agents.failures import EpisodeFailedError
from ludic.agents.requests import EpisodeRequest
from ludic.environments.environment import GroupAnswer, TaskScorer, Transition
from ludic.environments.limits import LimitedEnvironments
from ludic.printable import storable
from ludic.records import LARGEST_REWARD, EnvironmentStep, Rollout

Episodes = Sequence[Sequence[Rollout]]


async def score_together(environments: LimitedEnvironments, request: EpisodeRequest, episodes: Episodes) -> Episodes:
    """Return the rows of a group's episodes with the rewards that score_group gives; never raises what it raises.

    request: of any of the episodes, which share its example.
    """
    agents = [agent for rows in episodes for agent in _agents(rows)]
    if not agents:
        return episodes
    try:
        held = await calls.make(environments)
        try:
            scores = await calls.score_group(held, request.example, [_answer(agent) for agent in agents])
        finally:
            held.close()
    except EpisodeFailedError as error:
        why = f"score_group of environment {request.env_name} failed: {error}"
        return [[row if row.error is not None else failed(row, why) for row in rows] for rows in episodes]
    tasks_have_scores = isinstance(held.environment, TaskScorer)
    changed: dict[str, Rollout] = {}
    for agent, score in zip(agents, scores, strict=True):
        changed |= {row.rollout_id: row for row in _scored(agent, score)}
    return [
        [_with_score_of_root(changed.get(row.rollout_id, row), rows, changed, tasks_have_scores) for row in rows]
        for rows in episodes
    ]


def _agents(rows: Sequence[Rollout]) -> list[list[Rollout]]:
    """Return the rows of each agent of the environment that did not fail, in the order of its segments."""
    agents: dict[str | None, list[Rollout]] = {}
    for row in rows:
        if row.depth == 0 and row.error is None:
            agents.setdefault(row.trajectory_id, []).append(row)
    return list(agents.values())


def _answer(agent: Sequence[Rollout]) -> GroupAnswer:
    actions = [step.action for step in _steps(agent) if step.action is not None]
    last = agent[-1]
    return GroupAnswer(
        text=actions[-1] if actions else "",
        reward=_reward_of_steps(agent),
        components=dict(last.reward_components),
        messages=tuple(last.messages),
        group_index=last.group_index,
        agent_id=last.agent_id,
    )


def _steps(agent: Sequence[Rollout]) -> list[EnvironmentStep]:
    """Return the steps of all rows in the order of the episode."""
    return sorted((step for row in agent for step in row.environment_steps), key=lambda step: step.turn)


def _reward_of_steps(agent: Sequence[Rollout]) -> float:
    """Return what the environment gave; the rest of an episode's reward is for its format."""
    return sum((step.reward or 0.0 for step in _steps(agent)), 0.0)


def _scored(agent: Sequence[Rollout], score: Transition) -> list[Rollout]:
    """Return the rows of an agent with its score."""
    before = _reward_of_steps(agent)
    reward = (agent[0].episode_reward or 0.0) - before + score.reward
    components = {**agent[0].reward_components, **score.reward_components}
    rows = [
        replace(row, episode_reward=reward, reward_components=components, extra={**row.extra, **score.extra})
        for row in agent
    ]
    last = max(range(len(rows)), key=lambda index: [step.turn for step in rows[index].environment_steps[-1:]])
    rows[last] = _with_last_step(rows[last], score.reward - before, score)
    return rows


def _with_last_step(row: Rollout, difference: float, score: Transition) -> Rollout:
    """Return the row with a difference in reward at its last step, and at the last token that led to it."""
    steps, agent_steps = list(row.environment_steps), row.agent_steps
    at = agent_steps[-1]
    if steps:
        at = agent_steps[steps[-1].agent_steps[-1]]
        reward = (steps[-1].reward or 0.0) + difference
        steps[-1] = replace(steps[-1], reward=reward, info={**steps[-1].info, **score.info})
    rewards = row.token_rewards.astype(np.float64)
    rewards[at.end - 1] += difference
    rewards = np.clip(rewards, -LARGEST_REWARD, LARGEST_REWARD).astype(np.float32)
    return replace(row, environment_steps=tuple(steps), token_rewards=rewards)


def _with_score_of_root(
    row: Rollout, rows: Sequence[Rollout], changed: dict[str, Rollout], tasks_have_scores: bool
) -> Rollout:
    """Return the row of a sub-agent, whose reward includes that of the agent above it unless tasks have their own."""
    if row.depth == 0 or row.error is not None or tasks_have_scores:
        return row
    by_id = {each.rollout_id: each for each in rows}
    root = row
    while root.depth and root.parent_rollout_id in by_id:
        root = by_id[root.parent_rollout_id]
    if root.rollout_id not in changed:
        return row
    difference = (changed[root.rollout_id].episode_reward or 0.0) - (root.episode_reward or 0.0)
    return replace(row, episode_reward=(row.episode_reward or 0.0) + difference)


def failed(row: Rollout, error: str) -> Rollout:
    """Return the row of an episode that has failed after its end, with its tokens and steps."""
    return replace(
        row,
        error=storable(error),
        episode_reward=None,
        reward_components={},
        terminated=False,
        truncated=False,
        truncation_reason=None,
    )
