"""Agents that know nothing of ludic work through the gateway, and its rows hold what the engine sampled.

Each client is a program of tests/gateway_clients/programs, or a preset of `--agent`, in an environment of its own which
`make gateway-clients` installs. It gets a task, calls real tools in a folder of its own, and ends with a text. A script
drives the choice of tokens, since a tiny model rarely writes a valid tool call; one test has a real model. All of it
talks to 127.0.0.1 alone: before every other address stands a proxy that nobody answers.
"""

import os
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gateway.scripted import Asked, says, scripted_agent
from gateway.served import Episode, check_account, served
from tiny_models import forward_logprobs, make_model

from ludic.agents.agent import Agent
from ludic.engines.config import EngineConfig
from ludic.engines.engine import SamplingParams
from ludic.engines.registry import EngineSetup, engine_maker
from ludic.gateway.config import GatewaySettings
from ludic.gateway.episodes import agent_variables
from ludic.models.chat import load_tokenizer
from ludic.rollouts.commands import fill
from ludic.rollouts.presets import CODEX, Preset
from ludic.root.root import Root
from ludic.root.rows.calls import read_calls
from ludic.run.config import RunConfig
from ludic.run.run_json import put_run

PROGRAMS = Path(__file__).parent / "programs"
ENVIRONMENTS = Path(__file__).parents[2] / ".venv"
WRITE, READ = "echo one > notes.txt", "cat notes.txt"
ANSWER = "It says one."

Turns = Sequence[str]


def shell_turns(name: str, key: str, **also: Any) -> Turns:
    """Turns of a model that has a tool for commands."""
    return [
        says("I write.", (name, {key: WRITE, **also})),
        says("Now I look.", (name, {key: READ, **also})),
        says(ANSWER),
    ]


OWN_TOOLS = [
    says("", ("run", {"command": WRITE})),
    says("Now I look.", ("read_file", {"path": "notes.txt"})),
    says(ANSWER),
]


@dataclass(frozen=True, kw_only=True)
class Client:
    """A program or a preset, and what its model does."""

    program: str = ""
    preset: Preset | None = None
    """What a user gets by `--agent NAME`, in the place of a program."""
    environment: str = "clients-openai3"
    turns: Turns = field(default_factory=lambda: OWN_TOOLS)
    streams: bool | None = None
    """Whether it streams; None: both are tried."""
    variables: Mapping[str, str] = field(default_factory=dict)
    lenient: bool = False
    num_rows: int = 1
    """Rows of the episode: more than one if it asks for other things too, or writes past calls in another way."""
    num_calls: int = 3


CLIENTS = {
    "openai 3": Client(program="openai_chat.py"),
    "openai 2": Client(program="openai_chat.py", environment="clients-openai2"),
    "openai 3, responses": Client(program="openai_responses.py"),
    "openai 2, responses": Client(program="openai_responses.py", environment="clients-openai2"),
    "anthropic": Client(program="anthropic_messages.py"),
    "openai-agents": Client(program="openai_agents.py"),
    "openai-agents, responses": Client(program="openai_agents.py", variables={"API": "responses"}),
    "litellm": Client(program="litellm_loop.py"),
    "langgraph": Client(program="langgraph_agent.py"),
    "pydantic-ai": Client(program="pydantic_ai_agent.py"),
    # It requires a tool call at each step, also for its answer, and sends past calls as text.
    "smolagents": Client(
        program="smolagents_agent.py",
        turns=[*OWN_TOOLS[:2], says("", ("final_answer", {"answer": ANSWER}))],
        lenient=True,
        num_rows=3,
    ),
    "mini-swe-agent": Client(
        program="mini_swe.py",
        turns=[
            *shell_turns("bash", "command")[:2],
            says("Done.", ("bash", {"command": f"echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; echo {ANSWER}"})),
        ],
        streams=False,
    ),
    **{
        name: Client(
            program="pi.sh",
            environment="clients-node",
            turns=shell_turns("bash", "command"),
            streams=True,
            variables={"API": api},
        )
        for name, api in (
            ("pi", "openai-completions"),
            ("pi, responses", "openai-responses"),
            ("pi, messages", "anthropic-messages"),
        )
    },
    "codex": Client(preset=CODEX, environment="clients-node", turns=shell_turns("exec_command", "cmd"), streams=True),
    # Its thinking comes back as reasoning items.
    "codex, thinking": Client(
        preset=CODEX,
        environment="clients-node",
        turns=[f"<think>\nHm.\n</think>\n\n{turn}" for turn in shell_turns("exec_command", "cmd")],
        streams=True,
    ),
    "claude-code": Client(
        program="claude_code.sh",
        environment="clients-node",
        turns=shell_turns("Bash", "command", description="A command"),
        streams=True,
    ),
    "opencode": Client(
        program="opencode.sh",
        environment="clients-node",
        turns=shell_turns("bash", "command", description="A command"),
        streams=True,
        num_rows=2,  # it asks for a title
        num_calls=4,
    ),
}
CASES = [
    (name, streams)
    for name, client in CLIENTS.items()
    for streams in (False, True)
    if client.streams in (None, streams)
]


def script_of(turns: Turns) -> Callable[[Asked], str]:
    def turn(asked: Asked) -> str:
        if "title generator" in asked.prompt:
            return says("Notes")
        return turns[len(re.findall(r"<\|im_start\|>assistant\n", asked.prompt)) - 1]

    return turn


def prepare_home(preset: Preset, home: Path, values: Mapping[str, str]) -> Mapping[str, str]:
    """Write the files of a preset; returns its variables."""
    for name, text in preset.files(values["model"], values["base_url"]).items():
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text(text)
    return {name: value.replace("$HOME", str(home)) for name, value in preset.variables.items()}


