"""Try the code of a run before it starts: its environments, their first prompts, and its SQL.

Runs users' code, and so comes after consent: it gets an example and the first observation of an episode from each
environment, scores made-up answers of questions, and renders the first prompts with the model's chat template. Starts
no servers of tools. Each check returns its result, or raises a LudicError with the remedy.
"""

import json
import logging
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from ludic.agents import EpisodeFailedError, environment_tools
from ludic.agents import environment_calls as calls
from ludic.app.launch.config import Start
from ludic.app.launch.roots import rules_of
from ludic.environments import (
    Example,
    GroupAnswer,
    HeldEnvironment,
    LimitedEnvironments,
    MultiAgentEnvironment,
    SingleTurn,
    TimeLimit,
    Transition,
    event_loops,
)
from ludic.errors import ConfigError, LudicError, ModelError, TimeLimitError
from ludic.models import read_tokenizer, render_prompt, render_text
from ludic.records import Message
from ludic.rollouts import check_fits, check_sampling_code, has_program
from ludic.root.sql import try_rules
from ludic.root.storage import Storage
from ludic.run import located
from ludic.settings import NO_FILES, PROTOCOL, Files, describe_at
from ludic.training import OffPolicy

logger = logging.getLogger(__name__)

_SYNTHETIC_ANSWERS = ("42", "This is a made-up answer.")
_SYNTHETIC_TOOL = {
    "type": "function",
    "function": {
        "name": "made_up_tool",
        "description": "Placeholder for the run's tools, whose servers do not run yet.",
        "parameters": {"type": "object", "properties": {}},
    },
}
_SLOW_S = 10.0
"""Seconds after which a slow call is logged, since a person waits for it."""
_POSITIONS = re.compile("position|n_ctx|seq_len")
"""Matches the entries of a config.json that may limit the length of a sequence."""


@dataclass(frozen=True, slots=True)
class TrialNote:
    """Result of a check without an error."""

    text: str
    is_doubtful: bool = False
    """True if it is doubtful: the run starts, with a warning in the log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _First:
    """First messages of the agents of an environment."""

    prompts: Mapping[str, tuple[Message, ...]]
    """Messages by the id of the agent."""
    tools: Sequence[Mapping[str, Any]]
    """Schemas of the environment's own tools."""


