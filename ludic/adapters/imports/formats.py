"""Formats of other programs: one function each, from a record to an episode, named in ludic.settings.kinds.

A function takes a Record, which is a row of a data file, and returns an ImportedEpisode, or several. A user's own
function, in a file, is named as path/to/file.py:function. Pure, except for loading that file. Raises ConfigError if
there is no such format, RefusedRecordError if a record can't be used.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from ludic.adapters.imports.atif import atif, read_atif
from ludic.adapters.imports.episodes import (
    Conversation,
    ImportedEpisode,
    ImportedRow,
    Texts,
    agent_step,
    row_of,
    wanted_text,
)
from ludic.adapters.imports.evaluations import inspect as inspect_ai
from ludic.adapters.imports.evaluations import lighteval, lm_eval, read_inspect, read_lm_eval
from ludic.adapters.imports.forms import import_form
from ludic.adapters.imports.records import (
    FINISH_REASONS,
    ImportRecord,
    NumberedRecords,
    finite_numbers,
    is_number,
    own_columns,
    purpose_of,
    read_records,
    to_array,
)
from ludic.agents import CompletionSpan, RowBuilder
from ludic.base import is_data_file, module_file
from ludic.errors import ConfigError, RefusedRecordError, renamed
from ludic.records import (
    AgentStep,
    Message,
    add_rewards,
    read_messages,
    read_tools,
)
from ludic.settings import FORMAT, UserFile, describe_failure, digest, find, find_own, packaged_part
from ludic.settings.user_code import describe


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportFormat:
    """How to read the files of another program."""

    function: Callable[[ImportRecord], ImportedEpisode | Iterable[ImportedEpisode]]
    path: str = ""
    """Regular expression searched in a file's path; its named groups become fields of records that lack them."""
    files: str = ""
    """Regular expression searched in the paths of a followed folder; empty takes the data files that `path` finds."""
    grows: bool = True
    """Whether the program may append to a file that it has written, until it begins the file of its next step."""
    read: Callable[[str], NumberedRecords] = read_records
    """Yields the records of a file, each with its line or number."""
    env_field: str = ""
    """Field of a record that names its environment, unless the user names it."""
    name: str = ""
    user_file: UserFile | None = None
    """The user's file that holds the function."""
    module_sha256: str | None = None
    """Digest of the module of a format that an installed package brings."""

    def takes(self, path: str) -> bool:
        """Return whether a file of a followed folder is of this format."""
        if self.files:
            return re.search(self.files, path) is not None
        return is_data_file(path) and re.search(self.path, path) is not None

    @property
    def code_sha256(self) -> str | None:
        """Digest of a package's module, or of the user's file and the modules beside it; None for a format of ludic."""
        return self.module_sha256 if self.user_file is None else digest(json.dumps(self.user_file.digests).encode())

    def describe(self, error: Exception) -> str:
        """Return the reason for which a record could not be used, in one line."""
        if self.user_file is not None:
            return describe_failure(self.user_file.path, error)
        return f"does not fit format {self.name}: {describe(error)}"


# --- The formats -----------------------------------------------------------------------------------------


def jsonl(record: ImportRecord) -> ImportedEpisode | list[ImportedEpisode]:
    """JSON Lines under ludic's own names, one rollout a line: what `ludic export --format jsonl` writes.

    The simplest record to write by hand: {"prompt": "2 + 2 =", "completion": "4", "episode_reward": 1.0}. Takes tokens
    (prompt_tokens, response_tokens) if the record has them, else a conversation (messages, and tools with the schemas
    that the model was shown, as in OpenAI's chat format), else two texts. Also takes the other forms of conversations,
    and pairs of answers, which are two episodes (ludic.adapters.imports.forms).
    """
    form, read, records = import_form(record.values)
    record.used.update((*_REDUNDANT, *read))
    episodes = [_jsonl_episode(ImportRecord(values, record.used), form) for values in records]
    return episodes[0] if len(episodes) == 1 else episodes


def _jsonl_episode(record: ImportRecord, form: str) -> ImportedEpisode:
    return ImportedEpisode(
        rows=[_jsonl_row(record)],
        columns=own_columns(record),
        prompt=record.get("prompt"),
        group=record.get("group_id"),
        metadata=record.object("metadata"),
        form=form,
    )


