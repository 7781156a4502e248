"""Record the rollouts of OpenRLHF in a root, by the executor that its vLLM engines run.

A file for --train.agent_func_path:

    import ludic
    from openrlhf.utils.agent import SingleTurnAgentExecutor

    class Mine(SingleTurnAgentExecutor):
        def __init__(self):
            super().__init__("reward_func.py")  # as --reward.remote_url

    AgentExecutor = ludic.openrlhf.recorded(Mine, "runs/mine", model="Qwen/Qwen3-0.6B", group_size=8)

Read against OpenRLHF 0.11.2, whose runs leave no rollouts on disk: openrlhf/utils/agent.py for what an executor
returns, generate_responses and _load_agent_executor of openrlhf/trainer/ray/vllm_engine.py, and
openrlhf/trainer/ppo_utils/samples_generator.py for how both are called. An engine is a Ray actor, and so a recorder of
its own. Token ids are the sampler's, logprobs, too, with --algo.advantage.is_correction_level; without it vLLM is asked
for none, and rows have capture `ids`. The trainer is another process that calls nothing here: advantages, steps and
metrics are not recorded. What can't be recorded is counted (Recorder.lost) and ends nothing.
"""

import asyncio
import functools
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ludic.adapters.complaints import reason_of
from ludic.adapters.sampling import sampled_with
from ludic.base import name_and_version
from ludic.errors import ConfigError
from ludic.run import Recorder, record


def recorded(
    executor: type, root: str, *, model: str, group_size: int, temperature: float = 1.0, **options: Any
) -> type:
    """Return a subclass of an executor that records what it executes.

    group_size, temperature: of training, --rollout.n_samples_per_prompt and --rollout.temperature; a group of another
    size or temperature is stored as one of an evaluation. options: of `ludic.record`, and first_version, the version of
    the weights that an engine begins with, such as the step of the checkpoint of a resumed run; it counts on by the
    updates of the engine's weights. Raises ConfigError for stop_on_failure.
    """
    if options.get("stop_on_failure"):
        raise ConfigError("stop_on_failure is set, and an engine of OpenRLHF can't end its trainer; leave it out")

    class Recorded(executor):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            settings = {"model": model, "group_size": group_size, "temperature": temperature, **options}
            version = settings.pop("first_version", 0)
            settings.setdefault("trainer", name_and_version("openrlhf") or "openrlhf")
            self._recording = _Recording(record(root, **settings), group_size, temperature, version)

        def execute(self, prompt: Any, label: Any, sampling_params: Any, *args: Any, **kwargs: Any) -> Any:
            """Not `async`: the calls that one task makes before the loop goes on are a group."""
            result = super().execute(prompt, label, sampling_params, *args, **kwargs)
            engine = kwargs.get("llm_engine", args[2] if len(args) > 2 else None)
            return self._recording.execute(result, label, sampling_params, engine)

    Recorded.__name__ = Recorded.__qualname__ = executor.__name__
    return Recorded


@dataclass(slots=True, kw_only=True)
class _Group:
    """The samples of a prompt, whose number is known when the loop has gone on."""

    sampled: Mapping[str, Any]
    """Columns that say how: ludic.adapters.sampling."""
    rows: list[dict[str, Any]] = field(default_factory=list)
    num_samples: int = 0
    num_ended: int = 0
    is_open: bool = True
    reason: str = "a sample failed"
    """Why it is not recorded, if it is not."""


