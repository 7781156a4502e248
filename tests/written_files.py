"""Roots of fixed records, and the digests of all that ludic writes for them: tests/records/test_written_bytes.py.

    PYTHONPATH=tests python tests/written_files.py      record the digests of the present code

Do so after a wanted change of what is written (a new schema version, another pyarrow); the commit says what it is.
"""

import hashlib
import json
import shutil
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from importlib.metadata import version
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from ludic.adapters.exports.text import export_text
from ludic.records.columns import Ragged
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
    WeightSpan,
)
from ludic.root.catalogue import ATTEMPTS
from ludic.root.json_records import Attempt
from ludic.root.maintenance.compaction import compact
from ludic.root.root import Root
from ludic.root.rows.ledger import ledger_name, write_ledger
from ludic.root.rows.reader import RolloutReader
from ludic.root.rows.writer import RolloutWriter
from ludic.root.sql.planner import BatchRules, Planner
from ludic.run.config import RunConfig
from ludic.run.run_json import put_run

RECORDED = Path(__file__).parent / "records" / "written_bytes.json"
PROGRAMS = ("pyarrow", "duckdb")
"""What else decides about the bytes."""
NOON = datetime(2026, 11, 5, 12, tzinfo=UTC)
RUN_ID = "019a5432-0000-7000-8000-000000000037"
GOLDEN = Path(__file__).parent / "golden"
EXTRA_COLUMNS = {"x_judge": "string", "x_tags": "list<string>", "x_score": "double", "x_spans": "list<int64>"}
Arrays = Sequence[str]
"""Which arrays the rows of a batch have, of mask, kept_tokens, experts and rewards."""

# --- Records -------------------------------------------------------------------------------------------
# RandomState draws the same integers under any NumPy, and fractions of powers of two are exact on any machine.


def make_batch(
    worker_id: str,
    num_groups: int,
    group_size: int,
    *,
    seed: int,
    mean_length: int = 20,
    arrays: Arrays = (),
    extra: bool = False,
    policy_version: int = 3,
) -> RolloutBatch:
    """Groups of one environment; the last row of the first group failed before anything was sampled."""
    rng = np.random.RandomState(seed)
    groups = []
    for number in range(num_groups):
        group_id = f"{worker_id}-{seed}-{number:04}"
        rows = [
            _row(rng, group_id, index, group_size, mean_length, arrays, extra, policy_version)
            for index in range(group_size)
        ]
        if number == 0 and group_size > 2:
            rows[-1] = _failed(group_id, group_size, policy_version)
        groups.append(RolloutGroup(key=f"moar_cats/prompt-{number}", rollouts=tuple(rows)))
    metadata = RolloutMetadata(worker_id=worker_id, timestamp=NOON + timedelta(microseconds=seed))
    return RolloutBatch(groups=tuple(groups), metadata=metadata)


def _row(
    rng: np.random.RandomState,
    group_id: str,
    index: int,
    group_size: int,
    mean_length: int,
    arrays: Arrays,
    extra: bool,
    policy_version: int,
) -> Rollout:
    prompt, length = rng.randint(0, 150_000, rng.randint(1, 9)), int(rng.randint(1, 2 * mean_length))
    tokens = rng.randint(0, 150_000, length).astype(np.int32)
    has = {name: name in arrays and rng.randint(4) > 0 for name in ("mask", "kept_tokens", "experts", "rewards")}
    mask = rng.randint(3, size=length) > 0 if has["mask"] else None
    is_sampled = np.ones(length, bool) if mask is None else mask
    logprobs = (-rng.randint(0, 1 << 20, length) / (1 << 17)).astype(np.float32)
    reward = float(rng.randint(0, 4)) / 2
    values: dict[str, Any] = {"experts": _experts(rng, len(prompt) + length - 1)} if has["experts"] else {}
    if has["kept_tokens"]:
        values["kept_tokens"] = tuple(
            np.unique([token, *rng.randint(0, 150_000, rng.randint(4))]).astype(np.int32)[: None if sampled else 0]
            for token, sampled in zip(tokens.tolist(), is_sampled.tolist(), strict=True)
        )
    if extra and index:
        values["extra"] = {"x_judge": f"gpt {index} ☃", "x_tags": ["a", "ü"][:index], "x_score": reward / 3}
    if index == 1:
        spans = WeightSpan(version=policy_version, start=0, end=1), WeightSpan(version=7, start=1, end=max(2, length))
        values |= {"policy_version_last": 7, "weight_versions": spans[: 1 + (length > 1)], "top_k": 50}
    token_rewards = rng.randint(-16, 17, length) / 8 if has["rewards"] else np.append(np.zeros(length - 1), reward)
    return _rollout_of(
        **_identity(group_id, index, group_size, policy_version),
        **_texts(index, length, reward),
        prompt_tokens=prompt.astype(np.int32),
        response_tokens=tokens,
        response_logprobs=np.where(is_sampled, logprobs, np.float32(0)),
        token_rewards=token_rewards.astype(np.float32),
        action_mask=mask,
        episode_reward=reward,
        reward_components={"correct": reward, "länge": -0.1},
        finish_reason="stop",
        correct=(True, False, None)[index % 3],
        wanted="cat\nnumber 0 🐈" if index % 2 else None,
        engine="vllm 0.32.0" if index % 2 else None,
        **values,
    )


