"""Sample a batch of rollouts from group numbers: example, requests, episodes, groups; and make the parts of a run.

An episode may have any number of rows, of one agent or of several; the rows of a group's episodes are its rollouts.
"""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ludic.agents import environment_calls as calls
from ludic.agents.agent import Agent
from ludic.agents.contexts import make_context
from ludic.agents.delegation import DELEGATE, make_sub_agents
from ludic.agents.parsers import make_parser
from ludic.agents.play import make_protocol, run_episode
from ludic.agents.requests import EpisodeFailedError, EpisodeLimits, EpisodeRequest, derive_seed, repeat, sweep
from ludic.agents.tools.formats import make_tool_format
from ludic.agents.tools.registry import check_tools, make_tools
from ludic.agents.tools.toolbox import Toolbox
from ludic.code.consent import sampling_uses
from ludic.code.files import NO_FILES, Files, python_file_of
from ludic.code.kept import keep_code, trusted_files
from ludic.engines.engine import SamplingParams
from ludic.environments.environment import Example, Split
from ludic.environments.limits import NO_LIMIT, LimitedEnvironments, TimeLimit
from ludic.environments.registry import make_environment
from ludic.errors import ConfigError
from ludic.records import RolloutBatch, RolloutMetadata, new_id
from ludic.rollouts.pump import RunEpisode, sample_groups
from ludic.store import Root, RunConfig
from ludic.store.records import CodeRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSampler:
    """Samples the groups of a run's schedule."""

    run: RunConfig
    run_episode: RunEpisode
    environments: Mapping[str, LimitedEnvironments]
    """Factories by the names in `run.env`."""

    @classmethod
    def of_run(cls, run: RunConfig, agent: Agent) -> "GroupSampler":
        """Return a sampler with the run's parser, context and tools.

        Raises ConfigError if an environment or one of these can't be made.
        """
        return cls(run=run, run_episode=episodes_of_run(run, agent), environments=make_environments(run))

    def sample(self, group_numbers: Sequence[int], worker_id: str, split: Split = "train") -> RolloutBatch:
        """Sample one group per number, with all episodes at the same time.

        Raises ConfigError if an environment gave no example many times in a row.
        """
        requests = [self.episodes(number, split) for number in group_numbers]
        groups = sample_groups(requests, self.run_episode, self.environments, self.run.extra_columns)
        return RolloutBatch(groups=groups, metadata=RolloutMetadata(worker_id=worker_id))

    def env_of(self, group_number: int) -> str:
        """Return the environment of a group: they take turns; one that is named twice gets twice as many groups.

        With a curriculum the first one begins alone, and after each `curriculum` groups another one joins.
        """
        return self.run.env[group_number % self._num_envs(group_number)]

    def request(self, group_number: int, split: Split = "train") -> EpisodeRequest:
        """Return the request that a group's episodes share; its seed is the group's. Raises ConfigError, as `sample`.

        If the environment fails to give the example, the request says why, and its episodes fail.
        """
        env_name = self.env_of(group_number)
        example, failed = self._example(env_name, self._example_index(group_number), split)
        keep_mask = self.run.keep_sampling_mask
        return EpisodeRequest(
            env_name=env_name,
            example=example,
            params=SamplingParams(
                temperature=self.run.temperature,
                top_p=self.run.top_p,
                top_k=self.run.top_k,
                max_tokens=self.run.max_tokens,
                return_mask=split == "train" if keep_mask is None else keep_mask,
                return_experts=split == "train" and self.run.keep_experts,
            ),
            seed=derive_seed(self.run.seed, group_number),
            group_id=new_id(),
            request_index=group_number * self.run.group_size,
            purpose="train" if split == "train" else "eval",
            error=None if failed is None else str(failed),
            traceback=None if failed is None else failed.traceback,
        )

    def _example(self, env_name: str, index: int, split: Split) -> tuple[Example, EpisodeFailedError | None]:
        """Return an example and None; or an empty one, and why the environment has none of this index."""
        environments = self.environments[env_name]
        try:
            example = calls.example(environments, index, split)
        except EpisodeFailedError as error:
            environments.count_example(str(error))
            return Example(example_id=f"index {index}", messages=()), error
        environments.count_example()
        return example, None

    def episodes(self, group_number: int, split: Split = "train") -> Sequence[EpisodeRequest]:
        """Return the requests of a group's episodes. Raises ConfigError, as `sample`."""
        request = self.request(group_number, split)
        return sweep(repeat(request, self.run.group_size, request.seed), self.run.sweep)

    def _example_index(self, group_number: int) -> int:
        """Return the number of earlier groups of the same environment, in the order of the whole run."""
        name, index, start = self.env_of(group_number), 0, 0
        # Stages of a curriculum, in each of which the same environments take turns.
        for num_envs in range(self._num_envs(0), self._num_envs(group_number) + 1):
            is_last = num_envs == self._num_envs(group_number)
            end = group_number if is_last or self.run.curriculum is None else self.run.curriculum * num_envs
            envs = self.run.env[:num_envs]
            index += _num_turns(envs, name, end) - _num_turns(envs, name, start)
            start = end
        return index

    def _num_envs(self, group_number: int) -> int:
        """Return how many environments take turns at a group."""
        length = self.run.curriculum
        return len(self.run.env) if length is None else min(1 + group_number // length, len(self.run.env))


def episodes_of_run(
    run: RunConfig, agent: Agent, *, timeout_s: float | None = None, files: Files = NO_FILES
) -> RunEpisode:
    """Return a function that runs episodes by the run's protocol, with its parser, context, tools and sub-agents.

    timeout_s: of an episode; None is no limit. files: users' files to run instead of those on disk. Raises ConfigError
    if one of them can't be made.
    """
    protocol, equipped = make_protocol(run.protocol, files), equip(agent, run, files)
    return partial(run_episode, protocol, equipped, limits=limits_of(run, timeout_s))


def make_environments(
    run: RunConfig, files: Files = NO_FILES, limit: TimeLimit = NO_LIMIT, stop: threading.Event | None = None
) -> dict[str, LimitedEnvironments]:
    """Return factories by the names in `run.env`. files: users' files to run instead of those on disk.

    limit: for loading each environment, and for each of its calls. stop: if it is set, one timeout is enough. Raises
    ConfigError if an environment can't be made, TimeLimitError if it takes too long.
    """

    def make(name: str) -> LimitedEnvironments:
        load = partial(make_environment, name, run.env_options.get(name, {}), seed=run.seed, files=files)
        return LimitedEnvironments(name, limit.call(f"environment {name}: loading it", load), limit, stop)

    return {name: make(name) for name in dict.fromkeys(run.env)}


def check_sampling_code(
    run: RunConfig, files: Files = NO_FILES, limit: TimeLimit = NO_LIMIT, stop: threading.Event | None = None
) -> dict[str, LimitedEnvironments]:
    """Load all code that a worker runs, and return the environments by name. Starts no servers of tools.

    files, limit, stop: as in `make_environments`. Raises ConfigError, TimeLimitError.
    """
    environments = make_environments(run, files, limit, stop)
    check_agent(run, files)
    return environments


def open_code(
    root: Root, limit: TimeLimit, run: RunConfig | None = None, *, stop: threading.Event | None = None
) -> tuple[dict[str, LimitedEnvironments], Files, list[CodeRecord]]:
    """Return the run's environments by name, the users' files of its settings, and a record of all code.

    limit, stop: as in `make_environments`. run: settings to use instead of the root's; the user named the code that the
    root's do not name. Raises ConsentError, ConfigError, TimeLimitError.
    """
    run = run or root.run
    uses = sampling_uses(run, root.run)
    files = trusted_files(root, uses)
    environments = check_sampling_code(run, files, limit, stop)
    # Comes last: a file that can't be run is not kept, so that its fixed version is read.
    return environments, files, keep_code(root, uses, files)


def _num_turns(envs: Sequence[str], name: str, end: int) -> int:
    """Return how many of the groups from 0 to `end` an environment would get if these took turns."""
    turns, rest = divmod(end, len(envs))
    return turns * envs.count(name) + envs[:rest].count(name)


# --- The agent of a run ----------------------------------------------------------------------------------


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
