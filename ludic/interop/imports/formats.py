"""Formats of other programs: one function each, from a record to an episode, named in ludic.code.kinds.

A function takes a Record, which is a line of JSON or a row of Parquet, and returns an Episode, or several. A user's own
function, in a file, is named as path/to/file.py:function. Pure, except for loading that file. Raises ConfigError if
there is no such format, RefusedRecordError if a record can't be used.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np

from ludic.code.files import UserFile, digest, python_file_of
from ludic.code.kinds import FORMAT, find, find_own
from ludic.code.run import describe, describe_failure
from ludic.errors import ConfigError
from ludic.interop.imports.episodes import Conversation, Episode, Row, Texts
from ludic.interop.imports.evaluations import inspect as inspect_ai
from ludic.interop.imports.evaluations import lighteval, lm_eval, read_inspect, read_lm_eval
from ludic.interop.imports.reading import Records, read_records
from ludic.interop.imports.record import Record, RefusedRecordError, finite_numbers, is_number, refusal
from ludic.interop.imports.verifiers import FINISH_REASONS, prime_rl
from ludic.records import Purpose, WeightSpan


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """How to read the files of another program."""

    function: Callable[[Record], Episode | Iterable[Episode]]
    path: str = ""
    """Regular expression searched in a file's path; its named groups become fields of records that lack them."""
    read: Callable[[str], Records] = read_records
    """Yields the records of a file, each with its line or number."""
    env_field: str = ""
    """Field of a record that names its environment, unless the user names it."""
    name: str = ""
    user_file: UserFile | None = None
    """The user's file that holds the function."""

    @property
    def code_sha256(self) -> str | None:
        """Digest of the user's file and of the modules beside it that it imports; None for a format of ludic."""
        return None if self.user_file is None else digest(json.dumps(self.user_file.digests).encode())

    def describe(self, error: Exception) -> str:
        """Return the reason for which a record could not be used, in one line."""
        if self.user_file is not None:
            return describe_failure(self.user_file.path, error)
        return f"does not fit format {self.name}: {describe(error)}"


# --- The formats -----------------------------------------------------------------------------------------


def jsonl(record: Record) -> Episode:
    """JSON Lines under ludic's own names, one rollout a line: what `ludic export --format jsonl` writes.

    The simplest record to write by hand: {"prompt": "2 + 2 =", "completion": "4", "episode_reward": 1.0}. Takes tokens
    (prompt_tokens, response_tokens) if the record has them, else a conversation (messages, and tools with the schemas
    that the model was shown, as in OpenAI's chat format), else two texts.
    """
    record.used.update(_REDUNDANT)
    texts = ("env_name", "env_example_id", "agent_id", "model", "engine", "truncation_reason", "error")
    integers = ("policy_version", "policy_version_last", "top_k", "max_tokens", "seed")
    components, reward = finite_numbers(record.object("reward_components")), record.number("episode_reward")
    if "episode_reward" not in record.values and components:
        reward = sum(components.values())
    finish_reason = record.text("finish_reason")
    if finish_reason is not None and finish_reason not in FINISH_REASONS:
        raise refusal("finish_reason", finish_reason, ", ".join(FINISH_REASONS))
    return Episode(
        rows=[_jsonl_row(record)],
        columns={name: record.text(name) for name in texts}
        | {name: record.integer(name) for name in integers}
        | {name: record.number(name) for name in ("temperature", "top_p")}
        | {
            "purpose": _purpose(record.text("purpose")),
            "finish_reason": FINISH_REASONS.get(finish_reason or ""),
            "episode_reward": reward,
            "reward_components": components,
            "weight_versions": _weight_versions(record),
        },
        prompt=record.get("prompt"),
        group=record.get("group_id"),
        metadata=record.object("metadata"),
    )


_REDUNDANT = (
    *("prompt_length", "response_length", "action_length", "num_turns", "group_index", "group_size", "depth"),
    *("request_index", "run_id", "worker_id", "sequence", "created_at", "version", "env", "parse_error"),
    *("incomplete_completion", "terminated", "truncated", "agent_steps", "environment_steps"),
    *("segment_index", "parent_segment_index", "trajectory_id"),
)
"""Columns of an exported row that an import computes itself or drops."""


def _weight_versions(record: Record) -> tuple[WeightSpan, ...] | None:
    spans = record.get("weight_versions")
    try:
        return msgspec.convert(spans, tuple[WeightSpan, ...] | None)
    except msgspec.ValidationError:
        raise refusal("weight_versions", spans, "a list of objects with version, start and end") from None


def _jsonl_row(record: Record) -> Row | Conversation | Texts:
    tokens: dict[str, Any] = {name: record.array(name, np.int32) for name in ("prompt_tokens", "response_tokens")}
    tokens |= {name: record.array(name, np.float32) for name in ("response_logprobs", "token_rewards")}
    tokens["action_mask"] = record.array("action_mask", np.bool_)
    tokens["kept_tokens"] = record.arrays("kept_tokens", np.int32)
    completion, messages = record.text("completion"), record.get("messages") or ()
    if tokens["prompt_tokens"] is not None and tokens["response_tokens"] is not None:
        return Row(**tokens, messages=messages)
    if completion is None and messages:
        return Conversation(messages=messages, tools=_tools(record))
    return Texts(prompt=record.need("prompt", "completion")[0], completion=str(completion))


