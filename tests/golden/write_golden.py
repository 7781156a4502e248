"""Wrote the golden stores beside it, each once, with the ludic of its time: v1.0 with commit 08d7dd1, v1.1 to v1.9.

    PYTHONPATH=<checkout of that time> python tests/golden/write_golden.py tests/golden/v1.0

It stays to show where the files come from. They are never regenerated: what users stored reads the same forever,
and these files stand for it. `FOLDER.json` is what they must read as, worked out from the records alone.
"""

import json
import sys
from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict, fields, is_dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from ludic.records.columns import Ragged, array_columns
from ludic.records.rollout import (
    AgentStep,
    EnvironmentStep,
    Message,
    Rollout,
    RolloutBatch,
    RolloutGroup,
    RolloutMetadata,
    ToolCall,
)
from ludic.records.tables import SCHEMA_VERSION
from ludic.root.catalogue import ATTEMPTS
from ludic.root.json_records import Attempt, LatestPolicy
from ludic.root.root import Root
from ludic.root.rows.ledger import write_ledger
from ludic.root.rows.reader import RolloutReader
from ludic.root.rows.tables import MetricsLog
from ludic.root.rows.writer import RolloutWriter
from ludic.root.sql.planner import BatchRules, Planner
from ludic.root.weights.policies import point_latest
from ludic.run.config import RunConfig
from ludic.run.run_json import put_run

HAS_EXTRA = SCHEMA_VERSION != "1.0"
"""Columns x_* came with 1.1."""
HAS_SEGMENTS = SCHEMA_VERSION not in ("1.0", "1.1")
"""Versions of weights by token, parents of segments, feedback and hashes of observations came with 1.2."""
HAS_MASK = HAS_SEGMENTS and SCHEMA_VERSION != "1.2"
"""The engine and the tokens that top_k and top_p kept came with 1.3."""
HAS_TRAJECTORIES = HAS_MASK and SCHEMA_VERSION != "1.3"
"""Trajectories came with 1.4, and `truncated` in the ledger."""
HAS_WANTED = HAS_TRAJECTORIES and SCHEMA_VERSION != "1.4"
"""Wanted answers, whether an answer is correct, and tracebacks came with 1.5."""
HAS_EXPERTS = HAS_WANTED and SCHEMA_VERSION != "1.5"
"""The experts of mixtures came with 1.6."""
HAS_REASONING = HAS_EXPERTS and SCHEMA_VERSION != "1.6"
"""The thinking of messages and the ids of tool results came with 1.7."""
HAS_CAPTURE = HAS_REASONING and SCHEMA_VERSION != "1.7"
"""What was kept of the sampling came with 1.8, and other trainers' numbers with metrics 1.7."""
HAS_COLUMNS = HAS_CAPTURE and SCHEMA_VERSION != "1.8"
"""The columns of the data set came with 1.9."""
NOON = datetime(2026, 11, 5, 12, tzinfo=UTC)


def rollout(
    group_id: str, index: int, group_size: int, *, version: int, reward: float | None, **values: Any
) -> Rollout:
    length = 5 + index
    tokens = np.arange(100 * index, 100 * index + length, dtype=np.int32)
    defaults = {
        "rollout_id": f"{group_id}-r{index}",
        "episode_id": f"{group_id}-e{index}",
        "request_index": 40 + index,
        "env_name": "moar_cats",
        "env_example_id": "prompt-1",
        "policy_version_last": version,
        "model": "tiny-qwen2",
        "temperature": 0.7,
        "max_tokens": 16,
        "seed": 2**62 + index,
        "prompt_tokens": np.array([1, 2, 149_999], dtype=np.int32),
        "response_tokens": tokens,
        "response_logprobs": np.linspace(-3.3, 0, length, dtype=np.float32),
        "token_rewards": np.append(np.zeros(length - 1, np.float32), np.float32(reward or 0)),
        "reward_components": {} if reward is None else {"num_cats": reward, "länge": -0.1},
        "terminated": True,
        "truncated": False,
        "finish_reason": "stop",
        "metadata": {"note": "schön ☃ 𝄞", "empty": ""},
    }
    if HAS_TRAJECTORIES:
        defaults["trajectory_id"] = values.get("rollout_id", defaults["rollout_id"])
    if "kept_tokens" in values:
        values["kept_tokens"] = Ragged.of(values["kept_tokens"], np.int32)
    identity = {"group_id": group_id, "group_index": index, "group_size": group_size, "policy_version": version}
    return Rollout.of(**(defaults | identity | {"episode_reward": reward} | values))


