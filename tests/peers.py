"""Small files exactly as other programs write them; ludic/adapters/imports/formats.py names the sources."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

PROMPT = "user\naa bb\nassistant\n"


def write_lines(path: Path, records: Sequence[Mapping[str, Any] | str]) -> Path:
    """A line a record; a text is written as it is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [record if isinstance(record, str) else json.dumps(record, ensure_ascii=False) for record in records]
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def verl_record(output: str, score: float, *, prompt: str = PROMPT, step: int = 3, **extra: Any) -> dict[str, Any]:
    """One line of {rollout_data_dir}/{step}.jsonl; extra: reward_extra_infos_dict."""
    return {"input": prompt, "output": output, "gts": "cc", "score": score, "step": step, **extra}


def write_verl(folder: Path, records: Sequence[Mapping[str, Any] | str], step: int = 3) -> Path:
    return write_lines(folder / "rollouts" / f"{step}.jsonl", records)


def write_skyrl(folder: Path, records: Sequence[Mapping[str, Any]], *, step: int = 4) -> Path:
    """dumped_evals/global_step_{step}_evals/{data_source}.jsonl, and the numbers that SkyRL leaves beside it."""
    path = folder / "dumped_evals" / f"global_step_{step}_evals" / "openai_gsm8k.jsonl"
    write_lines(path.with_name("aggregated_results.jsonl"), [{"eval/all/avg_score": 0.5}])
    return write_lines(path, records)


def skyrl_record(output: str, score: float | list[float], *, stop_reason: str = "stop") -> dict[str, Any]:
    """One line; texts have their special tokens."""
    extras = {"data_source": "openai/gsm8k", "reward_model": {"method": "rule", "ground_truth": "cc"}}
    return {
        "input_prompt": "<|user|> aa bb <eos> <|assistant|>",
        "output_response": output,
        "score": score,
        "stop_reason": stop_reason,
        "env_class": "gsm8k",
        "env_extras": extras,
        "data_source": "openai/gsm8k",
    }


def write_trl(folder: Path, columns: Mapping[str, Sequence[Any]], step: int = 20) -> Path:
    """completions_{step}.parquet; columns: prompt, completion, one for each reward function, advantage."""
    path = folder / "completions" / f"completions_{step:05d}.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"step": [step] * len(columns["prompt"]), **columns}), path)
    return path


_ART_MESSAGE = pa.struct(
    [
        ("role", pa.string()),
        ("content", pa.string()),
        ("tool_calls", pa.string()),
        ("tool_call_id", pa.string()),
        ("trainable", pa.bool_()),
    ]
)
_ART_COLUMNS = [
    ("group_index", pa.int64()),
    ("group_metadata", pa.string()),
    ("group_metrics", pa.string()),
    ("group_logs", pa.list_(pa.string())),
    ("reward", pa.float64()),
    ("metrics", pa.string()),
    ("metadata", pa.string()),
    ("tools", pa.string()),
    ("logs", pa.list_(pa.string())),
    ("messages", pa.list_(_ART_MESSAGE)),
]
_ART_COLUMNS_2 = [
    ("format_version", pa.int16()),
    ("trajectory_index", pa.int64()),
    ("group_json", pa.large_string()),
    ("trajectory_json", pa.large_string()),
]


def art_message(role: str, content: str, *, trainable: bool = False, **fields: str) -> dict[str, Any]:
    return {"role": role, "content": content, "trainable": trainable, **fields}


def write_art(
    folder: Path, rows: Sequence[Mapping[str, Any]], *, split: str = "train", step: int = 7, format_version: int = 1
) -> Path:
    """{step}.parquet of one trajectory a row, in ART's first or second format."""
    path = folder / ".art" / "project" / "models" / "m" / "trajectories" / split / f"{step:04d}.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    columns = _ART_COLUMNS if format_version == 1 else [*_ART_COLUMNS_2, *_ART_COLUMNS]
    stamps = {"format_version": format_version, "group_json": "{}"}
    pq.write_table(pa.Table.from_pylist([{**stamps, **row} for row in rows], schema=pa.schema(columns)), path)
    return path


def trace_node(
    role: str, content: str, token_ids: Sequence[int], *, parent: int | None = None, num_sampled: int = 0, **fields: Any
) -> dict[str, Any]:
    """A MessageNode; the last num_sampled of its tokens were sampled, with logprobs -0.5, -1.0, -1.5, ..."""
    mask = [False] * (len(token_ids) - num_sampled) + [True] * num_sampled
    node = {
        "parent": parent,
        "message": {"role": role, "content": content, **fields},
        "sampled": num_sampled > 0,
        "timestamp": 1787375975.5,
        "token_ids": list(token_ids),
        "mask": mask,
        "is_content": [],
        "logprobs": [-0.5 * (index + 1) for index in range(num_sampled)],
    }
    return {name: value for name, value in node.items() if value is not None}


def trace(nodes: Sequence[Mapping[str, Any]], rewards: Mapping[str, Any], **fields: Any) -> dict[str, Any]:
    """A Trace; each sampled node came from a call that stopped by itself."""
    sampling = {"temperature": 0.7, "max_tokens": 64}
    calls = [
        {"node": index, "model": "m", "sampling": sampling, "finish_reason": "stop", "time": {"start": 0.0, "end": 1.0}}
        for index, node in enumerate(nodes)
        if node["sampled"]
    ]
    return {
        "version": 1,
        "id": "trace0",
        "verifiers": {"version": "0.2.0"},
        "task": {"type": "Task", "data": {"prompt": "aa bb"}},
        "agent": {"config": {}, "name": "agent", "trainable": True},
        "tools": [],
        "nodes": list(nodes),
        "calls": calls,
        "rewards": dict(rewards),
        "metrics": {"num_turns": 1.0},
        "info": {},
        "is_completed": True,
        "ok": True,
        "stop_condition": "agent_completed",
        "errors": [],
        "timing": {"start": 1787375975.0},
        **fields,
    }


def episode(traces: Sequence[Mapping[str, Any]], *, group: str | None = "g0", **fields: Any) -> dict[str, Any]:
    """An Episode.to_record(): values that are None are left out."""
    work = {"type": "train", "step": 12, "policy": {"start": 10, "end": 11}}
    record = {
        "id": "episode0",
        "env": {"id": "cats-v1", "name": "cats"},
        "task": {"type": "Task", "data": {"prompt": "aa bb"}, "key": "task-7", "hash": "ab12"},
        "group": {"id": group} if group else None,
        "run": {"type": "train", "id": "run0", "work": work},
        "ok": True,
        "errors": [],
        "traces": list(traces),
        **fields,
    }
    return {name: value for name, value in record.items() if value is not None}


def write_prime_rl(folder: Path, episodes: Sequence[Mapping[str, Any]], *, step: int = 12, kind: str = "train") -> Path:
    return write_lines(folder / "rollouts" / f"step_{step}" / kind / "effective" / "traces.jsonl", episodes)
