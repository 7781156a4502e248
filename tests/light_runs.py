"""What the package without extras has to do: a stored run, a tokenizer, and commands with what they must say.

Needs nothing that an extra installs. As a script, runs commands in one process: it takes a list of packages that can't
be imported and the commands, as JSON, and prints the exit status, stdout and stderr of each as JSON in the last line.
"""

import io
import json
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

TRAIN_PACKAGES = ("torch", "transformers", "peft", "reasoning_gym", "safetensors", "matplotlib")
"""What `pip install ludic-rl` does not bring."""
GROUP_SIZE, GROUPS_PER_BATCH = 4, 2
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }} {{ eos_token }}"
    "{% endgeneration %}{% else %}{{ m.content }} {% endif %}{% endfor %}"
)
GOLDEN = Path(__file__).parent / "golden"


def write_tokenizer(folder: Path) -> str:
    """A folder with config.json and a tokenizer of words, and without weights."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder.mkdir(parents=True)
    words = ["<unk>", "<eos>", "what", "is", "one", "two", "three", "?"]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<unk>", "<eos>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    own = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps({**own, "chat_template": TEMPLATE}))
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3", "vocab_size": 64, "eos_token_id": 1}))
    return str(folder)


def make_run(url: str, model: str) -> dict[str, str]:
    """A run of two planned steps with their metrics, and evaluations of two versions; returns ids of rows."""
    from evaluations import rows, store_evaluation

    from ludic.records.rollout import RolloutBatch, RolloutGroup, RolloutMetadata
    from ludic.root.attempts import start_attempt
    from ludic.root.rows.ledger import write_ledger
    from ludic.root.rows.reader import RolloutReader
    from ludic.root.rows.tables import MetricsLog
    from ludic.root.rows.writer import RolloutWriter
    from ludic.root.sql.planner import Planner
    from ludic.run.config import RunConfig
    from ludic.run.run_json import create_root
    from ludic.training.batches.source import batch_rules
    from ludic.training.config import TrainConfig

    run = RunConfig(model=model, env=("addition",), group_size=GROUP_SIZE, groups_per_batch=GROUPS_PER_BATCH)
    root = create_root(url, run)
    rewards = [0.0, 1.0, 1.0, 0.0]
    for number in range(2):
        examples = {f"example {each}": each for each in (2 * number, 2 * number + 1)}
        found = {name: rows(name, each, rewards, 0, {"purpose": "train"}) for name, each in examples.items()}
        groups = tuple(RolloutGroup(key=key, rollouts=of_group) for key, of_group in found.items())
        with RolloutWriter(root, f"w{number}-test") as writer:
            writer.append(RolloutBatch(groups=groups, metadata=RolloutMetadata(worker_id=f"w{number}-test")))
    planner = Planner(batch_rules(TrainConfig().batch, GROUPS_PER_BATCH))
    planner.add(RolloutReader(root, planner.columns).poll(None))
    attempt = start_attempt(root, config=TrainConfig().flat())
    with closing(MetricsLog(root, "train", f"{attempt.attempt_id}")) as log:
        for step in (1, 2):
            plan = planner.plan(step=step, attempt_id=attempt.attempt_id, trainer_version=0)
            assert plan is not None
            write_ledger(root, attempt, step, plan)
            log.write(attempt_id=attempt.attempt_id, step=step, reward_mean=float(step), policy_version=0)
    for version, of_version in ((0, [0.0, 1.0]), (1, [1.0, 1.0])):
        store_evaluation(root, {"one": of_version, "two": of_version}, version=version)
    return {"rollout": groups[0].rollouts[0].rollout_id, "group": groups[0].rollouts[0].group_id}


def commands(url: str, model: str, ids: Mapping[str, str], folder: Path) -> dict[str, list[str]]:
    """Commands on a run of `make_run`, in an order that all of them bear, by words of what each prints."""
    page, rows, answers = (str(folder / name) for name in ("page.html", "rows.jsonl", "answers.jsonl"))
    question = {"role": "user", "content": "what is one ?"}
    lines = [{"messages": [question, {"role": "assistant", "content": said}], "reward": 1.0} for said in ("two", "one")]
    Path(answers).write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    taken = "select response_tokens::text as t from rollouts where env_name = 'talk' order by t"
    return {
        "16": ["sql", url, "select count(*) as n from rollouts"],
        "evals": ["watch", url, "--totals"],
        "2 groups of 4": ["watch", url, "--once"],
        "2 of 100": ["runs", url],
        ids["rollout"][-8:]: ["view", url, ids["rollout"], "--tokens"],
        f"group    {ids['group']}": ["view", url, ids["group"]],
        "sound": ["verify", url],
        "turns true at step 2": ["bisect", url, "reward_mean > 1"],
        "The same as the ledger, bit for bit, in 2 steps.": ["what-if", url],
        "largest_differences": ["what-if", url, "--advantage", "grpo", "--json"],
        "paired on the same examples": ["compare", f"{url}@0", f"{url}@1"],
        "page.html": ["report", url, "--output", page],
        "rows.jsonl": ["export", url, "--format", "jsonl", "--out", rows],
        "2 rollouts in 1 group": ["import", url, answers, "--from", "jsonl", "--env", "talk"],
        "[4, 1]": ["sql", url, taken],
        "files of 1 partition became": ["compact", url, "--all-versions"],
        "in 2 steps": ["what-if", url],
        "deleted": ["expire", url, "--keep-versions", "1", "--folder", "evals"],
    }


def record(url: str, model: str) -> None:
    """Two groups and a step of another program's trainer; prints how many rollouts it gave."""
    import ludic

    row = {"prompt_tokens": [2, 3], "response_tokens": [4, 1], "response_logprobs": [-0.5, -0.25]}
    groups = [[{**row, "episode_reward": float(index)} for index in range(GROUP_SIZE)] for _ in range(2)]
    with ludic.record(url, model=model, trainer="a loop", model_folder=model, group_size=GROUP_SIZE) as recorder:
        ids = recorder.append(groups)
        recorder.step(
            1, advantages=dict(zip(ids, [-1.0, -0.5, 0.5, 1.0] * 2, strict=True)), metrics={"reward_mean": 1.5}
        )
    print(f"recorded {len(ids)} rollouts")


