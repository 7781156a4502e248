"""Record the training of SkyRL in a root, by one line before trainer.train().

    ludic.skyrl.record(trainer, "runs/mine")

Read against SkyRL 0.3.0: GeneratorOutput and BatchMetadata of skyrl/train/generators/base.py, RayPPOTrainer.train and
train_critic_and_policy of skyrl/train/trainer.py, fully_async_trainer.py, which refuses callbacks, Tracking.log of
skyrl/train/utils/tracking.py, and convert_prompts_responses_to_batch_tensors of skyrl/train/dataset/preprocess.py for
the layout of a batch. Wraps three methods of this trainer, its generator and its tracker; patches nothing else.

Rollouts are stored when they are generated, those of evaluations, too; the ledger of a step, with SkyRL's advantages,
before the optimizer moves; its metrics when SkyRL logs them. What can't be recorded is named in a warning and never
ends the training, unless stop_on_failure is given.
"""

import functools
import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np

from ludic.adapters.complaints import Complaints, reason_of
from ludic.adapters.sampling import is_of_the_model, sampled_with
from ludic.base import name_and_version
from ludic.errors import ConfigError
from ludic.records import FinishReason
from ludic.run import Recorder
from ludic.run import record as open_recorder

logger = logging.getLogger(__name__)

_FINISH_REASONS: Mapping[str, FinishReason] = {"stop": "stop", "length": "length"}
_OF_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_NOT_STORED = (
    "vLLM's logprobs are of the model before temperature, top_p, top_k and other settings of sampling, so they are not "
    "stored; generator.inference_engine.engine_init_kwargs.logprobs_mode=processed_logprobs brings those that were "
    "sampled with"
)
_MOST_WAITING = 1 << 16
"""Rollouts that wait for their step: those that a filter of SkyRL left out wait for ever."""


def record(trainer: Any, root: str, *, stop_on_failure: bool = False, **options: Any) -> Recorder:
    """Record the rollouts, steps and metrics of a trainer of SkyRL; return the recorder, which its process closes.

    trainer: RayPPOTrainer or FullyAsyncRayPPOTrainer. options: of `ludic.record`, in the place of what the trainer's
    configuration says. Raises ConfigError for step-wise trajectories, whose rows are merged before they are trained on.
    """
    config = trainer.cfg
    if config.generator.step_wise_trajectories:
        raise ConfigError("generator.step_wise_trajectories is on, and its merged rows can't be recorded; turn it off")
    sampling = config.generator.sampling_params
    known = {
        "model": config.trainer.policy.model.path,
        "env": config.environment.env_class or "skyrl",
        "trainer": name_and_version("skyrl") or "skyrl",
        "group_size": config.generator.n_samples_per_prompt,
        "groups_per_batch": config.trainer.train_batch_size,
        **sampled_with(_params(sampling)),
        "max_tokens": sampling.max_generate_length,
    }
    recorder = open_recorder(root, stop_on_failure=stop_on_failure, **({"take_over": False} | known | options))
    _Recording(trainer, recorder, is_strict=stop_on_failure).wrap()
    return recorder


