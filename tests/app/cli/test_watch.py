"""`ludic watch`: what a run does right now, from its files."""

import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from strategies import make_batch

from ludic.app.show.status import EvalMeans, RunStatus, Trainer, draw
from ludic.app.show.watch import Watcher
from ludic.base.defaults import RECORDED_ENV
from ludic.errors import MissingRootError
from ludic.records.tables import arrow_schema
from ludic.root.claims import LeaseState
from ludic.root.gateways import claim_episode, held_life, seal_episode
from ludic.root.json_records import Policy
from ludic.root.root import Root
from ludic.root.rows.tables import MetricsLog
from ludic.root.rows.writer import RolloutWriter
from ludic.run.config import RunConfig
from ludic.run.diagnostics import VersionSamples
from ludic.run.run_json import create_root

NOON = datetime(2026, 11, 21, 12, tzinfo=UTC)


def row(kind: str, **values: Any) -> dict[str, Any]:
    """Of the metrics table; null where nothing is said."""
    return dict.fromkeys(arrow_schema("metrics").names) | {"kind": kind, "created_at": NOON} | values


def train_row(step: int, **values: Any) -> dict[str, Any]:
    seconds = {"attempt_id": 1, "step": step, "wait_s": 0.5, "step_s": 1.0, "publish_s": 0.3, "num_pending_groups": 12}
    numbers = {
        "reward_mean": float(step),
        "loss": 0.25,
        "off_policy_steps_mean": 1.5,
        "off_policy_steps_max": 2,
        "tokens_per_s": 1234.0,
    }
    return row("train", **{**seconds, **numbers, **values})


def worker_row(worker_id: str, seconds_ago: float, **values: Any) -> dict[str, Any]:
    numbers = {"num_rollouts": 10, "num_groups": 2, "num_tokens": 600, "reward_mean": 0.5, "response_length_mean": 60.0}
    counts = {"num_truncated": 1, "num_incomplete_completions": 9, "num_parse_errors": 2, "num_errors": 0}
    defaults = {"env_name": "moar_cats", "policy_version": 7, "step_s": 20.0, "wait_s": 20.0, **numbers, **counts}
    return row("worker", worker_id=worker_id, **{**defaults, **values}) | {
        "created_at": NOON - timedelta(seconds=seconds_ago)
    }


@pytest.fixture
def status(started: Root) -> RunStatus:
    """Of a run after its third step of ten."""
    return RunStatus(
        root=started,
        at=NOON,
        trainer=Trainer(attempt_id=1, owner="host-5", lease_state=LeaseState("alive", 1.0), config={"num_steps": 10}),
        steps=[train_row(step) for step in (1, 2, 3)],
        calls=[],
        policy=Policy(version=3, step=3, attempt_id=1, parent_version=2, created_at="2026-11-21T11:58:30+00:00"),
        checkpoint=(1, 2),
    )


