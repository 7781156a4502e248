"""What `ludic cluster` writes: Bash and the tools' own schemas accept it, and its commands are ones that ludic has.

The scripts run here with stand-ins for Slurm's commands, which note how they were called.
"""

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import forks
import jsonschema
import pytest
import yaml
from command_settings import parsed
from hostile_folders import hostile_folder, imported_from
from tiny_runs import create_root, fill, make_model, query
from torch.distributed.elastic.utils.api import macros

import ludic
from ludic.adapters.clusters import systems
from ludic.adapters.clusters.plan import ClusterPlan, make_plan
from ludic.adapters.clusters.systems import kubernetes_files, slurm_files
from ludic.app.launch.config import ClusterConfig
from ludic.app.launch.process import stop_variables
from ludic.app.operations import machines
from ludic.app.operations.start import train, worker
from ludic.base.processes import SAFE_ENVIRONMENT
from ludic.engines.config import EngineConfig
from ludic.errors import ConfigError
from ludic.root.attempts import newest_attempt, start_attempt
from ludic.root.root import Root
from ludic.settings.kinds import CLUSTER_SYSTEM, find
from ludic.training.config import TrainConfig
from ludic.training.inherited_settings import next_config

ODD = "a 'b' $(touch hacked) \"c\" $$ $$(AWS_SECRET_ACCESS_KEY) $(AWS_SECRET_ACCESS_KEY) $"
"""A name that is code in a careless shell."""
ENGINE = EngineConfig(engine="vllm", tensor_parallel=2, engine_options={"note": ODD})
TRAIN = TrainConfig.of(num_steps=3, learning_rate=1e-6)
SLURM = ClusterConfig(nodes=2, ranks=4, gpu_type="h100", partition="gpu", account="lab", max_hours=24, setup="true")
KUBERNETES = ClusterConfig(image="registry/me/ludic:1", secret="bucket", namespace="rl", max_hours=2, gpu_type="H100")
SBATCH_OPTIONS = (
    *("account", "array", "cpus-per-task", "gpus-per-node", "job-name", "mem", "nodes", "ntasks-per-node"),
    *("open-mode", "output", "partition", "requeue", "signal", "time"),
)
"""Options of sbatch(1) in Slurm 24.11 that ludic writes."""
STAND_IN = """\
#!/bin/sh
{python} -c 'import json, os, sys
print(json.dumps([os.path.basename(sys.argv[1]), *sys.argv[2:]]))' "$0" "$@" >> {calls}
{answer}
"""


@pytest.fixture
def root(tmp_path: Path) -> Root:
    (tmp_path / ODD).mkdir()
    return create_root(str(tmp_path / ODD / "run"), make_model(tmp_path / "model"), num_workers=3)


def in_bucket(root: Root, cluster: ClusterConfig) -> ClusterPlan:
    """The plan of a run as if a bucket held it."""
    plan = make_plan(root, systems.SLURM, TRAIN, ENGINE, ClusterConfig())
    return replace(plan, url=f"s3://bucket/{ODD}", cluster=cluster)


def commands(script: str) -> list[list[str]]:
    """The arguments of each `ludic` command in a script, whose slot becomes 1."""
    lines = [shlex.split(line) for line in script.splitlines() if re.search(r"\bludic (worker|train)\b", line)]
    found = [of_rank(line)[line.index("ludic") + 1 :] for line in lines]
    return [["1" if word.startswith("$") else word for word in words if word != "&"] for words in found]


def of_rank(words: list[str]) -> list[str]:
    """The words that a rank sees, if torchrun starts it, by torchrun's own code."""
    return macros.substitute(words, "0") if "torch.distributed.run" in words else words


def check_command(words: list[str], url: str) -> None:
    """ludic parses a command to the settings that it was written from."""
    name, root, *flags = words
    assert root == url
    if name == "worker":
        settings = parsed(worker, root, *flags)
        assert (settings.engine, settings.worker.slot in (0, 1, 2)) == (ENGINE, True)
    else:
        assert parsed(train, root, *flags).train == TRAIN


