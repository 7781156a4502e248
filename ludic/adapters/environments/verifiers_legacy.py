"""Environments of verifiers 0.1.11 to 0.3: a module with `load_environment`. Importing this imports verifiers.

verifiers' own `rollout` plays the episode: its turns, its tools, its stops and its state. `_Client` takes the place of
the client of a model and hands each question to ludic. Then verifiers' own rubric scores the state.

A reward function that raises gives 0 in verifiers, and a line in the log. Here it fails the episode, as everywhere in
ludic, with its file and line.

Refused with the reason: what needs a sandbox, a container or a browser, images and sounds, completions without chat,
and reward functions that see a group.
"""

import importlib
import importlib.util
import inspect
import json
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import wraps
from hashlib import sha256
from typing import Any

import verifiers as vf

from ludic.adapters.environments.verifiers_turns import TurnChannel, VerifiersOutcome, plain
from ludic.base import installed_version
from ludic.environments import Example, Split, partition
from ludic.errors import ConfigError

_NEEDS = {
    "SandboxEnv": "a sandbox",
    "SandboxMixin": "a sandbox",
    "OpenEnvEnv": "a container",
    "BrowserEnv": "a browser",
}
"""Classes of verifiers, by name since most of them need further packages to be imported, and what they need."""

_CUT = ("max_turns_reached", "max_total_completion_tokens_reached", "prompt_too_long", "timeout_reached")
"""Stop conditions of verifiers that are limits."""

_NOT_COLUMNS = ("prompt", "question", "answer", "example_id")
"""Columns of a row that are stored as prompt, wanted answer and position; the others are columns of its example."""

# --- Loading ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class LegacyRows:
    """An Environment with the rows of its data sets; a `Loaded`."""

    env: Any
    rows: Sequence[tuple[Any, int]]
    """Data set of each number, and the index of its row."""
    numbers: Mapping[Split, Sequence[int]]
    max_turns: int | None
    weights: Mapping[str, float]
    """Weights of the rubric's functions, by name."""

    def row(self, number: int) -> dict[str, Any]:
        """Return a row of a data set."""
        dataset, index = self.rows[number]
        return dict(dataset[index])

    def example(self, number: int) -> Example:
        """Return the example of a row."""
        row = self.row(number)
        answer = row.get("answer")
        return Example(
            example_id=_digest(row)[:16],
            messages=plain(_messages_of(row)),
            data={"number": number},
            wanted=str(answer) if answer not in (None, "") else None,
            columns={name: value for name, value in row.items() if name not in _NOT_COLUMNS},
        )

    async def play(self, number: int, line: TurnChannel) -> VerifiersOutcome:
        """Play the example of a row as verifiers' own run_rollout does, but let errors out."""
        env = self.env
        failures: list[Exception] = []
        _failures.set(failures)
        state = await env.rollout(self.row(number), _Client(line), "ludic", {})
        if (error := state.get("error")) is not None:
            raise error.__cause__ or error
        line.send(_after_the_last_turn(state))
        if env.score_rollouts:
            await env.rubric.score_rollout(state)
        else:
            await env.rubric.dummy_score_rollout(state)
        await env.rubric.cleanup(state)
        if failures:
            raise failures[0]
        metrics = state["metrics"] or {}
        return VerifiersOutcome(
            reward=state["reward"],
            components={name: value * (self.weights.get(name) or 1.0) for name, value in metrics.items()},
            stop_condition=str(state.get("stop_condition")),
            is_cut=_is_cut(state),
        )


