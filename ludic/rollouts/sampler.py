"""Make the requests of a group from its number: examples, agents, parser, context and tools of the run's settings.

An episode may have any number of rows, of one or several agents; the rows of a group's episodes are its rollouts.
Raises ConfigError or ConsentError if a part of the run can't be made.
"""

import logging
import threading
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from ludic.agents import (
    DEFAULT_FORMAT,
    DELEGATE,
    Agent,
    EpisodeFailedError,
    EpisodeLimits,
    EpisodeRequest,
    Toolbox,
    check_tools,
    derive_seed,
    likely_format,
    make_context,
    make_parser,
    make_protocol,
    make_sub_agents,
    make_tool_format,
    make_tools,
    repeat,
    run_episode,
    sweep,
)
from ludic.agents import environment_calls as calls
from ludic.base import require
from ludic.engines import SamplingParams
from ludic.environments import NO_LIMIT, Example, LimitedEnvironments, Split, TimeLimit, make_environment
from ludic.errors import ConfigError
from ludic.records import RolloutBatch, RolloutMetadata, example_columns, new_id
from ludic.rollouts.programs import has_program, make_program
from ludic.rollouts.scheduler import RunEpisode, sample_groups
from ludic.root import CodeRecord, Root
from ludic.run import RunConfig, keep_code, located, run_of, sampling_uses, trusted_files
from ludic.settings import NO_FILES, Files, python_file_of

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSampler:
    """Samples the groups of a run's schedule."""

    run: RunConfig
    run_episode: RunEpisode
    environments: Mapping[str, LimitedEnvironments]
    """Factories by the names in `run.env`."""
    turns: "TurnOrder" = field(init=False, repr=False, compare=False)
    """The environment of each group."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "turns", TurnOrder(self.run.env, self.run.curriculum))

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

    def request(self, group_number: int, split: Split = "train") -> EpisodeRequest:
        """Return the request that a group's episodes share; its seed is the group's. Raises ConfigError, as `sample`.

        If the environment fails to give the example, the request holds the error, and its episodes fail.
        """
        env_name, index = self.turns.of(group_number)
        example, failed = self._example(env_name, index, split)
        return EpisodeRequest(
            env_name=env_name,
            example=example,
            params=sampling_params(self.run, split),
            seed=derive_seed(self.run.seed, group_number),
            group_id=new_id(),
            request_index=group_number * self.run.group_size,
            purpose="train" if split == "train" else "eval",
            example_columns=example_columns(example.columns, self.run.max_column_characters),
            error=None if failed is None else str(failed),
            traceback=None if failed is None else failed.traceback,
        )

    def _example(self, env_name: str, index: int, split: Split) -> tuple[Example, EpisodeFailedError | None]:
        """Return an example and None; or an empty example, and the reason why there is none of this index."""
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


def sampling_params(run: RunConfig, split: Split = "train") -> SamplingParams:
    """Return the parameters with which a run samples, before a sweep changes them."""
    keep_mask = run.keep_sampling_mask
    return SamplingParams(
        temperature=run.temperature,
        top_p=run.top_p,
        top_k=run.top_k,
        max_tokens=run.max_tokens,
        return_mask=split == "train" if keep_mask is None else keep_mask,
        return_experts=split == "train" and run.keep_experts,
    )


class TurnOrder:
    """Assigns environments to the groups of a run in turn; one that is named twice gets twice as many groups.

    With a curriculum the first one begins alone, and after each `curriculum` groups another one joins: in the stage of
    n environments, group g is of environment g % n. The last stage does not end.
    """

    def __init__(self, envs: Sequence[str], curriculum: int | None) -> None:
        self._envs, self._curriculum = envs, curriculum
        self._positions: dict[str, list[int]] = {}
        """Indexes at which each environment is named, in order."""
        for position, name in enumerate(envs):
            self._positions.setdefault(name, []).append(position)
        self._known: dict[str, tuple[int, int]] = {}
        """By environment, a stage and the number of its groups in all stages before."""

    def of(self, group_number: int) -> tuple[str, int]:
        """Return the environment of a group, and the number of its earlier groups in the order of the whole run.

        The time depends on how often this environment is named, not on the number of others.
        """
        num_envs = len(self._envs)
        if self._curriculum is not None:
            num_envs = min(1 + group_number // self._curriculum, num_envs)
        name = self._envs[group_number % num_envs]
        index = _num_turns(self._positions[name], num_envs, group_number)
        if self._curriculum is not None:
            start = self._curriculum * (num_envs - 1)
            index += self._num_before(name, num_envs, self._curriculum)
            index -= _num_turns(self._positions[name], num_envs, start)
        return name, index

    def _num_before(self, name: str, stage: int, curriculum: int) -> int:
        """Return the number of groups of an environment before a stage. stage: its number of environments."""
        since, num_groups = self._known.get(name, (1, 0))
        if since > stage:
            since, num_groups = 1, 0
        for position in self._positions[name] if since < stage else ():
            # Stage n has the groups from curriculum x (n - 1) to curriculum x n, without the last. Of these, g % n is
            # equal to the position for (curriculum + position) // n groups.
            num_groups += _sum_of_quotients(curriculum + position, max(since, position + 1), stage)
        self._known[name] = stage, num_groups
        return num_groups


def _num_turns(positions: Sequence[int], num_envs: int, end: int) -> int:
    """Return how many of the groups from 0 to `end` the environment at these positions gets of the first `num_envs`."""
    rounds, rest = divmod(end, num_envs)
    return rounds * bisect_left(positions, num_envs) + bisect_left(positions, rest)


def _sum_of_quotients(number: int, start: int, end: int) -> int:
    """Return the sum of number // n for n from `start` to `end`, without `end`.

    Neighbours with the same quotient are added at once; there are at most 2 sqrt(number) quotients.
    """
    total, first = 0, start
    while first < end and (quotient := number // first) > 0:
        after = min(end, number // quotient + 1)
        total += quotient * (after - first)
        first = after
    return total


def episodes_of_run(
    run: RunConfig,
    agent: Agent,
    *,
    timeout_s: float | None = None,
    files: Files = NO_FILES,
    root: Root | None = None,
    params: SamplingParams | None = None,
) -> RunEpisode:
    """Return a function that runs episodes by the run's protocol, with its parser, context, tools and sub-agents.

    Episodes of an agent that is a program run while it is `opened`. timeout_s: of an episode; None is no limit. files:
    users' files to run instead of those on disk. root: stores the calls of such a program. params: of all its calls;
    None are the run's. Raises ConfigError if one of them can't be made.
    """
    if has_program(run):
        from ludic.rollouts.program_gateway import ProgramEpisodes  # needs the packages of the gateway

        if root is None:
            raise ConfigError("agent and agent_command need a run's root, which stores their calls")
        equipped = equip(agent, run, files)
        return ProgramEpisodes(
            root, run, equipped, make_program(run, files), params or sampling_params(run), timeout_s=timeout_s
        )
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
    of_root = run_of(root)
    run = run or of_root
    uses = sampling_uses(run, of_root)
    files = trusted_files(root, uses)
    here = located(run, root)
    environments = check_sampling_code(here, files, limit, stop)
    # Comes last: a file that can't run is not stored, so that its fixed version is read later.
    return environments, files, keep_code(root, sampling_uses(here), files)


# --- The agent of a run ----------------------------------------------------------------------------------


def check_agent(run: RunConfig, files: Files = NO_FILES) -> None:
    """Raise ConfigError if a part of the agent can't be made. Runs users' files, and starts no servers of tools."""
    _make_parts(run, files)
    if has_program(run):
        require("uvicorn", "gateway", "an agent that makes its own calls")
        make_program(run, files)
        return
    make_protocol(run.protocol, files)
    check_tools(run.tools, files)
    make_tools([name for name in run.tools if python_file_of(name)], files)


def equip(agent: Agent, run: RunConfig, files: Files = NO_FILES) -> Agent:
    """Return the agent with the parts that the run's settings name; starts the servers of its tools.

    files: users' files to run instead of those on disk. Raises ConfigError if a part can't be made.
    """
    toolbox = Toolbox(make_tools(run.tools, files))
    if run.sub_agents and DELEGATE in toolbox:
        raise ConfigError(f"a tool is named {DELEGATE!r}, as is the tool of sub_agents; rename it")
    parts = _make_parts(run, files)
    has_tools = bool(run.tools or run.sub_agents) or has_program(run)
    return with_tool_format(replace(agent, **parts, toolbox=toolbox), run, says_which=has_tools)


def with_tool_format(agent: Agent, run: RunConfig, *, says_which: bool = True) -> Agent:
    """Return the agent with the run's format of tool calls, or with the one that the chat template shows.

    says_which: log which one the template shows.
    """
    if run.tool_format is not None:
        return replace(agent, tool_format=make_tool_format(run.tool_format))
    name, doubt = likely_format(agent.tokenizer)
    if says_which:
        logger.info("tool calls are read as %s: %s", name, doubt or "the chat template writes them so")
    return replace(agent, tool_format=make_tool_format(name))


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
        "tool_format": make_tool_format(run.tool_format or DEFAULT_FORMAT),
        "sub_agents": make_sub_agents(run.sub_agents, files),
    }
