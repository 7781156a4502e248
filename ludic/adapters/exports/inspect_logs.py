"""Write stored evaluations as inspect_ai logs, one .eval file for each evaluation, version and environment.

Reads evals/ through SQL, the samples of one log at a time. Writes files of inspect_ai's own format to a local folder; a
file appears whole, and a second export replaces it. Raises ConfigError if inspect-ai is missing, nothing is stored, or
a file can't be written.
"""

import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, BinaryIO

from ludic.adapters.exports.targets import given_folder
from ludic.app import interval_text
from ludic.base import Part, Result, Track, installed_version, plural, read_json, require, untracked
from ludic.errors import ConfigError, one_line
from ludic.eval import Chosen, MeasureConfig, Samples, numbers
from ludic.root import Root
from ludic.root.sql import connect, figure
from ludic.run import SAMPLING

if TYPE_CHECKING:
    from inspect_ai.log import EvalLog, EvalResults, EvalSample
    from inspect_ai.model import ChatMessage, GenerateConfig, ModelOutput, ModelUsage
    from inspect_ai.scorer import Score

REWARD = "reward"
"""Name of the score that is the reward of an episode; the others are its components."""

_IDS = ("rollout_id", "episode_id", "env_example_id", "agent_id", "policy_version")
_STOP_REASONS = {"stop": "stop", "length": "max_tokens"}

LogValues = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class LogsReport(Result):
    """Result of an export to inspect_ai logs."""

    location: str
    """Folder of the logs."""
    files: Sequence[str]
    """Names of the logs, in the order of versions and environments."""
    num_samples: int

    @property
    def num_files(self) -> int:
        return len(self.files)

    def to_dict(self) -> dict[str, Any]:
        return {"format": "inspect", **asdict(self)}

    def parts(self) -> Iterator[Part]:
        """A sentence."""
        logs = f"{plural(self.num_files, 'log')} of {plural(self.num_samples, 'sample')}"
        yield f"{self.location}: {logs}; `inspect view --log-dir` shows them"


def inspect(root: Root, target: str | BinaryIO | None, *, version: int | None, track: Track) -> LogsReport:
    """The exporter of logs. target: local folder of the logs."""
    return export_logs(root, given_folder(target, "inspect", "the folder of logs"), version, track)


def export_logs(root: Root, folder: Path, version: int | None = None, track: Track = untracked) -> LogsReport:
    """Write a log for each evaluation, version and environment. version: only this version; None is all."""
    require("inspect_ai", "inspect", "format inspect")
    chosen = Chosen(versions=None if version is None else [version])
    counts = numbers(root, MeasureConfig(measures=("mean_reward",)), chosen).counts.to_pylist()
    files, num_samples = [], 0
    with connect(root) as con:
        for count in track(counts, len(counts), "logs"):
            keys = {name: count[name] for name in ("evaluation", "policy_version", "env_name")}
            samples = Samples.choose(root, con, _chosen(keys))
            rows = samples.ask(figure("samples_as_logs")).to_pylist(maps_as_pydicts="lossy")
            # Measured alone: pass@k takes its k from the samples.
            measured = numbers(root, MeasureConfig(), _chosen(keys)).rows
            files.append(_write(folder, keys, _log(root, keys, rows, measured)))
            num_samples += len(rows)
    return LogsReport(location=str(folder), files=files, num_samples=num_samples)


def _chosen(keys: LogValues) -> Chosen:
    return Chosen(versions=[keys["policy_version"]], envs=[keys["env_name"]], evaluations=[keys["evaluation"]])


def _write(folder: Path, keys: LogValues, log: "EvalLog") -> str:
    """Write a log; return its name, which is the same for a second export."""
    from inspect_ai.log import write_eval_log

    task = re.sub(r"[^A-Za-z0-9]+", "-", keys["env_name"]).strip("-")[:80]
    name = f"{task}_v{keys['policy_version']}_{log.eval.eval_id}.eval"
    partial = folder / f"{name}.partial"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        partial.unlink(missing_ok=True)  # a link of that name would lead to another file
        write_eval_log(log, str(partial), format="eval")
        partial.replace(folder / name)
    except OSError as error:
        raise ConfigError(f"{folder / name} can't be written: {one_line(error)}") from error
    finally:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
    return name


# --- A log -----------------------------------------------------------------------------------------------


