"""What metrics say is wrong with a run, and what they do not."""

import logging
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from ludic.records.tables import arrow_schema
from ludic.run.config import RunConfig
from ludic.run.diagnostics import (
    LEAPS,
    Diagnostic,
    DiagnosticLog,
    Since,
    VersionSamples,
    find_falls,
    find_leaps,
    find_mismatch,
    find_sampling_diagnostics,
    find_shortage,
    find_some_failures,
    find_training_diagnostics,
    find_truncated_support,
    warn_of_rows,
)

NOON = datetime(2026, 11, 21, 12, tzinfo=UTC)
RUN = RunConfig(model="m", env=("cats",), groups_per_batch=4, max_tokens=32)


def row(**values: Any) -> dict[str, Any]:
    return dict.fromkeys(arrow_schema("metrics").names) | {"created_at": NOON} | values


def call(**values: Any) -> dict[str, Any]:
    """A call of four groups of eight, in which nothing is wrong."""
    counts = dict.fromkeys(("num_errors", "num_parse_errors", "num_incomplete_completions"), 0)
    sizes = {"env_name": "cats", "num_rollouts": 32, "num_groups": 4, "reward_mean": 0.25}
    return row(kind="worker", **{**sizes, **counts, "num_zero_variance_groups": 1, **values})


def step(**values: Any) -> dict[str, Any]:
    numbers = {"num_rollouts": 32, "reward_mean": 0.25, "grad_norm": 0.5, "advantage_mean": 0.0, "advantage_std": 0.4}
    return row(kind="train", **{**numbers, "drops": {}, **values})


def texts(diagnostics) -> list[str]:
    return [diagnostic.text for diagnostic in diagnostics]


def test_a_sound_run_has_no_troubles() -> None:
    assert texts(find_sampling_diagnostics([call()] * 9, RUN)) == []
    assert texts(find_training_diagnostics([step()] * 9, {"objective": "reinforce"})) == []
    assert texts(find_shortage([step()] * 9, [call()] * 9, RUN, {})) == []


def test_failures_are_told_at_once_with_the_first_error() -> None:
    failed = call(num_errors=32, num_groups=1, reward_mean=None, first_error="ValueError: reward is nan")
    assert texts(find_sampling_diagnostics([failed], RUN)) == [
        "every one of 32 rollouts failed in cats; the first error: ValueError: reward is nan"
    ]


def test_an_error_is_told_on_one_line_without_what_steers_a_terminal() -> None:
    failed = call(num_errors=32, first_error="ValueError: two\nlines, \x1b[31mred and \u202eback")
    assert texts(find_sampling_diagnostics([failed], RUN)) == [
        "every one of 32 rollouts failed in cats; the first error: ValueError: two lines,  [31mred and  back"
    ]


def test_failures_count_in_the_newest_batch_only() -> None:
    # 20 of 32 are more than half; a newer call without failures is a whole batch, and ends the trouble.
    calls = [call(num_errors=20, first_error="KeyError: 'x'")]
    assert texts(find_sampling_diagnostics(calls, RUN)) == [
        "62% of 32 rollouts failed in cats; the first error: KeyError: 'x'"
    ]
    assert texts(find_sampling_diagnostics([*calls, call()], RUN)) == []


def test_refused_answers_name_the_settings_that_refuse_them() -> None:
    refused = call(num_parse_errors=31, num_incomplete_completions=31, num_zero_variance_groups=4, reward_mean=0.0)
    assert texts(find_sampling_diagnostics([refused], RUN)) == [
        "97% of 32 answers in cats hit max_tokens (32) and were refused unscored; start a run with "
        "--accept-incomplete, or with a higher --max-tokens"
    ]
    unparsed = call(num_parse_errors=31, num_incomplete_completions=2)
    assert texts(find_sampling_diagnostics([unparsed], RUN)) == [
        "97% of 32 answers in cats could not be parsed; look at some with `ludic view --text`"
    ]