_REDUNDANT = (
    *("prompt_length", "response_length", "action_length", "num_turns", "group_index", "group_size", "depth"),
    *("request_index", "run_id", "worker_id", "sequence", "created_at", "version", "env", "parse_error"),
    *("incomplete_completion", "terminated", "truncated", "agent_steps", "environment_steps"),
    *("segment_index", "parent_segment_index", "trajectory_id"),
)
"""Columns of an exported row that an import computes itself or drops."""


def _jsonl_row(record: ImportRecord) -> ImportedRow | Conversation | Texts:
    columns, completion, messages = record.columns(), record.text("completion"), record.get("messages") or ()
    if {"prompt_tokens", "response_tokens"} <= columns.keys():
        return ImportedRow(columns=columns, messages=_own_messages(messages))
    if completion is None and messages:
        return Conversation(messages=messages, tools=read_tools(record.get("tools")))
    return Texts(prompt=record.need("prompt", "completion")[0], completion=str(completion))


_OWN = tuple({field.name for field in fields(Message)} - since for since in (set(), {"reasoning", "tool_call_id"}))
"""Fields of messages that ludic exports since rollouts 1.7, and before."""


def _own_messages(values: Any) -> Any:
    """Return messages as `ludic export` writes them, whatever the model wrote in a tool call; others unchanged."""
    if isinstance(values, list) and all(isinstance(each, dict) and each.keys() in _OWN for each in values):
        with suppress(msgspec.ValidationError):
            return msgspec.convert(values, tuple[Message, ...])
    return values


def verl(record: ImportRecord) -> ImportedEpisode:
    """verl: one line per rollout, of trainer.rollout_data_dir/{global_step}.jsonl, as text without special tokens.

    Source: _log_rollout_data and _write_generations of verl/trainer/ppo/v1/trainer_base.py, and of
    verl/trainer/ppo/ray_trainer.py for trainer.use_v1=False (verl 0.9.1). A thread writes a step's file in one go.
    score is the sum of token-level scores; gts, the ground truth, is the wanted answer. uid is the key of a rollout,
    {group}_{session}_{output}, of forks that of the group, and absent without v1. A session of several outputs, whose
    context was cut, is an episode for each output, with the score of the last one. Other fields are the lists of
    reward_extra_infos_dict. A step's rollouts count as those of the version of that number.
    """
    prompt, _ = record.need("input", "output")
    uid = record.get("uid")
    key = re.fullmatch(r"(.+)_\d+_\d+", uid) if isinstance(uid, str) else None
    return ImportedEpisode(
        rows=[Texts(prompt=prompt, completion=str(record.text("output")))],
        columns={
            "policy_version": _step(record),
            "episode_reward": record.number("score"),
            "wanted": wanted_text(record.get("gts")),
        },
        group=key[1] if key else uid,
        metadata={"uid": uid} if key else {},
    )


def skyrl(record: ImportRecord) -> ImportedEpisode:
    """SkyRL: one line a rollout of an evaluation, {export_path}/dumped_evals/global_step_{N}_evals/{data_source}.jsonl.

    Source: skyrl/train/utils/trainer_utils.py, dump_per_dataset_eval_results, called by skyrl/train/evaluate.py (SkyRL
    0.3.0), with trainer.dump_eval_results, the default. Texts have their special tokens. score is a number, or a list
    of one a token. Tool results in the middle of a response are not marked, so that all of it counts as the model's.
    Its training batches are left only as pickles (trainer.dump_data_batch), which ludic does not read.
    """
    prompt, _, score = record.need("input_prompt", "output_response", "score")
    extras = record.get("env_extras")
    scores = record.array("score", np.float64) if isinstance(score, list) else None
    return ImportedEpisode(
        rows=[Texts(prompt=prompt, completion=str(record.text("output_response")))],
        columns={
            "purpose": "eval",
            "policy_version": record.integer("file_step") or 0,
            "episode_reward": record.number("score") if scores is None else add_rewards(scores.tolist()),
            "finish_reason": FINISH_REASONS.get(record.text("stop_reason") or ""),
            "wanted": wanted_text(record.get("env_extras.reward_model.ground_truth")),
        },
        metadata={"data_source": record.get("data_source")},
        unused={"env_extras": extras},
    )


