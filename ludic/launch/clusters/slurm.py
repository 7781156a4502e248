"""Two batch files for Slurm: workers as an array job that is requeued, and the trainer under torchrun."""

import shlex
from collections.abc import Mapping

from ludic.launch.clusters.plan import ClusterPlan

_HEAD = "#!/bin/bash"
_SRUN = "srun --kill-on-bad-exit=1"
"""When one machine's process fails, Slurm ends the others, which would wait for it until their time limit."""
_NEWEST_STEP = "select coalesce(max(step), 0) as step from policies"


def slurm_files(plan: ClusterPlan) -> dict[str, str]:
    """Return the batch files by name; `sbatch` starts each, in any order."""
    return {f"{plan.name}-workers.sbatch": _workers(plan), f"{plan.name}-trainer.sbatch": _trainer(plan)}


def _workers(plan: ClusterPlan) -> str:
    options = {
        "job-name": f"{plan.name}-workers",
        "array": f"0-{plan.workers - 1}",
        "output": "%x-%a.log",
        **_options(plan, num_processes=1, num_gpus=plan.worker_gpus),
    }
    command = plan.worker_command('"$SLURM_ARRAY_TASK_ID"')
    return _file(plan, options, ["# Each array task is one slot of the run's schedule.", f"{_SRUN} {command}"])


def _trainer(plan: ClusterPlan) -> str:
    options = {
        "job-name": f"{plan.name}-trainer",
        "output": "%x.log",
        "nodes": str(plan.cluster.nodes),
        "ntasks-per-node": "1",
        **_options(plan, num_processes=plan.cluster.ranks, num_gpus=plan.trainer_gpus),
    }
    train = plan.train_command('"$host"', '"$((20000 + SLURM_JOB_ID % 20000))"')  # two jobs may share a machine
    lines = [
        "# Without `| head`, which may kill scontrol, and then this job.",
        'hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")',
        "host=${hosts%%$'\\n'*}",
        f"{_SRUN} {train}",
        "# The workers end with the run, but not if this job was only stopped.",
        f"step=$(ludic sql {plan.quoted_url} {shlex.quote(_NEWEST_STEP)} --format csv | tail -n 1)",
        f'[ "$step" -lt {plan.num_steps} ] || scancel --me --name={plan.name}-workers',
    ]
    return _file(plan, options, lines)


def _options(plan: ClusterPlan, *, num_processes: int, num_gpus: int) -> dict[str, str]:
    """Return the options of both jobs. num_processes: ludic's processes on a machine."""
    cluster = plan.cluster
    gpus = f"{cluster.gpu_type}:{num_gpus}" if cluster.gpu_type else str(num_gpus)
    options = {
        "cpus-per-task": str(cluster.cpus * num_processes),
        "mem": f"{cluster.memory_gb * num_processes}G",
        "gpus-per-node": gpus if num_gpus else None,
        "partition": cluster.partition,
        "account": cluster.account,
        "time": None if cluster.max_hours is None else f"{cluster.max_hours}:00:00",
        # To the processes, not to the batch shell. Slurm's clock ticks once a minute.
        "signal": f"TERM@{plan.kill_after_s + 60}",
        "requeue": "",
        "open-mode": "append",
    }
    return {name: value for name, value in options.items() if value is not None}


def _file(plan: ClusterPlan, options: Mapping[str, str], lines: list[str]) -> str:
    directives = [f"#SBATCH --{name}{f'={value}' if value else ''}" for name, value in options.items()]
    exports = [f"export {name}={value}" for name, value in plan.environment.items()]
    exports.append("export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK  # srun does not take it from sbatch")
    setup = [plan.cluster.setup] if plan.cluster.setup else []
    return "\n".join([_HEAD, *directives, "set -euo pipefail", *setup, *exports, *lines, ""])
