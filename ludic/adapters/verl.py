"""Record the rollouts of verl's trainer (trainer.use_v1, the default) in a root, by the workers of its agent loops.

A module that all nodes can import, such as mine.py, named by
actor_rollout_ref.rollout.agent.agent_loop_manager_class=mine.Manager:

    import ludic
    from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ, AgentLoopWorkerTQ

    Manager = ludic.verl.recorded(AgentLoopManagerTQ, AgentLoopWorkerTQ, "/shared/runs/mine")

Read against verl 0.9.1: _run_prompt and _agent_loop_postprocess of AgentLoopWorkerTQ, and AgentLoopManagerTQ.__init__,
in verl/trainer/ppo/v1/agent_loop_tq.py; AgentLoopOutput, _compute_score and _init_agent_loop_workers in
verl/experimental/agent_loop/agent_loop.py; TaskRunnerV1.init_agent_loop_manager in verl/trainer/main_ppo.py. A worker
is a Ray actor, and so a recorder of its own, which stores a prompt's sessions as a group when all have their reward:
token ids, masks and versions of the weights as verl has them, and logprobs with rollout.calculate_log_probs (else
capture is `ids`). Advantages, steps and metrics are in the trainer's process and are not recorded. What can't be
recorded is counted (Recorder.lost) and ends nothing.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ludic.adapters.complaints import reason_of
from ludic.adapters.sampling import is_of_the_model, sampled_with
from ludic.base import name_and_version
from ludic.errors import ConfigError
from ludic.records import new_id
from ludic.run import Recorder, record

_GREEDY = {"temperature": 0.0, "top_p": 1.0, "top_k": -1}
"""What verl samples a baseline with."""


def recorded(manager: type, worker: Any, root: str, **options: Any) -> type:
    """Return a subclass of AgentLoopManagerTQ whose workers record. worker: AgentLoopWorkerTQ, a class of Ray.

    options: of `ludic.record`, in the place of what verl's configuration says. Raises ConfigError for stop_on_failure.
    """
    import ray

    workers = ray.remote(recorded_worker(worker.__ray_metadata__.modified_class, root, **options))

    class Recorded(manager):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.agent_loop_workers_class = workers

    return Recorded


def recorded_worker(worker: type, root: str, **options: Any) -> type:
    """Return a subclass of the class that AgentLoopWorkerTQ is for Ray."""
    if options.get("stop_on_failure"):
        raise ConfigError("stop_on_failure is set, and a worker of verl can't end its trainer; leave it out")

    class Recorded(worker):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.recording = Recording(self.config.actor_rollout_ref, root, options)

        async def _run_prompt(self, prompt: Any, sampling_params: Any, trajectory: Any, **kwargs: Any) -> None:
            uid, validate, given_n = prompt["uid"], trajectory["validate"], prompt.get("__rollout_n__")
            is_greedy = not validate and not prompt.get("__do_sample__", True)
            await super()._run_prompt(prompt, sampling_params, trajectory, **kwargs)
            sampled = sampled_with(_GREEDY if is_greedy else sampling_params)
            self.recording.end(uid, validate=validate, given_n=given_n, sampled=sampled)

        async def _agent_loop_postprocess(self, output: Any, validate: bool, **kwargs: Any) -> None:
            await super()._agent_loop_postprocess(output, validate, **kwargs)  # which asks for the reward
            self.recording.add(output if isinstance(output, list) else [output], validate=validate, given=kwargs)

    return Recorded


class Recording:
    """What one worker gives to its recorder."""

    def __init__(self, config: Any, root: str, options: Mapping[str, Any]) -> None:
        """config: verl's actor_rollout_ref."""
        rollout = config.rollout
        known: dict[str, Any] = {
            "model": config.model.path,
            "env": "verl",
            "trainer": name_and_version("verl") or "verl",
            "group_size": rollout.n,
            "temperature": float(rollout.temperature),
            "top_p": float(rollout.top_p),
            "top_k": rollout.top_k if rollout.top_k > 0 else None,
            "max_tokens": rollout.response_length,
        }
        self.recorder: Recorder = record(root, **known | dict(options))
        self._config = rollout
        self._sessions: dict[str, list[list[dict[str, Any]]]] = {}
        """The rows of each session that has ended, by the uid of its prompt."""
        self._reasons: dict[str, str] = {}
        """Why a session of a prompt can't be recorded, by its uid."""

    def add(self, outputs: Sequence[Any], *, validate: bool, given: Mapping[str, Any]) -> None:
        """Keep the rows of a session; each output of its agent loop is one. given: the fields of its prompt."""
        try:
            rows = [self._row(output, outputs[-1].reward_score, given, validate=validate) for output in outputs]
        except Exception as error:
            self._reasons[given["uid"]] = f"a session is not what verl 0.9 gives: {reason_of(error)}"
            return
        episode_id = new_id()
        self._sessions.setdefault(given["uid"], []).append([row | {"episode_id": episode_id} for row in rows])

    def end(self, uid: str, *, validate: bool, given_n: int | None, sampled: Mapping[str, Any]) -> None:
        """Store a group whose sessions have all ended; one with a session that failed is counted as lost.

        sampled: columns that say how, ludic.adapters.sampling.
        """
        sessions, reason = self._sessions.pop(uid, []), self._reasons.pop(uid, "a session failed")
        wanted = given_n if given_n is not None else self._config.val_kwargs.n if validate else self._config.n
        if len(sessions) < wanted:
            self.recorder.lose(1, wanted, reason)
            return
        try:
            self.recorder.append([[{**row, **sampled} for session in sessions for row in session]])
        except Exception as error:
            self.recorder.lose(1, wanted, reason_of(error))

    def _row(self, output: Any, reward: float | None, given: Mapping[str, Any], *, validate: bool) -> dict[str, Any]:
        """Return a row. min_global_steps and max_global_steps are the versions of the weights that sampled it."""
        step = int(given["global_steps"])
        version = output.extra_fields.get("min_global_steps")
        version = version if version is not None else step if validate else step - 1
        last = output.extra_fields.get("max_global_steps")
        infos = output.extra_fields.get("reward_extra_info") or {}
        truth = (given.get("reward_model") or {}).get("ground_truth")
        return {
            "purpose": "eval" if validate else "train",
            "env_name": given.get("data_source"),
            "env_example_id": None if given.get("index") is None else str(given["index"]),
            "policy_version": int(version),
            "policy_version_last": int(version if last is None else last),
            "prompt_tokens": output.prompt_ids,
            "response_tokens": output.response_ids,
            "response_logprobs": output.response_logprobs if self._are_of_the_sampler() else None,
            "action_mask": np.asarray(output.response_mask, np.bool_),
            "episode_reward": None if reward is None else float(reward),
            "wanted": truth if isinstance(truth, str) else None,
            "example_columns": _columns_of(given),
            "metadata": {"uid": str(given["uid"]), **{name: str(value) for name, value in infos.items()}},
        }

    def _are_of_the_sampler(self) -> bool:
        """Return whether logprobs are of the distribution that was sampled from, which vLLM is asked for by default."""
        config = self._config
        if config.name == "vllm" and config.get("logprobs_mode", "processed_logprobs") == "processed_logprobs":
            return True
        return is_of_the_model({name: getattr(config, name) for name in ("temperature", "top_p", "top_k")})


def _columns_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns of a prompt's row in its data set that say more than prompt and wanted answer."""
    found = {name: given[name] for name in ("ability", "extra_info") if given.get(name) is not None}
    info = found.get("extra_info")
    if isinstance(info, Mapping):
        found["extra_info"] = {name: value for name, value in info.items() if name not in ("question", "answer")}
    return found
