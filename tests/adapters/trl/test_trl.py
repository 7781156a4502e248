"""Trainers of TRL, recorded: the root holds what TRL sampled, scored and trained on, whatever happens meanwhile."""

import errno
import json
import os
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import numpy as np
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from s3_proxy import Reset, S3Proxy
from torch.optim.optimizer import register_optimizer_step_pre_hook

pytest.importorskip("trl", reason="`make trl` makes an environment with TRL")

import torch
from transformers import AutoModelForCausalLM, TrainerCallback
from trl import GRPOTrainer, SFTTrainer
from trl_runs import make_model, make_trainer, questions, train, train_with_failing_rank
from trl_runs import run as run_processes

import ludic
from benchmarks import record_trl
from ludic.adapters import trl as adapter
from ludic.adapters.trl_sampling import captures_of
from ludic.app.cli.main import main
from ludic.errors import ConfigError
from ludic.root.storage.failures import RETRY_LIMIT
from ludic.run.recording import queue, recorder

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]

Row = tuple[tuple[int, ...], tuple[int, ...], float]
"""Prompt, response and advantage."""
ROWS = """
    select b.step, b.attempt_id, b.advantage, b.used, b.reason, b.trainer_version, b.superseded, r.*
    from all_batches b join rollouts r using (rollout_id)
    order by b.attempt_id, b.step, b.batch_index
"""


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session", autouse=True)
def path_of_processes() -> Iterator[None]:
    """The server that forks processes imports trl_runs once: TRL takes seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
        yield


class Spy:
    """Keeps what a trainer generated and trained on, from outside of what is recorded."""

    def __init__(self, trainer: Any) -> None:
        self.steps: dict[int, list[Row]] = {}
        """Rows of each step."""
        self.num_generated = 0
        self.weights: dict[int, dict[str, torch.Tensor]] = {}
        """Those that sampled, by version."""
        loss, generate = trainer._compute_loss, trainer._generate_and_score_completions

        def compute_loss(model: Any, inputs: Mapping[str, Any]) -> Any:
            if trainer.model.training:
                self.steps.setdefault(trainer.state.global_step + 1, []).extend(unpadded(inputs))
            return loss(model, inputs)

        def generate_and_score(inputs: Any) -> Any:
            state = trainer.model.state_dict()
            self.weights[trainer.state.global_step] = {name: value.clone() for name, value in state.items()}
            self.num_generated += len(inputs)
            return generate(inputs)

        trainer._compute_loss, trainer._generate_and_score_completions = compute_loss, generate_and_score


def unpadded(inputs: Mapping[str, Any]) -> Iterator[Row]:
    """Prompt, response and advantage of each row of a batch of TRL."""
    names = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages")
    for prompt, prompt_mask, response, mask, advantage in zip(*(inputs[name] for name in names), strict=True):
        yield tuple(prompt[prompt_mask.bool()].tolist()), tuple(response[mask.bool()].tolist()), float(advantage)


def recorded(model: Path, folder: Path, kind: str = "grpo", **settings: Any) -> tuple[ludic.Run, Any, Spy]:
    """Train with a recorder, and return the run."""
    trainer = make_trainer(model, folder / "trl", kind, **settings)
    recorder = ludic.trl.record(trainer, folder / "root")
    spy = Spy(trainer)
    trainer.train()
    recorder.close()
    assert not recorder.lost
    return ludic.open(folder / "root"), trainer, spy


def texts(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """A row of ours as TRL's table of completions has it: question, answer, rewards, extra column, advantage."""
    question, answer = (message["content"] for message in row["messages"])
    rewards, metadata = row["reward_components"], row["metadata"]
    values = (rewards.get("on_topic"), rewards.get("brief"), float(metadata["num_words"]), row["advantage"])
    return question, answer, *map(rounded, values)


