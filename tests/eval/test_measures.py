"""Measures and their intervals over stored rewards, worked by hand; what is left out is counted."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from eval.conftest import StoreSamples, says

import ludic
from ludic.app.launch.evaluate import _with_numbers
from ludic.base.by_name import packaged_names
from ludic.errors import ConfigError, QueryError
from ludic.eval.config import MeasureConfig
from ludic.eval.estimates import Chosen, Samples, numbers
from ludic.root.root import Root
from ludic.root.sql.connection import connect
from ludic.root.sql.library import load_measure

REWARDS = {"a": [1.0, 0.0, 1.0, 1.0], "b": [0.0, 0.0, 0.0, 1.0], "c": [0.0, 0.0, 0.0, 0.0]}


def measured(
    root: Root, measure: str, *, chosen: Chosen | None = None, **params: Any
) -> dict[str | None, float | None]:
    """Estimates by part."""
    found = numbers(root, MeasureConfig(measures=(measure,), params=params), chosen or Chosen())
    return {row["part"]: row["estimate"] for row in found.rows}


def test_an_estimate_is_the_mean_over_examples_or_episodes(root: Root, store_samples: StoreSamples) -> None:
    """tests/root/sql/cases/measures/ has the values of each example."""
    store_samples(REWARDS)
    assert measured(root, "mean_reward") == {None: pytest.approx(4 / 12)}
    # a: no pair of failures among C(4, 2) = 6; b: 3 of 6 pairs are failures; c: all
    assert measured(root, "pass_at_k", k=2) == {None: pytest.approx((1 + 3 / 6 + 0) / 3)}
    assert measured(root, "response_length") == {None: 3.0}


def test_pass_at_k_is_the_papers_for_all_counts(root: Root, store_samples: StoreSamples) -> None:
    counts = {f"{n}-{c}": (n, c) for n in range(1, 7) for c in range(n + 1)}
    store_samples({name: [1.0] * c + [0.0] * (n - c) for name, (n, c) in counts.items()})
    with connect(root) as con:
        samples = Samples.choose(root, con, Chosen())
        for k in (1, 2, 5):
            for measure, count in (("pass_at_k", lambda n, c: n - c), ("pass_hat_k", lambda n, c: c)):
                found = samples.measure(load_measure(measure), {"k": k}).to_pylist()
                for row in found:
                    n, c = counts[row["env_example_id"]]
                    share = math.comb(count(n, c), k) / math.comb(n, k) if n >= k else None
                    wanted = None if share is None else 1 - share if measure == "pass_at_k" else share
                    assert row["total"] == (None if wanted is None else pytest.approx(wanted)), (measure, k, row)


def test_large_counts_do_not_overflow(root: Root, store_samples: StoreSamples) -> None:
    store_samples({"a": [1.0] * 3 + [0.0] * 997})
    wanted = 1 - math.comb(997, 500) / math.comb(1000, 500)
    assert measured(root, "pass_at_k", k=500) == {None: pytest.approx(wanted, rel=1e-12)}


@pytest.mark.slow
def test_unscored_samples_are_counted_and_left_out_unless_they_get_a_reward(
    root: Root, store_samples: StoreSamples
) -> None:
    store_samples({"a": [1.0, None], "b": [0.0, 1.0], "c": [None, None]})
    found = numbers(root, MeasureConfig(measures=("mean_reward", "unscored")), Chosen())
    rows = {row["measure"]: row for row in found.rows}
    # a: 1, b: 1/2
    assert (rows["mean_reward"]["estimate"], rows["mean_reward"]["num_missing"]) == (pytest.approx(3 / 4), 3)
    assert (rows["mean_reward"]["num_values"], rows["mean_reward"]["num_examples"]) == (3, 2)
    assert rows["unscored"]["estimate"] == pytest.approx(3 / 6)
    assert measured(root, "mean_reward", unscored=0) == {None: pytest.approx(2 / 6)}
    assert measured(root, "pass_at_k", k=2) == {None: 1.0}  # b alone has two scored samples
    assert measured(root, "pass_at_k", k=2, unscored=0) == {None: pytest.approx(2 / 3)}
    counts = found.counts.to_pylist()[0]
    assert (counts["num_samples"], counts["num_unscored"], counts["num_failed"]) == (6, 3, 3)


def test_an_example_with_fewer_than_k_samples_is_counted_as_missing(root: Root, store_samples: StoreSamples) -> None:
    store_samples({"a": [1.0, 0.0], "b": [1.0]})
    found = numbers(root, MeasureConfig(measures=("pass_at_k",), params={"k": 2}), Chosen())
    assert [(row["estimate"], row["num_examples"], row["num_missing"]) for row in found.rows] == [(1.0, 1, 1)]


@pytest.mark.slow
def test_the_answer_of_the_majority(root: Root, store_samples: StoreSamples) -> None:
    answers = {
        "wins": ["4", "4", "5"],  # right
        "loses": ["9", "9", "4"],  # wrong
        "ties": ["4", "9", None],  # half
        "silent": [None, None, None],  # no answer: 0
    }
    rewards = {name: [1.0 if answer == "4" else 0.0 for answer in said] for name, said in answers.items()}
    store_samples(rewards, agent_steps=lambda example, index: says(answers[example][index]))
    assert measured(root, "maj_at_k", k=3) == {None: pytest.approx((1 + 0 + 0.5 + 0) / 4)}
    assert measured(root, "maj_at_k", k=1) == {None: pytest.approx((1 + 0 + 1 + 0) / 4)}


def test_without_answers_there_is_no_majority(root: Root, store_samples: StoreSamples) -> None:
    store_samples(REWARDS)
    assert measured(root, "maj_at_k", k=4) == {None: None}


def test_tool_errors_are_counted_by_episode(root: Root, store_samples: StoreSamples) -> None:
    store_samples({"a": [1.0, 1.0]}, agent_steps=lambda example, index: says("4", *["no such tool"] * (3 * index)))
    assert measured(root, "tool_errors") == {None: 1.5}


def test_the_ways_in_which_episodes_end(root: Root, store_samples: StoreSamples) -> None:
    store_samples({"a": [1.0, None]})
    store_samples({"b": [0.0, 0.0]}, terminated=False, truncated=True, truncation_reason="max_steps")
    assert measured(root, "ends") == {"failed": 0.25, "terminated": 0.25, "truncated: max_steps": 0.5}


@pytest.mark.slow
def test_a_figure_for_each_version(root: Root, store_samples: StoreSamples) -> None:
    store_samples({"a": [0.0], "b": [1.0]})
    store_samples({"a": [1.0], "b": [1.0]}, version=3)
    found = numbers(root, MeasureConfig(), Chosen()).frame()
    means = found.filter(measure="mean_reward").select("policy_version", "estimate").rows()
    assert means == [(0, 0.5), (3, 1.0)]
    assert measured(root, "mean_reward", chosen=Chosen(versions=[3])) == {None: 1.0}


def test_rows_that_two_processes_stored_count_once(root: Root, store_samples: StoreSamples) -> None:
    name = "eval-0123456789abcdef-0.1-0."
    store_samples({"a": [1.0, 0.0]}, worker_id=f"{name}2")
    store_samples({"a": [1.0, 0.0, 0.0]}, worker_id=f"{name}3")
    (row,) = numbers(root, MeasureConfig(measures=("mean_reward",)), Chosen()).rows
    assert (row["evaluation"], row["num_values"], row["estimate"]) == ("0123456789abcdef", 3, pytest.approx(1 / 3))


@pytest.mark.slow
def test_a_measure_of_your_own(root: Root, store_samples: StoreSamples, tmp_path: Path) -> None:
    store_samples(REWARDS)
    file = tmp_path / "double.sql"
    file.write_text(
        "-- default: factor = 2\n"
        "select evaluation, policy_version, env_name, env_example_id, $factor * reward as value from eval_episodes;"
    )
    assert measured(root, str(file)) == {None: pytest.approx(8 / 12)}
    assert measured(root, str(file), factor=3) == {None: pytest.approx(1.0)}
    file.write_text("select 1 as one from eval_episodes")
    with pytest.raises(QueryError, match=r"double\.sql: returns one; wanted one SELECT over eval_episodes"):
        measured(root, str(file))


def test_every_measure_runs_on_a_root_with_samples(root: Root, store_samples: StoreSamples) -> None:
    store_samples(REWARDS)
    found = numbers(root, MeasureConfig(measures=tuple(packaged_names("measures"))), Chosen()).frame()
    assert set(found["measure"]) == set(packaged_names("measures"))
    assert set(found.filter(measure="response_length")["interval"]) == {"clustered"}  # a length is no share
    assert set(found.filter(measure="success_rate")["interval"]) == {"korn_graubard"}


SHARES = {
    "avg_at_k", "ends", "maj_at_k", "mean_reward", "pass_at_k", "pass_hat_k", "success_rate", "unscored",
}  # fmt: skip
"""Measures of rewards 0 and 1 that are shares; the others are counts."""


@pytest.mark.parametrize("interval", ["korn_graubard", "clustered"])
def test_no_interval_of_equal_values_has_no_width(root: Root, store_samples: StoreSamples, interval: Any) -> None:
    names = tuple(packaged_names("measures"))
    for version, reward in enumerate((0.0, 1.0)):
        samples = {f"e{number}": [reward] * 4 for number in range(10)}
        store_samples(samples, version=version, agent_steps=lambda *_: says("4"))
    rows = numbers(root, MeasureConfig(measures=names), Chosen(), interval).rows
    for version in (0, 1):
        of_version = [row for row in rows if row["policy_version"] == version]
        check_that_no_interval_has_no_width(of_version, interval, names)


def check_that_no_interval_has_no_width(rows: list[dict[str, Any]], interval: str, names: tuple[str, ...]) -> None:
    assert {row["measure"] for row in rows} == set(names)
    for row in rows:
        if row["low"] is None:
            assert (row["high"], row["std_error"]) == (None, None), row["measure"]
            continue
        assert row["measure"] in SHARES
        assert interval == "korn_graubard"
        assert 0 <= row["low"] < row["high"] <= 1
    if interval == "korn_graubard":
        assert {row["measure"] for row in rows if row["low"] is not None} == SHARES


def test_forty_wrong_answers_do_not_mean_that_none_is_ever_right(root: Root, store_samples: StoreSamples) -> None:
    store_samples({f"e{number}": [0.0] for number in range(40)})
    (row,) = numbers(root, MeasureConfig(measures=("success_rate",)), Chosen()).rows
    # Clopper and Pearson: 0.025 = (1 - high)**40
    assert (row["interval"], row["low"]) == ("korn_graubard", 0.0)
    assert row["high"] == pytest.approx(1 - 0.025 ** (1 / 40))


def test_pass_at_k_of_one_sample_has_the_interval_of_the_success_rate(root: Root, store_samples: StoreSamples) -> None:
    store_samples(REWARDS)
    config = MeasureConfig(measures=("success_rate", "pass_at_k", "pass_hat_k", "avg_at_k"), params={"k": 1})
    rate, *others = numbers(root, config, Chosen()).rows[:3]
    for row in others:
        assert (row["low"], row["high"]) == pytest.approx((rate["low"], rate["high"]))


@pytest.mark.parametrize("interval", ["korn_graubard", "clustered"])
def test_no_interval_of_a_share_leaves_0_to_1(root: Root, store_samples: StoreSamples, interval: Any) -> None:
    # Clustered, pass^2 is 0.833 +- 0.367
    store_samples({**{f"e{number}": [1.0] * 4 for number in range(5)}, "f": [0.0] * 4})
    config = MeasureConfig(measures=tuple(SHARES - {"maj_at_k"}), params={"k": 2})
    for row in numbers(root, config, Chosen(), interval).rows:
        assert row["low"] is None or 0 <= row["low"] <= row["estimate"] <= row["high"] <= 1, row


def test_rewards_of_other_values_are_no_share(root: Root, store_samples: StoreSamples) -> None:
    store_samples({"a": [0.0, 1.0], "b": [0.5, 1.0], "c": [1.0, 1.0]})
    config = MeasureConfig(measures=("mean_reward", "avg_at_k", "pass_at_k"), params={"k": 2})
    found = {row["measure"]: row["interval"] for row in numbers(root, config, Chosen()).rows}
    assert found == {"mean_reward": "clustered", "avg_at_k": "clustered", "pass_at_k": "korn_graubard"}


@pytest.mark.slow
def test_what_cannot_be_estimated_is_said_wherever_an_interval_is_printed(
    root: Root, store_samples: StoreSamples, caplog: pytest.LogCaptureFixture
) -> None:
    for version in (0, 1):
        store_samples({f"e{number}": [0.25, 0.25] for number in range(8)}, version=version)
    run = ludic.Run(root)
    evaluation, comparison = run.eval(stored=True, measures=["mean_reward"]), run.compare(0, 1)
    page = run.report(compare=("0", "1")).html
    for text in (repr(evaluation), evaluation._repr_html_(), repr(comparison), comparison._repr_html_(), page):
        assert "cannot be estimated" in text
        assert not re.search(r"0\.25 to 0\.25|>0 to 0<", text)
    assert "0 to 0" not in repr(comparison)
    with caplog.at_level("INFO"):  # the log of `ludic run --eval-every`
        assert list(_with_numbers(root, [0, 1], {0})) == [0, 1]
    assert "mean reward 0.25 of 8 examples, no 95% interval: cannot be estimated" in caplog.text
    (found, _) = json.loads(json.dumps(evaluation.to_dict()))["measures"]
    assert (found["std_error"], found["low"], found["high"]) == (None, None, None)
    (found,) = json.loads(json.dumps(comparison.to_dict()))["differences"]
    names = ("std_error", "low", "high", "power", "examples_needed")
    assert [found[name] for name in names] == [None] * 5


def test_a_misspelt_parameter_is_refused(root: Root, store_samples: StoreSamples) -> None:
    store_samples(REWARDS)
    with pytest.raises(ConfigError, match="parameter 'treshold' is unknown; did you mean 'threshold'"):
        measured(root, "success_rate", treshold=1)


def test_a_misspelt_measure_is_refused(root: Root, store_samples: StoreSamples) -> None:
    store_samples(REWARDS)
    with pytest.raises(QueryError, match="measure 'pass_a_k' is unknown; did you mean 'pass_at_k'"):
        measured(root, "pass_a_k")


def test_a_root_without_evaluations_says_so(root: Root) -> None:
    with pytest.raises(ConfigError, match=r"has no evaluation; `ludic eval .*` samples one"):
        numbers(root, MeasureConfig(), Chosen())


def test_an_unknown_version_is_explained(root: Root, store_samples: StoreSamples) -> None:
    store_samples(REWARDS, version=2)
    with pytest.raises(ConfigError, match="has no evaluation of version 7; it has version 2 of addition"):
        numbers(root, MeasureConfig(), Chosen(versions=[7]))
