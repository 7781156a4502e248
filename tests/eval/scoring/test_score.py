"""Scores of users' functions: what is stored, what is scored again, and what a bad function costs."""

import threading
import time

import pytest
from forks import Forked
from strategies import make_batch

import ludic
from ludic.errors import ConfigError, QueryError, TimeLimitError
from ludic.eval.scoring import score as module
from ludic.root.rows.writer import RolloutWriter

LENGTH = "def score(rollout):\n    return rollout.response_length / 10\n"


def scores(run, columns="rollout_id, name, value, scorer, error"):
    return run.sql(f"select {columns} from scores order by all").rows()  # noqa: S608


@pytest.mark.slow
def test_every_rollout_gets_a_score_once(run, write_scorer):
    report = run.score(write_scorer(LENGTH))
    assert (report.num_scored, report.num_failed, report.num_done_before) == (8, 0, 0)
    ids = run.sql("select rollout_id from rollouts order by all")["rollout_id"]
    assert scores(run) == [(rollout_id, "score", 1.6, "score", None) for rollout_id in ids]
    ((version, run_id, duration_s),) = run.sql(
        "select distinct scorer_version, run_id, max(duration_s) over () from scores"
    ).rows()
    assert (version, run_id) == (report.version, run.root.run_id)
    assert 0 <= duration_s < 60
    again = run.score(write_scorer(LENGTH))
    assert (again.num_scored, again.num_done_before) == (0, 8)
    assert not run.verify().findings


@pytest.mark.slow
def test_new_rollouts_and_other_versions_of_the_code_are_scored(run, write_scorer):
    first = run.score(write_scorer(LENGTH), name="length")
    with RolloutWriter(run.root, "w1-test") as writer:
        writer.append(make_batch(worker_id="w1-test", num_groups=1, seed=7))
    second = run.score(write_scorer(LENGTH), name="length")
    assert (second.num_scored, second.num_done_before, second.version) == (4, 8, first.version)
    third = run.score(write_scorer(f"{LENGTH}# changed\n"), name="length")
    assert third.num_scored == 12
    assert third.version != first.version
    assert len(scores(run)) == 24


@pytest.mark.slow
def test_a_predicate_and_a_table_choose_the_rollouts(run, write_scorer):
    with RolloutWriter(run.root, "w1-test", folder="evals") as writer:
        writer.append(make_batch(worker_id="w1-test", num_groups=1, seed=7, purpose="eval"))
    assert run.score(write_scorer(LENGTH), where="episode_reward = 1 -- the best").num_scored == 3
    assert run.score(write_scorer(LENGTH), table="evals").num_scored == 4
    assert run.sql("select count(*) from evals join scores using (rollout_id)").item() == 4
    with pytest.raises(QueryError, match="no_such_column"):
        run.score(write_scorer(LENGTH), where="no_such_column > 1")


@pytest.mark.slow
def test_several_values_and_costs_are_stored_with_the_costs_once(run, write_scorer):
    text = """
from ludic.eval.scoring.outcome import CostedScore

async def score(rollout):
    values = {"help": 1, "harm": 0.25}
    return CostedScore(value=values, num_input_tokens=7, num_output_tokens=2, cost=0.5)
"""
    report = run.score(write_scorer(text))
    assert (report.num_scored, report.num_input_tokens, report.num_output_tokens, report.cost) == (8, 56, 16, 4.0)
    assert {row[:2] for row in scores(run, "name, value")} == {("help", 1.0), ("harm", 0.25)}
    sums = run.sql("select sum(num_input_tokens)::bigint, sum(num_output_tokens)::bigint, sum(cost) from all_scores")
    assert sums.rows() == [(56, 16, 4.0)]