def logged(folder: Path) -> Iterator[tuple[str, list[tuple[Any, ...]]]]:
    """The rows of each of TRL's tables of completions."""
    for file in sorted(folder.glob("completions_*.parquet")):
        rows = pq.read_table(file).to_pylist()
        yield (
            file.name,
            [
                (
                    *(row[side][0]["content"] for side in ("prompt", "completion")),
                    *(rounded(row[name]) for name in ("on_topic", "brief", "num_words", "advantage")),
                )
                for row in rows
            ],
        )


def rounded(value: float | None) -> float | None:
    return None if value is None or np.isnan(value) else round(value, 6)


def logprobs(model: Any, row: Mapping[str, Any], temperature: float) -> list[float]:
    """Logprobs of a row's response under a model, computed alone and without padding."""
    with torch.no_grad():
        logits = model(torch.tensor([row["prompt_tokens"] + row["response_tokens"]])).logits[0, :-1]
    own = torch.log_softmax(logits / temperature, dim=-1)[len(row["prompt_tokens"]) - 1 :]
    return own.gather(1, torch.tensor(row["response_tokens"])[:, None])[:, 0].tolist()


COMBINATIONS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "plain": ("grpo", {}),
    "rloo": ("rloo", {"beta": 0.05}),
    "reuse": (
        "grpo",
        {"steps_per_generation": 2, "gradient_accumulation_steps": 1, "num_iterations": 2, "max_steps": 4},
    ),
    "across": ("grpo", {"steps_per_generation": 2, "gradient_accumulation_steps": 3, "loss_type": "dr_grpo"}),
    "twice": ("grpo", {"steps_per_generation": 2, "gradient_accumulation_steps": 4, "num_iterations": 2}),
    "batch": ("grpo", {"scale_rewards": "batch", "temperature": 0.7, "beta": 0.1, "loss_type": "cispo"}),
}


@pytest.mark.parametrize(("kind", "settings"), COMBINATIONS.values(), ids=COMBINATIONS)
def test_a_root_holds_what_trl_logs_and_trains_on(model: Path, tmp_path: Path, kind: str, settings: dict[str, Any]):
    run, trainer, spy = recorded(model, tmp_path, kind, **settings)
    rows = run.sql(ROWS).to_dicts()
    assert sorted({row["step"] for row in rows}) == sorted(spy.steps) == [*range(1, trainer.state.max_steps + 1)]
    for step, of_step in spy.steps.items():
        ours = [row for row in rows if row["step"] == step]
        assert sorted(map(as_trained, ours)) == sorted(set(of_step))
        assert {row["trainer_version"] for row in ours} == {step - 1}
    once = {row["rollout_id"]: row for row in rows}.values()
    known = Counter(map(texts, once))
    for name, of_table in logged(tmp_path / "trl/completions"):
        assert not Counter(of_table) - known, name
    assert run.sql("select count(*) as n from rollouts").item() == spy.num_generated
    assert {row["group_size"] for row in once} == {4}
    policy = AutoModelForCausalLM.from_pretrained(model)
    for row in once:
        policy.load_state_dict(spy.weights[row["policy_version"]])
        assert row["capture"] == "trainer"
        assert row["response_logprobs"] == pytest.approx(logprobs(policy, row, trainer.temperature), abs=1e-4)
    assert run.verify().findings == []


def as_trained(row: Mapping[str, Any]) -> Row:
    return tuple(row["prompt_tokens"]), tuple(row["response_tokens"]), row["advantage"]


def constant_rollouts(prompts: Sequence[Any], trainer: Any) -> dict[str, Any]:
    """Rollouts of a user's own loop: two tokens of the model, one of an environment, and one of the model."""
    asked = [trainer.processing_class.apply_chat_template(prompt, add_generation_prompt=True) for prompt in prompts]
    ids = [[*each["input_ids"]] if hasattr(each, "keys") else [*each] for each in asked]
    num = len(prompts)
    said = [[20 + place % 3, 21, 22, 23] for place in range(num)]
    return {
        "prompt_ids": ids,
        "completion_ids": said,
        "logprobs": [[-1.0, -2.0, -50.0, -3.0] if place else [-1.0, None, -50.0, -3.0] for place in range(num)],
        "env_mask": [[1, 1, 0, 1]] * num,
    }