def run_client(client: Client, episode: Episode, folder: Path, *, streams: bool, task: str) -> str:
    """Run a client in folder/work; returns what its program prints, or the answer that a preset writes."""
    binaries = (
        ENVIRONMENTS / client.environment / ("node_modules/.bin" if client.environment == "clients-node" else "bin")
    )
    if not binaries.exists():
        pytest.skip(f"{binaries} is not installed; `make gateway-clients` installs it and runs these tests")
    for name in ("work", "home"):
        (folder / name).mkdir(exist_ok=True)
    home, answer = folder / "home", folder / "answer.txt"
    addresses = agent_variables(episode.url, episode.episode_id, episode.attempt, episode.key)
    if client.preset is None:
        program = PROGRAMS / client.program
        command = ["sh", program, binaries] if program.suffix == ".sh" else [binaries / "python", program]
        variables = client.variables
    else:
        values = {"prompt": task, "answer": str(answer), "model": "scripted", "base_url": addresses["OPENAI_BASE_URL"]}
        command = [binaries / client.preset.words[0], *fill(client.preset.words[1:], values)]
        variables = prepare_home(client.preset, home, values)
    nobody = "http://127.0.0.1:9"
    done = subprocess.run(
        command,
        cwd=folder / "work",
        env={
            "PATH": os.environ["PATH"],
            "HOME": str(home),
            "PYTHONDONTWRITEBYTECODE": "1",
            **{name: nobody for proxy in ("http_proxy", "https_proxy") for name in (proxy, proxy.upper())},
            "NO_PROXY": "127.0.0.1",
            "no_proxy": "127.0.0.1",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "MSWEA_SILENT_STARTUP": "1",
            "MODEL": "scripted",
            "TASK": task,
            "STREAM": str(int(streams)),
            **addresses,
            **variables,
        },
        capture_output=True,
        text=True,
        timeout=240,
        input=task if client.preset is not None and client.preset.reads_prompt else "",
    )
    assert done.returncode == 0, f"{done.stdout[-2_000:]}\n{done.stderr[-4_000:]}"
    return done.stdout if client.preset is None else answer.read_text()


@pytest.fixture
def root(tmp_path: Path) -> Root:
    return put_run(str(tmp_path / "root"), RunConfig(model="scripted", env=("moar_cats",)))


@pytest.mark.parametrize(
    ("name", "streams"), CASES, ids=lambda value: {False: "whole", True: "streamed"}.get(value, value)
)
def test_the_rows_of_a_client_hold_what_the_engine_sampled(
    name: str, streams: bool, root: Root, tmp_path: Path
) -> None:
    client = CLIENTS[name]
    agent = scripted_agent(script_of(client.turns))
    with served(root, agent, settings=GatewaySettings(lenient=client.lenient)) as gateway:
        episode = gateway.open_episode()
        task = "Put the word one into notes.txt and check it."
        printed = run_client(client, episode, tmp_path, streams=streams, task=task)
        gateway.wait_until_idle()
        episode.seal()
    assert ANSWER in printed.rpartition("FINAL: ")[2]
    assert (tmp_path / "work" / "notes.txt").read_text() == "one\n"
    log = agent.engine.log
    assembly = gateway.assembly(episode)
    where = check_account(log, [assembly], read_calls(root, episode.episode_id, episode.attempt))
    assert where == {"trained": sum(len(sample.tokens) for sample in log)}
    assert len(log) == client.num_calls
    assert len(assembly.rollouts) == client.num_rows
    if client.num_rows == 1:
        check_one_row(agent, assembly.rollouts[0])


def check_one_row(agent: Agent, row: Any) -> None:
    """One row is the last prompt and completion, as the engine saw them, and its mask is the completions."""
    log = agent.engine.log
    last = log[-1]
    whole = np.concatenate([row.prompt_tokens, row.response_tokens])
    assert whole.tolist() == [*last.request.prompt_tokens.tolist(), *last.tokens]
    mask = np.concatenate([np.zeros(len(row.prompt_tokens), bool), row.action_mask])
    expected = np.zeros(len(whole), bool)
    logprobs = np.zeros(len(whole), np.float32)
    for sample in log:
        start = len(sample.request.prompt_tokens)
        expected[start : start + len(sample.tokens)] = True
        logprobs[start : start + len(sample.tokens)] = sample.logprobs
    assert mask.tolist() == expected.tolist()
    assert row.response_logprobs.tolist() == logprobs[len(row.prompt_tokens) :].tolist()


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
def test_a_plain_forward_pass_repeats_the_logprobs_of_a_real_model(root: Root, tmp_path: Path, streams: bool) -> None:
    folder = make_model(tmp_path / "model", seed=3)
    engine = engine_maker(EngineSetup(config=EngineConfig(engine="transformers"), device="cpu"))(folder, 0)
    agent = Agent(engine=engine, tokenizer=load_tokenizer(folder), model="scripted", vocab_size=64)
    with served(root, agent, sampling=SamplingParams(max_tokens=20)) as gateway:
        episode = gateway.open_episode()
        run_client(Client(program="openai_turns.py"), episode, tmp_path, streams=streams, task="what is the sum of a b")
        gateway.wait_until_idle()
        episode.seal()
    assembly = gateway.assembly(episode)
    assert sum(row.num_turns for row in assembly.rollouts) == 3
    for row in assembly.rollouts:
        mask = np.ones(len(row.response_tokens), bool) if row.action_mask is None else row.action_mask
        plain = forward_logprobs(folder, row.prompt_tokens, row.response_tokens)
        np.testing.assert_allclose(row.response_logprobs[mask], plain[mask], atol=1e-4, rtol=0)
