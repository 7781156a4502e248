"""Read samples that other evaluation programs log: inspect_ai, lm-evaluation-harness, lighteval.

One record is one sample of one example. The example's id in the log becomes env_example_id, so that evaluations of the
same examples can be compared in pairs. Scores that are no single number are kept as metadata. Raises
RefusedRecordError if a record can't be used, ConfigError if a file is no log or inspect-ai is missing.
"""

import json
import math
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from shutil import copyfileobj
from typing import Any

from ludic.adapters.imports.episodes import Conversation, ImportedEpisode, Texts, wanted_text
from ludic.adapters.imports.records import ImportRecord, NumberedRecords, open_file, read_records
from ludic.base import require, temporary_folder
from ludic.errors import ConfigError, RefusedRecordError, one_line
from ludic.records import refusal
from ludic.run import SAMPLING

LARGEST_MEMBER = 1 << 30
"""Maximum bytes of one sample of an inspect_ai log, decompressed."""

LOG_VERSION = 2
"""Newest version of inspect_ai's logs that is read; inspect_ai itself reads any."""

_SCORES_AS_TEXT = {"C": 1.0, "I": 0.0, "P": 0.5, "N": 0.0, "yes": 1.0, "true": 1.0, "no": 0.0, "false": 0.0}
"""Numbers of scores that are text, as in inspect_ai/scorer/_metric.py, value_to_float."""
_STOP_REASONS = {"stop": "stop", "tool_calls": "stop", "max_tokens": "length", "model_length": "length"}
_NOT_READ = frozenset({"events", "events_data", "timelines", "store", "attachments", "role_usage", "uuid"})
_LM_EVAL = frozenset(
    {"doc_id", "doc", "target", "arguments", "resps", "filtered_resps", "filter", "metrics"}
    | {"doc_hash", "prompt_hash", "target_hash", "task", "scores"}
)


def score_number(value: Any) -> float | None:
    """Return a score as a finite number: right is 1, wrong 0, partly right 0.5; None for any other value."""
    if isinstance(value, str):
        value = _SCORES_AS_TEXT.get(value, _SCORES_AS_TEXT.get(value.lower(), value))
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _scored(scores: Mapping[str, Any]) -> tuple[float | None, dict[str, float]]:
    """Return the reward, which is the first score, and the others; the parts of a score that is an object are others.

    The reward is None if the first score is no number: the program could not score the sample.
    """
    numbers: dict[str, float | None] = {}
    for name, value in scores.items():
        parts = (
            {f"{name}/{part}": each for part, each in value.items()} if isinstance(value, Mapping) else {name: value}
        )
        numbers |= {part: score_number(each) for part, each in parts.items()}
    first = next(iter(scores), None)
    reward = numbers.pop(first, None) if first is not None else None
    return reward, {name: number for name, number in numbers.items() if number is not None}


# --- inspect_ai ------------------------------------------------------------------------------------------


def inspect(record: ImportRecord) -> ImportedEpisode:
    """inspect_ai: one sample of a .eval log, as `read_inspect` gives it.

    Source: inspect_ai/log/_log.py, EvalSample and EvalSpec (0.3.285). The samples of several epochs are a group. The
    reward is the first score, the others are components; C and I of the first one say whether the answer is correct. A
    log that ludic wrote gives version and agent too.
    """
    writer_is_ludic = record.get("log.metadata.writer") == "ludic"
    own = (record.get("metadata") or {}) if writer_is_ludic else {}
    scores = record.get("scores") or {}
    reward, components = _scored(scores)
    example, error = record.text("id"), record.text("error.message")
    generate, messages = record.get("log.generate") or {}, record.get("messages") or []
    columns = {
        "purpose": "eval",
        "model": record.text("log.metadata.model" if writer_is_ludic else "log.model"),
        "policy_version": record.integer("log.metadata.policy_version") if writer_is_ludic else None,
        "agent_id": own.get("agent_id"),
        "env_example_id": own.get("env_example_id") or example,
        "episode_reward": reward,
        "reward_components": components,
        "wanted": wanted_text(record.get("target") or None),
        "correct": {"C": True, "I": False}.get(str(next(iter(scores.values()), None))),
        "finish_reason": _STOP_REASONS.get(_stop_reason(record)),
        "truncation_reason": record.text("limit.type") or own.get("truncation_reason"),
        "error": error,
        **{name: generate.get(name) for name in (*SAMPLING, "seed")},
    }
    unused = {**dict(record.get("metadata") or {}), "epoch": record.get("epoch")}
    return ImportedEpisode(rows=[_inspect_row(record, messages)], columns=columns, group=example, unused=unused)


