"""The files of a run for Slurm and Kubernetes, as each system wants them.

Slurm: two batch files, workers as an array job that is requeued, and the trainer under torchrun. Kubernetes: a JobSet
with one indexed Job of workers and one of the trainer's machines.
"""

import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from ludic.adapters.clusters.plan import MAX_RESTARTS, PORT, ClusterPlan, System
from ludic.app import MAX_HOURS, NAME, ClusterConfig, ClusterSystem
from ludic.base import is_url
from ludic.root import LOGS

# --- Slurm -----------------------------------------------------------------------------------------------


_HEAD = "#!/bin/bash"
_SRUN = "srun --kill-on-bad-exit=1"
"""When one machine's process fails, Slurm ends the others, which would wait for it until their time limit."""
_SLURM_PORT = '"$((20000 + SLURM_JOB_ID % 20000))"'
"""Shell expression for a port: two jobs may share a machine."""
_NEWEST_STEP = "select coalesce(max(step), 0) as step from policies"


def slurm_files(plan: ClusterPlan) -> dict[str, str]:
    """Return the batch files by name; `sbatch` starts each, in any order."""
    return {f"{plan.name}-workers.sbatch": _slurm_workers(plan), f"{plan.name}-trainer.sbatch": _slurm_trainer(plan)}


def _slurm_workers(plan: ClusterPlan) -> str:
    options = {
        "job-name": f"{plan.name}-workers",
        "array": f"0-{plan.workers - 1}",
        "output": f"{_log_folder(plan)}%x-%a.log",
        **_slurm_options(plan, num_processes=1, num_gpus=plan.worker_gpus, memory_gb=plan.memory.worker),
    }
    command = plan.worker_command('"$SLURM_ARRAY_TASK_ID"', _SLURM_PORT)
    lines = ["# Each array task is one slot of the run's schedule."]
    if serve := plan.serve_command(_SLURM_PORT):
        lines.append("# One step for both: Slurm stops the server when the worker ends.")
        command = f"bash -c {shlex.quote(f'{serve} exec {command}')}"
    return _slurm_file(plan, options, [*lines, f"{_SRUN} {command}"])


def _slurm_trainer(plan: ClusterPlan) -> str:
    options = {
        "job-name": f"{plan.name}-trainer",
        "output": f"{_log_folder(plan)}%x.log",
        "nodes": str(plan.cluster.nodes),
        "ntasks-per-node": "1",
        **_slurm_options(
            plan, num_processes=plan.cluster.ranks, num_gpus=plan.trainer_gpus, memory_gb=plan.memory.trainer
        ),
    }
    train = plan.train_command('"$host"', _SLURM_PORT)
    lines = [
        "# Without `| head`, which may kill scontrol, and then this job.",
        'hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")',
        "host=${hosts%%$'\\n'*}",
        f"{_SRUN} {train}",
        "# The workers end with the run, but not if this job was only stopped.",
        f"step=$(ludic sql {plan.quoted_url} {shlex.quote(_NEWEST_STEP)} --format csv | tail -n 1)",
        f'[ "$step" -lt {plan.num_steps} ] || scancel --me --name={plan.name}-workers',
    ]
    return _slurm_file(plan, options, lines)


def _log_folder(plan: ClusterPlan) -> str:
    """Return the folder of log files with a slash at its end; empty for the folder in which sbatch runs."""
    folder = plan.cluster.log_folder or (None if is_url(plan.url) else f"{plan.url}/{LOGS.folder}")
    return f"{folder}/" if folder is not None and NAME.fullmatch(folder.removeprefix("/")) else ""


def _slurm_options(plan: ClusterPlan, *, num_processes: int, num_gpus: int, memory_gb: int) -> dict[str, str]:
    """Return the options of both jobs. num_processes, memory_gb: of ludic's processes on a machine."""
    cluster = plan.cluster
    gpus = f"{cluster.gpu_type}:{num_gpus}" if cluster.gpu_type else str(num_gpus)
    options = {
        "cpus-per-task": str(cluster.cpus * num_processes),
        "mem": f"{memory_gb}G",
        "gpus-per-node": gpus if num_gpus else None,
        "partition": cluster.partition,
        "account": cluster.account,
        "time": f"{cluster.max_hours or MAX_HOURS}:00:00",
        # To the processes, not to the batch shell. Slurm's clock ticks once a minute.
        "signal": f"TERM@{plan.kill_after_s + 60}",
        "requeue": "",
        "open-mode": "append",
    }
    return {name: value for name, value in options.items() if value is not None}


def _slurm_file(plan: ClusterPlan, options: Mapping[str, str], lines: list[str]) -> str:
    directives = [f"#SBATCH --{name}{f'={value}' if value else ''}" for name, value in options.items()]
    directives += [line for line in plan.cluster.line if line.startswith("#SBATCH")]
    exports = [f"export {name}={shlex.quote(value)}" for name, value in plan.environment.items()]
    exports.append("export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK  # srun does not take it from sbatch")
    setup = [plan.cluster.setup] if plan.cluster.setup else []
    setup += [line for line in plan.cluster.line if not line.startswith("#SBATCH")]
    return "\n".join([_HEAD, *directives, "set -euo pipefail", *setup, *exports, *lines, ""])


# --- Kubernetes ------------------------------------------------------------------------------------------


# The JobSet is done when the trainer is, and then its controller stops the workers. A pod that is lost is replaced by
# one of the same index, which is a worker's slot or a machine's number.

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
    memory_gb = plan.memory.trainer if name == "trainer" else plan.memory.worker
    amounts: dict[str, Any] = {"cpu": cluster.cpus * num_processes, "memory": f"{memory_gb}Gi"}
    script = _SCRIPT.format(command=command)
    if name == "worker" and (serve := plan.serve_command()):
        script = f"{serve}\n{script}"  # the container, and with it the server, ends with the worker
    if num_gpus:
        amounts["nvidia.com/gpu"] = num_gpus
    container: dict[str, Any] = {
        "name": name,
        "image": cluster.image,
        "command": ["bash", "-euc", _literal(script)],
        "env": [{"name": key, "value": _literal(value)} for key, value in plan.environment.items()],
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


# --- YAML with scripts as blocks of lines ----------------------------------------------------------------


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _represent_text)


def to_yaml(documents: Sequence[Any]) -> str:
    """Return the documents as YAML text; keys stay in order."""
    return yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, width=10**6, explicit_start=len(documents) > 1)


# --- The systems ---------------------------------------------------------------------------------------------------


def _missing_for_kubernetes(cluster: ClusterConfig) -> str | None:
    has_image = cluster.image is not None
    return None if has_image else "image is missing: a container image with ludic and the engine; give --image"


SLURM = System(
    name="slurm",
    start="sbatch {}",
    make_files=slurm_files,
    sees_folders=True,
)
KUBERNETES = System(
    name="kubernetes",
    start="kubectl apply -f {}",
    make_files=kubernetes_files,
    missing=_missing_for_kubernetes,
)
_fit: tuple[ClusterSystem, ...] = (SLURM, KUBERNETES)
