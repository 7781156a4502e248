"""Sample a batch of rollouts from group numbers: example, requests, episodes, groups. Touches no files.

An episode may have any number of rows, of one agent or of several; the rows of a group's episodes are its rollouts.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from ludic.agents.requests import EpisodeRequest, derive_seed, repeat
from ludic.agents.single_turn import Agent, run_single_step
from ludic.engines.engine import SamplingParams
from ludic.environments.environment import Split
from ludic.environments.limits import NO_LIMIT, TimeLimit
from ludic.environments.registry import EnvironmentFactory, make_environment
from ludic.records import Rollout, RolloutBatch, RolloutGroup, RolloutMetadata, new_id
from ludic.store import RunConfig
from ludic.user_files import NO_FILES, Files

RunEpisodes = Callable[[EnvironmentFactory, Sequence[EpisodeRequest]], Sequence[Sequence[Rollout]]]
"""Runs episodes of one environment and returns the rows of each, at least one, in the order of the requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSampler:
    """Samples the groups of a run's schedule."""

    run: RunConfig
    run_episodes: RunEpisodes
    environments: Mapping[str, EnvironmentFactory]
    """Factories by the names in `run.env`."""

    @classmethod
    def of_run(cls, run: RunConfig, agent: Agent) -> "GroupSampler":
        """Return a sampler of episodes of one step. Raises ConfigError if an environment can't be made."""
        return cls(run=run, run_episodes=single_step_episodes(run, agent), environments=make_environments(run))

    def sample(self, group_numbers: Sequence[int], worker_id: str, split: Split = "train") -> RolloutBatch:
        """Sample one group per number, with one call of the engine per environment.

        Raises TimeLimitError if an environment returns no example in time.
        """
        groups: dict[int, RolloutGroup] = {}
        for env_name in dict.fromkeys(self.run.env):
            requests = [self.request(number, split) for number in group_numbers if self.env_of(number) == env_name]
            if requests:
                groups.update(self._sample_groups(env_name, requests))
        return RolloutBatch(
            groups=tuple(groups[number] for number in group_numbers), metadata=RolloutMetadata(worker_id=worker_id)
        )

    def env_of(self, group_number: int) -> str:
        """Return the environment of a group: they take turns; one that is named twice gets twice as many groups."""
        return self.run.env[group_number % len(self.run.env)]

    def request(self, group_number: int, split: Split = "train") -> EpisodeRequest:
        """Return the request that a group's episodes share; its seed is the group's."""
        env_name = self.env_of(group_number)
        example = self.environments[env_name]().example(self._example_index(group_number), split)
        return EpisodeRequest(
            env_name=env_name,
            example=example,
            params=SamplingParams(
                temperature=self.run.temperature,
                top_p=self.run.top_p,
                top_k=self.run.top_k,
                max_tokens=self.run.max_tokens,
            ),
            seed=derive_seed(self.run.seed, group_number),
            group_id=new_id(),
            request_index=group_number * self.run.group_size,
            purpose="train" if split == "train" else "eval",
        )

    def _example_index(self, group_number: int) -> int:
        """Return the number of earlier groups of the same environment, in the order of the whole run."""
        turn, env_index = divmod(group_number, len(self.run.env))
        env_name = self.run.env[env_index]
        return turn * self.run.env.count(env_name) + self.run.env[:env_index].count(env_name)

    def _sample_groups(self, env_name: str, requests: Sequence[EpisodeRequest]) -> dict[int, RolloutGroup]:
        size = self.run.group_size
        episodes = [episode for request in requests for episode in repeat(request, size, request.seed)]
        rows = iter(self.run_episodes(self.environments[env_name], episodes))
        return {request.request_index // size: _group(request, islice(rows, size)) for request in requests}


def single_step_episodes(run: RunConfig, agent: Agent) -> RunEpisodes:
    """Return a function that runs episodes of one step, which have one row each."""

    def run_episodes(make: EnvironmentFactory, requests: Sequence[EpisodeRequest]) -> list[list[Rollout]]:
        rollouts = run_single_step(agent, make, requests, accept_incomplete=run.accept_incomplete)
        return [[rollout] for rollout in rollouts]

    return run_episodes


def make_environments(
    run: RunConfig, files: Files = NO_FILES, limit: TimeLimit = NO_LIMIT
) -> dict[str, EnvironmentFactory]:
    """Return factories by the names in `run.env`. files: users' files to run instead of those on disk.

    limit: for loading each environment. Raises ConfigError if an environment can't be made, TimeLimitError if it takes
    too long.
    """

    def make(name: str) -> EnvironmentFactory:
        options = run.env_options.get(name, {})
        return limit.call(
            f"environment {name}: loading it", lambda: make_environment(name, options, seed=run.seed, files=files)
        )

    return {name: make(name) for name in dict.fromkeys(run.env)}


def _group(request: EpisodeRequest, episodes: Iterable[Sequence[Rollout]]) -> RolloutGroup:
    rollouts = tuple(rollout for rows in episodes for rollout in rows)
    return RolloutGroup(key=f"{request.env_name}/{request.example.example_id}", rollouts=rollouts)