def trl(record: ImportRecord) -> ImportedEpisode:
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
    reward = add_rewards(components.values()) if components else None
    return ImportedEpisode(
        rows=[Texts(prompt=prompt, completion=completion)],
        columns={"policy_version": version, "episode_reward": reward, "reward_components": components},
        metadata={"advantage": advantage},
    )


def art(record: ImportRecord) -> ImportedEpisode:
    """OpenPipe ART: one row a trajectory of .../models/{model}/trajectories/{split}/{step:04d}.parquet.

    Source: src/art/utils/trajectory_logging.py, write_trajectory_groups_parquet; src/art/local/backend.py, _log.
    Version 1 and version 2 (with format_version, trajectory_index, group_json and trajectory_json) share group_index,
    reward, messages, group_logs, logs, and as JSON text metrics, metadata, tools, group_metadata and group_metrics. A
    message is trainable if the model sampled it. messages is null in a trajectory that holds raw exchanges.
    """
    record.used.update(("format_version", "trajectory_index", "group_json", "trajectory_json"))
    return ImportedEpisode(
        rows=[Conversation(messages=record["messages"], tools=read_tools(record.get("tools")))],
        columns={
            "purpose": purpose_of(record.text("split")),
            "policy_version": record.integer("step"),
            "episode_reward": record.number("reward"),
            "reward_components": finite_numbers(record.object("metrics")),
        },
        group=record.get("group_index"),
        metadata=record.object("metadata"),
    )


def _step(record: ImportRecord) -> int:
    step = record.integer("step", "file_step")
    if step is None:
        raise RefusedRecordError("has no step, and its file's name holds none")
    return step


# --- prime-rl, which logs episodes of verifiers: message graphs whose paths are token transcripts --------


Json = Mapping[str, Any]

_TRUNCATION_REASONS = {
    "max_turns": "max_steps",
    "context_length": "context_length",
    "max_input_tokens": "max_seq_len",
    "max_output_tokens": "max_seq_len",
    "max_total_tokens": "max_seq_len",
}
"""truncation_reason of the rollouts table, by stop condition of verifiers that is a limit (Trace.is_truncated)."""

_KNOWN_OF_TRACE = frozenset({"agent", "nodes", "calls", "rewards", "ok", "errors", "task", "version", "is_completed"})
"""Fields of a trace that are read or redundant."""


def prime_rl(record: ImportRecord) -> Iterator[ImportedEpisode]:
    """prime-rl: one episode of verifiers a line; also traces.jsonl of a verifiers evaluation.

    Files: {run_dir}/rollouts/step_{N}/{train,eval}/{all,effective}/traces.jsonl; import either `all` or `effective`,
    since the second repeats a part of the first. Sources: src/prime_rl/monitors/file.py (commit 559b4477) and
    verifiers/v1/{episode,trace,graph}.py (commit a60a606e, both August 2026). Null values are left out of a record.
    The nodes of a trace are a graph; a path from root to leaf is a branch, whose joined token_ids the model saw.
    A trace of a trainable agent becomes an episode of ludic, and each of its branches a row; a node that several
    branches share is sampled in the first of them and context in the others, as prime-rl trains it
    (iter_trainable_branches). Logprobs are of the distribution sampled from (vLLM's processed_logprobs, the default).
    """
    traces = record.get("traces") or []
    record.used.update(("ok", "errors"))
    trained = [trace for trace in traces if trace.get("agent", {}).get("trainable", True)]
    if not trained:
        hint = "; results.jsonl of verifiers is read by --from jsonl" if "completion" in record.values else ""
        raise RefusedRecordError(f"has no trace of an agent that is trained{_reason(record.values)}{hint}")
    shared = {
        "env_name": record.text("env.name", "env.id"),
        "env_example_id": record.text("task.key", "task.hash"),
        "purpose": "train" if record.text("run.work.type", "file_kind") in (None, "train") else "eval",
        "policy_version": record.integer("run.work.policy.start", "run.work.step", "file_step"),
        "policy_version_last": record.integer("run.work.policy.end"),
    }
    group, episode_id = record.get("group.id"), record.get("id")
    for trace in trained:
        agent_id = trace.get("agent", {}).get("name", "agent")
        unused = {
            f"trace.{key}": value
            for key, value in trace.items()
            if key not in _KNOWN_OF_TRACE and value not in ([], {})
        }
        yield ImportedEpisode(
            rows=_rows_of_trace(trace),
            columns={**shared, **_outcome(trace), "agent_id": agent_id},
            group=None if group is None else [group, agent_id],
            unused={"episode.id": episode_id, **unused},
        )


