"""Threads, versions and processors of an attempt: recorded, used again by a resume and a replay, and compared."""

import json
import logging
from dataclasses import asdict, replace
from importlib.metadata import version

import pytest
import torch
from tiny_runs import fill, query, train_here, train_until_killed

from ludic.root.attempts import read_attempt
from ludic.root.catalogue import ATTEMPTS
from ludic.training.inherited_settings import replay_settings
from ludic.training.numerics import recorded_threads, warn_of_differences

ONE = {"num_steps": 1, "num_threads": 1}


@pytest.fixture(autouse=True)
def two_threads():
    """This process's own number, which is none of those below."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def trained(new_root):
    root = new_root("trained")
    fill(root, num_files=1)
    train_here(root, **ONE)
    torch.set_num_threads(2)
    return root


def rewrite_numerics(root, change):
    """Attempt 1 as another machine, or an older ludic, would have recorded it."""
    attempt = read_attempt(root, 1)
    values = asdict(replace(attempt, numerics=change(attempt.numerics)))
    root.put(ATTEMPTS.name_of(attempt), json.dumps(values).encode())


def replay(root, url, **settings):
    train_here(root, **(replay_settings(url) | settings), replay_batches=url)
    return read_attempt(root, 1).numerics


def warnings(caplog):
    return [record.getMessage() for record in caplog.records if "last bits" in record.getMessage()]


@pytest.mark.slow
def test_an_attempt_records_what_its_weights_depend_on(trained):
    numerics = read_attempt(trained, 1).numerics
    expected = {"num_ranks": 1, "num_threads": [1], "device": "cpu", "dtype": "float32", "compile": False}
    assert expected.items() <= numerics.items()
    assert numerics["torch"] == torch.__version__
    assert numerics["ludic"] == version("ludic-rl")
    assert numerics["cpu_capability"] == torch.backends.cpu.get_cpu_capability()
    assert {"cpu", "attention", "matmul_precision", "deterministic", "transformers", "numpy", "ludic"} <= set(numerics)
    assert query(trained, "select numerics->>'$.num_threads[0]' from attempts") == [("1",)]


def test_a_replay_computes_with_the_threads_of_the_run(new_root, trained, caplog):
    assert "num_threads" not in replay_settings(trained.url)
    assert replay(new_root("again"), trained.url)["num_threads"] == [1]
    assert torch.get_num_threads() == 1
    assert warnings(caplog) == []


@pytest.mark.slow
def test_a_replay_with_other_threads_is_warned_of(new_root, trained, caplog):
    assert replay(new_root("again"), trained.url, num_threads=2)["num_threads"] == [2]
    assert warnings(caplog) == [
        f"attempt 1 of {trained.url}: num_threads is [2] here, [1] there: weights may differ in the last bits"
    ]


def test_a_replay_names_each_item_that_differs(new_root, trained, caplog):
    rewrite_numerics(trained, lambda numerics: numerics | {"torch": "2.0.0", "cpu": "a \u202e6502", "from_later": 1})
    replay(new_root("again"), trained.url)
    (line,) = warnings(caplog)
    assert f"torch is {torch.__version__!r} here, '2.0.0' there" in line
    assert "here, 'a \\u202e6502' there" in line
    assert "from_later" not in line


def test_a_replay_of_an_attempt_without_numerics_says_that_they_are_unknown(new_root, trained, caplog):
    rewrite_numerics(trained, lambda _: None)
    assert replay(new_root("again"), trained.url)["num_threads"] == [2]
    (line,) = warnings(caplog)
    assert line.startswith(f"attempt 1 of {trained.url}: its threads, versions and processor are unknown")


def test_a_rank_computes_with_its_own_number_of_threads_or_with_the_last():
    assert [recorded_threads({"num_threads": [1, 4]}, rank) for rank in range(3)] == [1, 4, 4]


@pytest.mark.parametrize("recorded", [[0], [10**9], ["3"], [], 3, None])
def test_a_number_of_threads_that_makes_no_sense_is_not_used(recorded):
    assert recorded_threads({"num_threads": recorded}, 0) is None


def test_what_was_trained_on_a_cpu_is_replayed_on_one(trained):
    assert replay_settings(trained.url)["device"] == "cpu"
    rewrite_numerics(trained, lambda numerics: numerics | {"device": "NVIDIA H200"})
    assert "device" not in replay_settings(trained.url)


@pytest.mark.slow
def test_a_resume_keeps_the_threads_and_names_what_differs(new_root, caplog):
    root = new_root("resumed")
    fill(root, num_files=1)
    train_until_killed(root, at_step=1, **(ONE | {"num_steps": 2, "checkpoint_every": 1, "async_checkpoint": False}))
    torch.set_num_threads(2)
    rewrite_numerics(root, lambda numerics: numerics | {"numpy": "1.0"})
    caplog.set_level(logging.INFO)
    train_here(root, num_steps=2)
    assert read_attempt(root, 2).numerics["num_threads"] == [1]
    (line,) = warnings(caplog)
    assert line.startswith(f"attempt 1 of {root.url}: numpy is ")
    assert f"num_threads is 1, as in attempt 1 of {root.url}; --num-threads sets another" in caplog.text


def test_equal_numerics_are_not_spoken_of(caplog):
    warn_of_differences("attempt 1", {"torch": "2", "new": 1}, {"torch": "2", "old": 1})
    assert caplog.text == ""