class _Recording:
    """What one trainer gives to its recorder."""

    def __init__(self, trainer: Any, recorder: Recorder, *, is_strict: bool) -> None:
        self._trainer, self._recorder, self._is_strict = trainer, recorder, is_strict
        self._complaints = Complaints(recorder.root)
        generator = trainer.cfg.generator
        self._params = _params(generator.sampling_params)
        """Those of training, by vLLM's names."""
        modes = generator.inference_engine.engine_init_kwargs
        self._are_processed = modes.get("logprobs_mode") == "processed_logprobs"
        if not self._are_processed and not is_of_the_model(self._params):
            logger.warning(_NOT_STORED)
        self._waiting: dict[bytes, deque[str]] = {}
        """rollout_ids that no step has used, by their tokens."""

    def wrap(self) -> None:
        trainer, generator, tracker = self._trainer, self._trainer.generator, self._trainer.tracker
        generate, train, log = generator.generate, trainer.train_critic_and_policy, tracker.log

        @functools.wraps(generate)  # the asynchronous trainer looks for `disable_tqdm` in its signature
        async def generate_and_record(input_batch: Any, *args: Any, **kwargs: Any) -> Any:
            output = await generate(input_batch, *args, **kwargs)
            self._try(self._append, input_batch, output)
            return output

        @functools.wraps(train)
        def record_and_train(data: Any, *args: Any, **kwargs: Any) -> Any:
            self._try(self._step, data)
            return train(data, *args, **kwargs)

        @functools.wraps(log)
        def record_and_log(data: Any, step: int, *args: Any, **kwargs: Any) -> Any:
            self._try(self._log, data, step)
            return log(data, step, *args, **kwargs)

        generator.generate, trainer.train_critic_and_policy = generate_and_record, record_and_train
        tracker.log = record_and_log

    def _try(self, function: Callable[..., None], *args: Any) -> None:
        try:
            function(*args)
        except Exception as error:
            if self._is_strict:
                raise
            what = function.__name__.strip("_")
            self._complaints.warn(f"{what} is not recorded: {reason_of(error)}")

    # --- Rollouts ------------------------------------------------------------------------------------------------

    def _append(self, given: Mapping[str, Any], output: Mapping[str, Any]) -> None:
        """Store the groups of one call of the generator. A group with a row that can't be stored is lost."""
        groups: dict[str, list[int]] = {}
        for index, trajectory in enumerate(given["trajectory_ids"]):
            groups.setdefault(trajectory.instance_id, []).append(index)
        for indexes in groups.values():
            try:
                rows = [self._row(index, given, output) for index in indexes]
                rollout_ids = self._recorder.append([rows])
            except Exception as error:
                if self._is_strict:
                    raise
                self._recorder.lose(1, len(indexes), reason_of(error))
                continue
            if rows[0]["purpose"] == "train":
                for row, rollout_id in zip(rows, rollout_ids, strict=True):
                    self._waiting.setdefault(_key(row["prompt_tokens"], row["response_tokens"]), deque()).append(
                        rollout_id
                    )
        while len(self._waiting) > _MOST_WAITING:
            del self._waiting[next(iter(self._waiting))]

    def _row(self, index: int, given: Mapping[str, Any], output: Mapping[str, Any]) -> dict[str, Any]:
        """Return a row. A step begins with the weights of the step before; an evaluation follows the step's own."""
        metadata = given["batch_metadata"]
        is_train = metadata.training_phase == "train"
        version = metadata.global_step - 1 if is_train else metadata.global_step or 0
        rewards, reasons = output["rewards"][index], output.get("stop_reasons")
        params = given.get("sampling_params") or self._params
        logprobs = output.get("rollout_logprobs") if self._are_processed or is_of_the_model(params) else None
        per_token = {"token_rewards": rewards} if isinstance(rewards, list) else {}
        return {
            "purpose": "train" if is_train else "eval",
            "env_name": given["env_classes"][index],
            "env_example_id": str(given["trajectory_ids"][index].instance_id),
            "policy_version": version,
            "policy_version_last": max(version, self._trainer.global_step - 1) if is_train else version,
            "prompt_tokens": output["prompt_token_ids"][index],
            "response_tokens": output["response_ids"][index],
            "response_logprobs": None if logprobs is None else logprobs[index],
            "action_mask": np.asarray(output["loss_masks"][index], np.bool_),
            "episode_reward": float(np.sum(rewards, dtype=np.float64)),
            "finish_reason": _FINISH_REASONS.get(reasons[index] or "") if reasons else None,
            **sampled_with(params),
            **per_token,
        }

    # --- Steps ---------------------------------------------------------------------------------------------------

    def _step(self, data: Any) -> None:
        """Store the ledger of the step that begins: which rows it uses, with their advantages by token."""
        advantages: dict[str, np.ndarray] = {}
        num_unknown = 0
        for tokens, values in _rows_of(data):
            waiting = self._waiting.get(tokens)
            if waiting:
                advantages[waiting.popleft()] = values
                if not waiting:
                    del self._waiting[tokens]
            else:
                num_unknown += 1
        step = self._trainer.global_step
        if num_unknown:
            self._complaints.warn(f"step {step}: {num_unknown} of its rows are not recorded")
        self._recorder.step(step, advantages=advantages)

    def _log(self, data: Mapping[str, Any], step: int) -> None:
        self._recorder.metrics(step, {name: value for name, value in data.items() if _is_number(value)})


def _rows_of(data: Any) -> Iterator[tuple[bytes, np.ndarray]]:
    """Yield the key and the advantages, (R,) float32, of each row of a batch but those that fill it up.

    sequences and attention_mask are (B, L), padded at the left; advantages and response_mask (B, R_max), of which the
    last columns are the response.
    """
    columns = [data[name].float().cpu().numpy() for name in ("attention_mask", "advantages", "response_mask")]
    num_rows = len(columns[0]) - data.metadata.get("pad_size", 0)
    rows = zip(data["sequences"].cpu().numpy(), *columns, strict=True)
    for tokens, seen, values, is_response in islice(rows, num_rows):
        yield tokens[seen > 0].astype(np.int32).tobytes(), values[is_response > 0]


def _key(prompt: Sequence[int], response: Sequence[int]) -> bytes:
    return np.asarray([*prompt, *response], np.int32).tobytes()


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | np.number) and not isinstance(value, bool)


def _params(sampling: Any) -> dict[str, Any]:
    """Return SkyRL's SamplingParams by vLLM's names, with those that it only hands on to vLLM."""
    handed_on = getattr(sampling, "additional_kwargs", None) or {}
    return {name: getattr(sampling, name) for name in _OF_SAMPLING} | dict(handed_on)