def _outcome(trace: Json) -> dict[str, Any]:
    """Return the columns for sampling settings, rewards and how a trace ended."""
    calls = trace.get("calls") or []
    ends = [end for call in calls if (end := call.get("finish_reason"))]
    rewards = {name: part for name, part in (trace.get("rewards") or {}).items() if part}
    components = {name: part["score"] * part.get("weight", 1.0) for name, part in rewards.items()}
    first: Json = next((call["sampling"] for call in calls if call.get("sampling")), {})
    sampling = {"temperature": float, "top_p": float, "max_tokens": int}
    return {
        **{name: kind(first[name]) for name, kind in sampling.items() if first.get(name) is not None},
        "episode_reward": add_rewards(components.values()) if components else None,
        "reward_components": components,
        "finish_reason": FINISH_REASONS.get(ends[-1]) if ends else None,
        "truncation_reason": _TRUNCATION_REASONS.get(trace.get("stop_condition") or ""),
        "error": None if trace.get("ok", True) else f"the trace is not ok{_reason(trace)}",
    }


def _reason(values: Json) -> str:
    """Return the last error of an episode or a trace, after a colon; empty if there is none."""
    errors = values.get("errors") or []
    return f": {errors[-1].get('type')}: {errors[-1].get('message')}" if errors else ""


def _rows_of_trace(trace: Json) -> list[ImportedRow | Conversation]:
    """Return a row for each path from a root to a leaf that has a new sampled node."""
    nodes, calls = trace.get("nodes") or [], trace.get("calls") or []
    parents = {node["parent"] for node in nodes if node.get("parent") is not None}
    ends = {call["node"]: call.get("finish_reason") for call in calls if call.get("node") is not None}
    said: set[int] = set()
    rows: list[ImportedRow | Conversation] = []
    for leaf in (index for index in range(len(nodes)) if index not in parents):
        path = _path_to(nodes, leaf)
        new = [index for index in path if nodes[index].get("sampled") and index not in said]
        said.update(new)
        if new and all(nodes[index].get("token_ids") for index in new):
            rows.append(_branch(nodes, path, new, ends))
        elif new:
            # A client without a renderer stores only texts.
            messages = [nodes[index]["message"] for index in path]
            rows.append(Conversation(messages=messages, sampled=[path.index(index) for index in new]))
    if not rows:
        raise RefusedRecordError(f"a trace has no token of the model{_reason(trace)}")
    return rows


def _path_to(nodes: Sequence[Json], leaf: int) -> list[int]:
    path: list[int] = []
    index: int | None = leaf
    while index is not None:
        if index in path or not 0 <= index < len(nodes):
            raise RefusedRecordError(f"the parents of node {leaf} lead nowhere")
        path.append(index)
        index = nodes[index].get("parent")
    return path[::-1]


def _branch(
    nodes: Sequence[Json], path: Sequence[int], new: Sequence[int], ends: Mapping[int, str | None]
) -> ImportedRow:
    """Return the row of a path; the response begins with the first sampled token of the nodes `new`."""
    builder = RowBuilder()
    steps: list[AgentStep] = []
    read = read_messages([nodes[index]["message"] for index in path], has_tokens=True)
    said = dict(zip(read.sources, read.messages, strict=True))
    for number, index in enumerate(path):
        if index not in new:
            builder.add_context(to_array(nodes[index].get("token_ids") or [], np.int32))
        elif spans := _add_sampled(builder, index, nodes[index]):
            finish_reason = FINISH_REASONS.get(ends.get(index) or "")
            start, end = spans[0].start, spans[-1].end
            steps.append(agent_step(len(steps), said[number], start, end, finish_reason))
    if not steps:
        raise RefusedRecordError("no token of a branch was sampled")
    return replace(row_of(builder.transcript(), read.messages, steps), unread=read.unread)