def single_turn() -> RolloutGroup:
    """Rewards 1, 0 and 1/2; each row's texts are those of its messages."""
    rows = []
    for index, reward in enumerate([1.0, 0.0, 0.5]):
        answer = f"cat number {index} 🐈"
        step = AgentStep(turn=0, action_target="env", start=0, end=5 + index, finish_reason="stop", action=answer)
        outcome = EnvironmentStep(
            turn=0,
            agent_steps=(0,),
            observation="Say something about cats.",
            action=answer,
            next_observation=None,
            reward=reward,
            terminated=True,
            truncated=False,
            info={"judge": "meow"},
        )
        messages = (
            Message(role="system", content=""),
            Message(role="user", content="Say something about cats."),
            Message(role="assistant", content=answer),
        )
        columns: dict[str, Any] = {}
        if HAS_EXTRA and index:
            columns["extra"] = {"x_judge": "gpt", "x_tags": ["a", "ü"], "x_score": 0.25}
        if HAS_CAPTURE:
            columns["capture"] = (None, "sampler", "trainer")[index]
        if HAS_COLUMNS and index:
            columns["example_columns"] = ('{"level":"härter 🐈","of":[1,null]}', "{}")[index - 1]
        if HAS_WANTED:
            columns |= {"wanted": "cat\nnumber 0 🐈", "correct": (True, False, None)[index]}
        texts = {"agent_steps": (step,), "environment_steps": (outcome,), "messages": messages}
        rows.append(rollout("single", index, 3, version=3, reward=reward, **texts, **columns))
    return RolloutGroup(key="moar_cats/prompt-1", rollouts=tuple(rows))


def mixed_versions() -> RolloutGroup:
    """Weights were swapped under it; the second episode was cut off."""
    kept = tuple(np.array([token, token + 7, 149_999], np.int32) for token in range(5))
    mask: dict[str, Any] = {"engine": "vllm 0.32.0", "kept_tokens": kept} if HAS_MASK else {}
    if HAS_EXPERTS:
        # 7 tokens that were read, 2 layers, 3 experts each
        mask["experts"] = np.arange(42, dtype=np.int16).reshape(7, 2, 3) + np.int16(255)
    cut_off = {"truncated": True, "truncation_reason": "max_steps", "terminated": False, "finish_reason": "length"}
    return RolloutGroup(
        key="moar_cats/prompt-2",
        rollouts=(
            rollout("mixed", 0, 3, version=4, reward=2.0, top_p=0.9, top_k=50, **mask),
            rollout("mixed", 1, 3, version=3, reward=0.0, incomplete_completion=True, parse_error=True, **cut_off),
            rollout("mixed", 2, 3, version=3, reward=-1.0, policy_version_last=4),
        ),
    )


