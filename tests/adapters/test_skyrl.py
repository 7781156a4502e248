"""A trainer with the loop, the generator's output and the batch layout of SkyRL 0.3.0."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_runs import query

import ludic
from ludic.adapters.skyrl import record
from ludic.errors import ConfigError
from ludic.root.root import Root


@dataclass(frozen=True)
class TrajectoryID:
    instance_id: str
    repetition_id: int


class Batch(dict):
    """TrainingInputBatch: tensors by name, and metadata."""

    metadata: dict[str, Any]


def config(model_folder: str, **sampling: Any) -> SimpleNamespace:
    params = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0} | sampling
    return SimpleNamespace(
        trainer=SimpleNamespace(policy=SimpleNamespace(model=SimpleNamespace(path=model_folder)), train_batch_size=2),
        environment=SimpleNamespace(env_class="gsm8k"),
        generator=SimpleNamespace(
            step_wise_trajectories=False,
            n_samples_per_prompt=2,
            sampling_params=SimpleNamespace(max_generate_length=16, **params),
            inference_engine=SimpleNamespace(engine_init_kwargs={}),
        ),
    )


class Generator:
    """Two prompts, each sampled twice; the second prompt's samples are equal."""

    async def generate(self, input_batch: dict, disable_tqdm: bool = False) -> dict:
        return {
            "prompt_token_ids": [[2, 3], [2, 3], [3, 3, 3], [3, 3, 3]],
            "response_ids": [[4, 5], [4, 5, 6], [7], [7]],
            "rewards": [[0.0, 1.0], [0.0, 0.0, 0.5], [0.0], [1.0]],
            "loss_masks": [[1, 1], [1, 0, 1], [1], [1]],
            "rollout_logprobs": [[-0.5, -1.0], [-0.5, 0.0, -1.5], [-2.0], [-2.0]],
            "stop_reasons": ["stop", "length", "stop", "stop"],
        }


class Odd(Generator):
    """A logprob of the first prompt is above 0."""

    async def generate(self, input_batch: dict, disable_tqdm: bool = False) -> dict:
        output = await super().generate(input_batch, disable_tqdm)
        return output | {"rollout_logprobs": [[-0.5, 5.0], *output["rollout_logprobs"][1:]]}


def input_of(step: int, phase: str = "train") -> dict:
    return {
        "env_classes": ["gsm8k", "gsm8k", "aime", "aime"],
        "trajectory_ids": [TrajectoryID(uid, number) for uid in ("u1", "u2") for number in range(2)],
        "batch_metadata": SimpleNamespace(global_step=step, training_phase=phase),
    }


def batch_of(output: dict, places: Sequence[int], pad_size: int) -> Batch:
    """As convert_prompts_responses_to_batch_tensors lays it out; rows that fill it up are copies of the first one."""
    prompts = [output["prompt_token_ids"][place] for place in places]
    answers = [output["response_ids"][place] for place in places]
    longest = max(len(prompt) + len(answer) for prompt, answer in zip(prompts, answers, strict=True))
    width = max(map(len, answers))

    def right(values: Sequence[Sequence[float]], size: int) -> torch.Tensor:
        return torch.tensor([[0] * (size - len(row)) + list(row) for row in values])

    whole = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
    tensors = {
        "sequences": right(whole, longest),
        "attention_mask": right([[1] * len(row) for row in whole], longest),
        "response_mask": right([[1] * len(row) for row in answers], width),
        "loss_mask": right([output["loss_masks"][place] for place in places], width),
        "advantages": right([[place - 0.5] * len(row) for place, row in zip(places, answers, strict=True)], width),
    }
    batch = Batch({name: torch.cat([each, each[[0] * pad_size]]) for name, each in tensors.items()})
    batch.metadata = {"pad_size": pad_size}
    return batch


class Trainer:
    """RayPPOTrainer.train, without models."""

    def __init__(self, cfg: SimpleNamespace) -> None:
        self.cfg, self.generator, self.global_step = cfg, Generator(), 0
        self.logged: list[tuple[int, bool]] = []
        self.tracker = SimpleNamespace(log=lambda data, step, commit=False: self.logged.append((step, commit)))
        self.moved: list[bool] = []

    def train_critic_and_policy(self, data: Batch) -> dict:
        self.moved.append(data.metadata["pad_size"] == 1)
        return {"policy_loss": 0.25}

    async def train(self, steps: Sequence[int], places: Sequence[int] = (0, 1, 2, 3)) -> None:
        other = {"temperature": 0.25, "top_p": 0.5, "top_k": 3}
        await self.generator.generate({**input_of(0, "eval"), "sampling_params": other})
        for self.global_step in steps:
            output = await self.generator.generate(input_of(self.global_step))
            status = self.train_critic_and_policy(batch_of(output, places, pad_size=1))
            self.tracker.log({**status, "note": "x", "reward/avg": 0.625}, step=self.global_step, commit=True)