CAPTURES: Mapping[str, tuple[Mapping[str, Any], set[str]]] = {
    "top_p": ({"top_p": 0.9}, {"ids"}),
    "min_p": ({"generation_kwargs": {"min_p": 0.01}}, {"ids"}),
    "top_k": ({"generation_kwargs": {"top_k": None}}, {"ids"}),  # None is 50 to transformers
    "cooler": ({"generation_kwargs": {"temperature": 0.5}}, {"ids"}),  # TRL's own passes divide by 1 then
    "noise": ({"neftune_noise_alpha": 5.0}, {"ids"}),  # drawn for each pass in training
    "masked": ({"mask_truncated_completions": True}, {"ids", "trainer"}),
    "own": ({"rollout_func": constant_rollouts}, {"sampler", "ids"}),
}


@pytest.mark.parametrize(("settings", "wanted"), CAPTURES.values(), ids=CAPTURES)
def test_logprobs_are_kept_of_the_distribution_sampled_from_alone(
    model: Path, tmp_path: Path, settings: dict[str, Any], wanted: set[str]
):
    run, trainer, _ = recorded(model, tmp_path, max_steps=2, **settings)
    rows = run.sql(ROWS).to_dicts()
    assert {row["capture"] for row in rows} == wanted
    for row in rows:
        if row["capture"] == "ids":
            assert set(row["response_logprobs"]) == {0}
        if trainer.mask_truncated_completions:
            was_cut = row["finish_reason"] == "length"
            assert (row["capture"] == "ids") == was_cut == (row["reason"] == "mask_truncated_completions")
        if row["capture"] == "sampler":
            assert (row["response_logprobs"], row["action_mask"]) == ([-1, -2, 0, -3], [True, True, False, True])
    assert {round(row["top_p"], 6) for row in rows} == {settings.get("top_p", 1)}
    assert {row["top_k"] for row in rows} == {50 if "top_k" in str(settings) else None}
    assert {row["metadata"].get("min_p") for row in rows} == {"0.01" if "min_p" in str(settings) else None}
    assert run.verify().findings == []


@pytest.mark.parametrize(
    "settings",
    [
        {"generation_kwargs": {"presence_penalty": 0.5}},
        {"generation_kwargs": {"bad_words": ["cats"]}},
        {"vllm_structured_outputs_regex": "a+"},
    ],
)
def test_settings_of_vllm_alone_change_what_it_samples_from(model: Path, tmp_path: Path, settings: dict[str, Any]):
    plain, other = (make_trainer(model, tmp_path / name, **own) for name, own in (("a", {}), ("b", settings)))
    plain.use_vllm = other.use_vllm = True  # no engine of it is started: only settings are read
    assert captures_of(plain, is_processed=False).sampler_logprobs
    assert captures_of(other, is_processed=True).sampler_logprobs
    found = captures_of(other, is_processed=False)
    assert (found.sampler_logprobs, found.train_logprobs, found.eval_logprobs) == (False, False, False)
    assert len(found.sampling.metadata) == 1


def test_dropout_keeps_logprobs_of_evaluations_alone(model: Path, tmp_path: Path):
    dropping = make_trainer(
        model, tmp_path / "trl", eval_strategy="steps", eval_steps=2, max_steps=2, eval_dataset=questions(4)
    )
    for layer in dropping.model.model.layers:
        layer.self_attn.attention_dropout = 0.1
    recorder = ludic.trl.record(dropping, tmp_path / "root", env="words")
    dropping.train()
    recorder.close()
    run = ludic.open(tmp_path / "root")
    found = run.sql(
        "select purpose, capture, policy_version, env_name, count(*) as n from rollouts group by all"
    ).rows()
    assert set(found) == {("train", "ids", 0, "words", 8), ("train", "ids", 1, "words", 8)}
    found = run.sql("select purpose, capture, policy_version, env_name, count(*) as n from evals group by all").rows()
    assert found == [("eval", "trainer", 2, "words", 16)]