def several_turns() -> RolloutGroup:
    """An episode of two rows, with a tool and a sub-agent; and one that failed before anything was sampled."""
    call = ToolCall(id="call-0", name="gcd", arguments='{"a": 12, "b": 18}', result="6")
    failed = ToolCall(id="call-1", name="gcd", arguments="{", error="no JSON")
    agent_steps = (
        AgentStep(turn=0, action_target="internal", start=0, end=2, finish_reason="stop", tool_calls=(call, failed)),
        AgentStep(turn=1, action_target="env", start=3, end=5, finish_reason="length", parse_error=True),
    )
    environment_steps = (
        EnvironmentStep(
            turn=0,
            agent_steps=(0, 1),
            observation="gcd of 12 and 18?",
            action=None,
            next_observation="Answer more briefly.",
            reward=None,
            terminated=False,
            truncated=True,
        ),
        EnvironmentStep(
            turn=1,
            agent_steps=(),
            observation="",
            action="6",
            next_observation="never said",
            reward=0.5,
            terminated=True,
            truncated=False,
        ),
    )
    thought: dict[str, Any] = {"reasoning": "12 = 6·2 ☃\n18 = 6·3"} if HAS_REASONING else {}
    of_call: dict[str, Any] = {"tool_call_id": "call-0"} if HAS_REASONING else {}
    messages = (
        Message(role="user", content="gcd of 12 and 18?"),
        Message(role="assistant", content="6", tool_calls=(call,), **thought),
        Message(role="tool", content="6", name="gcd", **of_call),
        Message(role="user", content="Answer more briefly."),
    )
    where = {"env_name": "reasoning_gym/gcd", "env_example_id": "17"}
    mask = np.array([True, True, False, True, True])
    spans: dict[str, Any] = {}
    parent: dict[str, Any] = {"trajectory_id": "turns-r0-first"} if HAS_TRAJECTORIES else {}
    if HAS_SEGMENTS:
        from ludic.records.rollout import WeightSpan

        agent_steps = (agent_steps[0], replace(agent_steps[1], parse_feedback="Answer more briefly."))
        environment_steps = (replace(environment_steps[0], observation_hash="0f" * 16), environment_steps[1])
        versions = (WeightSpan(version=3, start=0, end=2), WeightSpan(version=4, start=3, end=5))
        spans = {"policy_version_last": 4, "weight_versions": versions}
        parent["parent_segment_index"] = 0
    if HAS_MASK:
        parent["kept_tokens"] = tuple(np.array([token, 50_000 + token], np.int32) for token in range(5))
        spans["kept_tokens"] = tuple(
            ids[: 2 * sampled] for ids, sampled in zip(parent["kept_tokens"], mask, strict=True)
        )
    wanted: dict[str, Any] = {"wanted": "6"} if HAS_WANTED else {}
    if HAS_WANTED:
        spans["correct"] = True
    logprobs = np.where(mask, np.float32(-0.25), np.float32(0))
    if HAS_CAPTURE:
        logprobs = np.zeros(5, np.float32)
        spans["capture"] = "ids"
        parent |= {"capture": "text", "response_logprobs": logprobs}
    first = rollout(
        "turns",
        0,
        2,
        version=3,
        reward=0.5,
        num_turns=2,
        action_mask=mask,
        response_logprobs=logprobs,
        agent_steps=agent_steps,
        environment_steps=environment_steps,
        messages=messages,
        **where,
        **wanted,
        **spans,
    )
    second = rollout(
        "turns",
        0,
        2,
        version=3,
        reward=0.5,
        rollout_id="turns-r0-child",
        agent_id="helper",
        parent_rollout_id="turns-r0",
        depth=1,
        segment_index=1,
        action_mask=np.ones(5, dtype=np.bool_),
        **where,
        **parent,
    )
    empty = np.zeros(0, dtype=np.float32)
    nothing = {"response_tokens": empty.astype(np.int32), "response_logprobs": empty, "token_rewards": empty}
    broken = rollout(
        "turns",
        1,
        2,
        version=3,
        reward=None,
        num_turns=0,
        finish_reason=None,
        error="TimeoutError: the tool\nnever answered",
        **nothing,
        **where,
        **wanted,
        **({"traceback": 'File "tools.py", line 3, in gcd 🐈\n    wait()'} if HAS_WANTED else {}),
    )
    return RolloutGroup(key="reasoning_gym/gcd/17", rollouts=(first, second, broken))


def newer_version() -> RolloutGroup:
    return RolloutGroup(key="moar_cats/prompt-3", rollouts=(rollout("newer", 0, 1, version=4, reward=1e-9),))


def evaluation() -> RolloutGroup:
    columns: dict[str, Any] = {"wanted": "", "correct": False} if HAS_WANTED else {}
    if HAS_COLUMNS:
        columns["example_columns"] = '{"level":{"cut":"a","characters":9000}}'
    return RolloutGroup(
        key="moar_cats/heldout-0",
        rollouts=(rollout("heldout", 0, 1, version=3, reward=3.0, purpose="eval", **columns),),
    )