def load(name: str, options: Mapping[str, Any], num_rows: int | None) -> LegacyRows:
    """Load an environment. options: arguments of its load_environment. num_rows: of each data set; None takes all.

    Raises ConfigError, and what the environment raises.
    """
    if importlib.util.find_spec("verifiers.clients") is None:
        raise ConfigError(
            f"verifiers {installed_version('verifiers')} is too old; pip install 'verifiers>=0.1.11,<0.4'"
        )
    with _own_signals():
        try:
            env = vf.load_environment(name, **options)
        except (RuntimeError, ValueError) as error:
            raise (error.__cause__ or error) from None  # verifiers hides what the package raised
    train, heldout = env.build_dataset(), env.build_eval_dataset()
    _refuse(env, name)
    train = () if train is None else range(min(len(train), num_rows or len(train)))
    sets = [(env.dataset, index) for index in train]
    if heldout is None:
        numbers = partition(range(len(sets)), lambda number: _prompt_key(env.dataset[number]))
    else:
        size = min(len(heldout), num_rows or len(heldout))
        # A question of the evaluation is never trained on.
        keys = {_prompt_key(heldout[index]) for index in range(size)}
        left = tuple(index for index in train if _prompt_key(env.dataset[index]) not in keys)
        numbers = {"train": left, "heldout": tuple(range(len(sets), len(sets) + size))}
        sets += [(heldout, index) for index in range(size)]
    loaded = LegacyRows(
        env=env,
        rows=sets,
        numbers=numbers,
        max_turns=env.max_turns if getattr(env, "max_turns", -1) > 0 else None,
        weights=_weights(env.rubric),
    )
    if sets:
        loaded.example(0)
    _report_failures(env.rubric)
    return loaded