def test_equal_rewards_are_told_of_once_a_batch_has_no_others() -> None:
    equal = call(num_zero_variance_groups=4)
    assert texts(find_sampling_diagnostics([equal], RUN)) == [
        "rewards are equal within each of 4 groups in cats (about 0.25), so there is nothing to learn from; look at "
        "the environment's score, or at --temperature"
    ]
    assert texts(find_sampling_diagnostics([call(num_groups=2, num_zero_variance_groups=2)], RUN)) == []


def test_each_environment_has_troubles_of_its_own() -> None:
    calls = [call(), call(env_name="dogs", num_errors=32, first_error="no dogs")]
    assert texts(find_sampling_diagnostics(calls, RUN)) == [
        "every one of 32 rollouts failed in dogs; the first error: no dogs"
    ]


def history(*rewards: float | None, env_name: str = "cats", **values: Any) -> dict[str, list[VersionSamples]]:
    """A version for each reward, which the next step took: version 0 is that of step 1."""
    rows = [call(env_name=env_name, reward_mean=reward, **values) for reward in rewards]
    return {
        env_name: [
            VersionSamples(env_name=env_name, version=version, step=version + 1).plus(row)
            for version, row in enumerate(rows)
        ]
    }


def test_a_trouble_says_the_step_from_which_on_all_versions_have_it() -> None:
    found = history(0.5, 0.5, 0.0, 0.0)["cats"]
    found = [replace(it, num_equal_groups=number) for it, number in zip(found, (4, 3, 4, 4), strict=True)]
    equal = call(num_zero_variance_groups=4)
    (diagnostic,) = find_sampling_diagnostics([equal], RUN, {"cats": found})
    assert (diagnostic.env_name, diagnostic.since) == ("cats", Since(3, 2))
    assert str(diagnostic).startswith("since step 3: rewards are equal within each of 4 groups in cats")
    # Of what is known, all have it: it began before, unless this is the run's first version.
    (diagnostic,) = find_sampling_diagnostics([equal], RUN, {"cats": found[2:]})
    assert str(diagnostic).startswith("since step 3 or before: ")
    (diagnostic,) = find_sampling_diagnostics([equal], RUN, {"cats": found[:1]})
    assert str(diagnostic).startswith("since step 1: ")
    (diagnostic,) = find_sampling_diagnostics([equal], RUN, {"cats": [replace(found[2], step=None)]})
    assert str(diagnostic).startswith("since version 2 or before: ")
    failed = call(num_errors=32, first_error="gone")
    versions = [replace(it, num_errors=number) for it, number in zip(found, (32, 16, 17, 32), strict=True)]
    (diagnostic,) = find_sampling_diagnostics([failed], RUN, {"cats": versions})
    assert diagnostic.since == Since(3, 2)  # 16 of 32 is not more than half


def test_a_reward_that_rose_and_fell_is_told_of_with_the_step_of_the_fall() -> None:
    # Up from 0 to 4 in steps of 0.25 (17 versions), then at 1 from version 17 on, which is step 18. Levels are means
    # of 5: the best is (3 + 3.25 + 3.5 + 3.75 + 4) / 5. It has gained 3.5 - 0.5 = 3, so below 2.5 it has lost a third.
    rising = [version / 4 for version in range(17)]
    assert list(find_falls(history(*rising))) == []
    (diagnostic,) = find_falls(history(*rising, *[1.0] * 4))  # (4 + 4 * 1) / 5 = 1.6
    assert diagnostic.env_name == "cats"
    assert str(diagnostic).startswith(
        "since step 18: the reward in cats fell from 3.5 (step 17) to 1.6; look at entropy"
    )
    # One bad version is not a level: (3.25 + 3.5 + 3.75 + 4 + 1) / 5 = 3.1
    assert list(find_falls(history(*rising, 1.0))) == []
    # It rose again.
    assert list(find_falls(history(*rising, *[1.0] * 4, *[4.0] * 5))) == []


@pytest.mark.parametrize(
    "rewards",
    [
        [0.5, 0.3] * 20,  # noise around 0.4
        [0.0] * 20,
        [1.0] * 5 + [0.9] * 15,  # a tenth less than at the beginning
        [None] * 20,
        [4.0] * 4 + [0.0] * 4,  # too few versions to tell
    ],
)
def test_rewards_that_stay_or_shake_have_not_fallen(rewards: list[float | None]) -> None:
    assert list(find_falls(history(*rewards))) == []