def _rollout_of(**columns: Any) -> Rollout:
    """Return the record with these columns; an array that is left out is null."""
    kept = columns.get("kept_tokens")
    return Rollout.of(**{**columns, "kept_tokens": None if kept is None else Ragged.of(kept, np.int32)})


def _experts(rng: np.random.RandomState, num_read: int) -> np.ndarray:
    """Two or three layers, as if rows were of two models."""
    layers = 2 + rng.randint(2)
    choices = [np.sort(rng.permutation(64)[:4]) for _ in range(num_read * layers)]
    return np.array(choices, np.int16).reshape(num_read, layers, 4)


def _identity(group_id: str, index: int, group_size: int, policy_version: int) -> Mapping[str, Any]:
    return {
        "rollout_id": f"{group_id}-r{index}",
        "group_id": group_id,
        "episode_id": f"{group_id}-e{index}",
        "trajectory_id": f"{group_id}-r{index}",
        "group_index": index,
        "group_size": group_size,
        "request_index": 40 + index,
        "env_name": "moar_cats",
        "env_example_id": group_id.rpartition("-")[2],
        "policy_version": policy_version,
        **({} if index == 1 else {"policy_version_last": policy_version}),
        "model": "tiny-qwen2",
        "temperature": 0.7,
        "top_p": 0.9,
        "max_tokens": 64,
        "seed": 2**62 + index,
        "terminated": True,
        "truncated": False,
        "metadata": {"note": "schön ☃ 𝄞", "empty": ""},
    }


def _texts(index: int, length: int, reward: float) -> Mapping[str, Any]:
    """Steps whose texts are those of messages, and others."""
    call = ToolCall(id="call-0", name="gcd", arguments='{"a": 12, "b": 18}', result="6")
    answer = f"cat number {index} 🐈"
    step = AgentStep(turn=0, action_target="env", start=0, end=length, finish_reason="stop", action=answer)
    outcome = EnvironmentStep(
        turn=0,
        agent_steps=(0,),
        observation="Say something about cats.",
        observation_hash="0f" * 16,
        action=answer,
        next_observation="never said" if index % 2 else None,
        reward=reward,
        terminated=True,
        truncated=False,
        info={"judge": "meow"},
    )
    messages = (
        Message(role="user", content="Say something about cats."),
        Message(role="assistant", content=answer, tool_calls=(call,) if index == 1 else (), reasoning="2 · 3"),
        Message(role="tool", content="6", name="gcd", tool_call_id="call-0"),
    )
    return {"agent_steps": (step,), "environment_steps": (outcome,), "messages": messages[: 2 + index % 2]}


def _failed(group_id: str, group_size: int, policy_version: int) -> Rollout:
    nothing = np.zeros(0, np.float32)
    return _rollout_of(
        **_identity(group_id, group_size - 1, group_size, policy_version),
        prompt_tokens=np.array([1, 2, 149_999], np.int32),
        response_tokens=nothing.astype(np.int32),
        response_logprobs=nothing,
        token_rewards=nothing,
        num_turns=0,
        episode_reward=None,
        finish_reason=None,
        error="TimeoutError: the tool\nnever answered",
        traceback='File "tools.py", line 3, in gcd 🐈\n    wait()',
    )


def _events(batch: RolloutBatch) -> list[GroupEvent]:
    of_group = {"env_name": "moar_cats", "policy_version": 3, "created_at": NOON}
    events = []
    for number, group in enumerate(batch.groups):
        size, group_id = len(group.rollouts), group.rollouts[0].group_id
        of_group |= {"group_id": group_id, "group_number": number, "env_example_id": str(number), "group_size": size}
        ends = [
            EpisodeEnd(group_index=i, outcome="complete", ended_at=NOON, policy_version=3, num_tokens=i)
            for i in range(size)
        ]
        events.append(GroupEvent(event="started", **of_group))
        events.append(GroupEvent(event="complete", episodes=tuple(ends), **of_group))
    return events


# --- Roots ---------------------------------------------------------------------------------------------

ARRAYS = ("mask", "kept_tokens", "experts", "rewards")
EXPERIMENT = {"model": "tiny-qwen2", "env": ("moar_cats",), "group_size": 3, "groups_per_batch": 2}


