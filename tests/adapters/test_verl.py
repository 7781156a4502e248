"""A worker of agent loops as verl 0.9.1 has it, in verl/trainer/ppo/v1/agent_loop_tq.py."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiny_runs import query

from ludic.adapters.verl import recorded, recorded_worker
from ludic.root.root import Root


class Config(SimpleNamespace):
    def get(self, name: str, default: Any = None) -> Any:
        return getattr(self, name, default)


class Worker:
    """AgentLoopWorkerTQ: the sessions of a prompt are tasks, each puts its outputs when it has its reward."""

    def __init__(self, config: Config) -> None:
        self.config, self.put = config, []

    async def _run_prompt(self, prompt: dict, sampling_params: dict, trajectory: dict, trace: bool = False) -> None:
        rollout = self.config.actor_rollout_ref.rollout
        prompt.pop("__do_sample__", True)
        n = prompt.pop("__rollout_n__", rollout.val_kwargs.n if trajectory["validate"] else rollout.n)
        sessions = [self._run_agent_loop(trajectory["validate"], session_id=number, **prompt) for number in range(n)]
        await asyncio.gather(*sessions, return_exceptions=True)

    async def _run_agent_loop(self, validate: bool, *, session_id: int, **prompt: Any) -> None:
        await asyncio.sleep(0.001 * (3 - session_id))
        if prompt["index"] == 9 and session_id == 1:
            raise RuntimeError("no server")
        extra = {"min_global_steps": 1, "max_global_steps": 2} if prompt["index"] == 7 else {}
        outputs = [
            SimpleNamespace(
                prompt_ids=[2, 3, *[4] * number],
                response_ids=[4, 5, 6],
                response_mask=[1, 0, 1],
                response_logprobs=[-0.5, 0.0, -1.5],
                reward_score=None,
                extra_fields=dict(extra),
            )
            for number in range(1 + (prompt["index"] == 7))
        ]
        given = outputs if len(outputs) > 1 else outputs[0]
        await self._agent_loop_postprocess(given, validate, session_id=session_id, **prompt)

    async def _agent_loop_postprocess(self, output: Any, validate: bool, **kwargs: Any) -> None:
        outputs = output if isinstance(output, list) else [output]
        for each in outputs:
            each.reward_score = float(kwargs["session_id"])
            each.extra_fields["reward_extra_info"] = {"acc": kwargs["session_id"] == 1}
            self.put.append(kwargs["uid"])


def config(model_folder: str, **settings: Any) -> Config:
    rollout = {"n": 2, "temperature": 0.7, "top_p": 1.0, "top_k": -1, "response_length": 16, "name": "vllm"}
    rollout = Config(val_kwargs=SimpleNamespace(n=1), **(rollout | settings))
    return Config(actor_rollout_ref=Config(rollout=rollout, model=SimpleNamespace(path=model_folder)))


def prompt(uid: str, index: int, step: int = 3, **more: Any) -> dict:
    truth = {"reward_model": {"ground_truth": "cc"}}
    return {"uid": uid, "index": index, "global_steps": step, "data_source": "gsm8k", **truth, **more}


async def run(worker: Any) -> None:
    train, validate, sampled = {"validate": False}, {"validate": True}, {"temperature": 0.7}
    await asyncio.gather(
        worker._run_prompt(prompt("u1", 5), sampled, trajectory=train, trace=False),
        worker._run_prompt(prompt("u2", 7), sampled, trajectory=train, trace=False),
        worker._run_prompt(prompt("u3", 9), sampled, trajectory=train, trace=False),
        worker._run_prompt(
            prompt("u4", 5, __rollout_n__=1, __do_sample__=False), sampled, trajectory=train, trace=False
        ),
    )
    await worker._run_prompt(prompt("u5", 5), {"temperature": 0.5, "top_p": 0.25}, trajectory=validate, trace=False)


@pytest.mark.slow
def test_the_sessions_of_a_prompt_are_a_group_with_ids_masks_logprobs_and_versions(tmp_path: Path, model_folder: str):
    worker = recorded_worker(Worker, str(tmp_path / "run"))(config(model_folder))
    asyncio.run(run(worker))
    worker.recording.recorder.close()
    assert sorted(worker.put) == ["u1", "u1", "u2", "u2", "u2", "u2", "u3", "u4", "u5"]
    root = Root.open(str(tmp_path / "run"))
    groups = query(
        root,
        """
        select metadata['uid'], any_value(group_size), count(*), count(distinct episode_id), min(policy_version),
            max(policy_version_last), any_value(env_example_id), any_value(capture)
        from rollouts group by group_id, 1 order by 1
        """,
    )
    assert groups == [
        ("u1", 2, 2, 2, 2, 2, "5", None),
        ("u2", 2, 4, 2, 1, 2, "7", None),
        ("u4", 1, 1, 1, 2, 2, "5", None),
    ]
    columns = "action_mask, response_logprobs, token_rewards, env_name, wanted, metadata['acc']"
    [row] = query(root, f"select {columns} from rollouts where metadata['uid'] = 'u1' and episode_reward = 1")  # noqa: S608
    assert row == ([True, False, True], [-0.5, 0.0, -1.5], [0.0, 0.0, 1.0], "gsm8k", "cc", "True")
    segments = query(root, "select segment_index, list_sum(token_rewards) from rollouts where prompt_length = 3")
    assert sorted(segments) == [(1, 0.0), (1, 1.0)]  # the last row of a session has its reward
    assert query(root, "select policy_version, temperature, top_p, group_size from evals") == [(3, 0.5, 0.25, 1)]
    assert query(root, "select temperature from rollouts where metadata['uid'] = 'u4'") == [(0.0,)]  # a baseline
    assert str(worker.recording.recorder.lost) == "lost: 2 rollouts in 1 group (a session failed)"


def test_logprobs_before_the_temperature_are_not_stored(tmp_path: Path, model_folder: str):
    worker = recorded_worker(Worker, str(tmp_path / "run"))(config(model_folder, name="sglang"))
    asyncio.run(worker._run_prompt(prompt("u1", 5), {"temperature": 0.7}, trajectory={"validate": False}))
    worker.recording.recorder.close()
    assert query(Root.open(str(tmp_path / "run")), "select distinct capture from rollouts") == [("ids",)]


@pytest.mark.slow
def test_a_manager_starts_workers_that_record(tmp_path: Path):
    ray = pytest.importorskip("ray", reason="ray is in the extra ray")

    class Manager:
        def __init__(self) -> None:
            self.agent_loop_workers_class = None

    made = recorded(Manager, ray.remote(Worker), str(tmp_path / "run"))()
    assert isinstance(made, Manager)
    assert issubclass(made.agent_loop_workers_class.__ray_metadata__.modified_class, Worker)