def _stop_reason(record: ImportRecord) -> str:
    choices = record.get("output.choices") or [{}]
    return str(choices[0].get("stop_reason"))


def _inspect_row(record: ImportRecord, messages: Sequence[Mapping[str, Any]]) -> Conversation | Texts:
    if any(message.get("role") == "assistant" for message in messages):
        return Conversation(messages=[_message(message) for message in messages])
    prompt = messages or record["input"]
    if isinstance(prompt, list):
        prompt = [_message(message) for message in prompt]
    return Texts(prompt=prompt, completion=record.text("output.completion") or "")


_OF_LOG = frozenset({"id", "source", "model", "function", "tool_calls"})
"""Fields of a message that are of the log, or are converted."""


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message with its tool calls in OpenAI's format."""
    calls = [
        {"id": call["id"], "name": call["function"], "arguments": call["arguments"]}
        for call in message.get("tool_calls") or ()
    ]
    rest = {name: value for name, value in message.items() if name not in _OF_LOG}
    return {**rest, "tool_calls": calls, "name": message.get("function")}


def read_inspect(url: str) -> NumberedRecords:
    """Yield the samples of an inspect_ai log, each with the header of the log as `log`; inspect-ai reads the file."""
    require("inspect_ai", "inspect", "format inspect")
    from inspect_ai.log import read_eval_log, read_eval_log_sample, read_eval_log_sample_summaries

    with temporary_folder("inspect") as folder:
        path = str(folder / "log.eval")
        with open_file(url) as source, Path(path).open("wb") as copy:
            copyfileobj(source, copy)
        _check_log(path, url)
        header = _try(url, lambda: read_eval_log(path, header_only=True))
        if header.version > LOG_VERSION:
            raise ConfigError(
                f"{url} is of version {header.version} of inspect_ai's logs, wanted at most {LOG_VERSION}; update ludic"
            )
        summaries = _try(url, lambda: read_eval_log_sample_summaries(path))
        log = {"task": header.eval.task, "model": header.eval.model, "metadata": header.eval.metadata}
        configs = (header.eval.model_generate_config, header.plan.config)  # of the model, and of the evaluation
        log["generate"] = {
            name: each for config in configs for name, each in config.model_dump(exclude_none=True).items()
        }
        for number, summary in enumerate(summaries, start=1):
            try:
                found = read_eval_log_sample(path, summary.id, summary.epoch, resolve_attachments="core")
            except Exception as error:  # of another program's parser
                yield number, f"sample {str(summary.id)!r} can't be read: {one_line(error)[:200]}"
                continue
            values = found.model_dump(exclude=set(_NOT_READ), exclude_none=True)
            scores = {name: score.value for name, score in (found.scores or {}).items()}
            yield number, {**values, "scores": scores, "log": log}


def _check_log(path: str, url: str) -> None:
    """Raise ConfigError if a file is no whole zip archive, or holds a member that would fill the memory."""
    try:
        with zipfile.ZipFile(path) as archive:
            largest = max(archive.infolist(), key=lambda member: member.file_size, default=None)
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as error:
        raise ConfigError(f"{url} is no .eval log of inspect_ai: {one_line(error)}") from error
    if largest is not None and largest.file_size > LARGEST_MEMBER:
        raise ConfigError(
            f"{url}: {largest.filename!r} takes {largest.file_size:,} bytes, wanted at most {LARGEST_MEMBER:,}"
        )


def _try(url: str, read: Callable[[], Any]) -> Any:
    try:
        return read()
    except Exception as error:  # of another program's parser
        raise ConfigError(f"{url} is no .eval log that inspect_ai reads: {one_line(error)[:300]}") from error


# --- lm-evaluation-harness -------------------------------------------------------------------------------


def lm_eval(record: ImportRecord) -> ImportedEpisode:
    """lm-evaluation-harness: one document of samples_{task}_{date}.jsonl, of --log_samples, as `read_lm_eval` gives it.

    Source: lm_eval/evaluator.py, evaluate, and loggers/evaluation_tracker.py, save_results_samples (0.4.13). The reward
    is the first metric of the first filter. The answer to a multiple choice is the likeliest choice; of repeats it is
    the first.
    """
    arguments, resps = record.need("arguments", "resps")
    reward, components = _scored(record.object("scores"))
    return ImportedEpisode(
        rows=[Texts(prompt=_lm_eval_prompt(arguments), completion=_lm_eval_answer(arguments, resps))],
        columns={
            "purpose": "eval",
            "env_example_id": str(record.need("doc_id")[0]),
            "episode_reward": reward,
            "reward_components": components,
            # The target of a multiple choice is the index of a choice.
            "wanted": wanted_text(record.get("target")) if isinstance(resps[0][0], str) else None,
        },
        group=record.get("doc_id"),
    )