class Trial:
    """Environments, the agent's parts and SQL, as a worker and a trainer load them."""

    def __init__(self, start: Start, files: Files = NO_FILES, *, slow_s: float = _SLOW_S) -> None:
        """files: contents that replace those on disk. slow_s: seconds of a call after which it is logged."""
        self._start, self._files, self._slow_s = start, files, slow_s
        self._limit = TimeLimit(timeout_s=start.processes.env_timeout_s)
        self._has_agents = bool(start.run.sub_agents)
        """True if an episode may have rows of several agents, who are compared with each other."""
        self._first: dict[str, _First] = {}
        """By environment; only sound environments that were tried."""

    @cached_property
    def _environments(self) -> Mapping[str, LimitedEnvironments]:
        start = self._start
        here = located(start.run, start.root or Storage.connect(start.url))
        return check_sampling_code(here, self._files, self._limit)

    def check(self) -> str:
        run = self._start.run
        return f"{', '.join(self._environments)} and the parser {run.parser} load"

    # --- Environments ----------------------------------------------------------------------------------------

    def check_environment(self, name: str) -> TrialNote | str:
        """Get an example and the first observation, and for questions score made-up answers."""
        found: list[TrialNote | str] = []

        async def look() -> None:
            found.append(await self._look(name, self._environments[name]))

        event_loops.run(look())
        return found[0]

    async def _look(self, name: str, environments: LimitedEnvironments) -> TrialNote | str:
        with self._guarded(name, "making it"):
            held = await calls.make(environments)
        try:
            with self._guarded(name, "example"):
                example = calls.example(environments, 0, "train")
            self._has_agents |= isinstance(held.environment, MultiAgentEnvironment)
            self._first[name] = await self._begin(name, held, example)
            if not isinstance(held.environment, SingleTurn):
                return f"gives example {example.example_id!r}"
            return await self._score(name, held, example)
        finally:
            held.close()

    async def _begin(self, name: str, held: HeldEnvironment, example: Example) -> _First:
        """Begin an episode, and return its agents' first messages; a user's protocol may begin it differently."""
        prompts = {"agent": example.messages}
        if has_program(self._start.run):
            check_fits(name, held)
        if self._start.run.protocol in (None, *PROTOCOL.built_in):
            with self._guarded(name, "reset"):
                if isinstance(held.environment, MultiAgentEnvironment):
                    prompts = await calls.reset_agents(held, example)
                else:
                    prompts = {"agent": await calls.reset(held, example)}
        with self._guarded(name, "its tools"):
            own, _ = environment_tools(held)
            schemas = calls.tools_of(held) if hasattr(held.environment, "run_tools") else []
        return _First(prompts=prompts, tools=[*(tool.schema for tool in own), *schemas])

    async def _score(self, name: str, held: HeldEnvironment, example: Example) -> TrialNote | str:
        errors: dict[str, str] = {}
        rewards: list[float] = []
        for answer in _answers(example):
            try:
                with self._guarded(name, f"score of the made-up answer {answer!r}"):
                    await calls.reset(held, example)
                    rewards.append((await calls.step(held, answer)).reward)
            except _TooSlowError:
                raise
            except ConfigError as error:
                errors[answer] = str(error)
        if rewards and hasattr(held.environment, "score_group"):
            rewards = await self._score_groups(name, held, example, errors)
        if not rewards:
            answer, why = next(iter(errors.items()))
            raise ConfigError(f"{why} (tried with the answer {answer!r}); correct it, then start again")
        said = f"gives example {example.example_id!r}, and a test answer scores {rewards[0]:g}"
        doubts = [f"but with the answer {answer!r}: {why}" for answer, why in [*errors.items()][:1]]
        doubts += getattr(held.environment, "notes", ())
        return TrialNote("; ".join([said, *doubts]), is_doubtful=True) if doubts else said

    async def _score_groups(
        self, name: str, held: HeldEnvironment, example: Example, errors: dict[str, str]
    ) -> list[float]:
        """Score made-up answers as groups, all together and then twice each; return the rewards of the first group
        that is scored, none if none is. Adds to the errors by answer."""
        answers = [answer for answer in _answers(example) if answer not in errors]
        found: dict[str, str] = {}
        for group in [answers, *([answer] * 2 for answer in answers)]:
            try:
                with self._guarded(name, "score_group of made-up answers"):
                    scored = []
                    for index, text in enumerate(group):
                        await calls.reset(held, example)
                        scored.append(_group_answer(example, text, index, await calls.step(held, text)))
                    rewards = [each.reward for each in await calls.score_group(held, example, scored)]
            except _TooSlowError:
                raise
            except ConfigError as error:
                found[group[0] if len({*group}) == 1 else ", ".join(group)] = str(error)
            else:
                errors |= found
                return rewards
        errors |= found
        return []

    @contextmanager
    def _guarded(self, name: str, what: str) -> Iterator[None]:
        """Raise ConfigError, with file and line of a user's mistake, for an error that fails an episode; log slow
        calls.

        Raises _TooSlowError for a call that did not return in time.
        """
        limit_s = self._limit.timeout_s
        until = "without a limit" if limit_s is None else f"up to {limit_s:g} s (--env-timeout-s) for each call"
        words = ("environment %s: %s takes more than %g s; it is waited for %s", name, what, self._slow_s, until)
        timer = threading.Timer(self._slow_s, logger.warning, words)
        timer.daemon = True
        timer.start()
        try:
            yield
        except EpisodeFailedError as error:
            cause = error.__cause__
            if isinstance(cause, TimeLimitError):
                raise _TooSlowError(str(cause)) from error
            is_users = isinstance(cause, Exception) and not isinstance(cause, LudicError)
            raise ConfigError(f"environment {name}: {describe_at(cause) if is_users else error}") from error  # type: ignore[arg-type]
        except (
            TypeError,
            ValueError,
        ) as error:  # from `checked`: the reward is not a number; from tools: there is no schema
            raise ConfigError(f"environment {name}: {error}") from error
        finally:
            timer.cancel()

    # --- Prompts ---------------------------------------------------------------------------------------------

    def check_prompts(self, folder: Path) -> TrialNote | str:
        """Render the agents' first messages as a worker will. folder: of the model, with config.json and the
        tokenizer."""
        tokenizer = read_tokenizer(str(folder))
        tokenizer.name_or_path = self._start.run.model
        render_prompt(tokenizer, [Message(role="user", content="made up")])  # refuses a tokenizer without a template
        if not self._first:
            return "none, since no environment could be tried"
        lengths = {
            name: max(self._check_prompt(name, tokenizer, messages, first.tools) for messages in prompts)
            for name, first in self._first.items()
            if (prompts := [messages for messages in first.prompts.values() if messages])
        }
        if not lengths:
            return "none: no environment gives a first prompt"
        name = max(lengths, key=lambda each: lengths[each])
        return self._compare_with_positions(name, lengths[name], folder)

    def _check_prompt(
        self, name: str, tokenizer: Any, messages: Sequence[Message], own: Sequence[Mapping[str, Any]]
    ) -> int:
        """Return the length of a first prompt in tokens. Raises ConfigError for one that the model would not see."""
        model, run = self._start.run.model, self._start.run
        if messages[-1].role == "assistant":
            raise ConfigError(
                f"environment {name}: its first prompt ends with a message of the assistant, so the model would answer "
                "its own answer; end it with a message of the user"
            )
        tools = [*own, _SYNTHETIC_TOOL] if run.tools or run.sub_agents else own
        try:
            text = render_text(tokenizer, messages, tools=tools)
            length = len(render_prompt(tokenizer, messages, tools=tools))
        except ModelError as error:
            raise ConfigError(f"environment {name}: {error}") from error
        for tool in (each["function"]["name"] for each in tools):
            if tool not in text:
                raise ConfigError(f"environment {name}: {model}: the chat template does not show the tool {tool}")
        if (hidden := _hidden_message(tokenizer, messages, tools)) is not None:
            raise ConfigError(
                f"environment {name}: {model}: the chat template does not show messages of role "
                f"{messages[hidden].role!r}, so the model would never see message {hidden} of the prompt; give it "
                "another role, such as user"
            )
        return length

    def _compare_with_positions(self, name: str, length: int, folder: Path) -> TrialNote | str:
        """Compare the longest first prompt and max_tokens with the longest row of the model."""
        run = self._start.run
        wanted = length + run.max_tokens
        text = f"the longest of the first prompts has {length:,} tokens"
        if wanted <= _least_positions(json.loads((folder / "config.json").read_bytes())):
            return text
        from ludic.models import (
            load_config,
            max_positions,  # takes seconds to import
        )

        positions = max_positions(load_config(str(folder)), run.longrope)
        if wanted <= positions:
            return text
        fits = positions - length
        advice = f"lower --max-tokens to {fits}" if fits > 0 else "shorten the prompt, or take a model with more"
        return TrialNote(
            f"environment {name}: a prompt of {length:,} tokens and max_tokens {run.max_tokens:,} exceed the "
            f"{positions:,} positions of {run.model}, and such episodes fail; {advice}",
            is_doubtful=True,
        )

    # --- SQL -------------------------------------------------------------------------------------------------

    def check_sql(self) -> str:
        start = self._start
        rules = replace(rules_of(start.run, start.train), files=self._files)
        return try_rules(
            rules,
            start.run.extra_columns,
            group_size=start.run.group_size,
            env_name=start.run.env[0],
            is_weighted=isinstance(start.train.loss.objective, OffPolicy) and not self._has_agents,
        )


