"""Make and run the program of an episode: an agent of a user's, a function or command that calls the model over HTTP.

The program knows nothing of ludic: it gets an example, an address and a key, and ends with a text. A function that is
`async` runs in the event loop, any other in a thread of its own; a command runs in a folder of its own
(ludic.rollouts.commands). Raises ConfigError for a program that can't be made, EpisodeFailedError if it fails.
"""

import asyncio
import inspect
import json
import os
import stat
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from reprlib import repr as shown
from typing import Any, Protocol

from ludic.agents import EpisodeFailedError, fails_the_episode
from ludic.base import is_installed
from ludic.environments import HeldEnvironment
from ludic.errors import ConfigError
from ludic.records import Message
from ludic.rollouts.commands import check_program, environment_of, fill, limits_of, run_command, split_command
from ludic.rollouts.presets import Preset
from ludic.run import RunConfig
from ludic.settings import AGENT, NO_FILES, Files, SideThread, find, python_file_of

_MOST_ANSWER_BYTES = 1_000_000
"""Bytes of the answer that are read from the file that a command wrote."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What a program gets for an episode."""

    example_id: str
    messages: tuple[Message, ...]
    """First messages of the environment."""
    columns: Mapping[str, Any]
    """Other columns of the example in its data set."""
    model: str
    """Name to call the model by."""
    variables: Mapping[str, str] = field(repr=False)
    """OPENAI_BASE_URL, OPENAI_API_KEY, ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY; the key is the episode's secret."""
    folder: Path
    """Empty folder of the episode, deleted after it; see `work`."""
    tools: "AgentTools"
    clients: "Clients"

    @property
    def base_url(self) -> str:
        """Base URL of the OpenAI API."""
        return self.variables["OPENAI_BASE_URL"]

    @property
    def api_key(self) -> str:
        """Secret of the episode."""
        return self.variables["OPENAI_API_KEY"]

    @property
    def work(self) -> Path:
        """Working folder of the program, which `score_folder` and score_command see."""
        return self.folder / "work"

    @property
    def prompt(self) -> str:
        """Texts of the messages, one after the other."""
        return "\n\n".join(message.content for message in self.messages)

    @property
    def example(self) -> dict[str, Any]:
        """The example as JSON values."""
        return {
            "id": self.example_id,
            "messages": [{"role": each.role, "content": each.content} for each in self.messages],
            "prompt": self.prompt,
            "columns": dict(self.columns),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramEnd:
    """How a program ended."""

    text: str | None = None
    """Its final text; None takes that of the last answer of the model."""
    exit_code: int | None = None
    """Of a command."""
    last_output: str | None = None
    """End of the output of a command."""


class AgentProgram(Protocol):
    """Runs an agent in one episode after the other, many at the same time."""

    async def run(self, task: Task) -> ProgramEnd:
        """Run it to its end. Raises EpisodeFailedError. If this is cancelled, the program is stopped."""
        ...


def has_program(run: RunConfig) -> bool:
    """Return whether a program plays the run's episodes, and no protocol."""
    return run.agent is not None or run.agent_command is not None


def most_in_flight(run: RunConfig) -> int | None:
    """Return how many episodes run at a time, if no setting says so; None is as many as keep the engine full.

    The processes of a command take memory and CPU of the worker's machine.
    """
    is_command = has_program(run) and (run.agent is None or python_file_of(run.agent) is None)
    return max(4, 2 * (os.cpu_count() or 1)) if is_command else None


def check_fits(name: str, held: HeldEnvironment) -> None:
    """Raise ConfigError for an environment that an agent which makes its own calls can't play in."""
    for attribute, what in (("next_agents", "has several agents"), ("run_tools", "runs the agent's tool calls itself")):
        if hasattr(held.environment, attribute):
            raise ConfigError(
                f"environment {name} {what} ({attribute}), and an agent that makes its own calls can't play in it; "
                "take another environment, or leave out agent"
            )


def make_program(run: RunConfig, files: Files = NO_FILES) -> AgentProgram:
    """Return the program of a run's settings; runs a user's file.

    files: users' files to run instead of those on disk.
    """
    if run.score_command is not None:
        split_command("score_command", run.score_command)
    if run.agent_command is not None:
        return CommandProgram(run, split_command("agent_command", run.agent_command))
    assert run.agent is not None, "a program plays the run's episodes"
    found = find(AGENT, run.agent, files)
    if isinstance(found, Preset):
        check_program(f"agent {run.agent}", found.words[0])
        return CommandProgram(run, found.words, found)
    return FunctionProgram(run.agent, found)


# --- Functions -----------------------------------------------------------------------------------------------


class AgentTools:
    """Tools of the environment, which a function may call while its episode runs."""

    def __init__(self, schemas: Sequence[Mapping[str, Any]], call: Callable[[str, str], Any]) -> None:
        """call: runs a tool by name with its arguments as JSON text, as a coroutine, and returns its result or its
        error as a text."""
        fields = ("name", "description", "parameters")
        self.schemas = [
            {
                "type": "function",
                "function": {name: each["function"][name] for name in fields if name in each["function"]},
            }
            for each in schemas
        ]
        """Schemas for `tools` of a chat completion."""
        self._call, self._loop = call, asyncio.get_running_loop()

    def call(self, name: str, arguments: str | Mapping[str, Any]) -> Any:
        """Return the result of a tool, or its error, as a text. arguments: an object, or its JSON text.

        In an async function it is awaited.
        """
        text = arguments if isinstance(arguments, str) else json.dumps(arguments)
        coroutine = self._call(name, text)
        with suppress(RuntimeError):
            asyncio.get_running_loop()
            return coroutine
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()


class Clients:
    """Clients of the openai package, which share their connections."""

    def __init__(self) -> None:
        self._shared: dict[bool, Any] = {}

    @classmethod
    @asynccontextmanager
    async def opened(cls) -> AsyncIterator["Clients"]:
        """Yield them, and close their connections at the end."""
        clients = cls()
        try:
            yield clients
        finally:
            for client in clients._shared.values():
                closed = client.close()
                if inspect.isawaitable(closed):
                    await closed

    def of(self, task: Task, *, is_async: bool) -> Any:
        """Return an AsyncOpenAI, or an OpenAI, with address and key of an episode."""
        import openai

        if is_async not in self._shared:
            client: Any = openai.AsyncOpenAI if is_async else openai.OpenAI
            http: Any = openai.DefaultAsyncHttpxClient if is_async else openai.DefaultHttpxClient
            # The model is on this machine, so no proxy; and the episode has a limit of time, if any.
            self._shared[is_async] = client(
                api_key="none", base_url=task.base_url, timeout=None, http_client=http(trust_env=False)
            )
        return self._shared[is_async].with_options(api_key=task.api_key, base_url=task.base_url)


_ARGUMENTS: Mapping[str, Callable[[Task], Any]] = {
    "example": lambda task: task.example,
    "model": lambda task: task.model,
    "base_url": lambda task: task.base_url,
    "api_key": lambda task: task.api_key,
    "folder": lambda task: str(task.work),
    "tools": lambda task: task.tools,
}
"""Arguments of a function by name, besides `client`."""


class FunctionProgram:
    """A user's function."""

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        """Raises ConfigError for a function with other parameters, or that wants a client that is not installed."""
        self._name, self._function = name, function
        self._is_async = inspect.iscoroutinefunction(function)
        parameters = inspect.signature(function).parameters
        known = [*_ARGUMENTS, "client"]
        for each in parameters.values():
            is_named = each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)
            if not (each.name in known and is_named) and each.default is each.empty:
                raise ConfigError(
                    f"agent {name} takes {each}, wanted parameters of these names: {', '.join(sorted(known))}"
                )
        self._wanted = [each for each in parameters if each in known]
        if "client" in self._wanted and not is_installed("openai"):
            raise ConfigError(
                f"agent {name} takes a client, and the package openai is not installed; pip install openai, or take "
                "base_url and api_key"
            )
        annotation = getattr(parameters.get("client"), "annotation", "")
        named = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", "")
        kinds = {"AsyncOpenAI": True, "OpenAI": False}
        self._has_async_client = kinds.get(named.rpartition(".")[2], self._is_async)

    async def run(self, task: Task) -> ProgramEnd:
        """Call the function."""
        given = {name: _ARGUMENTS[name](task) for name in self._wanted if name != "client"}
        if "client" in self._wanted:
            given["client"] = task.clients.of(task, is_async=self._has_async_client)
        with fails_the_episode():
            function = partial(self._function, **given)
            found = await (function() if self._is_async else _in_thread(function))
            if found is not None and not isinstance(found, str):
                raise TypeError(f"agent {self._name} returned {shown(found)}, wanted its final text, or None")
        return ProgramEnd(text=found)