FILES: dict[str, tuple[RolloutGroup, ...]] = {
    "rollouts/version=3/env=moar_cats/host-1-0.parquet": (single_turn(), mixed_versions()),
    "rollouts/version=3/env=reasoning_gym%2Fgcd/host-1-1.parquet": (several_turns(),),
    "rollouts/version=4/env=moar_cats/host-1-2.parquet": (newer_version(),),
    "evals/version=3/env=moar_cats/host-2-0.parquet": (evaluation(),),
}
LEDGER = {
    # One group a step, oldest weights first. 1 - (0 + .5)/2, 0 - (1 + .5)/2, .5 - (1 + 0)/2
    "1": {"single-r0": [0.75, True, None], "single-r1": [-0.75, True, None], "single-r2": [0.0, True, None]},
    # The baseline is over the whole group: 2 - (0 - 1)/2, 0 - (2 - 1)/2, -1 - (2 + 0)/2
    "2": {"mixed-r0": [2.5, True, None], "mixed-r1": [-0.5, False, "drop_truncated"], "mixed-r2": [-2.0, True, None]},
}
if HAS_COLUMNS:
    # Rows that no objective could train on are dropped as soon as they arrive.
    LEDGER["1"] |= {
        "turns-r0": [None, False, "no_logprobs"],
        "turns-r0-child": [None, False, "text_capture"],
        "turns-r1": [None, False, "drop_errors"],
    }
METRICS: dict[str, Any] = {"step": 1, "policy_version": 3, "attempt_id": 1, "loss": -0.125}
if HAS_CAPTURE:
    METRICS["other"] = {"rewards/cats/mean": 0.1, "länge": -2.5}


def write_store(folder: Path) -> Root:
    columns = {"extra_columns": {"x_judge": "string", "x_tags": "list<string>", "x_score": "double"}}
    run = RunConfig(
        model="tiny-qwen2",
        env=("moar_cats", "reasoning_gym/gcd"),
        group_size=3,
        groups_per_batch=1,
        **(columns if HAS_EXTRA else {}),
    )
    root = put_run(str(folder), run)
    for worker_id, kind in (("host-1", "rollouts"), ("host-2", "evals")):
        with RolloutWriter(root, worker_id, folder=kind) as writer:
            for name, groups in FILES.items():
                if name.startswith(kind):
                    metadata = RolloutMetadata(worker_id=worker_id, timestamp=NOON)
                    writer.append(RolloutBatch(groups=groups, metadata=metadata))
                    writer.flush()
    return root


def write_what_a_trainer_writes(root: Root) -> None:
    created_at = NOON.isoformat()
    attempt = Attempt(
        attempt_id=1, parent_attempt=None, parent_step=None, owner="host-3", created_at=created_at, config={}
    )
    root.put_if_absent(ATTEMPTS.name_of(attempt), json.dumps(asdict(attempt)).encode())
    policy = {"version": 3, "step": 0, "attempt_id": 1, "parent_version": None, "created_at": created_at}
    root.put_if_absent("policies/version=3/policy.json", json.dumps(policy).encode())
    point_latest(root, LatestPolicy(version=3, budget=4))
    planner = Planner(BatchRules(filters=("drop_truncated",), groups_per_batch=1))
    planner.add(RolloutReader(root, planner.columns).poll(None))
    for step in map(int, LEDGER):
        write_ledger(root, attempt, step, planner.plan(step=step, attempt_id=1, trainer_version=4, now=NOON))
    with closing(MetricsLog(root, "train", "host-3")) as log:
        log.write(**METRICS)


def as_json(value: Any) -> Any:
    """Records as JSON; floats keep every bit, since Python writes the shortest decimal that reads as the same.

    The arrays of a rollout stand beside its other fields, by the name of their column; null for one that is absent.
    """
    if is_dataclass(value):
        found: dict[str, Any] = {}
        for field in fields(value):
            of_field = getattr(value, field.name)
            if isinstance(value, Rollout) and field.name == "columns":
                found |= as_json({name: of_field.get(name) for name in {**array_columns(), **of_field}})
            else:
                found[field.name] = as_json(of_field)
        return found
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, Mapping):
        return {key: as_json(item) for key, item in value.items()}
    return [as_json(item) for item in value] if isinstance(value, tuple | list | Ragged) else value


if __name__ == "__main__":
    target = Path(sys.argv[1])
    assert not target.exists(), f"{target} is there and stays as it is"
    store = write_store(target)
    write_what_a_trainer_writes(store)
    expected = {
        "run_id": store.run_id,
        "created_at": NOON.isoformat(),
        "files": as_json(FILES),
        "ledger": LEDGER,
        "metrics": METRICS,
    }
    Path(f"{target}.json").write_text(json.dumps(expected, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