class _Recording:
    """What one engine gives to its recorder."""

    def __init__(self, recorder: Recorder, group_size: int, temperature: float, version: int) -> None:
        self._recorder, self._group_size, self._temperature = recorder, group_size, temperature
        self._version: int = version
        self._engine: Any = None
        self._open: dict[int, _Group] = {}
        """Groups that a task still adds to, by its id."""

    def execute(
        self, result: Coroutine[Any, Any, Any], label: Any, sampling_params: Any, engine: Any
    ) -> Coroutine[Any, Any, Any]:
        """Return the awaitable of a sample, which is recorded when its group has ended."""
        try:
            self._watch(engine)
            group = self._group(sampling_params)
        except Exception as error:
            self._recorder.lose(1, 1, f"a call is not as of OpenRLHF 0.11: {reason_of(error)}")
            return result
        return self._sample(result, label, group)

    def _group(self, sampling_params: Any) -> _Group:
        """Return the group of the task that runs, with one sample more."""
        task = id(asyncio.current_task())
        group = self._open.get(task)
        if group is None:
            sampled = {name: getattr(sampling_params, name) for name in ("temperature", "top_p", "top_k")}
            group = self._open[task] = _Group(sampled=sampled_with(sampled))
            asyncio.get_running_loop().call_soon(self._seal, task, group)
        group.num_samples += 1
        return group

    def _seal(self, task: int, group: _Group) -> None:
        group.is_open = False
        if self._open.get(task) is group:
            del self._open[task]
        self._append_if_whole(group)

    async def _sample(self, result: Coroutine[Any, Any, Any], label: Any, group: _Group) -> Any:
        version = self._version
        try:
            output = await result
            try:
                row = _row(output, label)
                group.rows.append(row | {"policy_version": version, "policy_version_last": self._version})
            except Exception as error:
                group.reason = f"a sample is not what OpenRLHF 0.11 gives: {reason_of(error)}"
            return output
        finally:
            group.num_ended += 1
            self._append_if_whole(group)

    def _append_if_whole(self, group: _Group) -> None:
        """Store a group whose samples have all ended; one with a sample that failed is counted as lost."""
        if group.is_open or group.num_ended < group.num_samples:
            return
        if len(group.rows) < group.num_samples:
            self._recorder.lose(1, group.num_samples, group.reason)
            return
        is_train = group.num_samples == self._group_size and group.sampled["temperature"] == self._temperature
        shared = {"purpose": "train" if is_train else "eval", **group.sampled}
        try:
            self._recorder.append([[row | shared for row in group.rows]])
        except Exception as error:
            self._recorder.lose(1, group.num_samples, reason_of(error))

    def _watch(self, engine: Any) -> None:
        """Count the updates of an engine's weights: a call for each parameter, whose last argument says the last one.

        See update_weight of RolloutRayActor, and broadcast_to_vllm of openrlhf/trainer/ray/ppo_actor.py.
        """
        if engine is None or self._engine is engine:
            return
        call = engine.llm.collective_rpc

        @functools.wraps(call)
        def count(method: Any, *args: Any, **kwargs: Any) -> Any:
            given = kwargs.get("args") or (False,)
            if str(method).startswith("update_weight") and given[-1]:
                self._version += 1
            return call(method, *args, **kwargs)

        engine.llm.collective_rpc, self._engine = count, engine


def _row(output: dict[str, Any], label: Any) -> dict[str, Any]:
    """Return a row of what an executor returned: its prompt ends where the first action begins."""
    ranges: Sequence[tuple[int, int]] = output["action_ranges"]
    start, end = ranges[0][0], ranges[-1][1]
    mask = np.zeros(end - start, np.bool_)
    for first, last in ranges:
        mask[first - start : last - start] = True
    logprobs = output["rollout_log_probs"]
    extra = {name: str(_number(value)) for name, value in (output.get("extra_logs") or {}).items()}
    return {
        "prompt_tokens": output["observation_tokens"][:start],
        "response_tokens": output["observation_tokens"][start:end],
        "response_logprobs": None if logprobs is None else logprobs[start:end],
        "action_mask": mask,
        "episode_reward": _number(output["reward"]),
        "finish_reason": "length" if output.get("truncated") else "stop",
        "wanted": label if isinstance(label, str) else None,
        "metadata": extra,
    }


def _number(value: Any) -> float | None:
    """Return a number, also of a tensor or a list of one, as reward functions give it; None for none."""
    if isinstance(value, list | tuple) and len(value) == 1:
        value = value[0]
    return None if value is None else float(value.item() if hasattr(value, "item") else value)
