"""A JobSet for Kubernetes: one indexed Job of workers, and one of the trainer's machines.

The JobSet is done when the trainer is, and then its controller stops the workers. A pod that is lost is replaced by one
of the same index, which is a worker's slot or a machine's number.
"""

import re
from typing import Any

from ludic.launch.clusters.plan import MAX_RESTARTS, PORT, ClusterPlan
from ludic.launch.clusters.yaml_text import to_yaml

# A stopped process ends with 0, but an evicted pod must not count as completed. Process 1 must pass SIGTERM on.
_SCRIPT = """\
stopped= process=
trap 'stopped=1; [ -z "$process" ] || kill -TERM $process' TERM
{command} &
process=$!
if [ "$stopped" ]; then kill -TERM $process || true; fi
code=0
wait $process || code=$?
if [ "$stopped" ]; then wait $process || true; code=1; fi
exit $code
"""
_EXPANDED = re.compile(r"\$(?=\()|\$\$+")
"""Matches the dollar signs that Kubernetes takes for itself: it puts a variable's value for $(NAME), and $ for $$."""


def kubernetes_files(plan: ClusterPlan) -> dict[str, str]:
    """Return the JobSet by the name of its file; `kubectl apply -f` starts it."""
    cluster = plan.cluster
    worker = plan.worker_command('"$JOB_COMPLETION_INDEX"')
    # The name that the JobSet's headless service gives to the trainer's first pod.
    train = plan.train_command(f"{plan.name}-trainer-0-0.{plan.name}")
    worker_pod = _pod(plan, "worker", worker, num_processes=1, num_gpus=plan.worker_gpus)
    trainer_pod = _pod(plan, "trainer", train, num_processes=cluster.ranks, num_gpus=plan.trainer_gpus)
    jobset = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": plan.name, **({"namespace": cluster.namespace} if cluster.namespace else {})},
        "spec": {
            "successPolicy": {"operator": "All", "targetReplicatedJobs": ["trainer"]},
            "replicatedJobs": [
                _job("workers", plan.workers, worker_pod, cluster.max_hours),
                _job("trainer", cluster.nodes, trainer_pod, cluster.max_hours),
            ],
        },
    }
    return {f"{plan.name}.yaml": to_yaml([jobset])}


def _job(name: str, num_pods: int, pod: dict[str, Any], max_hours: int | None) -> dict[str, Any]:
    spec = {
        "completionMode": "Indexed",
        "completions": num_pods,
        "parallelism": num_pods,
        "backoffLimit": MAX_RESTARTS,
        **({} if max_hours is None else {"activeDeadlineSeconds": max_hours * 3600}),
        "template": {"spec": pod},
    }
    return {"name": name, "replicas": 1, "template": {"spec": spec}}


def _literal(text: str) -> str:
    """Return what Kubernetes turns into the text."""
    return _EXPANDED.sub(lambda dollars: 2 * dollars[0], text)


def _pod(plan: ClusterPlan, name: str, command: str, *, num_processes: int, num_gpus: int) -> dict[str, Any]:
    cluster = plan.cluster
    amounts: dict[str, Any] = {"cpu": cluster.cpus * num_processes, "memory": f"{cluster.memory_gb * num_processes}Gi"}
    if num_gpus:
        amounts["nvidia.com/gpu"] = num_gpus
    container: dict[str, Any] = {
        "name": name,
        "image": cluster.image,
        "command": ["bash", "-euc", _literal(_SCRIPT.format(command=command))],
        "env": [{"name": key, "value": value} for key, value in plan.environment.items()],
        "resources": {"requests": amounts, "limits": amounts},
        "volumeMounts": [{"name": "shared-memory", "mountPath": "/dev/shm"}],
    }
    if cluster.secret:
        container["envFrom"] = [{"secretRef": {"name": cluster.secret}}]
    if name == "trainer":
        container["ports"] = [{"containerPort": PORT}]
    pod: dict[str, Any] = {
        "restartPolicy": "OnFailure",
        "terminationGracePeriodSeconds": plan.kill_after_s,
        "containers": [container],
        # NCCL and vLLM pass data between processes through it; a container's own has 64 MB.
        "volumes": [{"name": "shared-memory", "emptyDir": {"medium": "Memory"}}],
    }
    if cluster.gpu_type and num_gpus:
        pod["nodeSelector"] = {"nvidia.com/gpu.product": cluster.gpu_type}
    return pod
