"""Trainers of TRL, recorded: the root holds what TRL sampled, scored and trained on, whatever happens meanwhile."""

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

pytest.importorskip("trl", reason="`make trl` makes an environment with TRL")

import torch
from transformers import AutoModelForCausalLM
from trl import SFTConfig, SFTTrainer
from trl_runs import SETTINGS, make_model, make_trainer, questions, run, train

import ludic
from ludic.errors import ConfigError

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]

ROWS = """
    select b.step, b.attempt_id, b.advantage, b.used, b.reason, b.trainer_version, b.superseded, r.*
    from all_batches b join rollouts r using (rollout_id)
    order by b.attempt_id, b.step, b.batch_index
"""


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(autouse=True)
def logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where processes that a test starts say what went wrong; stands in for a terminal."""
    monkeypatch.setenv("TRL_LOGS", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    return tmp_path


class Spy:
    """Keeps what a trainer trained on, from outside of what is recorded: it wraps the methods that are recorded."""

    def __init__(self, trainer: Any) -> None:
        self.steps: dict[int, list[tuple[Any, ...]]] = {}
        """(prompt, response, advantage) of each row of each step."""
        self.outputs: list[dict[str, Any]] = []
        loss, generate = trainer._compute_loss, trainer._generate_and_score_completions

        def compute_loss(model: Any, inputs: Mapping[str, Any]) -> Any:
            if trainer.model.training:
                self.steps.setdefault(trainer.state.global_step + 1, []).extend(unpadded(inputs))
            return loss(model, inputs)

        def generate_and_score(inputs: Any) -> Any:
            self.outputs.append(output := generate(inputs))
            return output

        trainer._compute_loss, trainer._generate_and_score_completions = compute_loss, generate_and_score


def unpadded(inputs: Mapping[str, Any]) -> Iterator[tuple[Any, ...]]:
    names = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages")
    for prompt, prompt_mask, response, mask, advantage in zip(*(inputs[name] for name in names), strict=True):
        yield tuple(prompt[prompt_mask.bool()].tolist()), tuple(response[mask.bool()].tolist()), float(advantage)


def recorded(model: Path, folder: Path, kind: str = "grpo", **settings: Any) -> tuple[ludic.Run, Any, Spy]:
    """Train with a recorder, and return the run."""
    trainer = make_trainer(model, folder / "trl", kind, **settings)
    recorder = ludic.trl.record(trainer, folder / "root")
    spy = Spy(trainer)
    trainer.train()
    recorder.close()
    assert not recorder.lost
    return ludic.open(folder / "root"), trainer, spy


def by_text(table: Sequence[Mapping[str, Any]]) -> list[Any]:
    return sorted(table, key=lambda row: json.dumps(row, sort_keys=True))


COMBINATIONS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "plain": ("grpo", {}),
    "rloo": ("rloo", {"beta": 0.05}),
    "reuse": ("grpo", {"steps_per_generation": 2, "gradient_accumulation_steps": 1, "num_iterations": 2, "max_steps": 5}),
    "across": ("grpo", {"steps_per_generation": 2, "gradient_accumulation_steps": 3, "loss_type": "dr_grpo"}),
    "twice": ("grpo", {"steps_per_generation": 2, "gradient_accumulation_steps": 4, "num_iterations": 2}),
    "batch": ("grpo", {"scale_rewards": "batch", "temperature": 0.7, "beta": 0.1, "loss_type": "cispo"}),
}


@pytest.mark.parametrize(("kind", "settings"), COMBINATIONS.values(), ids=COMBINATIONS)
def test_each_step_names_the_rows_that_it_trained_on(model: Path, tmp_path: Path, kind: str, settings: dict[str, Any]):
    run, trainer, spy = recorded(model, tmp_path, kind, **settings)
    rows = run.sql(ROWS).to_pylist()
    assert sorted({row["step"] for row in rows}) == sorted(spy.steps) == [*range(1, trainer.state.max_steps + 1)]
    for step, of_step in spy.steps.items():
        ours = [(tuple(r["prompt_tokens"]), tuple(r["response_tokens"]), r["advantage"]) for r in rows if r["step"] == step]
        assert sorted(ours) == sorted(set(of_step))