async def _in_thread(function: Callable[[], Any]) -> Any:
    """Return what a function returns, from a thread of its own, which is interrupted if this is cancelled."""
    thread = SideThread()
    try:
        found = await thread.run(function)
        return await found if inspect.isawaitable(found) else found
    except asyncio.CancelledError:
        thread.interrupt()
        raise
    finally:
        thread.close()


# --- Commands ------------------------------------------------------------------------------------------------


class CommandProgram:
    """A command, which is started in each episode."""

    def __init__(self, run: RunConfig, words: Sequence[str], preset: Preset | None = None) -> None:
        self._settings, self._words, self._preset = run, words, preset

    async def run(self, task: Task) -> ProgramEnd:
        """Run the command in the working folder of the episode."""
        with fails_the_episode():  # by a full disk, or a prompt that is too long for a command line
            return await self._run(task)

    async def _run(self, task: Task) -> ProgramEnd:
        example, answer, home = task.folder / "example.json", task.folder / "answer.txt", task.folder / "home"
        prompt = task.folder / "prompt.txt"
        home.mkdir(exist_ok=True)
        prompt.write_bytes(task.prompt.encode(errors="replace"))
        example.write_text(json.dumps(task.example, default=str), encoding="utf-8")
        variables = {
            **task.variables,
            "OPENAI_API_BASE": task.base_url,
            "OPENAI_MODEL": task.model,
            "ANTHROPIC_MODEL": task.model,
            "LUDIC_EXAMPLE": str(example),
            "LUDIC_ANSWER": str(answer),
        }
        if self._preset is not None:
            for name, text in self._preset.files(task.model, task.base_url).items():
                (home / name).parent.mkdir(parents=True, exist_ok=True)
                (home / name).write_text(text, encoding="utf-8")
            preset = {name: value.replace("$HOME", str(home)) for name, value in self._preset.variables.items()}
            variables = {**preset, **variables}
        values = {
            "prompt": task.prompt,
            "example": str(example),
            "folder": str(task.work),
            "answer": str(answer),
            "model": task.model,
            "base_url": task.base_url,
        }
        words = [_without_nul(word) for word in fill(self._words, values)]
        end = await run_command(
            words,
            folder=task.work,
            environment=environment_of(self._settings, home, variables),
            limits=limits_of(self._settings),
            secret=task.api_key,
            source=prompt if self._preset is not None and self._preset.reads_prompt else Path(os.devnull),
        )
        return ProgramEnd(text=_read_answer(answer), exit_code=end.exit_code, last_output=end.output)


def _without_nul(word: str) -> str:
    """Return a word of a command. Raises EpisodeFailedError for a text that no command line can hold."""
    if "\0" in word:
        raise EpisodeFailedError("a text of the example holds the character 0, which no command line can hold")
    return word.encode(errors="replace").decode()


def _read_answer(file: Path) -> str | None:
    """Return the text that a command wrote as its answer; None if it wrote none."""
    try:
        # A pipe that nobody writes to would block the worker.
        with os.fdopen(os.open(file, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)), "rb") as answer:
            if not stat.S_ISREG(os.fstat(answer.fileno()).st_mode):
                raise EpisodeFailedError("the answer of the command is no plain file")
            data = answer.read(_MOST_ANSWER_BYTES + 1)
    except (FileNotFoundError, IsADirectoryError):
        return None
    except OSError as error:
        raise EpisodeFailedError(f"the answer of the command can't be read: {error.strerror or error}") from error
    if len(data) > _MOST_ANSWER_BYTES:
        raise EpisodeFailedError(f"the answer of the command has more than {_MOST_ANSWER_BYTES:,} bytes")
    return data.decode(errors="replace").strip() or None