def _hidden_message(tokenizer: Any, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> int | None:
    """Return the index of the first message that the chat template omits; None if it shows all, or if that is unknown.

    Rendered with a mark in place of each text, since a text may occur elsewhere.
    """
    marked = [replace(message, content=f"Message{index}x") for index, message in enumerate(messages)]
    try:
        text = render_text(tokenizer, marked, tools=tools)
    except ModelError:  # raised by a template that reads the texts
        return None
    # Some templates show the calls of a message instead of its text.
    expected = [index for index, message in enumerate(messages) if message.content and not message.tool_calls]
    return next((index for index in expected if f"Message{index}x" not in text), None)


class _TooSlowError(ConfigError):
    """A call of an environment did not return in time; trying others would take as long again."""


def _least_positions(config: Any) -> int:
    """Return the smallest number in a config.json that may limit the length of a sequence; 0 if there is none."""
    inner = [each for each in config.values() if isinstance(each, Mapping)] if isinstance(config, Mapping) else []
    found = [
        value
        for values in (config, *inner)
        for name, value in values.items()
        if _POSITIONS.search(name) and isinstance(value, int) and value > 0 and not isinstance(value, bool)
    ]
    return min(found, default=0)


def _group_answer(example: Example, text: str, index: int, transition: Transition) -> GroupAnswer:
    return GroupAnswer(
        text=text,
        reward=transition.reward,
        components=transition.reward_components,
        messages=(*example.messages, Message(role="assistant", content=text)),
        group_index=index,
        agent_id="agent",
        correct=transition.correct,
    )


def _answers(example: Example) -> list[str]:
    """Return made-up answers, the right one first if the example has one."""
    if example.wanted:
        return [example.wanted, *_SYNTHETIC_ANSWERS]
    return list(_SYNTHETIC_ANSWERS)