KILLS = [("generation", 13), ("optimizer", 18), ("append", 23), None]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_that_was_killed_thrice_is_recorded_once(model: Path, tmp_path: Path, ranks: int):
    """A group of four lies across both ranks: each has two rows a step, of groups of four."""
    root, folder = tmp_path / "root", tmp_path / "trl"
    sizes = {"max_steps": 30, "save_strategy": "steps", "save_steps": 5, "per_device_train_batch_size": 8 // ranks}
    tables: list[dict[int, list[Any]]] = []
    for life, kill in enumerate(KILLS):
        codes = run_processes(
            train, model, folder, str(root), sizes, resume=life > 0, kill=kill, ranks=ranks, logs=tmp_path
        )
        assert (-9 in codes) == (kill is not None), (tmp_path / "0.log").read_text()[-3000:]
        tables.append({int(name[12:17]): rows for name, rows in logged(folder / "completions")})
        (folder / "completions").rename(folder / f"completions-{life}")
    run = ludic.open(root)
    rows = run.sql(ROWS).to_dicts()
    # It resumes from the checkpoints of steps 10, 15 and 20. The rows of step 23 are stored, and not its ledger.
    ends = {1: [*range(1, 13)], 2: [*range(11, 19)], 3: [*range(16, 23)], 4: [*range(21, 31)]}
    assert {life: sorted({r["step"] for r in rows if r["attempt_id"] == life}) for life in ends} == ends
    for (life, steps), of_life in zip(ends.items(), tables, strict=True):
        for step in steps:
            ours = [texts(row) for row in rows if (row["attempt_id"], row["step"]) == (life, step)]
            if step in of_life:  # TRL writes a step's table after the optimizer moved
                assert sorted(ours, key=str) == sorted(of_life[step], key=str)
            assert len(ours) == 8
    assert len({row["rollout_id"] for row in rows}) == len(rows) == 8 * sum(map(len, ends.values()))
    assert run.sql("select count(*) from rollouts").item() == len(rows) + 8
    assert sorted(run.sql("select distinct step from batches").to_series()) == [*range(1, 31)]
    assert run.sql("select count(*) from metrics where kind = 'train'").item() >= 30
    assert run.verify().findings == []


# --- Training on what was recorded -----------------------------------------------------------------------------------


def test_offline_training_has_the_gradient_of_trls_own_tensors(model: Path, tmp_path: Path):
    """One step of two groups, and the mean over sequences; TRL adds 1e-4 to the standard deviation."""
    trainer = make_trainer(
        model, tmp_path / "trl", loss_type="grpo", reward_funcs=[num_words], reward_weights=[1.0], max_steps=1
    )
    recorder, batches = ludic.trl.record(trainer, tmp_path / "root"), []
    generate = trainer._generate_and_score_completions
    trainer._generate_and_score_completions = lambda inputs: batches.append(generate(inputs)) or batches[-1]
    trainer.train()
    recorder.close()
    wanted = gradients_by_hand(AutoModelForCausalLM.from_pretrained(model), unpadded(batches[0]))
    found: list[dict[str, np.ndarray]] = []
    named = AutoModelForCausalLM.from_pretrained(model)
    hook = register_optimizer_step_pre_hook(lambda optimizer, *args: found.append(gradients(optimizer, named)))
    new = [str(tmp_path / "new"), "--offline", "--sources", str(tmp_path / "root"), "--num-steps", "1"]
    loss = ["--advantage", "grpo", "--sql-params", '{"epsilon": 1e-4}', "--loss-normalization", "sequences"]
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["train", *new, *loss, "--max-grad-norm", "None", "--device", "cpu", "--checkpoint-every", "None"])
    hook.remove()
    (gradient,) = found
    assert gradient.keys() == wanted.keys()
    for name, values in wanted.items():
        assert np.abs(gradient[name] - values).max() < 1e-5, name
    assert max(np.abs(values).max() for values in wanted.values()) > 1e-2


