"""A run of `ludic run` on an environment of verifiers with tools, of the API that is installed.

The model's texts are scripted, so that it calls the tool. Worker, store and trainer are real.
"""

import os
from importlib.util import find_spec
from pathlib import Path

import forks
import pytest

import ludic
from ludic.models.tiny import make_tiny_chat_model
from ludic.records.rollout import Message

pytest.importorskip("verifiers", reason="verifiers is in an environment of its own: make verifiers")

LEGACY = '''
import verifiers as vf
from datasets import Dataset


def double(number: int) -> int:
    """Double a number.

    Args:
        number: The number.
    """
    return 2 * number


def is_right(completion, answer):
    return float(completion[-1].content == answer)


def load_environment(num_rows=24):
    rows = [{"question": f"Double {number}.", "answer": str(2 * number)} for number in range(num_rows)]
    return vf.ToolEnv(dataset=Dataset.from_list(rows), tools=[double], rubric=vf.Rubric(funcs=[is_right]))
'''

V1 = '''
import verifiers.v1 as vf

__all__ = ["Doubles"]


class Calculator(vf.Toolset[vf.ToolsetConfig]):
    TOOL_PREFIX = None

    @vf.tool
    async def double(self, number: int) -> int:
        """Double a number."""
        return 2 * number


class Data(vf.TaskData):
    answer: str


class DoubleTask(vf.Task[Data, vf.State, vf.TaskConfig]):
    @classmethod
    def toolsets(cls, config):
        return [Calculator(vf.ToolsetConfig())]

    @vf.reward
    async def is_right(self, task, trace) -> float:
        return float(trace.last_reply == task.answer)


class Doubles(vf.Taskset[DoubleTask, vf.TasksetConfig]):
    def load(self):
        for number in range(24):
            yield DoubleTask(Data(prompt=f"Double {number}.", answer=str(2 * number)), self.config.task)
'''

ENGINE = '''
import json
import re

import numpy as np
from transformers import AutoTokenizer

from ludic.engines.engine import Completion
from ludic.records.rollout import WeightSpan


class Doubler:
    """Calls the tool with the number of the question, then repeats the result, or says no every second time."""

    name, repeats_in_any_batch, max_length, max_batch = "doubler 1", True, 1024, 8

    def __init__(self, folder, *, version, setup):
        self.policy_version, self.tokenizer = version, AutoTokenizer.from_pretrained(folder)
        self.num_answers = 0

    async def generate(self, request):
        prompt = self.tokenizer.decode(request.prompt_tokens.tolist())
        (asked,) = re.findall(r"Double (\\d+)\\.", prompt)
        results = re.findall(r"<tool_response>\\n(\\d+)\\n", prompt)
        if not results:
            text = f'<tool_call>{json.dumps({"name": "double", "arguments": {"number": int(asked)}})}</tool_call>'
        else:
            self.num_answers += 1
            text = results[0] if self.num_answers % 2 else "no"
        ids = [*self.tokenizer(text, add_special_tokens=False)["input_ids"], self.tokenizer.eos_token_id]
        return Completion(
            tokens=np.array(ids, np.int32),
            columns={"response_logprobs": np.full(len(ids), -1, np.float32)},
            finish_reason="stop",
            weight_versions=(WeightSpan(version=self.policy_version, start=0, end=len(ids)),),
        )

    def load_weights(self, folder, version):
        self.policy_version = version
'''


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_model_with_the_tools_of_a_package_is_trained(tmp_path: Path) -> None:
    name = f"doubles_{os.getpid()}"
    (tmp_path / "installed").mkdir()
    (tmp_path / "installed" / f"{name}.py").write_text(LEGACY if find_spec("verifiers.envs") else V1)
    (tmp_path / "doubler.py").write_text(ENGINE)
    said = [Message(role="user", content="Double 12."), Message(role="assistant", content="<tool_call>24</tool_call>")]
    make_tiny_chat_model(str(tmp_path / "model"), [said], max_length=1024, hidden_size=64, num_layers=1)
    command = (
        f"run run --model model --env verifiers/{name} --engine doubler.py:Doubler --num-steps 3 --group-size 4 "
        "--groups-per-batch 2 --num-workers 1 --max-tokens 256 --device cpu --max-tokens-per-micro-batch 4096 "
        "--env-timeout-s 600"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "installed")}
    child = forks.ludic(*command.split(), folder=tmp_path, environment=environment, timeout_s=900)
    assert child.returncode == 0, child.stderr
    run = ludic.open(str(tmp_path / "run"))
    (steps,) = run.sql("select count(distinct step) as steps from batches where used").to_dicts()
    assert steps["steps"] == 3
    rows = run.sql("select error, wanted, episode_reward, num_turns, messages, agent_steps from rollouts").to_dicts()
    assert {row["error"] for row in rows} == {None}
    assert len(rows) >= 24
    for row in rows:
        call, _ = row["agent_steps"]
        (called,) = call["tool_calls"]
        assert (call["action_target"], called["name"], called["result"]) == ("external", "double", row["wanted"])
        assert [message["role"] for message in row["messages"]][-3:] == ["assistant", "tool", "assistant"]
        assert row["episode_reward"] == float(row["messages"][-1]["content"] == row["wanted"])
    assert {row["episode_reward"] for row in rows} == {0.0, 1.0}
