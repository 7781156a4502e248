"""What a trainer sends to its tracker, and what a tracker that fails or hangs does to training: nothing."""

import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime

import pytest
from strategies import make_batch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tiny_runs import ledger, train_here, train_until_killed

from ludic.errors import ConfigError
from ludic.root.attempts import newest_attempt
from ludic.root.root import Root
from ludic.root.rows.evaluations import BlockClaims, SampleBlock, evaluation_of, put_evaluation
from ludic.root.rows.writer import RolloutWriter
from ludic.settings.kinds import TRACKER
from ludic.training import tracking
from ludic.training.config import TrackerConfig
from ludic.training.tracking import FinishedEvaluations, Sample, TrackedRun, TrackerLog, send_evaluations

CATS = [[1.0, 0.0, 0.5, 0.5], [0.25, 0.25, 0.25, None]]
DOGS = [[0.0, 0.0, 0.0, 0.0], [2.0, 2.0, 2.0, 2.0]]
NEVER = datetime(2026, 1, 1, tzinfo=UTC)


def append(root: Root, rewards: Sequence[Sequence[float | None]], env_name: str, seed: int) -> None:
    with RolloutWriter(root, f"w{seed}-test") as writer:
        writer.append(make_batch(worker_id=f"w{seed}-test", rewards=rewards, env_name=env_name, seed=seed))


def events(root: Root) -> EventAccumulator:
    return EventAccumulator(f"{root.path}/tensorboard").Reload()


def curve(root: Root, name: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in events(root).Scalars(name)]


@pytest.mark.slow
def test_a_step_is_sent_by_environment_and_by_component_with_its_best_and_worst_answers(new_root):
    root = new_root(env=("moar_cats", "dogs"), groups_per_batch=4)
    append(root, CATS, "moar_cats", seed=0)
    append(root, DOGS, "dogs", seed=1)
    train_here(root, num_steps=1, log_to="tensorboard", tracker_samples_every=1)
    found = events(root)
    of_environments = {
        name: found.Scalars(name)[0].value for name in found.Tags()["scalars"] if name.startswith("env/")
    }
    assert of_environments == pytest.approx(
        {
            "env/moar_cats/reward_mean": (2.0 + 0.75) / 7,
            "env/moar_cats/component/num_cats": (2.0 + 0.75) / 7,
            "env/moar_cats/signal": 1 / 2,
            "env/moar_cats/error_fraction": 1 / 8,
            "env/dogs/reward_mean": 1.0,
            "env/dogs/component/num_cats": 1.0,
            "env/dogs/signal": 0.0,
            "env/dogs/error_fraction": 0.0,
        }
        | {f"env/{name}/response_length_mean": 16.0 for name in ("moar_cats", "dogs")}
        | {f"env/{name}/truncated_fraction": 0.0 for name in ("moar_cats", "dogs")}
    )
    texts = {
        name: found.Tensors(f"samples/{name}/text_summary")[0].tensor_proto.string_val[0].decode()
        for name in ("moar_cats", "dogs")
    }
    # Of the group that differs most the best and the worst; a group of equal rewards has one answer.
    rewards = {name: [part.partition(",")[0] for part in text.split("---\n\n")] for name, text in texts.items()}
    assert rewards["moar_cats"] == ["reward 1", "reward 0", "reward 0.25"]
    assert sorted(rewards["dogs"]) == ["reward 0", "reward 2"]
    assert "prompt:\n\n    Say something about cats.\n\nanswer:\n\n    cat number " in texts["moar_cats"]


@pytest.mark.slow
def test_steps_that_are_trained_again_are_shown_once_and_secrets_never(new_root, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret-of-s3")
    root = new_root()
    append(root, [[1.0, 0.0, 0.5, 0.5]] * 12, "moar_cats", seed=0)
    settings = {"log_to": "tensorboard", "where": "env_name <> 'secret-of-s3'", "async_checkpoint": False}
    train_until_killed(root, at_step=5, num_steps=6, **settings)  # its last checkpoint is that of step 3
    train_here(root, num_steps=6, **settings)
    assert [step for step, _ in curve(root, "loss")] == [1, 2, 3, 4, 5, 6]
    text = events(root).Tensors("settings/text_summary")[0].tensor_proto.string_val[0].decode()
    assert "- where: env_name <> '***'" in text
    assert "secret" not in text


# --- Trackers that fail, hang, or are not installed ------------------------------------------------------------------

OVER = threading.Event()


@contextmanager
def refuses(run: TrackedRun) -> Iterator[TrackerLog]:
    raise PermissionError("no API key, Bearer abcdefgh")
    yield


class _Fails:
    def numbers(self, step: int, values: Mapping[str, float]) -> None:
        if step == 2:
            raise OSError("connection lost")

    def samples(self, step: int, samples: Sequence[Sample]) -> None: ...


@contextmanager
def fails(run: TrackedRun) -> Iterator[TrackerLog]:
    yield _Fails()


@contextmanager
def hangs(run: TrackedRun) -> Iterator[TrackerLog]:
    OVER.wait()
    yield _Fails()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tracker", "reason"),
    [("refuses", "PermissionError: no API key, Bearer ***"), ("fails", "OSError: connection lost")],
)
def test_a_tracker_that_fails_is_told_of_once_and_training_goes_on(new_root, monkeypatch, caplog, tracker, reason):
    monkeypatch.setattr(tracking, "TRACKER", replace(TRACKER, built_in={"tensorboard": f"{__name__}:{tracker}"}))
    root = new_root()
    append(root, [[1.0, 0.0, 0.5, 0.5]] * 8, "moar_cats", seed=0)
    assert train_here(root, num_steps=4, log_to="tensorboard") == 4
    assert {row[0] for row in ledger(root)} == {1, 2, 3, 4}
    told = [record.getMessage() for record in caplog.records if record.name == "ludic.training.tracking"]
    assert told == [f"tensorboard stopped receiving this run, which continues; the root holds everything: {reason}"]