def num_words(completions: Sequence[Any], **columns: Any) -> list[float]:
    return [float(len({*completion[0]["content"].split()})) for completion in completions]


def gradients_by_hand(policy: Any, rows: Iterator[Row]) -> dict[str, np.ndarray]:
    """Of minus the mean over rows of advantage times mean logprob: on the policy itself the ratio is 1."""
    losses = []
    for prompt, response, advantage in rows:
        own = torch.log_softmax(policy(torch.tensor([prompt + response])).logits[0, :-1], dim=-1)[len(prompt) - 1 :]
        losses.append(-advantage * own.gather(1, torch.tensor(response)[:, None]).mean())
    torch.stack(losses).mean().backward()
    return {name: weight.grad.numpy() for name, weight in policy.named_parameters()}


def gradients(optimizer: torch.optim.Optimizer, named: Any) -> dict[str, np.ndarray]:
    """The gradients of an optimizer by the names that a model gives to equal weights, those of norms in their order."""
    names: dict[Any, list[str]] = {}
    for name, weight in named.named_parameters():
        names.setdefault((weight.shape, weight.detach().numpy().tobytes()), []).append(name)
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    return {
        names[weight.shape, weight.detach().numpy().tobytes()].pop(0): weight.grad.numpy().copy() for weight in weights
    }


def test_the_benchmark_of_recording_runs(capsys: pytest.CaptureFixture[str]):
    record_trl.main(quick=True)
    assert "ratio in a round, median" in capsys.readouterr().out


# --- What fails ------------------------------------------------------------------------------------------------------


class Store(MemoryFileSystem):
    """Files of memory:// below failing://, where each write raises an error that a test sets."""

    protocol = "failing"
    cachable = False
    error: ClassVar[OSError | None] = None

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return super()._strip_protocol(path.replace("failing://", "memory://"))

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> None:
        if self.error is not None:
            raise self.error
        super().pipe_file(path, value, mode=mode, **options)


class FailFrom(TrainerCallback):
    """Makes a store fail once ten steps were taken."""

    def __init__(self, fail: Callable[[], None]) -> None:
        self.fail = fail

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 10:
            self.fail()


