"""Train a branch: a new run that begins with a stored policy and trains on another run's batches by other rules."""

import shlex
import threading
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ludic.app.launch.roots import is_there
from ludic.app.launch.train import train_in_process
from ludic.base import ADAPTER_CONFIG
from ludic.errors import ConfigError
from ludic.eval import config_of, planned_steps, rules_of_step
from ludic.root import Root
from ludic.root.weights import (
    copy_policy,
    has_weights,
    identify_at,
    keep_model,
    policy_folder,
    policy_versions,
    read_policy,
)
from ludic.run import create_root, run_of
from ludic.settings import CodeSettings
from ludic.training import TrainConfig


def train_branch(root: Root, url: str, given: Mapping[str, Any], from_step: int, num_steps: int | None) -> list[str]:
    """Train a new run at `url` from the policy of a step; return commands that evaluate both in pairs."""
    planned = planned_steps(root)
    last = max(planned) if num_steps is None else from_step + num_steps
    for step in (from_step + 1, last):
        if step not in planned:
            raise ConfigError(
                f"{root.url} has no step {step} to train a branch on; its batches end with {max(planned)}"
            )
    version = version_of_step(root, planned, from_step)
    config = branch_config(root, planned[from_step + 1], given, from_step, last - from_step)
    branch = start_branch(url, root, version)
    train_in_process(branch, config, threading.Event(), code=CodeSettings())
    return compare_commands(root, planned, last, branch)


def version_of_step(root: Root, planned: Mapping[int, int], step: int) -> int:
    """Return the stored version of the weights after a step. Raises ConfigError if there is none, or it was pruned."""
    versions = [version for version in reversed(policy_versions(root)) if _is_of(root, version, planned, step)]
    for version in versions:
        if has_weights(root, version):
            return version
    pruned = f"{policy_folder(versions[0])} was pruned" if versions else "the step published none"
    raise ConfigError(f"{root.url}: no policy of step {step} is stored ({pruned}); choose another step")


def _is_of(root: Root, version: int, planned: Mapping[int, int], step: int) -> bool:
    policy = read_policy(root, version)
    return policy is not None and policy.step == step and (step == 0 or policy.attempt_id >= planned.get(step, 0))


def branch_config(root: Root, attempt_id: int, given: Mapping[str, Any], from_step: int, num_steps: int) -> TrainConfig:
    """Return the settings of the branch: those of the attempt, changed by the settings given."""
    config = config_of(root, attempt_id, given)
    if config.batch.compute_logprobs:
        raise ConfigError(
            f"{root.url}: attempt {attempt_id} trained on logprobs that it computed, and a branch computes none; "
            "train a new run offline by the other rules, or name an objective that needs none, such as --objective sft"
        )
    rules = rules_of_step(root, config, given)
    params = {name: value for name, value in rules.params.items() if name in config.batch.sql_params}
    own = {"offline": False, "sources": (), "epochs": None, "sql_params": params}
    return config.replace(**own, replay_batches=root.url, replan_from=from_step, num_steps=num_steps)


def start_branch(url: str, root: Root, version: int) -> Root:
    """Create a run whose first model is a version of another run's policy; the new root holds these weights."""
    if is_there(url):
        raise ConfigError(f"{url} holds a run already; give the branch a root of its own, or resume: ludic train {url}")
    source = f"{root.url}/{policy_folder(version)}"
    if root.exists(f"{policy_folder(version)}/{ADAPTER_CONFIG}"):
        raise ConfigError(f"{source} holds only an adapter; a branch needs whole weights (publish_lora merged)")
    branch = create_root(url, replace(run_of(root), model=source), like=root)
    with branch.scratch_folder() as folder:
        copy_policy(root, version, folder)
        keep_model(branch, folder, identify_at(folder, source), with_weights=True)
    return branch


def compare_commands(root: Root, planned: Mapping[int, int], last: int, branch: Root) -> list[str]:
    """Return the commands that evaluate the branch and the run after the same number of steps, and compare them."""
    try:
        version = str(version_of_step(root, planned, last))
    except ConfigError:
        version = "VERSION"  # of the nearest step whose policy is stored
    one, other = shlex.quote(root.url), shlex.quote(branch.url)
    return [
        f"ludic eval {one} --versions {version}",
        f"ludic eval {other} --versions latest",
        f"ludic compare {one}@{version} {other}@latest",
    ]
