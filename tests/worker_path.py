"""Episodes as a worker plays them: a sampler's groups through the scheduler, environments held with a time limit."""

from collections.abc import Mapping, Sequence
from typing import Any

from chat_models import scripted_agent

from ludic.environments.limits import TimeLimit
from ludic.records.rollout import Rollout, RolloutBatch, RolloutGroup, RolloutMetadata
from ludic.records.validation import validate
from ludic.rollouts.sampler import GroupSampler, episodes_of_run, make_environments
from ludic.run.config import RunConfig


def sampled(
    name: str,
    replies: Sequence[Any],
    options: Mapping[str, Any] | None = None,
    *,
    timeout_s: float = 60.0,
    agent: Mapping[str, Any] | None = None,
    **run: Any,
) -> list[Rollout]:
    """Rows of the first group of a run, which may be stored. replies: texts of the model, in the order of its calls.

    agent: options of the agent. run: settings of the run.
    """
    settings = {"group_size": 1, "max_tokens": 256, "env_options": {name: dict(options or {})}}
    config = RunConfig(model="m", env=(name,), **(settings | run))
    sampler = GroupSampler(
        run=config,
        run_episode=episodes_of_run(config, scripted_agent(replies, **(agent or {}))),
        environments=make_environments(config, limit=TimeLimit(timeout_s=timeout_s)),
    )
    rows = sampler.sample([0], "worker").groups[0].rollouts
    group = RolloutGroup(key="a", rollouts=tuple(rows))
    validate(RolloutBatch(groups=(group,), metadata=RolloutMetadata(worker_id="w0-test")))
    return list(rows)