def recorded_commands(url: str, model: str) -> dict[str, list[str]]:
    """The same, by words of what is printed; the first is `record`, and the others are commands."""
    return {
        "recorded 8 rollouts": [RECORD, url, model],
        "0.5": ["sql", url, "select max(advantage) / 2 as half from batches"],
        "1.5": ["sql", url, "select reward_mean from metrics"],
        "sound": ["verify", url],
        "is true from the start, step 1": ["bisect", url, "reward_mean > 1"],
        "attempts": ["watch", url, "--totals"],
    }


def print_heavy(url: str, folder: str) -> None:
    """Print what functions of Python say that need the extra train, by their names, as JSON."""
    import ludic

    answers = {"model": "m", "dataset": [], "reward": len, "root": f"{folder}/begun"}
    calls = {
        "ludic.fit: ": lambda: ludic.grpo(**answers),
        "ludic train: ": lambda: ludic.open(url).train(),
        "ludic worker: ": lambda: ludic.open(url).worker(1),
        "": lambda: ludic.trl,
    }
    said = {}
    for name, call in calls.items():
        try:
            call()
        except ImportError as error:
            said[name] = str(error)
    print(json.dumps(said))


RECORD, FUNCTIONS = "record", "functions"
"""What `run_all` takes beside commands."""


def golden_commands(url: str) -> dict[str, list[str]]:
    """Commands on a copy of a golden store, by words of what each prints; its weights are left out, says verify."""
    return {
        "v": ["sql", url, "select 'v' as v, * from rollouts limit 1"],
        "attempts": ["watch", url, "--totals"],
        "is not sound: 1 policy": ["verify", url],
        ".html": ["report", url, "--output", f"{url.rpartition('/')[2]}.html"],
    }


def heavy_commands(url: str, model: str, folder: Path) -> dict[str, list[str]]:
    """Commands that need the extra train, by what they call themselves; empty for one whose import says it."""
    begun = [f"{folder}/begun", "--model", model, "--env", "addition"]
    return {
        "ludic demo: ": ["demo"],
        "ludic run: ": ["run", *begun],
        "ludic train: ": ["train", url],
        "ludic worker: ": ["worker", url],
        "ludic gateway without --upstream URL, which records another server's answers: ": ["gateway", url],
        "ludic eval: ": ["eval", url],
        "ludic sample: ": ["sample", url, "--prompt", "one"],
        "ludic init: ": ["init", f"{folder}/first"],
        "": ["plan", "--model", model],
    }


def run_all(refused: Sequence[str], wanted: Sequence[Sequence[str]]) -> list[tuple[int, str, str]]:
    """Run `ludic` with each of the arguments; return the exit status, stdout and stderr of each."""

    class Refuse:
        def find_spec(name: str, path: Any = None, target: Any = None) -> None:  # noqa: N805
            if name.partition(".")[0] in refused:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    sys.meta_path.insert(0, Refuse)  # type: ignore[arg-type]
    from ludic.app.cli.main import main

    found = []
    for args in wanted:
        out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2))
        with redirect_stdout(out), redirect_stderr(err):
            try:
                own = {RECORD: record, FUNCTIONS: print_heavy}.get(args[0])
                code: Any = own(*args[1:]) if own else main(args)
            except SystemExit as ended:
                code = ended.code
        found.append((int(code or 0), *(stream.buffer.getvalue().decode() for stream in (out, err))))
    return found


if __name__ == "__main__":
    print(json.dumps(run_all(*json.loads(sys.argv[1]))), flush=True)
    os._exit(0)  # what a command left behind must not hide what it printed