def roots() -> dict[str, tuple[RunConfig, list[RolloutBatch]]]:
    """The settings and the batches of each root; each batch becomes a file."""
    many = {"mean_length": 12, "seed": 2}
    return {
        # 330 rows are two row groups with dictionaries, three rows one without.
        "plain": (RunConfig(**EXPERIMENT), [make_batch("w0", 1, 3, seed=1), make_batch("w0", 110, 3, **many)]),
        "arrays": (
            RunConfig(**EXPERIMENT, keep_experts=True, keep_sampling_mask=True, top_p=0.9, top_k=50, seed=5),
            [
                make_batch("w0", 1, 3, seed=1, arrays=("mask",)),
                make_batch("w0", 2, 3, seed=2, arrays=("kept_tokens", "rewards")),
                make_batch("w0", 2, 3, seed=3, arrays=("experts",)),
                make_batch("w0", 100, 3, seed=4, arrays=ARRAYS),
                make_batch("w0", 1, 3, seed=5, arrays=ARRAYS, policy_version=4),
            ],
        ),
        "extra": (
            RunConfig(**EXPERIMENT, extra_columns=EXTRA_COLUMNS, env_options={"moar_cats": {"n": 1.5}}),
            [
                make_batch("w0", 1, 3, seed=1),
                make_batch("w0", 2, 3, seed=2, extra=True, arrays=ARRAYS),
                make_batch("w0", 30, 4, seed=3, extra=True),
            ],
        ),
    }


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def digests_below(root: Root, folders: Iterable[str]) -> dict[str, str]:
    return {name: digest(root.read(name)) for folder in folders for name in sorted(root.list(folder))}


def append(root: Root, worker_id: str, batches: Iterable[RolloutBatch]) -> None:
    with RolloutWriter(root, worker_id) as writer:
        for batch in batches:
            writer.append(batch, _events(batch))
            writer.flush()


def digests_of(name: str, folder: Path) -> dict[str, str]:
    """Write one of the roots below a folder: run.json, files of a worker, a ledger, exports, and compacted files."""
    run, batches = roots()[name]
    root = put_run(str(folder / name), run, run_id=RUN_ID)
    append(root, "w0", batches)
    found = {"run.json": digest(root.read("run.json")), **digests_below(root, ("rollouts", "requests"))}
    for advantage in ("rloo", "token_returns"):
        found[f"ledger of {advantage}"] = _ledger(root, advantage, attempt_id=1 + (advantage != "rloo"))
    export_text(root, sink := BytesIO(), table="rollouts", where=None, sql=None)
    found["export as jsonl"] = digest(sink.getvalue())
    compact(root)
    compacted = digests_below(root, ("rollouts", "requests"))
    return found | {f"compacted: {file}": each for file, each in compacted.items() if file not in found}


def _ledger(root: Root, advantage: str, attempt_id: int) -> str:
    attempt = Attempt(
        attempt_id=attempt_id,
        parent_attempt=None,
        parent_step=None,
        owner="host-3",
        created_at=NOON.isoformat(),
        config={},
    )
    root.put_if_absent(ATTEMPTS.name_of(attempt), json.dumps(asdict(attempt)).encode())
    planner = Planner(BatchRules(advantage=advantage, groups_per_batch=2))
    planner.add(RolloutReader(root, planner.columns).poll(None))
    write_ledger(root, attempt, 1, planner.plan(step=1, attempt_id=attempt_id, trainer_version=4, now=NOON))
    return digest(root.read(ledger_name(attempt_id, 1)))


def digests_of_old(name: str, folder: Path) -> dict[str, str]:
    """Go on with a root of an older ludic, and compact its files together with the new ones."""
    shutil.copytree(GOLDEN / name, folder / name)
    root = Root.open(str(folder / name), writable=True)
    before = digests_below(root, ("rollouts", "requests"))
    append(root, "w1", [make_batch("w1", 2, 3, seed=1, arrays=ARRAYS, extra=bool(root.extra_columns))])
    compact(root)
    return {file: each for file, each in digests_below(root, ("rollouts", "requests")).items() if file not in before}


def programs() -> dict[str, str]:
    return {program: version(program) for program in PROGRAMS}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        written = {name: digests_of(name, Path(scratch)) for name in roots()}
        olds = sorted(path.name for path in GOLDEN.glob("v1.*") if path.is_dir())
        written |= {name: digests_of_old(name, Path(scratch)) for name in olds}
    RECORDED.write_text(json.dumps({"programs": programs(), "digests": written}, indent=1) + "\n", encoding="utf-8")
    sys.stderr.write(f"{RECORDED}: {sum(map(len, written.values()))} digests\n")