@pytest.mark.parametrize("failure", ["full", "read-only", "s3"])
def test_a_trainer_ends_its_steps_whatever_its_store_does(
    model: Path,
    tmp_path: Path,
    failure: str,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    for module, name, seconds in (
        (recorder, "CLOSE_S", 1.0),
        (recorder, "STEP_S", 1.0),
        (queue, "_LONGEST_PAUSE_S", 0.2),
    ):
        monkeypatch.setattr(module, name, seconds)
    monkeypatch.setenv(RETRY_LIMIT, "0")
    monkeypatch.setattr(adapter, "_FLUSH_S", 0.5)
    if failure == "s3":
        proxy = S3Proxy(request.getfixturevalue("s3_server"))
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        url = f"{request.getfixturevalue('s3_bucket')}/{uuid.uuid4()}"

        def fail() -> None:
            proxy.react = lambda method, path: Reset()

        def mend() -> None:
            proxy.react = lambda method, path: None
    else:
        fsspec.register_implementation("failing", Store, clobber=True)
        url, code = f"failing://{uuid.uuid4()}", {"full": errno.ENOSPC, "read-only": errno.EROFS}[failure]
        fail = partial(setattr, Store, "error", OSError(code, os.strerror(code)))
        mend = partial(setattr, Store, "error", None)
    trainer = make_trainer(model, tmp_path / "trl", max_steps=30, log_completions=False)
    recording = ludic.trl.record(trainer, url)
    trainer.add_callback(FailFrom(fail))
    trainer.train()
    assert trainer.state.global_step == 30
    assert (recording.lost.waiting.num_rollouts, recording.lost.waiting.num_steps) == (160, 20)
    assert "training has ended; waiting at most 0 s for the store" in caplog.text
    assert "at the end of training 160 rollouts in 40 groups and the ledger of 20 steps wait" in caplog.text
    recording.close()
    lost = recording.lost
    assert (lost.num_rollouts, lost.num_groups, lost.steps) == (160, 40, ((11, 31),))
    assert {"full": "No space", "read-only": "read-only", "s3": "onnect"}[failure] in str(lost)
    mend()
    run = ludic.open(url)
    assert run.sql("select distinct step from batches order by step").to_series().to_list() == [*range(1, 11)]
    assert run.verify().findings == []


def test_a_rank_that_fails_neither_hangs_nor_ends_the_others(model: Path, tmp_path: Path):
    """Its rows, and so the groups that lie across ranks, are lost, counted and named; steps go on without them."""
    codes = run_processes(
        train_with_failing_rank, model, tmp_path / "trl", str(tmp_path / "root"), ranks=2, logs=tmp_path
    )
    assert codes == [0, 0], (tmp_path / "0.log").read_text()[-3000:]
    lost = (tmp_path / "trl/lost").read_text()
    assert "4 groups" in lost
    assert "a rank lost its rows" in lost
    said = (tmp_path / "1.log").read_text()
    assert "rank 1 can't" in said
    assert "rank 1 sends nothing" in said
    run = ludic.open(tmp_path / "root")
    assert run.sql("select step, count(*) from batches group by step order by step").rows() == [(1, 4), (2, 4)]
    assert run.verify().findings == []


def test_a_trainer_that_was_interrupted_evaluates_and_trains_again(model: Path, tmp_path: Path):
    trainer = make_trainer(model, tmp_path / "trl", eval_dataset=questions(4))
    recording = ludic.trl.record(trainer, tmp_path / "root")
    backward, interrupts = trainer.accelerator.backward, iter([None, KeyboardInterrupt()])

    def interrupted(loss: torch.Tensor, **options: Any) -> None:
        if (error := next(interrupts, None)) is not None:
            raise error
        backward(loss, **options)

    trainer.accelerator.backward = interrupted
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    trainer.evaluate()
    trainer.train()
    recording.close()
    assert not recording.lost
    run = ludic.open(tmp_path / "root")
    steps = run.sql("select attempt_id, step, count(*) from all_batches group by all order by all").rows()
    assert steps == [(1, 1, 8), (1, 2, 8), (2, 1, 8), (2, 2, 8), (2, 3, 8)]
    assert run.sql("select distinct capture from rollouts union select capture from evals").rows() == [("trainer",)]
    assert run.verify().findings == []


def test_rows_of_a_trainer_that_trains_on_others_than_it_generated_are_not_recorded(model: Path, tmp_path: Path):
    """Else advantages would be those of other rows."""
    trainer = make_trainer(model, tmp_path / "trl", max_steps=2, reward_funcs=[num_words, num_words])
    generate = trainer._generate_and_score_completions

    def replay(inputs: Any) -> dict[str, Any]:
        found = generate(inputs)
        is_first = trainer.state.global_step == 0
        return found if is_first else {name: each.flip(0) if each.dim() else each for name, each in found.items()}

    trainer._generate_and_score_completions = replay
    recording = ludic.trl.record(trainer, tmp_path / "root")
    trainer.train()
    recording.close()
    assert trainer.state.global_step == 2
    assert recording.lost.num_rollouts == 8
    assert {"a generation could not be recorded", "a micro-batch could not be recorded"} <= {*recording.lost.reasons}
    run = ludic.open(tmp_path / "root")
    assert run.sql("select step, count(*) from batches group by step").rows() == [(1, 8)]
    rows = run.sql("select reward_components from rollouts").to_series().to_list()
    assert {len({*values}) == 2 and len({*values.values()}) == 1 for values in map(dict, rows)} == {True}
    assert run.verify().findings == []


def test_a_recorder_says_where_it_records_and_whether_it_was_used(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
):
    trainer = make_trainer(model, tmp_path / "trl", max_steps=1)
    recording = ludic.trl.record(trainer, tmp_path / "root")
    assert f"ludic: records to {tmp_path / 'root'}, life 1\n" in capsys.readouterr().err
    (own,) = (each for each in trainer.callback_handler.callbacks if isinstance(each, adapter._Recording))
    own._store.end()
    assert "nothing was recorded: call ludic.trl.record before trainer.train()" in caplog.text
    trainer.train()
    caplog.clear()
    own._store.end()
    recording.close()
    assert caplog.text == ""


def test_a_trainer_that_can_not_be_recorded_is_refused_by_name(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    with pytest.raises(ConfigError, match=r"^trainer is str, wanted a trainer of TRL: GRPOTrainer or RLOOTrainer$"):
        ludic.trl.record("trainer", tmp_path / "root")
    with pytest.raises(ConfigError, match=r"^SFTTrainer can't be recorded, wanted GRPOTrainer or RLOOTrainer;"):
        ludic.trl.record(SFTTrainer.__new__(SFTTrainer), tmp_path / "root")
    with monkeypatch.context() as patch:
        patch.delattr(GRPOTrainer, "_compute_loss")
        with pytest.raises(ConfigError, match=r"^GRPOTrainer of TRL 1.16.0 has no _compute_loss; install trl==1.16.0"):
            ludic.trl.record(GRPOTrainer.__new__(GRPOTrainer), tmp_path / "root")
    assert not (tmp_path / "root").exists()
    trainer = make_trainer(model, tmp_path / "trl", hub_token="hf_" + "secret" * 6)
    trainer.train_dataset = trainer.train_dataset.add_column("image", ["a.png"] * 16)
    with pytest.raises(ConfigError, match=r"^the data set has the column image, and a root holds texts"):
        ludic.trl.record(trainer, tmp_path / "root")
    trainer.train_dataset = trainer.train_dataset.remove_columns("image")
    ludic.record(tmp_path / "other", model="another").close()
    with pytest.raises(ConfigError, match="was started with model 'another'"):
        ludic.trl.record(trainer, tmp_path / "other")
    for root in (tmp_path / "trl", tmp_path):
        with pytest.raises(
            ConfigError, match=r"writes checkpoints into '.*' \(output_dir\); wanted a folder of its own"
        ):
            ludic.trl.record(trainer, root)
        assert not (root / "run.json").exists()
    assert "chat template" not in caplog.text
    trainer.processing_class.chat_template += "{# of a user #}"
    recording = ludic.trl.record(trainer, tmp_path / "root")
    assert "whose chat template is another one than the trainer's" in caplog.text
    with pytest.raises(ConfigError, match=r"^this trainer is recorded already"):
        ludic.trl.record(trainer, tmp_path / "second")
    trainer.train()
    recording.close()
    run = ludic.open(tmp_path / "root")
    assert (run.config.model, run.config.group_size, run.config.groups_per_batch) == (str(model), 4, 2)
    assert (run.config.max_tokens, run.config.temperature, run.config.env) == (6, 1.0, ("recorded",))
    settings = json.loads(run.sql("select config from attempts").item())["recorded"]
    assert settings["trainer"] == "trl 1.16.0"
    assert settings["settings"]["learning_rate"] == 0.01
    assert "secret" not in json.dumps(settings)
    assert {"config.json", "tokenizer.json", "identity.json"} <= {
        file.name for file in (tmp_path / "root/model").iterdir()
    }