def _log(root: Root, keys: LogValues, rows: Sequence[LogValues], measured: Sequence[LogValues]) -> "EvalLog":
    from inspect_ai.log import EvalConfig, EvalDataset, EvalLog, EvalSpec, EvalStats

    eval_id = hashlib.sha256(json.dumps([root.run_id, *keys.values()]).encode()).hexdigest()[:22]
    times = [_as_utc(row["created_at"]) for row in rows]
    model = f"{rows[0]['model']}@{keys['policy_version']}"
    samples = [_sample(row, model) for row in rows]
    spec = EvalSpec(
        eval_id=eval_id,
        run_id=root.run_id,
        task_id=eval_id,
        created=min(times),
        task=keys["env_name"],
        task_args={name: value for name, value in keys.items() if name != "env_name" and value is not None},
        dataset=EvalDataset(
            name=keys["env_name"],
            samples=len({sample.id for sample in samples}),
            sample_ids=list(dict.fromkeys(str(sample.id) for sample in samples)),
            shuffled=False,
        ),
        model=model,
        model_generate_config=_generate_config(rows[0]),
        config=EvalConfig(epochs=max(sample.epoch for sample in samples)),
        packages={"ludic-rl": installed_version("ludic-rl") or "unknown"},
        metadata={"writer": "ludic", "model": rows[0]["model"], **keys},
    )
    stats = EvalStats(started_at=min(times), completed_at=max(times), model_usage={model: _usage(*rows)})
    return EvalLog(status="success", eval=spec, results=_results(rows, samples, measured), stats=stats, samples=samples)


def _as_utc(time: datetime) -> str:
    return time.astimezone(UTC).isoformat(timespec="seconds")


def _generate_config(row: LogValues) -> "GenerateConfig":
    from inspect_ai.model import GenerateConfig

    return GenerateConfig(**{name: row[name] for name in SAMPLING})


def _usage(*rows: LogValues) -> "ModelUsage":
    from inspect_ai.model import ModelUsage

    prompt, sampled = (int(sum(row[f"num_{name}_tokens"] for row in rows)) for name in ("prompt", "sampled"))
    return ModelUsage(input_tokens=prompt, output_tokens=sampled, total_tokens=prompt + sampled)


def _interval(row: LogValues) -> dict[str, Any]:
    if row["low"] is None:
        return {"interval": interval_text(row)}
    return {name: row[name] for name in ("interval", "low", "high")}


def _results(
    rows: Sequence[LogValues], samples: "Sequence[EvalSample]", measured: Sequence[LogValues]
) -> "EvalResults":
    """Return ludic's measures as metrics of the reward, and the mean of each component, both over examples."""
    from inspect_ai.log import EvalMetric, EvalResults, EvalScore

    metrics: dict[str, EvalMetric] = {}
    for row in measured:
        name = "mean" if row["measure"] == "mean_reward" else row["measure"]
        name += f"_{row['part']}" if row["part"] else ""
        for key, value in (
            (name, row["estimate"]),
            (f"{name}_stderr" if name != "mean" else "stderr", row["std_error"]),
        ):
            if value is not None and math.isfinite(value):
                params = {} if row["k"] is None else {"k": row["k"]}
                metrics[key] = EvalMetric(name=key, value=value, params=params, metadata=_interval(row))
    scores: list[EvalScore] = []
    for name in dict.fromkeys(name for sample in samples for name in sample.scores or {}):
        scored: dict[str, list[float]] = {}
        for sample in samples:
            value = float(sample.scores[name].value) if name in (sample.scores or {}) else math.nan
            if math.isfinite(value):
                scored.setdefault(str(sample.id), []).append(value)
        if name != REWARD:
            mean = fmean(map(fmean, scored.values())) if scored else None
            metrics = {} if mean is None else {"mean": EvalMetric(name="mean", value=mean)}
        num_scored = sum(map(len, scored.values()))
        counts = {"scored_samples": num_scored, "unscored_samples": len(samples) - num_scored}
        scores.append(EvalScore(name=name, scorer=name, metrics=metrics, **counts))
    num_completed = sum(row["error"] is None for row in rows)
    return EvalResults(total_samples=len(rows), completed_samples=num_completed, scores=scores)


# --- A sample --------------------------------------------------------------------------------------------