def shown(status: RunStatus, width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(draw(status, width))
    return console.file.getvalue()


def line(text: str, name: str) -> str:
    """The value of a line of the panel."""
    (found,) = [words for words in text.splitlines() if words.startswith(f"│ {name} ")]
    return found.strip("│ ").removeprefix(name).strip()


def test_a_frame_says_where_the_run_is(status: RunStatus) -> None:
    text = shown(status)
    assert line(text, "trainer") == "attempt 1, host-5: renews its lease"
    ended = replace(status, trainer=replace(status.trainer, lease_state=LeaseState("ended", 1.0)))
    assert line(shown(ended), "trainer").startswith("attempt 1, host-5: has ended before its last step; the")
    assert line(shown(replace(ended, steps=[train_row(10)])), "trainer").endswith("host-5: has ended")
    assert line(text, "step").startswith("3 of 10")
    assert line(text, "reward") == "3.000  ▁▅█  over 3 steps"
    assert line(text, "loss") == "0.25"
    assert line(text, "speed") == "1,234 tokens/s trained, 0 tokens/s sampled"
    assert line(text, "queue") == "12 finished groups left for later steps after the last plan"
    assert line(text, "policy") == "version 3, published 90 s ago; off-policy steps 1.5, at most 2"
    assert line(text, "checkpoint") == "step 2 of attempt 1"
    assert line(text, "dropped") == "no rollouts in 3 steps"
    assert max(map(len, text.splitlines())) <= 80


def test_a_frame_says_what_the_last_step_did(status: RunStatus) -> None:
    values = {"entropy": 2.0, "clip_fraction": 0.034, "learning_rate": 3e-3, "response_length_mean": 31.5}
    steps = [train_row(1, **values | {"entropy": 4.0}), train_row(2, **values)]
    text = shown(replace(status, steps=steps))
    assert line(text, "entropy") == "2.000  █▁  over 2 steps"
    assert line(text, "length") == "31.500  ▁▁  over 2 steps"
    assert line(text, "loss") == "0.25, clipped 3.4%, learning rate 0.003"
    assert "│ entropy" not in shown(status)


@pytest.mark.parametrize(("state", "is_told"), [("alive", True), ("unknown", True), ("ended", False), ("dead", False)])
def test_the_time_left_follows_from_the_pace_of_the_newest_steps(status, state: str, is_told: bool) -> None:
    # A step every 30 s, waits and all; 7 of 10 are left, and 12 s of the next one are over.
    ages = {1: 72, 2: 42, 3: 12}
    steps = [train_row(step) | {"created_at": NOON - timedelta(seconds=ages[step])} for step in ages]
    trainer = replace(status.trainer, lease_state=LeaseState(state, 1.0))
    shown_line = line(shown(replace(status, steps=steps, trainer=trainer)), "step")
    assert shown_line.endswith("3 min left") == is_told  # 7 x 30 - 12 = 198 s
    assert "left" not in line(shown(replace(status, steps=steps[:1], trainer=trainer)), "step")


def test_environments_have_a_curve_each_and_the_newest_evaluation(status: RunStatus) -> None:
    def versions(env_name: str, *rewards: float) -> list[VersionSamples]:
        rows = [worker_row("w0", 1, reward_mean=reward, env_name=env_name) for reward in rewards]
        return [VersionSamples(env_name=env_name, version=version).plus(row) for version, row in enumerate(rows)]

    history = {"cats": versions("cats", 0.0, 1.0, 0.5), "colours": versions("colours", 0.0, 0.0, 0.0)}
    evals = [
        EvalMeans(version=2, env_name="cats", num_rollouts=64, reward_mean=0.75, accuracy=0.5),
        EvalMeans(version=2, env_name="colours", num_rollouts=1, reward_mean=None, accuracy=None),
    ]
    lines = [words.strip("│ ") for words in shown(replace(status, history=history, evals=evals)).splitlines()]
    assert "cats            0.5  ▁█▅" in lines
    assert "colours           0  ▁▁▁" in lines
    assert "evaluation  version 2 in cats: reward 0.75, 50.0% correct, 64 rollouts" in lines
    assert "version 2 in colours: no rollout was scored, 1 rollout" in lines
    alone = shown(replace(status, history={"cats": history["cats"]}))
    assert "▁█▅" not in alone  # which the line above shows already


def test_environments_and_workers_stay_after_the_end(status: RunStatus) -> None:
    # The last rollouts are two hours old: 40 in a minute that began 20 s before the first of the two calls.
    calls = [worker_row("w0-a", 7240, num_rollouts=20), worker_row("w0-a", 7200, num_rollouts=20)]
    calls.insert(0, worker_row("w9-of-hours-before", 9999))
    text = shown(replace(status, newest_calls=calls))
    lines = [words.strip("│ ").split() for words in text.splitlines()]
    assert ["moar_cats", "40", "0.5", "60", "5.0%", "45.0%", "10.0%", "0.0%"] in lines
    assert ["w0-a", "40", "20", "7", "50%", "2", "h", "ago"] in lines
    assert "w9-of" not in text


def test_time_and_balance_are_of_the_same_steps(status: RunStatus) -> None:
    # While the first step waited 90 s, no rollout was known yet.
    def at(row: dict[str, Any], second: float) -> dict[str, Any]:
        return row | {"created_at": NOON + timedelta(seconds=second)}

    steps = [at(train_row(1, wait_s=90.0), 91.3), at(train_row(2), 93.1), at(train_row(3), 94.9)]
    calls = [at(worker_row("w0", 0, step_s=5.0, wait_s=0.0), 91.0), at(worker_row("w0", 0, step_s=4.0), 95.0)]
    text = shown(replace(status, steps=steps, calls=calls))
    assert "wait 28%" in text  # 0.5 of 1.8
    assert "the trainer works 72% of the time" in " ".join(text.replace("│", " ").split())


def test_a_frame_says_what_a_version_costs_and_what_a_kill_loses(status: RunStatus) -> None:
    assert "publishing" not in shown(status)
    assert "at risk" not in shown(status)
    # Versions of 20 and 40 MB: 30 MB. Two workers swapped; 24 and 64 episodes run.
    steps = [train_row(1, publish_bytes=20_000_000, publish_write_s=0.2)]
    steps += [train_row(2), train_row(3, publish_bytes=40_000_000, publish_write_s=0.4)]
    times = {"first_token_s": 1.0, "fetch_s": 0.25, "load_s": 0.5}
    calls = [worker_row("w0", 20, num_running=99), worker_row("w0", 10, num_running=24, **times)]
    calls += [worker_row("w1", 5, num_running=64, **times | {"first_token_s": 2.0})]
    text = shown(replace(status, steps=steps, calls=calls, newest_calls=calls))
    assert "publishing  30.0 MB a version, written in 0.3 s; workers sample with" in text
    assert "it after 1.5 s (fetch 0.25 s, load 0.5 s)" in " ".join(text.replace("│", " ").split())
    assert line(text, "at risk") == "up to 64 running episodes, if a worker is killed"


def test_a_frame_says_what_workers_wait_for(status: RunStatus) -> None:
    rows = [worker_row("w0", 10, wait_s=9.0, step_s=1.0, waited_for="budget"), worker_row("w1", 5, wait_s=0.0)]
    workers = line(shown(replace(status, calls=rows)), "workers")
    assert workers == "wait for the trainer, which limits the number of open groups"
    rows = [worker_row("w0", 10, wait_s=9.0, step_s=1.0, waited_for="weights")]
    assert line(shown(replace(status, calls=rows)), "workers") == "wait for new weights"
    rows = [worker_row("w0", 10, wait_s=0.5, step_s=20.0, waited_for="budget")]
    assert "│ workers" not in shown(replace(status, calls=rows))


def test_time_is_shared_out_over_the_phases_of_the_loop(status: RunStatus) -> None:
    # 0.5 waiting, 1 stepping, 0.3 publishing, 0.2 checkpointing: 2 s a step, of which 0.1 s of the step is nobody's.
    parts = {"forward_s": 0.4, "backward_s": 0.4, "collectives_s": 0.06, "optimizer_s": 0.04, "checkpoint_s": 0.2}
    steps = [train_row(step, **parts, read_s=0.05, pack_s=0.01, mfu=0.415) for step in (1, 2)]
    text = shown(replace(status, steps=steps))
    assert line(text, "time") == "█" * 50 + "  2 s a step"  # 62 columns beside the names
    assert "│             wait 25%  forward 20%  backward 20%  collectives 3%" in text
    assert "│             optimizer 2%  other 5%  publish 15%  checkpoint 10%" in text
    assert "meanwhile, for the next step: read 0.05 s, pack 0.01 s" in text
    assert "MFU 41.5%" in line(text, "speed")


def test_the_panel_says_who_waits_and_how_many_workers_would_balance(status: RunStatus) -> None:
    assert status.balance is None
    assert "│ balance" not in shown(status)
    # 5 s of work and 5 s of waiting, while a worker samples for all of the 10 s
    step = train_row(1, step_s=5.0, wait_s=5.0, publish_s=0.0)
    calls = [worker_row("w0", seconds_ago, step_s=10.0, wait_s=0.0) for seconds_ago in (10.0, 0.0)]
    text = " ".join(shown(replace(status, steps=[step], calls=calls)).replace("│", " ").split())
    assert "balance workers are the bottleneck: 1 worker samples 100% of the time, " in text
    assert "the trainer works 50% of the time; about 2.0 workers would keep the trainer busy" in text


@pytest.mark.parametrize(("imbalance", "is_told"), [(1.25, True), (1.01, False), (None, False)])
def test_uneven_ranks_are_told_of(status: RunStatus, imbalance: float | None, is_told: bool) -> None:
    text = shown(replace(status, steps=[train_row(1, token_imbalance=imbalance)]))
    assert ("the fullest rank has 25% more tokens than the mean" in " ".join(text.replace("│", " ").split())) == is_told


def test_metrics_of_an_older_ludic_show_the_step_as_a_whole(status: RunStatus) -> None:
    text = shown(status)
    assert "wait 28%  step 56%  publish 17%" in text  # 0.5, 1.0 and 0.3 of 1.8
    assert "meanwhile" not in text


def test_drops_are_added_up_by_reason(status: RunStatus) -> None:
    drops = [{"drop_truncated": 2}, [("drop_truncated", 1), ("max_age", 9)], None]
    steps = [train_row(step, drops=each) for step, each in enumerate(drops, 1)]
    assert line(shown(replace(status, steps=steps)), "dropped") == "9 by max_age, 3 by drop_truncated, in 3 steps"
    assert line(shown(replace(status, steps=steps * 9)), "dropped").endswith(", in the newest 20 steps")


def test_workers_and_environments_have_rates_over_the_time_that_is_known(status: RunStatus) -> None:
    # The first call began 120 s ago: 40 + 20 rollouts in two minutes.
    calls = [
        worker_row("w0-a", 100, num_rollouts=40),
        worker_row("w1-b", 10, env_name="addition", reward_mean=None, num_rollouts=20, wait_s=60.0),
    ]
    lines = [words.strip("│ ").split() for words in shown(replace(status, calls=calls)).splitlines()]
    assert ["moar_cats", "20", "0.5", "60", "2.5%", "22.5%", "5.0%", "0.0%"] in lines
    # Of a call that began 30 s ago.
    assert ["addition", "40", "-", "60", "5.0%", "45.0%", "10.0%", "0.0%"] in lines
    assert ["w0-a", "20", "5", "7", "50%", "100", "s", "ago"] in lines
    assert ["w1-b", "40", "20", "7", "75%", "10", "s", "ago"] in lines


def test_workers_that_do_not_count_incomplete_completions_show_a_dash(status: RunStatus) -> None:
    text = shown(replace(status, calls=[worker_row("w0", 10, num_incomplete_completions=None)]))
    lines = [words.strip("│ ").split() for words in text.splitlines()]
    assert ["moar_cats", "20", "0.5", "60", "10.0%", "-", "20.0%", "0.0%"] in lines


@pytest.mark.parametrize("width", [40, 60, 80, 200])
def test_nothing_is_cut_in_a_terminal_of_any_width(status: RunStatus, width: int) -> None:
    parts = {"forward_s": 0.4, "backward_s": 0.4, "collectives_s": 0.06, "optimizer_s": 0.04, "read_s": 0.05}
    steps = [train_row(step, **parts) for step in range(1, 100)]
    calls = [worker_row("w0-host-1234", 12, num_rollouts=1234), worker_row("w1-host-1235", 10, env_name="cats.py:Cats")]
    text = shown(replace(status, steps=steps, calls=calls), width)
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= min(width, 120)
    words = " ".join(text.replace("│", " ").split())
    for each in ("w0-host-1234", "cats.py:Cats", "rollouts/min", "max_tokens", "last heard", "over 99 steps"):
        assert each in words


def test_of_many_workers_some_are_shown_and_the_rest_counted(status: RunStatus) -> None:
    text = shown(replace(status, calls=[worker_row(f"w{slot:02}-host", 10) for slot in range(11)]))
    assert "w07-host" in text
    assert "w08-host" not in text
    assert "and 3 more" in text


@pytest.mark.parametrize(
    ("lease_state", "words"),
    [
        (LeaseState("silent", 90.0), "silent for 90 s, longer than its lease: dead or disconnected"),
        (LeaseState("ended", 0.0), "has ended"),
        (LeaseState("dead", 0.0), "its process is gone"),
        (LeaseState("unknown", 1.0), "not watched long enough to know whether it is alive"),
    ],
)
def test_a_trainer_that_is_not_seen_to_live_is_said_to_be_what_is_known(
    status, lease_state: LeaseState, words: str
) -> None:
    trainer = replace(status.trainer, lease_state=lease_state)
    assert " ".join(shown(replace(status, trainer=trainer)).replace("│", "").split()).count(f"host-5: {words}") == 1


def test_names_from_the_files_reach_the_terminal_as_text(status: RunStatus) -> None:
    text = shown(replace(status, calls=[worker_row("w0", 10, env_name="[bold]\x1b[31mred")]))
    assert "\x1b" not in text
    assert "[bold]\\x1b[31mred" in text


def test_one_frame_of_a_run_that_has_ended(ludic, trained: Root) -> None:
    result = ludic("watch", trained.url, "--once")
    assert (result.code, result.err) == (0, "")
    assert "attempt 1, " in result.out
    assert ": has ended" in " ".join(result.out.split())
    assert line(result.out, "step").startswith("1 of 1")
    assert line(result.out, "dropped") == "4 by drop_zero_variance_groups, in 1 step"
    assert line(result.out, "checkpoint") == "step 1 of attempt 1"
    assert line(result.out, "policy").startswith("version 1, ")
    assert "forward" in result.out
    assert max(map(len, result.out.splitlines())) <= 80
    assert "\x1b" not in result.out


def test_a_run_that_was_just_created_is_not_told_to_start_a_second_trainer(ludic, started: Root) -> None:
    words = " ".join(ludic("watch", started.url, "--once").out.replace("│", " ").split())
    assert "none yet; the run was created" in words
    assert "ludic train" not in words


def test_a_run_that_has_had_no_trainer_for_long_says_how_to_start_one(status: RunStatus) -> None:
    words = " ".join(shown(replace(status, at=datetime.now(UTC) + timedelta(hours=1), trainer=None)).split())
    assert "none has started; unless one is loading its model, `ludic train" in words


def test_what_is_wrong_comes_first(status: RunStatus) -> None:
    failing = worker_row("w0", 10, num_errors=10, first_error="ValueError: reward is nan")
    text = " ".join(shown(replace(status, newest_calls=[failing])).replace("│", " ").split())
    assert "warning every one of 10 rollouts failed in moar_cats; the first error: ValueError: reward is nan" in text
    assert text.index("warning") < text.index("model ")


def test_troubles_are_seen_however_long_ago_the_last_rollout_was(started: Root) -> None:
    log = MetricsLog(started, "worker", "w0-test")
    counts = {"num_rollouts": 8, "num_groups": 2, "num_tokens": 64, "num_errors": 8, "first_error": "KeyError: 'x'"}
    log.write(worker_id="w0-test", env_name="moar_cats", policy_version=0, **counts)
    log.close()
    watcher = Watcher(started.url)
    watcher._take([worker_row("w1", 10**6, num_errors=10, first_error="KeyError: 'y'")], NOON)
    (diagnostic,) = watcher.poll().diagnostics()
    assert "every one of 8 rollouts failed in moar_cats; the first error: KeyError: 'x'" in diagnostic.text


def test_the_beginning_of_a_trouble_is_told_as_the_step_that_its_version_took(started: Root) -> None:
    # Version 3 is the first of which the last versions have equal rewards, and step 5 trained from it.
    watcher = Watcher(started.url)
    for version, num_equal in enumerate((1, 2, 1, 2, 2, 2)):
        row = worker_row("w0", 60 - version, policy_version=version, num_zero_variance_groups=num_equal)
        watcher._take([row | {"num_incomplete_completions": 0}], NOON)
    watcher._take([train_row(step, policy_version=step - 2) for step in range(2, 7)], NOON)
    (diagnostic,) = watcher.poll().diagnostics()
    assert str(diagnostic).startswith("since step 5: rewards are equal within each of 2 groups in moar_cats")
    assert diagnostic.env_name == "moar_cats"


def test_the_newest_evaluated_version_is_shown_without_files_that_are_broken(ludic, breakable: Path) -> None:
    root = Root.open(str(breakable), writable=True)
    for version, rewards in ((0, [[0.0, 0.0]]), (4, [[1.0, 0.5], [0.0, None]])):
        with RolloutWriter(root, f"e{version}-eval", folder="evals") as writer:
            writer.append(
                make_batch(worker_id=f"e{version}-eval", rewards=rewards, policy_version=version, purpose="eval")
            )
    root.put("evals/version=4/env=moar_cats/e9-eval-0.parquet", b"torn")
    out = ludic("watch", root.url, "--once").out
    assert (
        line(out, "evaluation") == "version 4 in moar_cats: reward 0.375, 4 rollouts"
    )  # examples: (1 + 0.5) / 2 and 0


def test_a_run_of_which_nothing_is_there_says_so(ludic, started: Root) -> None:
    out = ludic("watch", started.url, "--once").out
    assert line(out, "step") == "none yet; 0 groups sampled in the last 5 min"
    assert line(out, "policy") == "none published"
    assert line(out, "checkpoint") == "none yet"


def test_each_look_takes_in_what_was_written_since_the_last(started: Root) -> None:
    watcher = Watcher(started.url)
    assert watcher.poll().calls == []
    log = MetricsLog(started, "worker", "w0-test")
    log.write(worker_id="w0-test", env_name="moar_cats", policy_version=0, num_rollouts=8, num_groups=2, num_tokens=64)
    log.close()
    assert [call["num_rollouts"] for call in watcher.poll().calls] == [8]
    assert [call["num_rollouts"] for call in watcher.poll().calls] == [8]


@pytest.mark.slow
def test_a_run_that_vanishes_ends_the_watch_in_one_line(breakable: Path) -> None:
    process = start_watch(str(breakable))
    (breakable / "run.json").unlink()
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert err == f"ludic: {breakable} holds no run: run.json is missing; `ludic run` or `ludic.record` starts one\n"


@pytest.mark.slow
def test_ctrl_c_ends_it_without_a_word(trained: Root) -> None:
    process = start_watch(trained.url)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")


def start_watch(url: str) -> subprocess.Popen[str]:
    """Returns once it has shown the begin of a frame."""
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", "ludic", "watch", url, "--interval-s", "0.1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONIOENCODING": "utf-8"},
    )
    assert process.stdout is not None
    assert process.stdout.readline().startswith("╭")
    return process