def run_with_stand_ins(script: str, folder: Path, **answers: str) -> list[list[str]]:
    """Run a script in an empty folder; the calls of commands, which print an answer or nothing."""
    calls = folder / "calls"
    for name in ("srun", "scontrol", "scancel", "ludic", "python"):
        stand_in = STAND_IN.format(python=sys.executable, calls=shlex.quote(str(calls)), answer=answers.get(name, ""))
        (folder / name).write_text(stand_in)
        (folder / name).chmod(0o755)
    environment = {
        "PATH": f"{folder}:/usr/bin:/bin",
        "SLURM_ARRAY_TASK_ID": "1",
        "SLURM_JOB_ID": "40001",
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_CPUS_PER_TASK": "16",
    }
    subprocess.run(["bash", "-c", script], cwd=folder, env=environment, check=True, timeout=60)
    return [json.loads(line) for line in calls.read_text().splitlines()]


def test_slurms_files_run_the_commands_and_quote_names(root: Root, tmp_path: Path) -> None:
    workers, trainer = systems.SLURM.files(root, TRAIN, ENGINE, SLURM).values()
    (tmp_path / "w").mkdir()
    ((program, *words),) = run_with_stand_ins(workers, tmp_path / "w")
    assert (program, *words[:2]) == ("srun", "--kill-on-bad-exit=1", "ludic")
    check_command(words[2:], root.url)
    (tmp_path / "t").mkdir()
    names = "seq --format=node%.0f 50000"  # more than a pipe holds
    calls = run_with_stand_ins(trainer, tmp_path / "t", scontrol=names, ludic="echo step; echo 2")
    assert [call[0] for call in calls] == ["scontrol", "srun", "ludic"]
    assert {"--nnodes=2", "--nproc-per-node=4", "--rdzv-endpoint=node1:20001"} <= set(calls[1])
    check_command(of_rank(calls[1])[calls[1].index("ludic") + 1 :], root.url)
    assert not list(tmp_path.rglob("hacked"))


def test_slurms_processes_get_the_cpus_of_the_job_and_its_signal_before_its_end(root: Root, tmp_path: Path) -> None:
    for number, text in enumerate(systems.SLURM.files(root, TRAIN, ENGINE, replace(SLURM, stop_within_s=300)).values()):
        (tmp_path / str(number)).mkdir()
        seen = 'echo "$SRUN_CPUS_PER_TASK $LUDIC_STOP_WITHIN_S $PYTHONSAFEPATH" >> seen'
        run_with_stand_ins(text, tmp_path / str(number), srun=seen, scontrol="echo node1", ludic="echo step; echo 2")
        assert (tmp_path / str(number) / "seen").read_text() == "16 300 1\n"
        (signal_s,) = re.findall(r"^#SBATCH --signal=TERM@(\d+)$", text, re.MULTILINE)
        assert 300 + 60 < int(signal_s) <= 400


def test_slurms_workers_end_with_the_run_but_not_with_a_stopped_trainer(root: Root, tmp_path: Path) -> None:
    *_, trainer = systems.SLURM.files(root, TRAIN, ENGINE, SLURM).values()
    answers = {"scontrol": "echo node1", "ludic": "echo step; echo 3"}  # num_steps is 3
    *_, query, cancel = run_with_stand_ins(trainer, tmp_path, **answers)
    plan = make_plan(root, systems.SLURM, TRAIN, ENGINE, SLURM)
    assert cancel == ["scancel", "--me", f"--name={plan.name}-workers"]
    assert query[:3] == ["ludic", "sql", root.url]
    assert ludic.open(root.url).sql(query[3])["step"].to_list() == [0]  # nothing is trained yet


def test_slurms_options_are_options_of_sbatch(root: Root) -> None:
    for text in systems.SLURM.files(root, TRAIN, ENGINE, SLURM).values():
        assert subprocess.run(["bash", "-n"], input=text, text=True, check=True).returncode == 0
        options = re.findall(r"^#SBATCH --([a-z-]+)(?:=(\S+))?$", text, re.MULTILINE)
        assert len(options) == text.count("#SBATCH")
        assert {name for name, _ in options} <= set(SBATCH_OPTIONS)
    workers, trainer = systems.SLURM.files(root, TRAIN, ENGINE, SLURM).values()
    assert "#SBATCH --array=0-2\n" in workers
    assert "#SBATCH --gpus-per-node=h100:2\n" in workers
    assert "#SBATCH --gpus-per-node=h100:4\n#SBATCH --partition=gpu\n#SBATCH --account=lab\n" in trainer


