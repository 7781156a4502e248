"""The agents' demo's run: a model of random weights learns to call a calculator, from demonstrations and then by RL.

It does in one root, on this machine and without downloads, what a user does with a large model: create a run, import
demonstrations, train on them offline, and train online. Tokenizer, model and demonstrations are generated. Held-out
problems are answered before RL, while it goes on, and after it. Each function continues what an interrupted call began.
"""

import json

from ludic.by_name import find_by_name
from ludic.code.kept import create_root
from ludic.engines.config import EngineConfig
from ludic.eval.config import EvalConfig
from ludic.launch.config import LaunchConfig
from ludic.launch.demo import keep_new_model
from ludic.launch.demonstrations import PARSER, TOOLS, make_demonstrations
from ludic.launch.evaluation import evaluate_here
from ludic.launch.local import launch
from ludic.launch.process import interruptible
from ludic.launch.train import train_here
from ludic.models.tiny import make_tiny_chat_model
from ludic.sql import connect
from ludic.store import Root, RunConfig
from ludic.store.catalogue import MODEL
from ludic.training.config import TrainConfig

ENVIRONMENT = "word_problems"
DEMONSTRATIONS = "demonstrations.jsonl"
"""File of the root that is imported."""
IMPORT_FILES = "ludic.adapters.imports.importing:import_files"
TO_MESSAGE = "ludic.adapters.imports.episodes:to_message"
NUM_PROBLEMS, PER_PROBLEM, NUM_EPOCHS = 1500, 2, 4
"""Problems with demonstrations, demonstrations of each, and passes over all of them."""
NUM_HELDOUT = 256
"""Held-out problems that each evaluated version answers."""
EVAL_EVERY = 10
"""Versions of RL from one evaluation to the next."""


def open_demo(url: str) -> Root:
    """Start the run with a new tiny model that is stored in its root, or open the existing run."""
    url = url.rstrip("/")
    run = RunConfig(
        model=f"{url}/{MODEL.folder}",
        env=(ENVIRONMENT,),
        tools=TOOLS,
        parser=PARSER,
        group_size=8,
        groups_per_batch=16,
        # One worker keeps up with the trainer, so that two cores have one process each.
        num_workers=1,
        max_tokens=48,
    )
    root = create_root(url, run)
    keep_new_model(root, _make_model)
    return root


def _make_model(folder: str) -> None:
    records = list(make_demonstrations(num_problems=500, per_problem=PER_PROBLEM))
    to_message = find_by_name(TO_MESSAGE)
    conversations = (list(map(to_message, record["messages"])) for record in records)
    make_tiny_chat_model(folder, conversations, tools=records[0]["tools"])


def warm_start(root: Root, *, num_problems: int = NUM_PROBLEMS, num_heldout: int = NUM_HELDOUT) -> None:
    """Import demonstrations, train on them, good ones and bad ones, and evaluate; does nothing once this is done.

    num_problems: of which there are demonstrations; fewer make a shorter warm start. Raises KeyboardInterrupt after
    Ctrl-C.
    """
    if (version := version_before_rl(root)) is not None:
        evaluate(root, str(version), num_heldout)
        return
    lines = (json.dumps(record) + "\n" for record in make_demonstrations(num_problems, PER_PROBLEM))
    root.put_if_absent(DEMONSTRATIONS, "".join(lines).encode())
    find_by_name(IMPORT_FILES)(root, [f"{root.url}/{DEMONSTRATIONS}"], "jsonl", env=ENVIRONMENT)
    with interruptible() as stop:
        train_here(root, warm_start_config(), stop)
    evaluate(root, "latest", num_heldout)


def warm_start_config() -> TrainConfig:
    """Return settings of supervised fine-tuning on the root's own rollouts, as `--offline --algorithm sft` has them."""
    return TrainConfig.of(
        offline=True,
        epochs=NUM_EPOCHS,
        advantage="reinforce",
        objective="sft",
        learning_rate=1.5e-3,
        schedule="cosine",
        warmup_steps=10,
        max_tokens_per_micro_batch=4096,
        device="cpu",
        # Threads of a step wait for each other: where others use the cores too, a second one makes it slower.
        num_threads=1,
        checkpoint_every=None,
    )


def improve(root: Root, num_steps: int) -> None:
    """Train online for `num_steps` steps after those of the warm start, and evaluate versions beside it."""
    processes = LaunchConfig(eval_every=EVAL_EVERY, eval_options={"num_examples": NUM_HELDOUT})
    launch(root, rl_config(_last_warm_step(root) + num_steps), processes, EngineConfig())


def _last_warm_step(root: Root) -> int:
    """Return the last step that trained on demonstrations; 0 before the first."""
    query = """
        select max(step) from batches join rollouts using (rollout_id)
        where used and rollouts.worker_id like 'import-%'
    """
    (step,) = connect(root).execute(query).fetchall()[0]
    return int(step or 0)


def rl_config(num_steps: int) -> TrainConfig:
    """Return settings of RLOO. num_steps: of the whole run, with those of the warm start."""
    return TrainConfig.of(
        num_steps=num_steps,
        # The demonstrations were not sampled by the model.
        filters=("drop_absent_logprobs",),
        learning_rate=3e-4,
        is_ratio_cap=2.0,
        max_tokens_per_micro_batch=4096,
        device="cpu",
        num_threads=1,
        checkpoint_every=20,
    )


def evaluate(root: Root, versions: str, num_heldout: int = NUM_HELDOUT) -> None:
    """Sample an answer to each held-out problem, as `ludic eval` does; what is stored is not sampled again."""
    config = EvalConfig(versions=versions, num_examples=num_heldout)
    with interruptible() as stop:
        evaluate_here(root, {"": config}, stop, device="cpu")


def version_before_rl(root: Root) -> int | None:
    """Return the version with stored evals that the warm start ended with; None before it has ended."""
    query = """
        select min(policy_version)
        from evals
        join policies on policies.version = policy_version
        where step = $step and step > 0
    """
    (version,) = connect(root).execute(query, {"step": _last_warm_step(root)}).fetchall()[0]
    return version