def verl(record: Record) -> Episode:
    """verl: one line per rollout, of trainer.rollout_data_dir/{global_step}.jsonl, as text without special tokens.

    Source: verl/trainer/ppo/ray_trainer.py, _dump_generations and _log_rollout_data (commit b178a3cd, January 2026).
    score is the sum of token_level_scores. Some forks dump uid, the id of a group. Other fields are gts, the ground
    truth, and the lists of reward_extra_infos_dict. A step's rollouts count as those of the version of that number.
    """
    prompt, _ = record.need("input", "output")
    return Episode(
        rows=[Texts(prompt=prompt, completion=str(record.text("output")))],
        columns={"policy_version": _step(record), "episode_reward": record.number("score")},
        group=record.get("uid"),
    )


def trl(record: Record) -> Episode:
    """TRL: one row a completion of {output_dir}/completions/completions_{step:05d}.parquet, without special tokens.

    Source: trl/trainer/grpo_trainer.py, log and _generate_and_score_completions (commit f2cd5771, July 2026), with
    log_completions=True. Columns: step, prompt, completion, advantage, one for each reward function (NaN where it
    returned None), and those of log_extra. The reward is the sum of all number columns besides step and advantage:
    where reward_weights were used, or a column of log_extra is a number, call this function from your own and replace
    the reward. TRL logs the last batch that was generated, so the same completions may stand under several steps.
    """
    prompt, _ = record.need("prompt", "completion")
    completion, version, advantage = str(record.text("completion")), _step(record), record.get("advantage")
    numbers = {name: value for name, value in record.rest().items() if is_number(value)}
    record.used.update(numbers)
    components = finite_numbers(numbers)
    reward = sum(components.values()) if components else None
    return Episode(
        rows=[Texts(prompt=prompt, completion=completion)],
        columns={"policy_version": version, "episode_reward": reward, "reward_components": components},
        metadata={"advantage": advantage},
    )


def art(record: Record) -> Episode:
    """OpenPipe ART: one row a trajectory of .../models/{model}/trajectories/{split}/{step:04d}.parquet.

    Source: src/art/utils/trajectory_logging.py, write_trajectory_groups_parquet; src/art/local/backend.py, _log.
    Version 1 and version 2 (with format_version, trajectory_index, group_json and trajectory_json) share group_index,
    reward, messages, group_logs, logs, and as JSON text metrics, metadata, tools, group_metadata and group_metrics. A
    message is trainable if the model sampled it. messages is null in a trajectory that holds raw exchanges.
    """
    record.used.update(("format_version", "trajectory_index", "group_json", "trajectory_json"))
    return Episode(
        rows=[Conversation(messages=record["messages"], tools=_tools(record))],
        columns={
            "purpose": _purpose(record.text("split")),
            "policy_version": record.integer("step"),
            "episode_reward": record.number("reward"),
            "reward_components": finite_numbers(record.object("metrics")),
        },
        group=record.get("group_index"),
        metadata=record.object("metadata"),
    )


def _tools(record: Record) -> list[Mapping[str, Any]]:
    """Return the schemas of a record's tools, a list or JSON text; empty if it has none."""
    value = record.get("tools") or []
    try:
        return msgspec.convert(json.loads(value) if isinstance(value, str) else value, list[dict[str, Any]])
    except (ValueError, msgspec.ValidationError):
        raise refusal("tools", value, "a list of the tools' JSON schemas") from None


def _purpose(text: str | None) -> Purpose:
    return "train" if text in (None, "", "train") else "eval"


def _step(record: Record) -> int:
    step = record.integer("step", "file_step")
    if step is None:
        raise RefusedRecordError("has no step, and its file's name holds none")
    return step


ART = Format(function=art, path=r"trajectories/(?P<split>[^/]+)/(?P<step>\d+)\.parquet$")
INSPECT = Format(function=inspect_ai, read=read_inspect, env_field="log.task")
JSONL = Format(function=jsonl)
LIGHTEVAL = Format(function=lighteval, env_field="doc.task_name")
LM_EVAL = Format(
    function=lm_eval,
    path=r"samples_(?P<task>[^/]+)_\d{4}-\d\d-\d\dT[^/_]*\.jsonl$",
    read=read_lm_eval,
    env_field="task",
)
PRIME_RL = Format(function=prime_rl, path=r"step_(?P<file_step>\d+)/(?P<file_kind>train|eval)/")
TRL = Format(function=trl, path=r"completions_(?P<file_step>\d+)\.parquet$")
VERL = Format(function=verl, path=r"(?:^|/)(?P<file_step>\d+)\.jsonl$")


# --- Loading ---------------------------------------------------------------------------------------------


def load_format(name: str) -> Format:
    """Return a format of ludic by its name, or a user's: path/to/file.py:function, or the name of a Format in a file.

    Runs the user's file. Raises ConfigError.
    """
    if python_file_of(name) is None:
        return replace(find(FORMAT, name), name=name)
    own = find_own(FORMAT, name)
    found = own.value if isinstance(own.value, Format) else Format(function=own.value)
    try:
        re.compile(found.path)
    except re.error as error:
        raise ConfigError(f"{name}: path {found.path!r} is no regular expression: {error}") from error
    return replace(found, name=name.rpartition(":")[2], user_file=own.file)