@pytest.mark.slow
def test_failures_are_stored_and_counted_and_tried_again_only_if_asked(run, write_scorer):
    text = "def score(rollout):\n    return 1 / rollout.episode_reward\n"
    report = run.score(write_scorer(text), name="mine")
    assert (report.num_scored, report.num_failed) == (5, 3)
    ((reason, count),) = report.reasons.items()
    assert count == 3
    assert "mine.py, line 2, failed: ZeroDivisionError:" in reason
    failures = run.sql("select name, value, error from scores where error is not null").rows()
    assert failures == [("score", None, reason)] * 3
    assert run.score(write_scorer(text), name="mine").num_done_before == 8
    again = run.score(write_scorer(text), name="mine", retry_failed=True)
    assert (again.num_failed, again.num_done_before) == (3, 5)
    assert run.sql("select count(*), (select count(*) from scores) from all_scores").rows() == [(11, 8)]
    assert not run.verify().findings
    scores = run.watch(once=True).totals.scores
    assert scores.select("scorer", "name", "num_scores", "num_failed", "value_mean").rows() == [
        ("mine", "score", 5, 3, 1.4)  # (1/1 + 1/0.5 + 1/0.5 + 1/1 + 1/1) / 5
    ]


@pytest.mark.parametrize(
    ("returned", "reason"),
    [
        ("'good'", "returned 'good', wanted a number"),
        ("None", "returned None, wanted a number"),
        ("{}", "returned {}, wanted a number"),
        ("{'a': 'x'}", "returned {'a': 'x'}, wanted a number"),
        ("float('nan')", "returned nan for 'score', wanted a finite number"),
        ("{'a': 10 ** 400}", "wanted a number"),
        ("exit(3)", "RuntimeError: sys.exit(3) was called"),
        ("type('Bad', (), {'__repr__': lambda self: 1 / 0})()", "wanted a number"),
    ],
)
def test_a_result_that_is_no_score_is_a_failure(run, write_scorer, returned, reason):
    report = run.score(write_scorer(f"def score(rollout):\n    return {returned}\n"), where="episode_reward = 0.5")
    assert (report.num_scored, report.num_failed) == (0, 2)
    assert all(reason in error for error in report.reasons)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["", "async "])
def test_a_slow_function_fails_only_for_the_rollouts_that_it_is_slow_for(run, write_scorer, monkeypatch, kind):
    monkeypatch.setattr(module, "_GRACE_S", 0.05)
    wait = "await asyncio.sleep(30)" if kind else "time.sleep(30)"
    text = f"""
import asyncio, time

{kind}def score(rollout):
    if rollout.episode_reward == 0.5:
        {wait}
    return 1
"""
    began = time.monotonic()
    report = run.score(write_scorer(text), scorer_timeout_s=0.5, concurrency=2)
    assert (report.num_scored, report.num_failed) == (6, 2)
    assert all("0.5 s" in reason for reason in report.reasons)
    assert time.monotonic() - began < 20


@pytest.mark.slow
def test_a_function_that_always_hangs_ends_the_scoring_and_not_the_machine(run, write_scorer, monkeypatch):
    monkeypatch.setattr(module, "MOST_LOST", 3)
    monkeypatch.setattr(module, "_GRACE_S", 0.05)
    text = "import time\n\ndef score(rollout):\n    time.sleep(60)\n"
    with pytest.raises(TimeLimitError, match=r"3 calls .* 0\.2 s each"):
        run.score(write_scorer(text), scorer_timeout_s=0.2, concurrency=2)
    assert len(scores(run)) == 3  # the failures that were counted are stored; the other rollouts are left for later


def test_one_long_call_holds_up_no_others(run, write_scorer):
    text = """
import threading

first, others = threading.Lock(), threading.Semaphore(0)

def score(rollout):
    if first.acquire(blocking=False):
        for _ in range(7):
            assert others.acquire(timeout=20)
    others.release()
    return 1
"""
    report = run.score(write_scorer(text), concurrency=2)
    assert (report.num_scored, report.num_failed) == (8, 0)


