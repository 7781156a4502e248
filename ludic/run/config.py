"""Settings that workers and trainers of one run share; ludic.run.run_json reads and writes those of a root.

Imports no store, so that `--help` answers at once.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Any

from ludic.base import MAX_OBSERVATION_CHARACTERS, Longrope
from ludic.errors import ConfigError
from ludic.records import (
    DEFAULT_COLUMN_CHARACTERS,
    FEWEST_COLUMN_CHARACTERS,
    MOST_COLUMN_CHARACTERS,
    check_extra_columns,
)
from ludic.settings import (
    FormatReward,
    GroupSize,
    GroupsPerBatch,
    MaxSteps,
    PositiveCount,
    Processes,
    Range,
    Role,
    Seed,
    Temperature,
    Tokens,
    TopP,
    WhenNone,
    names_of,
    settings_of,
)
from ludic.settings.table import check

AGE_SHARE = 3 / 8
"""Mean age of a rollout when it is used, as a share of max_off_policy_steps, at the largest budget of open groups.
Answers of log-normal length, the longest eight times the mean, then lose few tokens as too old
(benchmarks/in_flight.py)."""
_NO_BOUND = 10**6
_OF_SAMPLING = Role(of_sampling=True, in_evaluations=True)
_OF_EPISODES = Role(of_episodes=True, in_evaluations=True)
_OF_PROGRAM = Role(of_episodes=True, in_evaluations=True, stored_if_set=True, of_program=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """Settings shared by every process of a run; `ludic worker ROOT` and `ludic train ROOT` need no others."""

    model: Annotated[str, Role(first_page=True, on_card=True)]
    """Folder or Hugging Face id of the first weights."""
    env: Annotated[tuple[str, ...], Role(first_page=True, on_card=True)]
    """One or more environments, which take turns: a built-in name, qa/FILE.jsonl for questions of a file,
    reasoning_gym/NAME, textarena/NAME, gymnasium/NAME, verifiers/NAME, or path/to/file.py:ClassName; see
    docs/environments.md."""
    env_options: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the environments, by environment name."""
    group_size: Annotated[GroupSize, Role(first_page=True, on_card=True)] = 8
    """Episodes sampled from one example."""
    close_groups_at: GroupSize | None = None
    """Close a group when so many of its episodes have ended, and give up the others; None waits for all. A group waits
    less for its longest answer, and training sees fewer long answers: see the view bias_by_length."""
    groups_per_batch: Annotated[GroupsPerBatch, Role(first_page=True, on_card=True)] = 8
    """Groups in the batch of a gradient step, counted after filters."""
    steps_per_version: PositiveCount = 1
    """Gradient steps between two published versions."""
    batches_ahead: Annotated[int, Range(0, 10**4)] | None = None
    """Batches that workers may sample beyond those that the current version needs; 0 is nearly on-policy. None lets
    them sample as far ahead as keeps the trainer busy, within max_off_policy_steps."""
    num_workers: Annotated[Processes, Role(first_page=True)] = 1
    """Number of workers that share the schedule. More or fewer may run; see ludic.rollouts.group_schedule."""
    temperature: Annotated[Temperature, Role(on_card=True, of_sampling=True, in_evaluations=True)] = 1.0
    """Divides the logits before a token is sampled, and again when the trainer computes its logprob. 0, which only
    evaluations and `ludic sample` take, samples the likeliest tokens."""
    top_p: Annotated[TopP, _OF_SAMPLING] = 1.0
    """Sample from the most likely tokens whose probabilities add up to this; 1 samples from all."""
    top_k: Annotated[PositiveCount | None, WhenNone("samples from all"), _OF_SAMPLING] = None
    """Sample from this number of the most likely tokens."""
    max_tokens: Annotated[Tokens, Role(first_page=True, on_card=True, of_sampling=True, in_evaluations=True)] = 256
    """Maximum tokens in one completion."""
    keep_sampling_mask: Annotated[bool | None, Role(free_if_none=True, stored_if_set=True)] = None
    """Store the tokens that top_k and top_p kept at each sampled token, so that the trainer renormalises over them.
    None stores them in training where top_k or top_p is set; True in evaluations too."""
    keep_experts: Annotated[bool, Role(stored_if_set=True)] = False
    """Store the experts that a mixture's routers chose for each token in training, so that the trainer sends tokens to
    the same ones (router replay, docs/models.md)."""
    sweep: Mapping[str, Any] = field(default_factory=dict)
    """Sampling settings that the episodes of a group take in turn, such as {"temperature": [0.7, 1.0, 1.3]}; also
    top_p, top_k and max_tokens. Several settings are combined."""
    curriculum: PositiveCount | None = None
    """Groups after which the next environment of env joins those before it, easy ones first; None begins with all."""
    accept_incomplete: Annotated[bool, _OF_EPISODES] = False
    """Pass a completion that hit max_tokens to the environment, instead of refusing it as a parse failure."""
    max_steps: Annotated[
        MaxSteps | None,
        WhenNone("takes the environment's own number: 1 for a question and a score, else 32 unless its class says"),
        _OF_EPISODES,
    ] = None
    """Maximum steps of the environment in an episode."""
    max_sequence_tokens: Annotated[
        Tokens | None,
        WhenNone("is the model's limit"),
        Role(of_episodes=True, in_evaluations=True, of_programs_too=True),
    ] = None
    """Maximum tokens of prompt and completions together; an episode that needs more is truncated."""
    longrope: Annotated[Longrope | None, Role(free_if_none=True, stored_if_set=True)] = None
    """Factors of a longrope model (Phi-3-128k, Phi-4-mini, PhiMoE): short, for sequences that fit into its original
    context (4096 tokens), or long. None takes long if max_sequence_tokens is larger than that; run.json records
    which."""
    max_observation_characters: PositiveCount | None = MAX_OBSERVATION_CHARACTERS
    """Maximum characters of an observation of the environment; the rest is cut, and the text and the row say so. None
    is no limit."""
    max_column_characters: Annotated[int, Range(0, MOST_COLUMN_CHARACTERS), Role(stored_if_set=True)] = (
        DEFAULT_COLUMN_CHARACTERS
    )
    """Maximum characters of the example's columns in its data set, such as difficulty, that each rollout stores in
    example_columns; the longest values are cut, and say so. 0 stores none."""
    parser: Annotated[str, _OF_EPISODES] = "whole"
    """How an action is read from a completion: whole, tag:NAME, boxed, json, regex:PATTERN, think, several joined by |,
    or path/to/file.py:ClassName."""
    format_reward: Annotated[FormatReward, _OF_EPISODES] = 0.0
    """Reward for each completion that the parser can read, in addition to the environment's."""
    context: Annotated[str, _OF_EPISODES] = "full"
    """What the model sees of the dialogue: full, no_thinking, window:N, summary:N, or path/to/file.py:ClassName."""
    tools: Annotated[tuple[str, ...], _OF_EPISODES] = ()
    """Tools that the model may call: calculator, python, path/to/file.py:function, or mcp:COMMAND for a server."""
    tool_format: Annotated[
        str | None,
        WhenNone("is what its chat template shows, or hermes if that can't be told"),
        Role(of_episodes=True, in_evaluations=True, free_if_none=True, of_programs_too=True),
    ] = None
    """How the model writes tool calls: hermes, which Qwen 2.5 and 3 use too, qwen3_coder, which is the XML of Qwen 3.5,
    llama, mistral, json or json:TAG."""
    protocol: Annotated[str | None, WhenNone("is what fits the environment"), _OF_EPISODES] = None
    """How an episode is played: single_agent, several_agents, or path/to/file.py:function."""
    sub_agents: Annotated[tuple[str, ...], Role(of_episodes=True)] = ()
    """Agents to which the model may hand tasks with the tool delegate: helper, or path/to/file.py:function."""
    max_depth: Annotated[int, Range(0, 100), Role(of_episodes=True)] = 1
    """Maximum number of agents above one that works on a task; 1 lets no sub-agent hand on tasks itself."""
    max_children: Annotated[int, Range(0, 10**6), Role(of_episodes=True)] = 8
    """Maximum tasks that are handed on in an episode."""
    max_child_tokens: Annotated[Tokens | None, Role(of_episodes=True)] = None
    """Maximum tokens that are sampled for all tasks of an episode that are handed on; None is no limit."""
    agent: Annotated[str | None, _OF_PROGRAM] = None
    """An agent that makes its own calls over HTTP to an OpenAI or Anthropic API (docs/gateway.md), instead of a
    protocol: path/to/file.py:function, or a harness that is installed: claude, codex, mini, opencode or pi. The
    function takes any of these by name: example, client, model, base_url, api_key, folder, tools; it returns its final
    text. None plays the protocol."""
    agent_command: Annotated[str | None, _OF_PROGRAM] = None
    """A command that is such an agent, started for each episode in a working folder of its own, with the addresses and
    the key of the model in its environment. {prompt}, {example}, {folder}, {answer} and {model} are replaced."""
    agent_variables: Annotated[tuple[str, ...], _OF_PROGRAM] = ()
    """Names of environment variables that commands of the agent get from the worker, besides PATH, LANG, LC_*, TZ,
    TERM, TMPDIR and proxies. The worker's other variables, such as its keys, stay out."""
    agent_cpu_s: Annotated[PositiveCount | None, _OF_PROGRAM] = None
    """Maximum CPU seconds of each process of a command; None is no limit."""
    agent_memory_mb: Annotated[PositiveCount | None, _OF_PROGRAM] = None
    """Maximum address space of each process of a command in MB, of which node and Go reserve far more than they use;
    None is no limit."""
    agent_open_files: Annotated[PositiveCount | None, _OF_PROGRAM] = None
    """Maximum open files of each process of a command; None is the worker's limit."""
    agent_file_mb: Annotated[PositiveCount | None, _OF_PROGRAM] = None
    """Maximum MB of each file that a command writes; None is no limit."""
    agent_lenient: Annotated[bool, _OF_PROGRAM] = False
    """Treat response_format and a required tool choice of the agent's calls as auto, instead of refusing them."""
    agent_keep_thinking: Annotated[bool, _OF_PROGRAM] = False
    """Keep the thinking of earlier answers in the agent's prompts, where the chat template would drop it."""
    agent_replay: Annotated[bool, Role(stored_if_set=True, of_program=True)] = True
    """Continue an episode whose worker was killed: run the agent again, and answer its calls with the stored answers
    as long as they repeat. If they do not repeat, or if this is off, the episode starts again."""
    score_command: Annotated[str | None, _OF_PROGRAM] = None
    """A command that scores the agent's working folder in the place of the environment: reward 1 if it ends with exit
    code 0, else 0."""
    posted_scores: Annotated[bool, _OF_PROGRAM] = False
    """Take the score that the agent posts to the gateway in the place of the environment's. An agent that runs what the
    model writes may then score itself."""
    float32_head: Annotated[bool, Role(of_episodes=True, stored_if_set=True, of_programs_too=True)] = False
    """Compute logits in float32 when the model computes in bfloat16, in workers and trainer alike (MiniMax-M1)."""
    seed: Annotated[Seed, Role(on_card=True)] = 0
    """Decides which examples are served in which order, and seeds the sampling of each answer."""
    extra_columns: Annotated[Mapping[str, str], Role(stored_if_set=True)] = field(default_factory=dict)
    """Extra columns of the run's rollouts, type by name, such as {"x_judge": "string"}; Score.extra fills them."""

    def __post_init__(self) -> None:
        check(
            self, urls=False
        )  # run.json of an older ludic may hold some; ludic.run.run_json checks those of a new run
        if not self.env:
            raise ConfigError("env is empty, wanted at least one environment, for example moar_cats")
        if self.temperature == 0:
            raise ConfigError(f"temperature is {self.temperature}; training needs a number above 0")
        if self.close_groups_at is not None and self.close_groups_at > self.group_size:
            raise ConfigError(
                f"close_groups_at is {self.close_groups_at}, wanted at most {self.group_size} (group_size)"
            )
        if 0 < self.max_column_characters < FEWEST_COLUMN_CHARACTERS:
            raise ConfigError(
                f"max_column_characters is {self.max_column_characters}, wanted 0, which stores none, or at least "
                f"{FEWEST_COLUMN_CHARACTERS}"
            )
        check_extra_columns(self.extra_columns)
        self._check_sweep()
        self._check_program()

    def _check_program(self) -> None:
        """Raise ConfigError for settings that have no effect, with an agent of one's own or without one."""
        set_ = {each.name: each for each in settings_of(RunConfig) if getattr(self, each.name) != each.default}
        programs = [name for name in ("agent", "agent_command", "protocol") if name in set_]
        if len(programs) > 1:
            raise ConfigError(f"{' and '.join(programs)} are set; one of them plays an episode, leave out the others")
        has_program = bool({"agent", "agent_command"} & {*programs})
        for name, each in set_.items():
            if name in programs:
                continue
            if each.role.of_program and not has_program:
                raise ConfigError(f"{name} has no effect without agent or agent_command; leave it out")
            if has_program and each.role.of_episodes and not (each.role.of_program or each.role.of_programs_too):
                raise ConfigError(
                    f"{name} has no effect on an agent that makes its own calls ({programs[0]}); leave it out, and let "
                    "the agent do it"
                )
        if has_program and self.sweep:
            raise ConfigError("sweep has no effect on an agent that makes its own calls; leave it out")
        if self.score_command is not None and self.posted_scores:
            raise ConfigError("score_command and posted_scores are set; one of them scores an episode")

    def _check_sweep(self) -> None:
        for name, values in self.sweep.items():
            if name not in SAMPLING:
                raise ConfigError(f"sweep has {name!r}, wanted {', '.join(SAMPLING)}")
            if not isinstance(values, list | tuple) or not values:
                raise ConfigError(f"sweep has {name} = {values!r}, wanted a list of values, such as [0.7, 1.0]")
            for value in values:
                try:
                    replace(self, sweep={}, **{name: value})
                except ConfigError as error:
                    raise ConfigError(f"sweep: {error}") from error

    @property
    def groups_per_version(self) -> int:
        """Groups that the gradient steps of one version train on."""
        return self.groups_per_batch * self.steps_per_version

    def budget_bounds(self, max_off_policy_steps: int | None) -> tuple[int, int]:
        """Return the least and the most groups that may be open at a time (ludic.training.batches.budget).

        With batches_ahead both are what it says. Else the most let a rollout be AGE_SHARE of max_off_policy_steps old
        on average when it is used.
        """
        ahead = 1 if self.batches_ahead is None else self.batches_ahead
        least = self.groups_per_version + ahead * self.groups_per_batch
        if self.batches_ahead is not None:
            return least, least
        if max_off_policy_steps is None:
            return least, _NO_BOUND
        return least, max(least, round(max_off_policy_steps * self.groups_per_version * AGE_SHARE))

    def differences(self, other: "RunConfig") -> str:
        """Describe in one sentence the settings that differ, compared as JSON; empty if none differs.

        None of a setting in FREE_IF_NONE differs from nothing.
        """
        mine, theirs = (json.loads(json.dumps(asdict(config))) for config in (self, other))
        for name in FREE_IF_NONE:
            if mine[name] is None:
                del mine[name]
        names = [name for name in mine if mine[name] != theirs[name]]
        return ", ".join(f"{name} is {theirs[name]!r} there, {mine[name]!r} was asked for" for name in names)


FREE_IF_NONE = names_of(RunConfig, "free_if_none")
"""Settings whose None leaves the choice to ludic, so that it differs from no value."""
SAMPLING = names_of(RunConfig, "of_sampling")
"""Settings of a completion's sampling, which `sweep`, evaluations and `ludic sample` may override."""
