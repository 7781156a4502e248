"""A job group for SkyPilot: the trainer, and a task for each worker, so that each recovers alone."""

from typing import Any

from ludic.launch.clusters.plan import MAX_RESTARTS, ClusterPlan
from ludic.launch.clusters.yaml_text import to_yaml

_HOST = '"$(echo "$SKYPILOT_NODE_IPS" | head -n 1)"'
"""Shell expression for the address of a task's first machine."""


def skypilot_files(plan: ClusterPlan) -> dict[str, str]:
    """Return the job group by the name of its file; `sky jobs launch` starts it."""
    # Workers end with the trainer, the only primary task.
    header = {"name": plan.name, "execution": "parallel", "primary_tasks": ["trainer"], "termination_delay": "1m"}
    trainer = {
        "name": "trainer",
        "num_nodes": plan.cluster.nodes,
        **_task(plan, plan.train_command(_HOST), num_processes=plan.cluster.ranks, num_gpus=plan.trainer_gpus),
    }
    workers = [
        {
            "name": f"worker-{slot}",
            **_task(plan, plan.worker_command(str(slot)), num_processes=1, num_gpus=plan.worker_gpus, use_spot=True),
        }
        for slot in range(plan.workers)
    ]
    return {f"{plan.name}.yaml": to_yaml([header, trainer, *workers])}


def _task(
    plan: ClusterPlan, command: str, *, num_processes: int, num_gpus: int, use_spot: bool = False
) -> dict[str, Any]:
    cluster = plan.cluster
    resources: dict[str, Any] = {
        "infra": cluster.infra,
        "cpus": f"{cluster.cpus * num_processes}+",
        "memory": f"{cluster.memory_gb * num_processes}+",
        "accelerators": f"{cluster.gpu_type}:{num_gpus}" if num_gpus else None,
        "image_id": None if cluster.image is None else f"docker:{cluster.image}",
        "use_spot": use_spot or None,
        "job_recovery": {"max_restarts_on_errors": MAX_RESTARTS},
    }
    return {
        "resources": {name: value for name, value in resources.items() if value is not None},
        "envs": plan.environment,
        **({"setup": cluster.setup} if cluster.setup else {}),
        "run": f"{command}\n",
    }