def test_a_reward_that_only_falls_is_told_of() -> None:
    (diagnostic,) = find_falls(history(*[0.9] * 8, *[0.1] * 8))
    assert str(diagnostic).startswith("since step 9: the reward in cats fell from 0.9 (step 5) to 0.1")
    (diagnostic,) = find_falls(history(*[-1.0] * 8, *[-5.0] * 8))
    assert str(diagnostic).startswith("since step 9: the reward in cats fell from -1 (step 5) to -5")


def test_a_real_collapse_is_found_where_a_reader_sees_it() -> None:
    """Means by version of a run at a learning rate of 0.02; each version sampled 1 to 28 groups of 8."""
    groups = [8, 16, 2, 4, 10, 1, 13, 4, 12, 1, 12, 3, 3, 4, 9, 4, 4, 12, 4, 10, 1, 3, 18, 28, 12]
    rewards = [0.52, 0.6, 1.53, 2.73, 3.2, 3.91, 3.92, 3.94, 3.63, 2.75, 3.78, 3.92, 4.09, 2.91, 2.33, 1.91, 1.59]
    rewards += [1.38, 1.81, 1.88, 2.0, 2.0, 2.06, 1.54, 1.2]
    versions = history(*rewards)["cats"]
    versions = [
        replace(it, num_scored=8 * size, reward_sum=it.reward_sum / it.num_scored * 8 * size)
        for it, size in zip(versions, groups, strict=True)
    ]
    (diagnostic,) = find_falls({"cats": versions})
    assert diagnostic.since == Since(15, 14)  # 2.33, the first that is a third below and is followed by no other
    assert list(find_falls({"cats": versions[:13]})) == []


def test_steps_far_from_the_weights_that_sampled_are_told_of() -> None:
    far = [step(step=45, sampler_kl=1.2, clip_fraction=0.16), step(step=46, sampler_kl=0.1, clip_fraction=0.11)]
    near = [step(step=number, sampler_kl=0.2, clip_fraction=0.05) for number in (44, 47)]
    (diagnostic,) = find_leaps([near[0], *far, near[1]], {"objective": "reinforce"})
    assert str(diagnostic) == (
        "since step 45: in 2 of the newest 4 steps the trainer's weights were far from those that sampled, most in "
        "step 45 (sampler KL 1.2 nats, 16.0% of the tokens clipped); lower --learning-rate, or --max-off-policy-steps"
    )
    assert list(find_leaps(near, {})) == []
    assert list(find_leaps(far, {"objective": "sft"})) == []
    assert list(find_leaps(far, {"offline": True})) == []
    assert [each.kind for each in find_training_diagnostics([*near, *far], {})] == [LEAPS]


def test_workers_of_an_older_version_cause_no_false_alarm() -> None:
    old = call(num_errors=None, num_parse_errors=None, num_incomplete_completions=None, num_zero_variance_groups=None)
    assert texts(find_sampling_diagnostics([old] * 3, RUN)) == []


@pytest.mark.parametrize("still", [{"grad_norm": 0.0}, {"advantage_mean": 0.0, "advantage_std": 0.0}])
def test_three_steps_without_a_gradient_are_told_of(still: dict[str, float]) -> None:
    config = {"objective": "reinforce"}
    assert texts(find_training_diagnostics([step(), *[step(**still)] * 2], config)) == []
    assert texts(find_training_diagnostics([step(), *[step(**still)] * 3], config)) == [
        "the last 3 steps got no gradient: all advantages or gradients are 0 (mean reward 0.25); look at the "
        "environment's score, and at answers that were cut at max_tokens or not parsed"
    ]
    assert texts(find_training_diagnostics([*[step(**still)] * 3, step()], config)) == []


def test_supervised_steps_need_no_advantages() -> None:
    assert texts(find_training_diagnostics([step(advantage_std=0.0)] * 5, {"objective": "sft"})) == []