def _sample(row: LogValues, model: str) -> "EvalSample":
    from inspect_ai.log import EvalError, EvalSample

    messages = list(_messages(row["messages"] or ()))
    num_before = next((index for index, each in enumerate(messages) if each.role == "assistant"), len(messages))
    agent = f" {row['agent_id']}" if row["has_several_agents"] else ""
    error, usage, metadata = row["error"], _usage(row), row["metadata"] or {}
    return EvalSample(
        id=f"{row['env_example_id']}{agent}",
        epoch=row["sample_index"] + 1,
        input=messages[:num_before] or "",
        target=row["wanted"] or metadata.get("target", ""),
        messages=messages,
        output=_output(row, model, messages, usage),
        scores=_scores(row, messages),
        metadata={**metadata, **{name: row[name] for name in _IDS}, **_truncation(row)},
        model_usage={model: usage},
        turn_count=row["num_turns"],
        completed_at=_as_utc(row["created_at"]),
        uuid=row["rollout_id"],
        error=None if error is None else EvalError(message=error, traceback=error, traceback_ansi=error),
    )


def _truncation(row: LogValues) -> dict[str, str]:
    return {"truncation_reason": row["truncation_reason"]} if row["truncation_reason"] else {}


def _scores(row: LogValues, messages: "Sequence[ChatMessage]") -> "dict[str, Score]":
    """Return the reward, which is unscored if it is null, and its components."""
    from inspect_ai.scorer import Score

    reward = row["reward"]
    answer = next((message.text for message in reversed(messages) if message.role == "assistant"), None)
    value = math.nan if reward is None else reward  # NaN is inspect_ai's mark of a sample that is not scored
    first = Score(value=value, answer=answer, explanation=row["error"])
    components = {
        f"component {name}" if name == REWARD else name: Score(value=value)
        for name, value in (row["reward_components"] or {}).items()
    }
    return {REWARD: first, **components}


def _output(row: LogValues, model: str, messages: "Sequence[ChatMessage]", usage: "ModelUsage") -> "ModelOutput":
    from inspect_ai.model import ChatCompletionChoice, ModelOutput

    last = next((message for message in reversed(messages) if message.role == "assistant"), None)
    stop_reason: Any = _STOP_REASONS.get(row["finish_reason"], "unknown")
    choices = [] if last is None else [ChatCompletionChoice(message=last, stop_reason=stop_reason)]
    return ModelOutput(model=model, choices=choices, usage=usage, error=row["error"])


def _messages(messages: Sequence[LogValues]) -> "Iterator[ChatMessage]":
    from inspect_ai.model import (
        ChatMessageAssistant,
        ChatMessageSystem,
        ChatMessageTool,
        ChatMessageUser,
        ContentReasoning,
        ContentText,
    )
    from inspect_ai.tool import ToolCall

    pending: list[ToolCall] = []
    for number, message in enumerate(messages):
        number_text, text = str(number), message["content"]
        match message["role"]:
            case "assistant":
                pending = [_tool_call(call) for call in message["tool_calls"] or ()]
                if reasoning := message.get("reasoning"):
                    text = [ContentReasoning(reasoning=reasoning), ContentText(text=text)]
                yield ChatMessageAssistant(id=number_text, content=text, tool_calls=list(pending) or None)
            case "tool":
                answered = next((call for call in pending if message["name"] in (None, call.function)), None)
                if answered is not None:
                    pending.remove(answered)
                call_id = message.get("tool_call_id") or (None if answered is None else answered.id)
                yield ChatMessageTool(id=number_text, content=text, function=message["name"], tool_call_id=call_id)
            case "system" | "developer":
                yield ChatMessageSystem(id=number_text, content=text)
            case _:
                yield ChatMessageUser(id=number_text, content=text)


def _tool_call(call: LogValues) -> Any:
    """Return inspect_ai's tool call; arguments that are no JSON object are kept as text."""
    from inspect_ai.tool import ToolCall

    arguments: Any = None
    with suppress(ValueError, RecursionError):
        arguments = read_json(call["arguments"])
    is_object = isinstance(arguments, dict)
    return ToolCall(
        id=call["id"] or "",
        function=call["name"],
        arguments=arguments if is_object else {"text": call["arguments"]},
        parse_error=None if is_object else "the arguments are no JSON object",
    )