def test_a_watcher_sees_that_the_run_is_gone(breakable: Path) -> None:
    watcher = Watcher(str(breakable))
    assert watcher.poll().trainer is not None
    (breakable / "run.json").unlink()
    with pytest.raises(MissingRootError, match="holds no run"):
        watcher.poll()


def test_an_interval_of_nothing_is_wrong_usage(ludic, trained: Root) -> None:
    result = ludic("watch", trained.url, "--interval-s", "0")
    assert result.code == 2
    assert "--interval-s is 0, wanted a number above 0" in " ".join(result.err.replace("│", "").split())


@pytest.mark.slow
def test_a_run_looks_the_same_on_every_filesystem(root_url: str, make_trained: Callable[[str], Root]) -> None:
    root = make_trained(root_url)
    watcher = Watcher(root.url)
    first = watcher.poll()
    assert [step["step"] for step in first.steps] == [1]
    assert (first.checkpoint, first.policy.version) == ((1, 1), 1)
    assert first.trainer.lease_state.state == "ended"
    time.sleep(0.01)
    assert watcher.poll().steps == first.steps


@pytest.mark.parametrize(
    ("seconds_ago", "age"), [(119, "119 s"), (120, "2 min"), (7199, "120 min"), (172800, "2 days")]
)
def test_ages_are_in_the_largest_unit_of_which_there_are_two(status: RunStatus, seconds_ago: float, age: str) -> None:
    created_at = (NOON - timedelta(seconds=seconds_ago)).isoformat()
    text = shown(replace(status, policy=replace(status.policy, created_at=created_at)))
    assert line(text, "policy").startswith(f"version 3, published {age} ago")


