"""A run to look at: three versions of two environments, tools and agents, evaluations, drops, requests, code, labels.

Every text is what a test or a person gives; names of environments and examples hold quotes and slashes.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
from chat_models import chat_tokenizer, hermes_call, scripted_agent
from episodes import Script, end, go_on, run_episode
from evaluations import store_evaluation

from ludic.agents.delegation import SubAgent
from ludic.records.rollout import (
    AgentStep,
    EnvironmentStep,
    EpisodeEnd,
    GroupEvent,
    Message,
    Rollout,
    RolloutBatch,
    RolloutGroup,
    RolloutMetadata,
    ToolCall,
    new_id,
)
from ludic.root.attempts import start_attempt
from ludic.root.claims import claim_slot
from ludic.root.code import keep_files, to_dicts
from ludic.root.json_records import CodeRecord
from ludic.root.root import Root
from ludic.root.rows.ledger import write_ledger
from ludic.root.rows.reader import RolloutReader
from ludic.root.rows.tables import put_label
from ludic.root.rows.writer import RolloutWriter
from ludic.root.sql.planner import Planner
from ludic.run.config import RunConfig
from ludic.run.run_json import create_root
from ludic.settings import UserFile
from ludic.training.batches.source import batch_rules
from ludic.training.config import TrainConfig

ENV = "sums/'two\" & <b>"
"""Name of an environment that needs escaping everywhere."""
EXAMPLE = "17 + 4 = ?/&'\""
QUESTION = "What is 17 + 4? Think first."
ANSWERS = (
    ("I add the tens, then the ones: 10 + 0 and 7 + 4 make 21. The answer is 21.", 1.0),
    ("I add the tens, then the ones: 10 + 0 and 7 + 4 make 20. The answer is 20.", 0.0),
    ("The answer is 21.", 0.5),
    ("I do not know.", 0.0),
)
NOON = datetime(2026, 11, 30, 12, tzinfo=UTC)
VERSIONS = (0, 1, 2)


def make_viewed_run(folder: Path, **texts: str) -> Root:
    """Make the run below a folder. texts: question, answer and wanted in place of the usual ones."""
    root = create_root(str(folder / "run"), RunConfig(model="tiny", env=(ENV,), group_size=4))
    chat_tokenizer().save_pretrained(folder / "model")
    root.put("policies/version=0/tokenizer.json", (folder / "model" / "tokenizer.json").read_bytes())
    claim_slot(root, 0, "w0-a", code=_code(root, folder))
    with RolloutWriter(root, "w0-a") as writer:
        for version in VERSIONS:
            groups = [_group(number, version, texts) for number in range(2)]
            if version == 1:
                groups += [agents_group(), tools_group()]
            events = [event for number, group in enumerate(groups) for event in _events(10 * version + number, group)]
            writer.append(RolloutBatch(groups=tuple(groups), metadata=RolloutMetadata(worker_id="w0-a")), events)
            writer.flush()
    _train(root)
    for version in (0, 2):
        of = {EXAMPLE: [0.0, float(version > 0)], "2": [1.0, 0.0], "3": [0.0, 0.0], "4": [1.0, 1.0], "5": [0.0, 1.0]}
        messages = _messages(texts.get("question", QUESTION), texts.get("answer", f"It is 2{version}."))
        store_evaluation(root, of, version=version, env_name=ENV, messages=messages)
    put_label(root, groups[0].rollouts[0].rollout_id, 1.0, "a good one", author="a reader")
    return root


def _code(root: Root, folder: Path) -> Sequence[Mapping[str, Any]]:
    """Store a user's file, and return the record of a worker that scored with it."""
    source = b"def score(answer):\n    return float('21' in answer)  # <script>alert(1)</script>\n"
    file = UserFile(path=folder / "sums.py", source=source)
    keep_files(root, {f"{file.path}:score": file})
    return to_dicts([CodeRecord(role="environment", name=ENV, sha256=file.sha256, path=str(file.path))])


def _group(number: int, version: int, texts: Mapping[str, str]) -> RolloutGroup:
    group_id = new_id()
    rows = [
        text_row(
            texts.get("question", QUESTION),
            texts.get("answer") or f"{answer}{' Sure.' * version}",
            group_id=group_id,
            group_index=index,
            env_example_id=EXAMPLE if number == 0 else f"other {version}",
            # the second group of a version has one reward, so that the filter drops it
            episode_reward=reward if number == 0 else 0.25,
            request_index=(10 * version + number) * 4 + index,
            policy_version=version,
            wanted=texts.get("wanted", "21"),
            example_columns=json.dumps({texts.get("wanted", "difficulty"): "hard", "level": number}),
            correct=reward == 1.0,
        )
        for index, (answer, reward) in enumerate(ANSWERS)
    ]
    return RolloutGroup(key=f"{ENV}/{number}", rollouts=tuple(rows))


def _messages(question: str, *answers: str) -> tuple[Message, ...]:
    system = Message(role="system", content="Answer in short sentences.")
    return (system, Message(role="user", content=question), *(Message(role="assistant", content=it) for it in answers))