def _lm_eval_prompt(arguments: Any) -> Any:
    """Return the first request's text; messages if a chat template was left to a server."""
    try:
        prompt = arguments["gen_args_0"]["arg_0"]
        if isinstance(prompt, list):  # lm_eval/api/utils.py, JsonChatStr: a tuple of JSON text
            prompt = json.loads(prompt[0])
    except (TypeError, KeyError, IndexError, ValueError):
        raise refusal("arguments", arguments, "an object with gen_args_0.arg_0") from None
    return prompt


def _lm_eval_answer(arguments: Any, resps: Any) -> str:
    try:
        if isinstance(resps[0][0], str) and "arg_1" in arguments["gen_args_0"]:  # else the text itself was scored
            return resps[0][0]
        logprobs = [float(repeats[0][0]) for repeats in resps]
        answer = arguments[f"gen_args_{logprobs.index(max(logprobs))}"]["arg_1"]
    except (TypeError, KeyError, IndexError, ValueError):
        raise refusal("resps", resps, "a generated text, or a log probability for each choice") from None
    if not isinstance(answer, str):
        raise refusal("arguments", arguments, "the text of a choice as arg_1")
    return answer


def read_lm_eval(url: str) -> NumberedRecords:
    """Yield one record a document: a file holds a line for each filter of a document."""
    merged: dict[str, tuple[int, dict[str, Any]]] = {}
    for line, values in read_records(url):
        if isinstance(values, str) or "doc_id" not in values:
            yield line, values
            continue
        metrics = values.get("metrics") or [name for name in values if name not in _LM_EVAL]
        if not isinstance(metrics, list):
            yield line, f"metrics is {str(metrics)[:60]!r}, wanted a list of names"
            continue
        scores = {f"{name},{values.get('filter', 'none')}": values.get(str(name)) for name in metrics}
        kept = {name: value for name, value in values.items() if name in _LM_EVAL}
        _, first = merged.setdefault(json.dumps(values["doc_id"], ensure_ascii=False), (line, {**kept, "scores": {}}))
        first["scores"] |= scores
    yield from merged.values()


# --- lighteval -------------------------------------------------------------------------------------------


def lighteval(record: ImportRecord) -> ImportedEpisode:
    """lighteval: one document of details_{task}_{date}.parquet, of --save-details.

    Source: lighteval/logging/info_loggers.py, DetailsLogger.Detail, and evaluation_tracker.py, save_details (0.13.0).
    The reward is the first metric. The answer is the first text, or the likeliest choice.
    """
    doc, response = record.object("doc"), record.object("model_response")
    query = doc.get("query")
    if not isinstance(query, str):
        raise RefusedRecordError("has no doc.query; details of lighteval before 0.11 are not read")
    reward, components = _scored({name: each for name, each in record.object("metric").items() if each is not None})
    example = doc.get("id")
    return ImportedEpisode(
        rows=[Texts(prompt=response.get("input") or query, completion=_lighteval_answer(doc, response))],
        columns={
            "purpose": "eval",
            "env_example_id": None if example in (None, "") else str(example),
            "episode_reward": reward,
            "reward_components": components,
            "wanted": wanted_text(_gold(doc)),
        },
        group=[doc.get("task_name"), example or query],
    )


def _lighteval_answer(doc: Mapping[str, Any], response: Mapping[str, Any]) -> str:
    texts, logprobs, choices = response.get("text"), response.get("logprobs"), doc.get("choices") or []
    if texts:
        return str(texts[0])
    if logprobs and len(choices) == len(logprobs):
        return str(choices[logprobs.index(max(logprobs))])
    raise RefusedRecordError("has no model_response.text, and no log probability for each of doc.choices")


def _gold(doc: Mapping[str, Any]) -> list[str]:
    """Return the right answers."""
    indexes, choices = doc.get("gold_index"), doc.get("choices") or []
    wanted = indexes if isinstance(indexes, list) else [indexes]
    return [str(choices[index]) for index in wanted if isinstance(index, int) and 0 <= index < len(choices)]