@contextmanager
def _own_signals() -> Iterator[None]:
    """Keep this process's handlers of signals; an Environment replaces them when it is made."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _refuse(env: Any, name: str) -> None:
    problem = next(_problems(env), None)
    if problem is not None:
        raise ConfigError(f"{name} {problem}; ludic runs environments of verifiers that need only text and their tools")


def _problems(env: Any) -> Iterator[str]:
    """Yield what an Environment needs beyond text and tools."""
    for each in (env, *getattr(env, "envs", ())):
        for base in type(each).__mro__:
            if base.__module__.startswith("verifiers.") and base.__name__ in _NEEDS:
                yield f"is a {base.__name__}, which needs {_NEEDS[base.__name__]}"
        if each.message_type != "chat":
            yield f"has the message_type {each.message_type!r}, and ludic's agents chat"
    for function in _functions(env.rubric):
        if vf.Rubric()._is_group_func(function):
            yield f"has the reward function {_name(function)}, which sees the answers of a group"


def _digest(row: Mapping[str, Any]) -> str:
    """Return the digest of a row without its position."""
    kept = {key: value for key, value in row.items() if key != "example_id" and value is not None}
    return sha256(json.dumps(kept, sort_keys=True, default=str).encode()).hexdigest()


def _prompt_key(row: Mapping[str, Any]) -> str:
    """Return what identifies the question of a row, so that equal questions are in one split."""
    prompt = row["prompt"]
    if isinstance(prompt, str):
        return prompt
    kept = [{key: value for key, value in dict(message).items() if value is not None} for message in prompt]
    return json.dumps(kept, sort_keys=True, default=str)


def _messages_of(row: Mapping[str, Any]) -> Sequence[Any]:
    """Return the prompt of a row as messages of verifiers. Raises ConfigError for a prompt without roles."""
    prompt = row["prompt"]
    if isinstance(prompt, str):
        raise ConfigError(f"a prompt is the text {prompt[:40]!r}, wanted messages; use the column `question` for texts")
    utilities = importlib.import_module("verifiers.utils.message_utils")
    messages: Sequence[Any] = utilities.normalize_messages(prompt, field_name="prompt")
    return messages


# --- Rubrics ---------------------------------------------------------------------------------------------


def _rubrics(rubric: Any) -> Iterator[Any]:
    """Yield a rubric and those that it is made of: of a RubricGroup, and of the environments of an EnvGroup."""
    yield rubric
    inner = [*getattr(rubric, "rubrics", ()), *(env.rubric for env in getattr(rubric, "env_map", {}).values())]
    for each in inner:
        yield from _rubrics(each)


def _functions(rubric: Any) -> list[Callable[..., Any]]:
    return [function for each in _rubrics(rubric) for function in each.funcs]


def _weights(rubric: Any) -> dict[str, float]:
    pairs = (pair for each in _rubrics(rubric) for pair in zip(each.funcs, each.weights, strict=True))
    return {_name(function): float(weight) for function, weight in pairs}


def _name(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__name__", repr(function)))


_failures: ContextVar[list[Exception]] = ContextVar("failures")
"""Errors of reward functions in the episode of this context."""


def _report_failures(rubric: Any) -> None:
    """Let the functions of a rubric note what they raise, since the rubric makes it a 0."""
    for each in _rubrics(rubric):
        each.funcs[:] = [_noting(function) for function in each.funcs]


def _noting(function: Callable[..., Any]) -> Callable[..., Any]:
    async def awaited(result: Any) -> Any:
        try:
            return await result
        except Exception as error:
            _failures.get().append(error)
            raise

    @wraps(function)
    def noting(*args: Any, **options: Any) -> Any:
        try:
            result = function(*args, **options)
        except Exception as error:
            _failures.get().append(error)
            raise
        return awaited(result) if inspect.isawaitable(result) else result

    return noting


# --- Episodes --------------------------------------------------------------------------------------------


class _Client(vf.Client):
    """The client of a model that verifiers asks: each question goes to ludic's agent.

    A question holds the whole conversation; what is new in it is what follows the last question and its answer.
    """

    def __init__(self, line: TurnChannel) -> None:
        super().__init__(line)
        self._line = line
        self._seen: list[Any] = []
        """Messages of the last question, and its answer."""

    async def get_native_response(
        self, prompt: Sequence[Any], model: str, sampling_args: Any, tools: Sequence[Any] | None = None, **options: Any
    ) -> Any:
        if not _same(prompt[: len(self._seen)], self._seen):
            raise RuntimeError(
                "the environment rewrote the conversation, or asked its model aside; ludic's agent sees each message "
                "once"
            )
        self._line.send(prompt[len(self._seen) :])
        reply = await self._line.ask(tools or ())
        types = importlib.import_module("verifiers.types")
        calls = [types.ToolCall(id=call.id, name=call.name, arguments=call.arguments) for call in reply.calls]
        message = types.ResponseMessage(
            content=reply.text,
            tool_calls=calls or None,
            finish_reason="tool_calls" if calls else "stop",
            is_truncated=False,
        )
        self._seen = [*prompt, message]
        return types.Response(id="ludic", created=0, model=model, usage=None, message=message)

    async def to_native_tool(self, tool: Any) -> dict[str, Any]:
        about = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
        return {"type": "function", "function": about}

    async def to_native_prompt(self, messages: Sequence[Any]) -> tuple[Sequence[Any], dict[str, Any]]:
        return messages, {}

    async def from_native_response(self, response: Any) -> Any:
        return response

    async def raise_from_native_response(self, response: Any) -> None:
        pass

    def setup_client(self, config: Any) -> Any:
        raise NotImplementedError("it is made with a line")

    async def close(self) -> None:
        pass


def _same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    """Return whether messages say the same."""
    return [_said(each) for each in some] == [_said(each) for each in others]


def _said(message: Any) -> tuple[Any, ...]:
    calls = [(call.name, call.arguments) for call in getattr(message, "tool_calls", None) or ()]
    return message.role, message.content or "", calls


def _after_the_last_turn(state: Any) -> Sequence[Any]:
    """Return the messages after the last completion, such as the results of tools that ended the episode."""
    final = state.get("final_env_response") or ()
    return [] if isinstance(final, str) else _messages_of({"prompt": final})


def _is_cut(state: Any) -> bool:
    """Return whether a limit ended an episode: of several turns, and not with an answer of an agent that has tools."""
    if state.get("stop_condition") not in _CUT:
        return False
    turns = state["trajectory"]
    has_answered = bool(state.get("tool_defs")) and not getattr(turns[-1]["completion"][-1], "tool_calls", None)
    return len(turns) > 1 and not has_answered