def _add_sampled(builder: RowBuilder, index: int, node: Json) -> list[CompletionSpan]:
    """Add the tokens of a node by its mask; return the spans of the sampled ones."""
    tokens, mask = to_array(node["token_ids"], np.int32), to_array(node.get("mask") or [], np.bool_)
    if len(mask) != len(tokens):
        raise RefusedRecordError(f"node {index} has {len(tokens)} token_ids and a mask of {len(mask)}")
    found = to_array(node.get("logprobs") or [], np.float32)
    logprobs = np.full(len(tokens), np.nan, np.float32)
    if len(found) == np.count_nonzero(mask):
        logprobs[mask] = found
    spans = []
    for part in np.split(np.arange(len(tokens)), np.flatnonzero(np.diff(mask)) + 1):
        if mask[part[0]]:
            known = not np.isnan(logprobs[part]).any()
            columns = {"response_logprobs": logprobs[part]} if known else {}
            spans.append(builder.add_completion(tokens[part], columns))
        else:
            builder.add_context(tokens[part])
    return spans


# --- The formats -----------------------------------------------------------------------------------------

ART = ImportFormat(function=art, path=r"trajectories/(?P<split>[^/]+)/(?P<step>\d+)\.parquet$", grows=False)
# An agent may write its trajectory after each step.
ATIF = ImportFormat(function=atif, read=read_atif, files=r"trajectory[^/]*\.jsonl?$")
INSPECT = ImportFormat(function=inspect_ai, read=read_inspect, env_field="log.task", files=r"\.eval$", grows=False)
JSONL = ImportFormat(function=jsonl)
LIGHTEVAL = ImportFormat(function=lighteval, env_field="doc.task_name", files=r"details_[^/]*\.parquet$", grows=False)
LM_EVAL = ImportFormat(
    function=lm_eval,
    path=r"samples_(?P<task>[^/]+)_\d{4}-\d\d-\d\dT[^/_]*\.jsonl$",
    read=read_lm_eval,
    env_field="task",
)
PRIME_RL = ImportFormat(
    function=prime_rl,
    path=r"step_(?P<file_step>\d+)/(?P<file_kind>train|eval)/",
    files=r"(?<!/effective)/traces\.jsonl$",
)
SKYRL = ImportFormat(
    function=skyrl,
    path=r"dumped_evals/(?:global_step_(?P<file_step>\d+)_evals|eval_only)/[^/]+\.jsonl$",
    files=r"dumped_evals/[^/]+/(?!aggregated_results)[^/]+\.jsonl$",
    env_field="env_class",
    grows=False,
)
TRL = ImportFormat(function=trl, path=r"completions_(?P<file_step>\d+)\.parquet$", grows=False)
VERL = ImportFormat(function=verl, path=r"(?:^|/)(?P<file_step>\d+)\.jsonl$", grows=False)


# --- Loading ---------------------------------------------------------------------------------------------


def load_format(name: str) -> ImportFormat:
    """Return a format by its name, of ludic or a package, or a user's function or ImportFormat, path/to/file.py:NAME.

    Imports the package, and runs the user's file. Raises ConfigError.
    """
    if name in FORMAT.built_in:
        return replace(find(FORMAT, name), name=name)
    part = packaged_part(FORMAT, name)
    own = find_own(FORMAT, name) if part is None else None
    value = find(FORMAT, name) if own is None else own.value
    found = value if isinstance(value, ImportFormat) else ImportFormat(function=value)
    try:
        re.compile(found.path)
    except re.error as error:
        raise ConfigError(f"{name}: path {found.path!r} is no regular expression: {error}") from error
    module = None if part is None else module_file(part.module)
    return replace(
        found,
        name=name.rpartition(":")[2],
        user_file=None if own is None else own.file,
        module_sha256=None if module is None else digest(Path(module).read_bytes()),
    )


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        raise renamed(__name__, name, {"Format": "ImportFormat"})