def test_a_filter_that_drops_most_is_named_with_what_to_do() -> None:
    # 96 used, 90 + 30 dropped: 120 of 216.
    steps = [step(drops={"drop_truncated": 30, "mine": 10})] * 3
    assert texts(find_training_diagnostics(steps, {})) == [
        "filters dropped 56% of 216 rollouts in 3 steps, drop_truncated most (90): a limit of the environment ended "
        "them; raise it, or leave the filter out"
    ]
    assert texts(find_training_diagnostics([step(drops=[("mine", 40)])] * 3, {})) == [
        "filters dropped 56% of 216 rollouts in 3 steps, mine most (120): look at that filter"
    ]


@pytest.mark.parametrize("reason", ["where", "drop_not_best_of_group"])
def test_filters_that_are_there_to_drop_most_are_no_trouble(reason: str) -> None:
    assert texts(find_training_diagnostics([step(drops={reason: 300})] * 3, {})) == []


def test_much_that_was_sampled_without_a_batch_is_told_of() -> None:
    # A batch is 4 groups, and 2 x 4 may be open for 5 off-policy steps; 20 groups after the last step are more than two
    # batches beyond these.
    later = call(num_groups=20) | {"created_at": NOON + timedelta(minutes=1)}
    filters = {"filters": ("drop_truncated",), "max_off_policy_steps": 5}
    wanted = (
        "20 groups were sampled since the newest step, and they made no batch; look at the trainer's log and at its "
        "filters (drop_truncated)"
    )
    assert texts(find_shortage([step()], [later], RUN, filters)) == [wanted]
    assert texts(find_shortage([], [call(num_groups=0), later], RUN, filters)) == [wanted]
    soon = later | {"created_at": NOON + timedelta(seconds=59)}
    assert texts(find_shortage([step()], [soon], RUN, filters)) == [], "the row of a step may still come"
    assert texts(find_shortage([], [soon, later], RUN, filters)) == [], "the trainer may still start"
    assert texts(find_shortage([step()], [call(num_groups=20)], RUN, filters)) == []
    assert texts(find_shortage([step()], [later | {"num_errors": 32}], RUN, filters)) == []
    # 4 x 32 x 3/8 + 8 = 56 for 32 steps
    assert texts(find_shortage([step()], [later], RUN, filters | {"max_off_policy_steps": 32})) == []


def test_a_trouble_is_logged_once_and_again_after_it_was_gone(caplog: pytest.LogCaptureFixture) -> None:
    log = DiagnosticLog(logging.getLogger("test"))
    for text in ("1 of 2", "2 of 3", None, "3 of 4"):
        log.report([Diagnostic("failures", text)] if text else [])
    assert [record.getMessage() for record in caplog.records] == ["1 of 2", "3 of 4"]


def test_a_process_warns_of_its_own_rows(caplog: pytest.LogCaptureFixture) -> None:
    warn = warn_of_rows(logging.getLogger("test"), lambda rows: find_sampling_diagnostics(rows, RUN))
    warn(call())
    warn(call(num_errors=32, first_error="100% wrong"))
    assert [record.getMessage() for record in caplog.records] == [
        "every one of 32 rollouts failed in cats; the first error: 100% wrong"
    ]


@pytest.mark.parametrize(
    "config",
    [
        {"objective": "ppo_clip", "advantage": "zero", "kl_weight": 1.0, "kl_placement": "reward"},
        {"objective": "sft"},
    ],
)
def test_a_run_that_learns_from_something_else_than_rewards_is_not_still(config) -> None:
    distilled = step(advantage_std=0.0, grad_norm=1.0)
    assert texts(find_training_diagnostics([distilled] * 9, config)) == []
    without_gradient = step(advantage_std=0.0, grad_norm=0.0)
    assert len(texts(find_training_diagnostics([without_gradient] * 9, config))) == 1


def test_a_kl_penalty_in_the_loss_teaches_nothing_where_rewards_are_equal() -> None:
    config = {"objective": "ppo_clip", "advantage": "grpo", "kl_weight": 0.04, "kl_placement": "loss"}
    assert len(texts(find_training_diagnostics([step(advantage_std=0.0)] * 9, config))) == 1