def jobset_of(root: Root) -> dict[str, Any]:
    (text,) = kubernetes_files(in_bucket(root, KUBERNETES)).values()
    return yaml.safe_load(text)


def expand(text: str, variables: dict[str, str]) -> str:
    """What the kubelet makes of a word of a command: expansion.Expand in Kubernetes 1.33, k8s.io/kubernetes."""
    out, at = "", 0
    while at < len(text):
        if text[at] != "$" or at + 1 == len(text):
            out, at = out + text[at], at + 1
        elif text[at + 1] == "$":
            out, at = out + "$", at + 2
        elif text[at + 1] == "(" and ")" in text[at + 2 :]:
            end = text.index(")", at + 2)
            out, at = out + variables.get(text[at + 2 : end], text[at : end + 1]), end + 1
        else:
            out, at = out + text[at : at + 2], at + 2
    return out


def test_the_jobset_fits_the_schema_of_jobset(root: Root) -> None:
    schema = json.loads(Path(__file__).with_name("jobset.v1alpha2.json").read_text())
    jobset = jobset_of(root)
    jsonschema.validate(jobset, schema)
    # A name of Kubernetes' services, which begins with a letter.
    assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", jobset["metadata"]["name"])


def test_the_jobs_of_the_jobset_fit_the_schema_of_kubernetes(root: Root) -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="`make clusters` installs it")
    for job in jobset_of(root)["spec"]["replicatedJobs"]:
        whole = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": job["name"]}, **job["template"]}
        kubernetes_validate.validate(whole, "1.33", strict=True)


def test_the_jobset_runs_the_commands_and_reads_secrets_by_name(root: Root) -> None:
    jobset = jobset_of(root)
    pods = {job["name"]: job["template"]["spec"] for job in jobset["spec"]["replicatedJobs"]}
    containers = {name: spec["template"]["spec"]["containers"][0] for name, spec in pods.items()}
    for name, command in (("workers", "worker"), ("trainer", "train")):
        ((found, *words),) = commands(expand(containers[name]["command"][-1], {"AWS_SECRET_ACCESS_KEY": "secret"}))
        assert found == command
        check_command([found, *words], f"s3://bucket/{ODD}")
        assert containers[name]["envFrom"] == [{"secretRef": {"name": "bucket"}}]
    assert (pods["workers"]["completions"], pods["trainer"]["completions"]) == (3, 1)
    assert containers["workers"]["resources"]["limits"]["nvidia.com/gpu"] == 2
    assert jobset["spec"]["successPolicy"]["targetReplicatedJobs"] == ["trainer"]


def scripts_of(root: Root) -> list[list[str]]:
    """The commands of the workers' pods and of the trainer's, as they start."""
    jobs = jobset_of(root)["spec"]["replicatedJobs"]
    found = [job["template"]["spec"]["template"]["spec"]["containers"][0]["command"] for job in jobs]
    return [[expand(word, {"touch hacked": "expanded"}) for word in command] for command in found]


@pytest.mark.parametrize("index", [0, 1], ids=["worker", "trainer"])
def test_a_pod_passes_sigterm_on_and_then_does_not_count_as_completed(root: Root, tmp_path: Path, index: int) -> None:
    environment = pretend(tmp_path, "trap 'touch stored; exit 0' TERM; touch began; sleep 60 & wait")
    command = scripts_of(root)[index]
    with subprocess.Popen(command, cwd=tmp_path, env=environment, start_new_session=True) as process:
        try:
            while not (tmp_path / "began").exists():
                assert process.poll() is None
                time.sleep(0.01)
            process.terminate()
            assert process.wait(30) == 1
        finally:
            with suppress(ProcessLookupError):  # the whole group has ended
                os.killpg(process.pid, signal.SIGKILL)
    assert (tmp_path / "stored").exists()


def test_a_pod_ends_as_its_process_does(root: Root, tmp_path: Path) -> None:
    commands = scripts_of(root)
    for code in (0, 93):
        environment = pretend(tmp_path, f"exit {code}")
        for command in commands:
            assert subprocess.run(command, cwd=tmp_path, env=environment, timeout=30).returncode == code


