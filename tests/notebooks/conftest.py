"""Runs that the notebooks are executed on: one by two workers and a trainer, and one in which tasks are handed on."""

import importlib.util
import random
import re
from pathlib import Path
from types import ModuleType

import forks
import numpy as np
import pytest
from chat_models import hermes_call

import ludic
from ludic.engines.engine import Completion, GenerationRequest
from ludic.environments.moar_cats import WORDS
from ludic.models.chat import load_tokenizer
from ludic.models.decoding import decode
from ludic.models.tiny import make_tiny_model
from ludic.records.rollout import WeightSpan


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> ludic.Run:
    """4 steps of 8 groups of 8, with token stats; first and last version evaluated on 8 prompts, 2 answers each."""
    folder = tmp_path_factory.mktemp("trained")
    make_tiny_model(str(folder / "model"), WORDS)
    settings = "--env moar_cats --num-workers 2 --max-tokens 16 --accept-incomplete --num-steps 4 --advantage rloo"
    settings += " --learning-rate 4e-3 --keep-token-stats --device cpu --num-threads 1"
    words = ["run", folder / "run", "--model", folder / "model", *settings.split()]
    done = forks.ludic(*words, folder=folder)
    assert done.returncode == 0, done.stderr
    run = ludic.open(folder / "run")
    run.eval("0,latest", num_examples=8, n=2)
    return run


class Errand:
    """Engine that hands on up to two of the sums that it is asked for, and computes two thirds of single sums right."""

    name, max_length = "errand 1", 10_000

    def __init__(self, folder: str, version: int) -> None:
        self.policy_version, self.tokenizer = version, load_tokenizer(folder)

    async def generate(self, request: GenerationRequest) -> Completion:
        text = self.say(decode(self.tokenizer, request.prompt_tokens), random.Random(request.seed))
        ids = [*self.tokenizer(text, add_special_tokens=False)["input_ids"], self.tokenizer.eos_token_id]
        return Completion(
            tokens=np.array(ids, np.int32),
            columns={"response_logprobs": np.full(len(ids), -0.5, np.float32)},
            finish_reason="stop",
            weight_versions=(WeightSpan(version=self.policy_version, start=0, end=len(ids)),),
        )

    def say(self, prompt: str, chance: random.Random) -> str:
        _, is_list, dialogue = prompt.rpartition("Compute ")
        sums = re.findall(r"(\d+) \+ (\d+)", dialogue)
        if is_list and "tool_call" not in dialogue and (handed_on := sums[: chance.choice([0, 1, 2])]):
            return "\n".join(hermes_call("delegate", task=f"{a} + {b}") for a, b in handed_on)
        a, b = sums[2] if is_list else sums[-1]
        return str(int(a) + int(b) + chance.choice([0, 0, 1]))

    def load_weights(self, folder: str, version: int) -> None:
        self.policy_version = version


@pytest.fixture(scope="session")
def delegated(tmp_path_factory: pytest.TempPathFactory) -> ludic.Run:
    """4 groups of 8 episodes with errands, some of which are handed on."""
    folder, pipeline = tmp_path_factory.mktemp("delegated"), _pipeline("delegation")
    model = pipeline.model_beside(folder / "run", list(pipeline.demonstrations(30)))
    settings = {"sub_agents": ("helper",), "group_size": 8, "max_tokens": 200}
    run = ludic.create(folder / "run", model=model, env="errands", **settings)
    run.worker(num_groups=4, engine=Errand)
    return run


def _pipeline(name: str) -> ModuleType:
    path = Path(__file__).parents[2] / "pipelines" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