def test_calls_of_an_older_version_lack_counts() -> None:
    assert texts(find_sampling_diagnostics([call(num_groups=None)] * 3, RUN)) == []


TOP_P = (
    "and the tokens that were kept are not stored: the trainer takes its logprobs over all tokens, so each importance "
    "ratio is too small by a factor, the probability that the kept tokens have together; where it falls below the "
    "clip, rollouts of negative advantage have no gradient; start a run without --keep-sampling-mask False"
)


def test_a_truncated_support_is_told_with_its_setting() -> None:
    run = RunConfig(model="m", env=("cats",), top_p=0.8, keep_sampling_mask=False)
    assert texts(find_truncated_support(run, {"objective": "reinforce"})) == [f"top_p is 0.8, {TOP_P}"]
    assert texts(find_truncated_support(replace(run, keep_sampling_mask=None), {})) == []
    swept = RunConfig(
        model="m", env=("cats",), keep_sampling_mask=False, sweep={"top_p": [0.8, 1.0, 0.9], "top_k": [None, 5]}
    )
    assert [diagnostic.kind for diagnostic in find_truncated_support(swept, {})] == [
        "truncated by top_p",
        "truncated by top_k",
    ]
    assert texts(find_truncated_support(swept, {}))[0].startswith("top_p is 0.8 or 0.9, ")


def test_a_loss_that_uses_no_ratio_needs_no_whole_support() -> None:
    run = RunConfig(model="m", env=("cats",), top_k=5, keep_sampling_mask=False)
    assert texts(find_truncated_support(run, {"objective": "sft"})) == []
    assert texts(find_truncated_support(RunConfig(model="m", env=("cats",)), {})) == []


def mismatched(**values: Any) -> dict[str, Any]:
    return step(**{"step": 1, "off_policy_steps_max": 0, "sampler_kl": 0.02, **values})


def test_other_probabilities_under_the_same_weights_are_told() -> None:
    # (0.02 + 0.01) / 2 = 0.015 nats; the off-policy step does not count
    stale = {"off_policy_steps_max": 1}
    rows = [
        mismatched(),
        mismatched(step=2, sampler_kl=0.01),
        mismatched(step=3, sampler_kl=5.0, **stale),
    ]
    (text,) = texts(find_mismatch(rows, RUN, {}))
    assert text.startswith("sampler_kl is 0.015 nats per token in 2 steps on rollouts of the trainer's own weights")
    assert "dtype, attention and --float32-head" in text


def test_a_mismatch_needs_equal_weights_and_more_than_rounding() -> None:
    two_a_version = RunConfig(model="m", env=("cats",), steps_per_version=2)
    assert texts(find_mismatch([mismatched(step=2)], two_a_version, {})) == []  # the second step of a version
    assert texts(find_mismatch([mismatched(step=3)], two_a_version, {})) != []
    assert texts(find_mismatch([mismatched(sampler_kl=0.009)], RUN, {})) == []
    assert texts(find_mismatch([mismatched(sampler_kl=None)], RUN, {})) == []
    assert texts(find_mismatch([mismatched()], RUN, {"offline": True})) == []
    assert texts(find_mismatch([mismatched()], RUN, {"replay_batches": "runs/a"})) == []


def test_a_truncated_support_explains_a_mismatch() -> None:
    run = RunConfig(model="m", env=("cats",), top_p=0.8, keep_sampling_mask=False)
    assert texts(find_mismatch([mismatched()], run, {"objective": "reinforce"})) == []


def test_some_failures_are_told_with_the_first_error_and_most_failures_only_once() -> None:
    some = [call(num_errors=4, first_error="KeyError: 'x' (own.py:3, in score)"), call(env_name="dogs", num_errors=0)]
    assert texts(find_some_failures(some, RUN)) == [
        "4 of 32 rollouts failed in cats; the first error: KeyError: 'x' (own.py:3, in score)"
    ]
    assert texts(find_some_failures([call(num_errors=32, first_error="KeyError: 'x'")], RUN)) == []