def test_what_could_not_be_trained_on_is_shown(status: RunStatus) -> None:
    steps = [train_row(1, num_unreadable_files=2, num_seq_len_truncated=1)]
    text = shown(replace(status, steps=steps))
    assert line(text, "unreadable") == "2 files quarantined"
    assert line(text, "cut") == "1 sequence cut to max_seq_len in the last step"


def test_steps_of_an_earlier_trainer_are_not_judged_by_the_settings_of_the_newest(status: RunStatus) -> None:
    """A warm start by sft has advantages of 0, and learns."""
    still = [train_row(step) | {"advantage_mean": 0.0, "advantage_std": 0.0} for step in (1, 2, 3)]
    warm_start = [row | {"attempt_id": 1} for row in still]
    assert status.trainer is not None
    newest = replace(status.trainer, attempt_id=2)
    assert list(replace(status, steps=warm_start, trainer=newest).diagnostics()) == []
    own = [row | {"attempt_id": 2} for row in still]
    (diagnostic,) = replace(status, steps=own, trainer=newest).diagnostics()
    assert "got no gradient" in diagnostic.text


def test_of_a_run_that_has_ended_all_steps_are_judged_and_of_one_that_lives_the_newest(status: RunStatus) -> None:
    far = train_row(1) | {"sampler_kl": 19.0}
    living = replace(status, steps=[far, *map(train_row, range(2, 23))])
    assert list(living.diagnostics()) == []
    assert living.trainer is not None
    ended = replace(living, trainer=replace(living.trainer, lease_state=LeaseState("ended", 1.0)))
    (diagnostic,) = ended.diagnostics()
    assert str(diagnostic).startswith("since step 1: in 1 of 22 steps the trainer's weights were far")
    later = replace(living, steps=[*map(train_row, range(1, 22)), far | {"step": 22}])
    assert [each.text[:26] for each in later.diagnostics()] == ["in 1 of the newest 20 step"]


def shown_of(watcher: Watcher) -> str:
    return " ".join(shown(watcher.poll(), 120).replace("│", "").split())


def test_a_recorded_root_shows_how_its_agents_episodes_ended(tmp_path: Path) -> None:
    root = create_root(str(tmp_path / "run"), RunConfig(model="theirs", env=(RECORDED_ENV,)))
    watcher = Watcher(root.url)
    assert "another program records here" in shown_of(watcher)
    facts = {"group_id": "g", "env_name": RECORDED_ENV, "env_example_id": "1"}
    with held_life(root, "http://127.0.0.1:1") as life:
        claims = [claim_episode(life, episode_id=name, attempt=1, key_digest=name * 64, **facts) for name in "ab"]
        seal_episode(life, claims[0], end="given_up")
        # Twice, since what has ended is not read again.
        for _ in range(2):
            assert "1 episode given up, 1 episode open" in shown_of(watcher)
        seal_episode(life, claims[1], end="given_up")
    assert "2 episodes given up" in shown_of(watcher)
    assert "`ludic assemble" in shown_of(watcher)
    assert watcher.poll().to_dict()["agent_episodes"] == {"given up": 2}