def text_row(question: str, answer: str, *, episode_reward: float | None, **options: Any) -> Rollout:
    """A rollout of one turn, whose tokens are those of its answer."""
    tokenizer = chat_tokenizer()
    tokens = np.array(tokenizer(answer, add_special_tokens=False)["input_ids"], np.int32)
    rewards = np.zeros(len(tokens), np.float32)
    rewards[-1:] = episode_reward or 0.0
    version = options.get("policy_version", 0)
    defaults = {
        "rollout_id": new_id(),
        "episode_id": new_id(),
        "group_size": 4,
        "env_name": ENV,
        "policy_version_last": version,
        "model": "tiny",
        "temperature": 1.0,
        "max_tokens": 4096,
        "seed": 1,
        "prompt_tokens": np.array(tokenizer(question, add_special_tokens=False)["input_ids"], np.int32),
        "response_tokens": tokens,
        "response_logprobs": -(np.abs(np.sin(np.arange(len(tokens), dtype=np.float32)) * 5) ** 2) / 4,
        "token_rewards": rewards,
        "reward_components": {} if episode_reward is None else {"right": episode_reward, "short": 0.0},
        "terminated": True,
        "truncated": False,
        "finish_reason": "stop",
        "agent_steps": [
            AgentStep(turn=0, action_target="env", start=0, end=len(tokens), finish_reason="stop", action=answer)
        ],
        "environment_steps": [
            EnvironmentStep(
                turn=0,
                agent_steps=(0,),
                observation=question,
                action=answer,
                next_observation=None,
                reward=episode_reward,
                terminated=True,
                truncated=False,
            )
        ],
        "messages": _messages(question, answer),
    }
    return Rollout.of(**(defaults | {"episode_reward": episode_reward} | options))


def agents_group() -> RolloutGroup:
    """An episode of an agent that hands two tasks to a helper."""
    calls = [hermes_call("delegate", task=task) for task in ("add 17 and 4", "check it")]
    helper = SubAgent(name="helper", description="Helps.")
    agent = scripted_agent(["\n".join(calls), "21", "right", "It is 21."], sub_agents=(helper,))
    rows = run_episode(agent, Script([end(0.75)]), max_tokens=256)
    return _in_run(rows, 2)


def tools_group() -> RolloutGroup:
    """An episode of several turns, with a tool that works and one that fails, and rewards by turn."""
    agent = scripted_agent(["first", "second", "third"])
    rows = run_episode(agent, Script([go_on("You said first.", 0.25), go_on("Then second.", 0.5), end(1.0)]))
    calls = (
        ToolCall(id="c1", name="add", arguments='{"a": 17, "b": 4}', result="21"),
        ToolCall(id="c2", name="lookup", arguments='{"page": "sums"}', error="there is no page <b>sums</b>"),
    )
    first, *others = rows[0].agent_steps
    messages = [
        replace(message, tool_calls=calls, reasoning="I need a tool.") if index == 1 else message
        for index, message in enumerate(rows[0].messages)
    ]
    row = replace(rows[0], agent_steps=(replace(first, tool_calls=calls), *others), messages=tuple(messages))
    return _in_run([row], 3)


def _in_run(rows: Sequence[Rollout], number: int) -> RolloutGroup:
    """Give rows of a scripted episode their own group and version."""
    ids = {"group_id": new_id(), "policy_version": 1, "policy_version_last": 1, "request_index": 40 * number}
    own = [replace(row, **ids, weight_versions=None) for row in rows]
    return RolloutGroup(key=f"script/{number}", rollouts=tuple(own))


def _events(number: int, group: RolloutGroup) -> list[GroupEvent]:
    first = group.rollouts[0]
    of_group = {
        "group_id": first.group_id,
        "group_number": number,
        "env_name": first.env_name,
        "env_example_id": first.env_example_id,
        "group_size": first.group_size,
        "policy_version": first.policy_version,
    }
    ends = tuple(
        EpisodeEnd(group_index=row.group_index, outcome="complete", ended_at=NOON, policy_version=0, num_tokens=3)
        for row in group.rollouts
        if not row.depth
    )
    lost = {**of_group, "group_id": new_id(), "group_number": number + 1000}
    return [
        GroupEvent(event="started", created_at=NOON - timedelta(seconds=9), **of_group),
        GroupEvent(event="complete", created_at=NOON, episodes=ends, **of_group),
        GroupEvent(event="started", created_at=NOON, **lost),
    ]


def _train(root: Root) -> None:
    """Plan two steps as a trainer would; groups without a difference of rewards are dropped."""
    config = TrainConfig()
    planner = Planner(batch_rules(replace(config.batch, filters=("drop_zero_variance_groups",)), 1))
    planner.add(RolloutReader(root, planner.columns).poll(None))
    attempt = start_attempt(root, config=config.flat())
    for step in (1, 2):
        plan = planner.plan(step=step, attempt_id=attempt.attempt_id, trainer_version=step - 1)
        assert plan is not None
        write_ledger(root, attempt, step, plan)
