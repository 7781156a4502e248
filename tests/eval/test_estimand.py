"""One estimand: the mean over examples of the mean of each one's scored samples, in every place that shows it.

Examples have 1 to 9 samples, some of them unscored, as after a later and larger --n of fewer examples.
"""

import json
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import get_args

import pytest
from eval.conftest import StoreSamples, says
from evaluations import store_evaluation

import ludic
from ludic.app.show.watch import Watcher
from ludic.base.by_name import packaged_names
from ludic.eval.compare import Side, compare
from ludic.eval.config import IntervalMethod, MeasureConfig
from ludic.eval.estimates import Chosen, Samples, numbers
from ludic.root.root import Root
from ludic.root.sql.connection import Connections, connect
from ludic.root.sql.library import load_measure
from ludic.root.sql.query import ask
from ludic.root.sql.reports import figure

REWARDS: Mapping[str, Sequence[float | None]] = {
    "a": [1.0] * 9,
    "b": [1.0, 0.0, 1.0, 1.0, None],
    "c": [0.0],
    "d": [0.0, 0.0],
    "e": [1.0, None, 0.0],
    "f": [0.0],
}
MEAN = fmean([1, 3 / 4, 0, 0, 1 / 2, 0])
"""Over samples it is 13/19."""


def is_correct(example: str, index: int) -> bool | None:
    reward = REWARDS[example][index]
    return None if reward is None else reward == 1


def store(store_samples: StoreSamples) -> None:
    """Version 0, and version 1 with the same examples but one sample each, all wrong."""
    steps = {"agent_steps": lambda example, index: says("4", *["no tool"] * index)}
    store_samples(REWARDS, correct=is_correct, **steps)
    store_samples({example: [0.0] for example in REWARDS}, version=1, correct=False, **steps)


ALL = MeasureConfig(measures=tuple(packaged_names("measures")), params={"k": 1})


def by_hand(samples: Samples) -> dict[tuple[str, str | None], float | None]:
    """Own arithmetic over the values of all measures: the mean over examples, by measure and part."""
    values: dict[tuple[str, str | None], list[float]] = {}
    for measure in ALL.measures:
        for row in samples.measure(load_measure(measure), ALL.params).to_pylist():
            of_part = values.setdefault((measure, row["part"]), [])
            of_part += [row["total"] / row["num_values"]] if row["num_values"] else []
    return {key: fmean(of_part) if of_part else None for key, of_part in values.items()}


@pytest.mark.slow
def test_every_measure_has_one_estimand_in_eval_and_compare(root: Root, store_samples: StoreSamples) -> None:
    store(store_samples)
    with Connections() as connections:
        wanted = by_hand(Samples.choose(root, connections.to(root), Chosen(versions=[0])))
        assert {measure for measure, _ in wanted} == set(packaged_names("measures"))
        for interval in get_args(IntervalMethod):
            rows = numbers(root, ALL, Chosen(versions=[0]), interval, connections.to(root)).rows
            assert {(row["measure"], row["part"]): row["estimate"] for row in rows} == pytest.approx(wanted)
            for row in rows:
                assert row["low"] is None or row["low"] <= row["estimate"] <= row["high"], row
        sides = Side(root=root, version=0), Side(root=root, version=1)
        found = compare(sides[0], sides[1:], ALL, connections=connections).rows
    compared = {(row["measure"], row["part"]): row["estimate_a"] for row in found}
    assert compared == pytest.approx({key: wanted[key] for key in compared})
    assert {measure for measure, _ in compared} == {measure for measure, _ in wanted}


@pytest.mark.slow
def test_the_mean_reward_is_over_examples_everywhere(root: Root, store_samples: StoreSamples) -> None:
    store(store_samples)
    run = ludic.Run(root)
    (row,) = numbers(root, MeasureConfig(measures=("mean_reward",)), Chosen(versions=[0])).rows
    assert (row["estimate"], row["num_examples"], row["num_values"]) == (pytest.approx(MEAN), 6, 19)
    assert run.compare(0, 1).differences["estimate_a"].to_list() == pytest.approx([MEAN])
    assert run.watch(once=True).totals.evals["reward_mean"].to_list() == pytest.approx([MEAN, 0.0])
    assert run.watch(once=True).totals.evals["accuracy"].to_list() == pytest.approx([MEAN, 0.0])
    with connect(root) as con:
        tracked = list(ask(con, root, figure("evaluation_means"), {"versions": [0]}))
    assert [each["reward_mean"] for each in tracked] == pytest.approx([MEAN])
    assert [each["accuracy"] for each in tracked] == pytest.approx([MEAN])
    assert [each["num_samples"] for each in tracked] == [21]


def test_the_panel_shows_the_mean_over_examples(root: Root) -> None:
    store_evaluation(root, REWARDS, version=0, correct=is_correct)
    (means,) = Watcher(root.url).poll().evals
    assert (means.num_rollouts, means.reward_mean, means.accuracy) == (21, pytest.approx(MEAN), pytest.approx(MEAN))


@pytest.mark.slow
def test_the_estimand_is_said_beside_the_figures(root: Root, store_samples: StoreSamples) -> None:
    store(store_samples)
    run = ludic.Run(root)
    evaluation, comparison = run.eval(stored=True), run.compare(0, 1)
    page = run.report(compare=("0", "1")).html
    for text in (repr(evaluation), evaluation._repr_html_(), page):
        assert "mean over examples" in text
    for text in (repr(comparison), comparison._repr_html_()):
        assert "means are over these examples" in text
    for found in (evaluation, comparison):
        assert json.loads(json.dumps(found.to_dict()))["estimand"].startswith("mean over examples")


@pytest.mark.parametrize("reward", [0.0, 1.0])
def test_more_samples_of_some_examples_do_not_widen_an_interval(
    root: Root, store_samples: StoreSamples, reward: float
) -> None:
    measures = ("unscored", "mean_reward", "success_rate", "accuracy", "pass_at_k", "pass_hat_k", "ends")
    config = MeasureConfig(measures=measures, params={"k": 1})
    store_samples({f"e{number}": [reward] for number in range(8)}, correct=reward == 1)
    store_samples({f"e{number}": [reward] for number in range(8)}, version=1, correct=reward == 1)
    more = {f"e{number}": [reward] * 8 for number in range(3)}
    store_samples(more, version=1, correct=reward == 1, request_index=lambda example, index: 9 + index)
    rows = numbers(root, config, Chosen()).rows
    assert {row["num_values"] for row in rows} == {8, 32}
    for row in rows:
        # Clopper and Pearson's interval of 0 of 8, or 8 of 8: 1 - 0.025**(1 / 8)
        assert (row["num_examples"], row["high"] - row["low"]) == (8, pytest.approx(1 - 0.025 ** (1 / 8))), row
