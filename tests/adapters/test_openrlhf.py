"""An executor as openrlhf/utils/agent.py has it, run as the vLLM engines of OpenRLHF 0.11.2 run it."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tiny_runs import query

from ludic.adapters.openrlhf import recorded
from ludic.errors import ConfigError
from ludic.root.root import Root


class Executor:
    """Gives what SingleTurnAgentExecutor.execute returns; each sample takes another time."""

    async def execute(self, prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine, images=None) -> dict:
        number = llm_engine.number = llm_engine.number + 1
        await asyncio.sleep(0.001 * (7 - number % 7))
        if label == "fails":
            raise RuntimeError("no reward")
        return {
            "prompt": prompt,
            "label": label,
            "observation_tokens": [*prompt, 4, 5, 6, 7],
            "action_ranges": [(2, 4), (5, 6)],
            "rollout_log_probs": None if sampling_params.logprobs is None else [0.0, 0.0, -0.5, -1.0, 0.0, -1.5],
            "truncated": number % 2 == 0,
            "reward": np.array([float(number)]),
            "scores": None,
            "extra_logs": {"length": np.float32(0.5)},
        }


class Engine:
    """RolloutRayActor: several samples of a prompt are tasks of one call; a weight is one call of collective_rpc."""

    def __init__(self, executor: Any) -> None:
        self.executor, self.number, self.calls = executor, 0, []
        self.llm = SimpleNamespace(collective_rpc=self._rpc)

    async def _rpc(self, method: str, args: tuple = ()) -> None:
        self.calls.append(method)

    async def update_weight(self, name: str, *, is_last: bool) -> None:
        await self.llm.collective_rpc("update_weight", args=(name, "bfloat16", (1,), is_last))

    async def generate_responses(self, prompt, label, num_samples, temperature=0.7, logprobs=1) -> list[dict]:
        params = SimpleNamespace(temperature=temperature, top_p=0.75, top_k=-1, logprobs=logprobs)
        given = {"max_length": 64, "hf_tokenizer": None, "llm_engine": self, "images": None}
        tasks = [
            self.executor.execute(prompt=prompt, label=label, sampling_params=params, **given)
            for _ in range(num_samples)
        ]
        return await asyncio.gather(*tasks)


async def generate(engine: Engine) -> None:
    """Three prompts at once, two of them equal; new weights; then one prompt, two evaluations, and a failure."""
    await asyncio.gather(
        *(engine.generate_responses([2, 3], "x", 4) for _ in range(2)), engine.generate_responses([3, 3], "x", 4)
    )
    for name in ("a", "b"):
        await engine.update_weight(name, is_last=name == "b")
    await engine.generate_responses([2, 3], "x", 4, logprobs=None)
    await engine.generate_responses([2, 3], "x", 1)
    await engine.generate_responses([2, 3], "x", 4, temperature=0.6)
    with pytest.raises(RuntimeError, match="no reward"):
        await engine.generate_responses([2, 3], "fails", 4)


@pytest.mark.slow
def test_the_samples_of_a_call_are_a_group_with_the_ids_and_logprobs_of_the_sampler(tmp_path: Path, model_folder: str):
    cls = recorded(Executor, str(tmp_path / "run"), model=model_folder, group_size=4, temperature=0.7)
    assert issubclass(cls, Executor)  # as _load_agent_executor checks
    engine = Engine(cls())
    asyncio.run(generate(engine))
    engine.executor._recording._recorder.close()
    assert engine.calls == ["update_weight"] * 2
    root = Root.open(str(tmp_path / "run"))
    groups = query(
        root, "select policy_version, capture, count(*), any_value(group_size) from rollouts group by group_id, 1, 2"
    )
    assert sorted(groups, key=str) == [(0, None, 4, 4)] * 3 + [(1, "ids", 4, 4)]
    evals = query(root, "select group_size, temperature from evals order by 1, 2")
    assert [(size, round(temperature, 3)) for size, temperature in evals] == [(1, 0.7)] + [(4, 0.6)] * 4
    assert query(root, "select distinct top_p, top_k from rollouts") == [(0.75, None)]  # as it was sampled
    [row] = query(
        root,
        """
        select
            prompt_tokens, response_tokens, action_mask, response_logprobs, token_rewards,
            finish_reason, wanted, metadata
        from rollouts where episode_reward = 2 and policy_version = 0
        """,
    )
    mask, logprobs = [True, True, False, True], [-0.5, -1.0, 0.0, -1.5]
    assert row == ([2, 3], [4, 5, 6, 7], mask, logprobs, [0.0, 0.0, 0.0, 2.0], "length", "x", {"length": "0.5"})
    assert str(engine.executor._recording._recorder.lost) == "lost: 4 rollouts in 1 group (a sample failed)"


def test_calls_of_another_version_go_on_and_are_counted(tmp_path: Path, model_folder: str):
    executor = recorded(Executor, str(tmp_path / "run"), model=model_folder, group_size=4)()
    engine = SimpleNamespace(number=0)  # without `llm`
    call = {"prompt": [2, 3], "label": "x", "sampling_params": SimpleNamespace(temperature=1.0, logprobs=1)}
    output = asyncio.run(_await(lambda: executor.execute(**call, max_length=9, hf_tokenizer=None, llm_engine=engine)))
    assert output["observation_tokens"] == [2, 3, 4, 5, 6, 7]
    recorder = executor._recording._recorder
    recorder.close()
    assert str(recorder.lost).startswith(
        "lost: 1 rollout in 1 group (a call is not as of OpenRLHF 0.11: AttributeError"
    )
    with pytest.raises(ConfigError, match="stop_on_failure is set, and an engine of OpenRLHF can't end its trainer"):
        recorded(Executor, str(tmp_path / "run"), model=model_folder, group_size=4, stop_on_failure=True)


async def _await(call: Callable[[], Awaitable[dict]]) -> dict:
    return await call()
