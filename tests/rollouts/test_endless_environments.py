"""An environment whose calls never return, or want to end Python, costs episodes stored as failed, not the worker."""

import re

import pytest
from tiny_models import committed_rows, publish

from ludic.errors import ConfigError, TimeLimitError
from ludic.root.sql.connection import connect
from ludic.run.run_json import create_root

ENDLESS = """
from ludic.environments.environment import Example, Score
from ludic.records.rollout import Message

class Sums:
    def example(self, index, split):
        while index == 2:
            pass
        return Example(example_id=f"sum-{index}", messages=(Message(role="user", content="1+1"),))

    def score(self, example, answer):
        while example.example_id == "sum-1":
            pass
        return Score(reward=1.0)
"""


@pytest.fixture
def start(tmp_path, run_config, folder):
    def start(text):
        path = tmp_path / "sums.py"
        path.write_text(text)
        root = create_root(str(tmp_path / "run"), run_config(env=(f"{path}:Sums",), accept_incomplete=True))
        publish(root, folder, budget=3)
        return root

    return start


@pytest.fixture
def root(start):
    return start(ENDLESS)


def test_an_endless_score_is_a_failed_rollout(root, work):
    assert work(root, env_timeout_s=0.1, num_groups=2) == 2
    rows = committed_rows(root, "env_example_id", "episode_reward", "error")
    (env,) = root.record.env
    said = f"TimeLimitError: environment {env}: score on example 'sum-1' did not return within 0.1 s; "
    by_example = {row["env_example_id"]: (row["episode_reward"], row["error"]) for row in rows}
    limit = "--env-timeout-s sets the limit (sums.py:12, in score)"
    assert by_example == {"sum-0": (1.0, None), "sum-1": (None, f"{said}{limit}")}
    assert connect(root).execute("select sum(num_errors) from metrics").fetchall() == [(2,)]


@pytest.mark.parametrize("error", ["KeyboardInterrupt", "SystemExit"])
def test_an_environment_that_wants_to_end_the_process_fails_its_episodes(start, work, error):
    root = start(ENDLESS.replace('while example.example_id == "sum-1":\n            pass', f"raise {error}"))
    assert work(root, env_timeout_s=1.0, num_groups=2) == 2
    errors = [row["error"] for row in committed_rows(root, "error")]
    assert len(errors) == 4
    assert all("raise an" in text for text in errors)


@pytest.mark.slow
def test_an_endless_score_is_tried_three_times_between_two_appends(start, work, caplog):
    root = start(ENDLESS.replace('example.example_id == "sum-1"', "True").replace("index == 2", "False"))
    assert work(root, env_timeout_s=0.3, num_groups=6, in_flight=6, follow_budget=False) == 6
    errors = [row["error"] for row in committed_rows(root, "request_index", "error")]
    num_tried = sum("did not return within" in error for error in errors)
    assert num_tried + sum("was not called, after timeouts in a row: 3" in error for error in errors) == 12
    assert 3 <= num_tried < 12
    assert num_tried % 3 == 0
    assert caplog.text.count("further timeouts of this environment") == 1


@pytest.mark.parametrize(
    "text", ["while True:\n    pass\n", ENDLESS + "    def __init__(self):\n        while True: pass\n"]
)
def test_an_environment_that_is_not_made_in_time_ends_the_worker_with_its_name(start, work, text):
    with pytest.raises(TimeLimitError, match=r"sums\.py:Sums: loading it did not return within 0\.3 s"):
        work(start(text), env_timeout_s=0.3, num_groups=1)


def test_an_endless_example_is_a_failed_group(root, work):
    assert work(root, env_timeout_s=0.1, num_groups=4, follow_budget=False) == 4
    errors = {row["env_example_id"]: row["error"] for row in committed_rows(root, "env_example_id", "error")}
    assert errors.keys() == {"sum-0", "sum-1", "index 2", "sum-3"}
    assert re.search(r"sums\.py:Sums: example of index 2, train did not return within 0\.1 s", errors["index 2"])
    assert errors["sum-0"] is errors["sum-3"] is None


def test_an_environment_that_never_gives_an_example_ends_the_worker_with_its_name(start, work):
    with pytest.raises(
        ConfigError, match=r"sums\.py:Sums gave no example 16 times in a row; the last time: KeyError: 'question'"
    ):
        work(start(ENDLESS.replace("index == 2", 'dict()["question"]')), num_groups=20, follow_budget=False)