def pretend(folder: Path, script: str) -> dict[str, str]:
    """The environment of a pod in which `ludic` runs a script."""
    (folder / "ludic").write_text(f"#!/bin/bash\n{script}\n")
    (folder / "ludic").chmod(0o755)
    return {"PATH": f"{folder}:/usr/bin:/bin", "JOB_COMPLETION_INDEX": "1"}


@pytest.mark.slow
def test_the_trainers_command_trains_one_model_on_two_machines(tmp_path: Path, root: Root) -> None:
    fill(root, num_files=2)
    config = TRAIN.replace(num_steps=2, device="cpu", max_off_policy_steps=None, rollout_timeout_s=60.0)
    plan = make_plan(root, systems.SLURM, config, EngineConfig(), ClusterConfig(nodes=2))
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    command = plan.train_command("127.0.0.1", str(port)).replace("python ", f"exec {sys.executable} ", 1)
    log, hostile = tmp_path / "log", hostile_folder(tmp_path / "hostile")
    options = {"cwd": hostile, "env": os.environ | plan.environment}
    with log.open("ab") as out:
        machines = [subprocess.Popen(["bash", "-c", command], stdout=out, stderr=out, **options) for _ in range(2)]
    try:
        assert [machine.wait(280) for machine in machines] == [0, 0], log.read_text()[-3000:]
    finally:
        for machine in machines:
            machine.kill()
    attempt = newest_attempt(root)
    assert attempt is not None
    assert attempt.numerics["num_ranks"] == 2
    assert query(root, "select count(distinct step) from batches where used") == [(2,)]
    assert imported_from(hostile) == []


def test_settings_of_another_system_and_missing_ones_are_refused(root: Root) -> None:
    for system, cluster, message in [
        ("slurm", KUBERNETES, "image does not apply to slurm"),
        ("kubernetes", ClusterConfig(), "image is missing"),
        ("kubernetes", KUBERNETES, "is a folder, which machines of kubernetes do not see"),
    ]:
        with pytest.raises(ConfigError, match=message):
            find(CLUSTER_SYSTEM, system).files(root, TRAIN, ENGINE, cluster)
    with pytest.raises(ConfigError, match="partition is 'a b', wanted a name"):
        ClusterConfig(partition="a b")
    with pytest.raises(ConfigError, match="image is 'x\\\\ny', wanted a name"):
        ClusterConfig(image="x\ny")


def python_commands(text: str) -> list[list[str]]:
    """The words of each `python` in a file, up to the end of its line."""
    return [
        shlex.split(line[line.index("python ") :]) for line in text.splitlines() if re.search(r"(^|\s)python ", line)
    ]


@pytest.mark.parametrize(
    ("system", "cluster"),
    [("slurm", SLURM), ("kubernetes", KUBERNETES)],
    ids=lambda x: str(x)[:7],
)
def test_processes_of_a_cluster_are_safe_and_have_the_time_to_stop_that_the_user_gives(
    root: Root, system: str, cluster: ClusterConfig
) -> None:
    plan = in_bucket(root, replace(cluster, nodes=2, ranks=4, stop_within_s=900))
    write = {"slurm": slurm_files, "kubernetes": kubernetes_files}[system]
    text = "\n".join(write(plan).values())
    found = [words for words in python_commands(text) if "torch.distributed.run" in words]
    assert [words[1] for words in found] == ["-P"]
    for name, value in {**SAFE_ENVIRONMENT, **stop_variables(900)}.items():
        assert len(re.findall(rf"{name}(?:=|: |\n +value: )'?{value}\b", text)) >= 2, (name, text)
    if system == "kubernetes":
        grace = re.findall(r"terminationGracePeriodSeconds: (\d+)", text)
        assert len(grace) == 2
        assert all(900 < int(seconds) <= 960 for seconds in grace)