def test_rollouts_are_scored_at_the_same_time(run, write_scorer):
    text = """
import subprocess
import sys
import threading

barrier = threading.Barrier(4, timeout=20)

def score(rollout):
    barrier.wait()
    return 1
"""
    assert run.score(write_scorer(text), concurrency=4).num_scored == 8


@pytest.mark.slow
def test_two_processes_count_a_rollout_once(run, write_scorer):
    source = write_scorer("import random\n\ndef score(rollout):\n    return random.random()\n")
    runs = [ludic.open(run.url), ludic.open(run.url)]
    threads = [threading.Thread(target=each.score, args=(source,)) for each in runs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(scores(run)) == len(set(scores(run, "rollout_id"))) == 8
    # The view shows the value that was stored first, also after more are stored.
    first = "select rollout_id, arg_min(value, created_at) from all_scores group by all order by all"
    assert run.sql(first).rows() == scores(run, "rollout_id, value")


@pytest.mark.slow
def test_names_become_no_paths(run, write_scorer):
    report = run.score(write_scorer(LENGTH), name="../50% a=b/ü")
    assert report.num_scored == 8
    (folder,) = run.root.folders("scores")
    assert folder == "scores/scorer=..%2F50%25%20a%3Db%2F%C3%BC"
    assert run.sql("select distinct scorer from scores").item() == "../50% a=b/ü"
    assert not run.verify().findings
    for name in ("a@b", "a:b", "a,b", "a\nb", "x" * 201):
        with pytest.raises(ConfigError, match="can't be used"):
            run.score(write_scorer(LENGTH), name=name)


def test_wrong_options_are_refused(run, write_scorer, tmp_path):
    with pytest.raises(ConfigError, match="wanted one scorer"):
        run.score()
    with pytest.raises(ConfigError, match="judge_model is an option of a judge"):
        run.score(write_scorer(LENGTH), judge_model="big")
    with pytest.raises(ConfigError, match="setting 'judge_modle' is unknown; did you mean 'judge_model'"):
        run.score(judge_modle="big")
    with pytest.raises(ConfigError, match="has no function 'other'"):
        run.score(write_scorer(LENGTH).replace(":score", ":other"))
    with pytest.raises(ConfigError, match=r"is unknown; there are model:PATH_OR_ID, pooling:URL; your own is path/to"):
        run.score("mine")
    with pytest.raises(ConfigError, match="concurrency is 0"):
        run.score(write_scorer(LENGTH), concurrency=0)


@pytest.mark.slow
def test_a_scoring_that_was_killed_goes_on_with_the_rest(run, write_scorer, tmp_path):
    text = """
import time
from pathlib import Path

def score(rollout):
    with Path({calls!r}).open("a") as file:
        file.write(rollout.rollout_id + "\\n")
    time.sleep({pause})
    return rollout.response_length
"""
    calls_file = tmp_path / "calls"
    # The version is that of the text, so the pause must not be a part of it.
    (tmp_path / "pause").write_text("4")
    source = write_scorer(
        text.format(calls=str(calls_file), pause=f"float(Path({str(tmp_path / 'pause')!r}).read_text())")
    )
    process = Forked(["ludic", "score", run.url, "--scorer", source, "--concurrency", "2"], tmp_path / "log")
    until = time.monotonic() + 120
    while not run.root.list("scores") and time.monotonic() < until:
        time.sleep(0.05)
    process.kill()
    process.wait()
    num_stored = len(scores(run))
    assert 2 <= num_stored < 8
    num_calls = len(calls_file.read_text().split())
    (tmp_path / "pause").write_text("0")
    report = run.score(source)
    assert (report.num_done_before, report.num_scored) == (num_stored, 8 - num_stored)
    assert len(calls_file.read_text().split()) == num_calls + 8 - num_stored
    assert [row[2] for row in scores(run)] == [16.0] * 8
    assert not run.verify().findings