@pytest.mark.slow
def test_training_neither_waits_for_a_tracker_that_hangs_nor_keeps_all_its_steps(new_root, monkeypatch, caplog):
    monkeypatch.setattr(tracking, "TRACKER", replace(TRACKER, built_in={"tensorboard": f"{__name__}:hangs"}))
    monkeypatch.setattr(tracking, "_CLOSE_S", 0.2)
    monkeypatch.setattr(tracking, "_MOST_WAITING", 1)
    root = new_root()
    append(root, [[1.0, 0.0, 0.5, 0.5]] * 8, "moar_cats", seed=0)
    assert train_here(root, num_steps=4, log_to="tensorboard") == 4
    OVER.set()
    told = [record.getMessage() for record in caplog.records if record.name == "ludic.training.tracking"]
    assert told == [
        "tensorboard did not accept everything within 0 s; the rest is not sent",
        "tensorboard was slower than training: 3 steps were not sent",
    ]


@pytest.mark.parametrize(
    ("log_to", "extra"),
    [("tensorboard", "telemetry"), ("wandb", "telemetry"), ("mlflow", "mlflow"), ("trackio", "trackio")],
)
def test_a_tracker_that_is_not_installed_is_named_with_its_extra_before_a_trainer_owns_the_root(
    new_root, monkeypatch, log_to, extra
):
    monkeypatch.setitem(sys.modules, log_to, None)  # what import finds when there is none
    root = new_root()
    with pytest.raises(ConfigError, match=rf"log_to is {log_to}.*ludic-rl\[{extra}\]"):
        train_here(root, num_steps=1, log_to=log_to)
    assert newest_attempt(root) is None


# --- Evaluations, which other processes make -------------------------------------------------------------------------


def evaluate(
    root: Root, examples: range, *, version: int, temperature: float = 1.0, begun: int = 2025, made: datetime = NEVER
) -> str:
    """Store a block of four samples of each example, of which one has the example's index as its reward.

    begun: year in which the evaluation was. made: time of the samples. Returns the block's name.
    """
    evaluation = evaluation_of("moar_cats", {"temperature": temperature}, [])
    put_evaluation(root, replace(evaluation, created_at=f"{begun}-01-01T00:00:00+00:00"))
    block = SampleBlock(evaluation=evaluation.evaluation, examples=examples, samples=range(4)).worker_id
    rewards = [[float(example), 0.0, 0.0, 0.0] for example in examples]
    seed = 100 * version + examples.start + 10 * int(temperature)
    batch = make_batch(worker_id=block, rewards=rewards, purpose="eval", policy_version=version, seed=seed)
    with RolloutWriter(root, block, folder="evals") as writer:
        writer.append(replace(batch, metadata=replace(batch.metadata, timestamp=made)))
    return block


def means(found: Sequence[Mapping[str, object]]) -> list[tuple]:
    return [(row["step"], row["num_samples"], row["reward_mean"], row["is_first"]) for row in found]


def test_an_evaluation_is_finished_when_nobody_claims_a_block_of_it_and_it_no_longer_grows(new_root):
    root = new_root(steps_per_version=5)
    finished = FinishedEvaluations(root)
    assert finished.new() == finished.new() == []
    with BlockClaims(root) as evaluator:
        block = evaluate(root, range(1, 2), version=2)
        assert evaluator.take(block)
        assert finished.new() == finished.new() == []
        evaluate(root, range(2, 3), version=2)
        evaluator.release(block)
        assert finished.new() == []  # it has grown since the look before
        assert means(finished.new()) == [(10, 8, 3 / 8, True)]  # (1 + 2) / 8; version 2 is of step 10
        assert finished.new() == []
        # Of two versions only the newer one may still grow.
        block = evaluate(root, range(4, 5), version=3)
        assert evaluator.take(block)
        evaluate(root, range(3, 4), version=2)
        finished.new()
        assert means(finished.new()) == [(10, 12, 6 / 12, True)]
    assert means(finished.new()) == [(15, 4, 4 / 4, True)]


@pytest.mark.slow
def test_evaluations_are_sent_at_the_step_of_their_version_also_those_after_training(new_root, monkeypatch):
    root = new_root()
    append(root, [[1.0, 0.0, 0.5, 0.5]] * 8, "moar_cats", seed=0)
    evaluate(root, range(1, 3), version=0)
    evaluate(root, range(1, 2), version=0, temperature=0.0, begun=2026)
    monkeypatch.setattr(tracking, "_POLL_EVERY_S", 0.0)  # after each step
    train_here(root, num_steps=4, log_to="tensorboard")
    assert curve(root, "eval/moar_cats/reward_mean") == [(0, 3 / 8)]
    assert curve(root, "eval/moar_cats/num_samples") == [(0, 8.0)]
    # A second evaluation of the environment has its id in its name.
    other = evaluation_of("moar_cats", {"temperature": 0.0}, []).evaluation
    assert curve(root, f"eval/moar_cats/{other}/reward_mean") == [(0, 1 / 4)]

    evaluate(root, range(4, 5), version=4, made=datetime.now(UTC))
    send_evaluations(root, TrackerConfig(log_to="tensorboard"))
    assert curve(root, "eval/moar_cats/reward_mean") == [(0, 3 / 8), (4, 4 / 4)]