@pytest.mark.slow
def test_a_trainer_of_skyrl_is_recorded_with_its_advantages_and_a_new_life_takes_steps_again(
    tmp_path: Path, model_folder: str, caplog: pytest.LogCaptureFixture
):
    url = str(tmp_path / "run")
    for steps in ((1, 2), (2, 3)):
        trainer = Trainer(config(model_folder))
        recorder = record(trainer, url)
        asyncio.run(trainer.train(steps))
        recorder.close()
        assert (trainer.logged, trainer.moved) == ([(step, True) for step in steps], [True, True])
        assert not recorder.lost
    root = Root.open(url)
    assert query(root, "select policy_version, count(*) from rollouts group by 1 order by 1") == [
        (0, 4),
        (1, 8),
        (2, 4),
    ]
    [row] = query(
        root,
        """
        select
            env_name, env_example_id, group_size, capture, action_mask, response_logprobs, token_rewards, finish_reason
        from rollouts where policy_version = 0 and response_length = 3
        """,
    )
    mask, logprobs = [True, False, True], [-0.5, 0.0, -1.5]
    assert row == ("gsm8k", "u1", 2, None, mask, logprobs, [0.0, 0.0, 0.5], "length")
    ledger = query(
        root,
        """
        select b.step, r.env_name, r.response_length, b.advantage, r.policy_version
        from batches b join rollouts r using (rollout_id) where b.step = 2 order by b.advantage
        """,
    )
    assert ledger == [
        (2, "gsm8k", 2, -0.5, 1),
        (2, "gsm8k", 3, 0.5, 1),
        (2, "aime", 1, 1.5, 1),
        (2, "aime", 1, 2.5, 1),
    ]
    assert query(root, "select count(*), count(distinct rollout_id) from batches") == [(12, 12)]
    evals = "select distinct policy_version, temperature, top_p, top_k, capture from evals"
    assert query(root, evals) == [(0, 0.25, 0.5, 3, "ids")]
    metrics = query(root, "select step, other['policy_loss'], other['reward/avg'] from metrics where step = 3")
    assert metrics == [(3, 0.25, 0.625)]
    assert ludic.open(url).verify().findings == []
    assert [each for each in caplog.records if each.name == "ludic.record"] == []


@pytest.mark.slow
def test_logprobs_before_the_temperature_are_not_the_samplers_and_a_filtered_row_is_in_no_step(
    tmp_path: Path, model_folder: str, caplog: pytest.LogCaptureFixture
):
    url = str(tmp_path / "run")
    trainer = Trainer(config(model_folder, temperature=0.7))
    recorder = record(trainer, url)
    asyncio.run(trainer.train([1], places=(0, 1)))
    recorder.close()
    root = Root.open(url)
    assert query(root, "select distinct capture, temperature > 0.69 from rollouts") == [("ids", True)]
    assert query(root, "select count(*) from batches") == [(2,)]
    assert "logprobs_mode=processed_logprobs" in caplog.text
    processed = config(model_folder, temperature=0.7)
    processed.generator.inference_engine.engine_init_kwargs["logprobs_mode"] = "processed_logprobs"
    other = record(trainer := Trainer(processed), str(tmp_path / "other"))
    asyncio.run(trainer.train([1]))
    other.close()
    assert query(Root.open(str(tmp_path / "other")), "select distinct capture from rollouts") == [(None,)]


def test_settings_that_only_vllm_knows_make_its_logprobs_those_of_another_distribution(
    tmp_path: Path, model_folder: str
):
    trainer = Trainer(config(model_folder, additional_kwargs={"presence_penalty": 0.5, "seed": 7}))
    with record(trainer, str(tmp_path / "run")):
        asyncio.run(trainer.train([1]))
    assert query(Root.open(str(tmp_path / "run")), "select distinct capture from rollouts") == [("ids",)]


def test_what_can_not_be_recorded_never_ends_the_training(
    tmp_path: Path, model_folder: str, caplog: pytest.LogCaptureFixture
):
    trainer = Trainer(config(model_folder))
    recorder = record(trainer, str(tmp_path / "run"))
    output = asyncio.run(trainer.generator.generate({"trajectory_ids": input_of(1)["trajectory_ids"]}))
    assert len(output["response_ids"]) == 4
    asyncio.run(trainer.train([1]))
    trainer.tracker.log(None, step=1)
    odd = Trainer(config(model_folder))
    odd.generator = Odd()
    second = record(odd, str(tmp_path / "odd"))
    asyncio.run(odd.generator.generate(input_of(1)))
    second.close()
    assert (second.lost.num_groups, second.lost.num_rollouts) == (1, 2)
    assert str(recorder.lost) == "lost: 4 rollouts in 2 groups (KeyError: 'batch_metadata')"
    assert query(Root.open(str(tmp_path / "odd")), "select count(*) from rollouts") == [(2,)]
    recorder.close()
    [warning] = [each.getMessage() for each in caplog.records if each.name == "ludic.record"]
    assert "log is not recorded: AttributeError: " in warning
    stepwise = config(model_folder)
    stepwise.generator.step_wise_trajectories = True
    with pytest.raises(ConfigError, match="step_wise_trajectories is on"):
        record(Trainer(stepwise), str(tmp_path / "other"))