def test_a_machines_memory_is_what_the_plan_says_unless_it_is_given(root: Root) -> None:
    text = systems.SLURM.files(root, TRAIN, ENGINE, replace(SLURM, memory_gb=7))
    assert [re.findall(r"--mem=(\d+)G", each) for each in text.values()] == [["7"], ["28"]]  # four ranks
    plan = make_plan(root, systems.SLURM, TRAIN, ENGINE, SLURM)
    # Libraries of four ranks on CUDA, 4 GB each, and of vLLM, 6 GB; a quarter more. The tiny model adds a few MB.
    assert (plan.memory.trainer, plan.memory.worker) == (19, 7)
    assert make_plan(root, systems.SLURM, TRAIN, ENGINE, ClusterConfig(gpus=False)).memory.trainer == 2


def test_a_model_that_can_not_be_looked_at_gets_32_gib_a_process(
    root: Root, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.rmtree(tmp_path / "model")
    plan = make_plan(root, systems.SLURM, TRAIN, ENGINE, SLURM)
    assert (plan.memory.trainer, plan.memory.worker) == (4 * 32, 32)
    assert "--memory-gb sets another number" in caplog.text


def test_lines_and_variables_of_the_user_are_in_the_files(root: Root, tmp_path: Path) -> None:
    value = "a 'b' $(touch hacked)"
    cluster = replace(
        SLURM, line=("#SBATCH --exclusive", "touch before"), variable=(f"ODD={value}", "HF_HOME=/shared/hf")
    )
    workers, _ = systems.SLURM.files(root, TRAIN, ENGINE, cluster).values()
    assert workers.index("#SBATCH --exclusive\n") < workers.index("set -euo")
    run_with_stand_ins(workers, tmp_path, srun='printf %s "$ODD" > seen; [ -e before ]')
    assert (tmp_path / "seen").read_text() == value
    assert not (tmp_path / "hacked").exists()
    (text,) = kubernetes_files(in_bucket(root, replace(KUBERNETES, variable=("ODD=$(HOME) $$",)))).values()
    assert text.count("value: $$(HOME) $$$$") == 2
    for wrong, said in [({"variable": ("1X=2",)}, "wanted NAME=VALUE"), ({"line": ("a\nb",)}, "wanted one line")]:
        with pytest.raises(ConfigError, match=said):
            ClusterConfig(**wrong)
    with pytest.raises(ConfigError, match="HF_TOKEN is or holds a secret"):
        make_plan(root, systems.SLURM, TRAIN, ENGINE, replace(SLURM, variable=("HF_TOKEN=hf_abcdefghijklmnop",)))
    with pytest.raises(ConfigError, match="line does not apply to kubernetes"):
        systems.KUBERNETES.check(replace(KUBERNETES, line=("#SBATCH --exclusive",)))


def test_a_server_runs_beside_each_worker_and_has_the_options_of_vllm(root: Root, tmp_path: Path) -> None:
    for system, cluster in (("slurm", SLURM), ("kubernetes", KUBERNETES)):
        write = {"slurm": slurm_files, "kubernetes": kubernetes_files}[system]
        plan = make_plan(root, systems.SLURM, TRAIN, ENGINE, replace(SLURM, serve=True))
        text = "\n".join(write(replace(plan, cluster=replace(cluster, serve=True))).values())
        assert "serve" in text
    assert parsed(machines.serve, root.url, "--port", "8000", *plan.serve_flags).serve.tensor_parallel == 2
    settings = parsed(worker, root.url, *shlex.split(plan.worker_command("1"))[3:])
    assert (settings.engine.engine, settings.engine.server_url) == ("server", ("http://127.0.0.1:8000",))
    assert settings.engine.tensor_parallel == 1
    workers, _ = systems.SLURM.files(root, TRAIN, ENGINE, replace(SLURM, serve=True)).values()
    answers = {"srun": 'shift; exec "$@"', "ludic": "sleep 0.1"}
    calls = run_with_stand_ins(workers, tmp_path, **answers)
    assert {tuple(call[:2]) for call in calls if call[0] == "ludic"} == {("ludic", "serve"), ("ludic", "worker")}
    ports = {word.rpartition(":")[2] for call in calls for word in call if re.search(r"^(20001|http:.*:20001)$", word)}
    assert ports == {"20001"}


def test_slurms_jobs_have_a_time_limit_and_log_where_slurm_can_read_the_name(root: Root) -> None:
    for text in systems.SLURM.files(root, TRAIN, ENGINE, ClusterConfig()).values():
        assert "#SBATCH --time=24:00:00\n" in text
        assert re.search(r"--output=%x(-%a)?\.log\n", text)  # the root's name is odd
    for text in systems.SLURM.files(root, TRAIN, ENGINE, ClusterConfig(log_folder="/shared/logs")).values():
        assert "#SBATCH --output=/shared/logs/%x" in text
    plan = replace(make_plan(root, systems.SLURM, TRAIN, ENGINE, ClusterConfig()), url="/shared/runs/7")
    assert all("#SBATCH --output=/shared/runs/7/logs/%x" in text for text in slurm_files(plan).values())


def test_only_settings_that_differ_from_the_commands_own_become_flags(root: Root) -> None:
    config = TrainConfig.of(num_steps=5, learning_rate=2e-3)
    plan = make_plan(root, systems.SLURM, config, EngineConfig(), ClusterConfig())
    assert plan.train_flags == ["--num-steps", "5", "--learning-rate", "0.002"]
    assert plan.worker_flags == []
    assert make_plan(
        root, systems.SLURM, TrainConfig(), EngineConfig(), ClusterConfig(trust_code=True)
    ).train_flags == ["--trust-code"]


def test_a_trainer_elsewhere_goes_over_to_another_objective(root: Root) -> None:
    before = TrainConfig.of(objective="ppo_clip", clip_low=0.1, clip_high=0.2, dual_clip=3.0)
    start_attempt(root, config=before.flat())
    config = TrainConfig.of(objective="cispo", clip_high=0.2)
    flags = make_plan(root, systems.SLURM, config, EngineConfig(), ClusterConfig()).train_flags
    assert flags == ["--objective", "cispo", "--clip-low", "None"]
    assert next_config(root.url, {"objective": "cispo", "clip_low": None}, online=True) == config
    config = TrainConfig.of(objective="sapo", sapo_tau=(2.0, 1.0))
    flags = make_plan(root, systems.SLURM, config, EngineConfig(), ClusterConfig()).train_flags
    assert flags == ["--objective", "sapo", "--sapo-tau", "2.0", "1.0"]


@pytest.mark.slow
def test_the_command_writes_files_once_and_says_what_starts_them(root: Root, tmp_path: Path) -> None:
    (tmp_path / "experiment.toml").write_text("num_steps = 7\n")
    args = ["cluster", root.url, "slurm", "--config", "experiment.toml", "--out", "jobs", "--workers", "2"]
    said = forks.ludic(*args, folder=tmp_path)
    assert said.returncode == 0, said.stderr
    names = sorted(path.name for path in (tmp_path / "jobs").iterdir())
    assert said.stdout.splitlines() == [f"sbatch jobs/{name}" for name in names[::-1]]
    plan = make_plan(root, systems.SLURM, TrainConfig.of(num_steps=7), EngineConfig(), ClusterConfig(workers=2))
    assert (tmp_path / "jobs" / names[1]).read_text() == slurm_files(plan)[names[1]]
    again = forks.ludic(*args, folder=tmp_path)
    assert (again.returncode, "is there already" in again.stderr) == (1, True)


def test_settings_of_trainer_and_engine_come_from_the_file_and_those_of_the_cluster_from_flags(
    root: Root, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "experiment.toml"
    file.write_text("num_steps = 9\ntensor_parallel = 2\ncpus = 8\nmax_tokens = 64\n")  # the last one is the run's
    flags = ["--config", str(file), "--image", "me/ludic:1", "--algorithm", "dapo", "--cpus", "6"]
    settings = parsed(machines.cluster, root.url, "kubernetes", *flags)
    assert settings.cluster.cpus == 6
    assert (settings.system, settings.root, settings.cluster.image) == ("kubernetes", root.url, "me/ludic:1")
    assert (settings.train.num_steps, settings.engine.tensor_parallel, settings.algorithm) == (9, 2, "dapo")
    for flag in ("--num-steps", "--no-keep-token-stats", "--tensor-parallel"):
        with pytest.raises(SystemExit):
            parsed(machines.cluster, root.url, "kubernetes", flag, "9")
        said = capsys.readouterr().err
        assert f"{flag} is no option of this command; put it into the file of --config" in said
