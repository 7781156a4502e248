"""Comparisons in pairs, worked by hand; what differs between the sides is said, what is left out is counted."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from eval.conftest import StoreSamples

import ludic
from ludic.errors import ConfigError, MissingRootError
from ludic.eval.statistics import mcnemar
from ludic.records.rollout import Message
from ludic.root.json_records import CodeRecord, EvaluationRecord
from ludic.root.root import Root
from ludic.root.rows.evaluations import evaluation_of, put_evaluation
from ludic.run.config import RunConfig
from ludic.run.run_json import put_run


def row_of(found: Any) -> dict[str, Any]:
    return found.differences.row(0, named=True)


def samples(rewards: list[float | None]) -> dict[str, list[float | None]]:
    """One sample of each example."""
    return {f"e{number}": [reward] for number, reward in enumerate(rewards)}


def evaluation(settings: dict[str, Any], digest: str = "a") -> EvaluationRecord:
    return evaluation_of("addition", settings, [CodeRecord(role="environment", name="addition", sha256=digest * 64)])


def worker(each: EvaluationRecord, root: Root) -> str:
    put_evaluation(root, each)
    return f"eval-{each.evaluation}-0.9-0.1"


def test_single_answers_right_or_wrong_are_compared_by_mcnemar(root: Root, store_samples: StoreSamples) -> None:
    store_samples(samples([0.0] * 7 + [1.0, 1.0, 0.0]))
    store_samples(samples([1.0] * 6 + [0.0, 0.0, 1.0, 0.0]), version=2)
    row = row_of(ludic.Run(root).compare(0, 2))
    # 6 gains and 1 loss: 2 (1 + 7) / 2**7
    assert (row["test"], row["p_value"]) == ("mcnemar", pytest.approx(0.125))
    assert (row["num_gains"], row["num_losses"], row["num_examples"]) == (6, 1, 10)
    assert (row["estimate_a"], row["estimate_b"], row["difference"]) == pytest.approx((0.2, 0.7, 0.5))
    # six 1, one -1, three 0: variance (7 - 10 / 4) / 9 = 1/2, t(0.975, 9) = 2.26216
    assert row["std_error"] == pytest.approx(np.sqrt(0.5 / 10))
    # The upper end would be 1.0058, more than two shares can differ.
    assert (row["low"], row["high"]) == pytest.approx((0.5 - 0.505834, 1.0), abs=1e-5)


def test_means_of_several_samples_are_compared_by_permutation(root: Root, store_samples: StoreSamples) -> None:
    store_samples({"a": [0.0, 0.0], "b": [0.0, 1.0], "c": [0.0, 0.0], "d": [0.0, 1.0], "e": [1.0, 1.0]})
    store_samples({"a": [1.0, 0.0], "b": [1.0, 1.0], "c": [1.0, 1.0], "d": [1.0, 0.0], "e": [1.0, 1.0]}, version=1)
    row = row_of(ludic.Run(root).compare(0, "latest"))
    # 1/2, 1/2 and 1, which are 2 or -2 in 2 of 8 ways of signs; the other two examples are equal
    assert (row["test"], row["p_value"], row["difference"]) == ("permutation", 0.25, pytest.approx(2 / 5))


def test_only_examples_that_both_have_are_compared_and_the_others_counted(
    root: Root, store_samples: StoreSamples
) -> None:
    store_samples(samples([0.0, 0.0, 1.0, None]))
    store_samples({"e1": [1.0], "e2": [1.0], "e3": [1.0], "other": [1.0], "more": [1.0]}, version=1)
    found = ludic.Run(root).compare(0, 1)
    row = row_of(found)
    assert (row["num_examples"], row["num_only_a"], row["num_only_b"]) == (2, 1, 3)
    assert (row["num_missing_a"], row["num_missing_b"]) == (1, 0)
    assert found.examples.select("env_example_id", "value_a", "value_b", "difference").rows() == [
        ("e1", 0.0, 1.0, 1.0),
        ("e2", 1.0, 1.0, 0.0),
    ]
    assert "values left out: 1 of the baseline, 0 of this one" in repr(found)
    assert "examples of one side only: 1 of the baseline, 3 of this one" in repr(found)


@pytest.mark.slow
def test_several_comparisons_are_corrected_together(root: Root, store_samples: StoreSamples) -> None:
    store_samples(samples([0.0] * 8))
    store_samples(samples([1.0] * 8), version=1)
    store_samples(samples([1.0] * 6 + [0.0] * 2), version=2)
    rows = ludic.Run(root).compare(0, 1, 2).differences
    assert rows["p_value"].to_list() == pytest.approx([2 / 256, 2 / 64])
    assert rows["p_holm"].to_list() == pytest.approx([4 / 256, 2 / 64])
    assert rows["p_mid"].to_list() == pytest.approx([1 / 256, 1 / 64])
    assert rows["p_mid_holm"].to_list() == pytest.approx([2 / 256, 1 / 64])


def test_few_pairs_have_neither_an_interval_nor_a_test_nor_a_power(root: Root, store_samples: StoreSamples) -> None:
    # One pair of equal answers: the interval of a share would be -0.95 to 0.95.
    for version, rewards in enumerate(([0.0], [0.0], [0.0, 0.25, 0.5, 0.0], [1.0, 0.5, 0.5, 0.0])):
        store_samples(samples(rewards), version=version)
    for versions, num_pairs in ((0, 1), 1), ((2, 3), 4):
        found = ludic.Run(root).compare(*versions)
        row = row_of(found)
        absent = ("low", "high", "std_error", "p_value", "p_mid", "p_holm", "p_mid_holm")
        assert ([row[name] for name in absent], row["power"]) == ([None] * len(absent), 0.0)
        assert f"too few examples ({num_pairs})" in repr(found)
    store_samples(samples([0.0, 1.0] * 5), version=4)
    store_samples(samples([1.0, 1.0] * 4 + [0.0, 0.0]), version=5)
    found = ludic.Run(root).compare(4, 5)
    assert (row_of(found)["low"] is None, row_of(found)["power"]) == (False, None)
    assert "power for a difference of 0.05: too few examples" in repr(found)


def test_power_and_the_number_of_examples(root: Root, store_samples: StoreSamples) -> None:
    store_samples(samples([0.0, 1.0] * 12))
    store_samples(samples([0.0, 0.0, 1.0, 1.0] * 6), version=1)
    row = row_of(ludic.Run(root).compare(0, 1, difference=0.5))
    # Six gains, six losses, twelve equal, tilted to a mean of 1/2: with x = exp(factor),
    # (x - 1/x) / (x + 1/x + 2) = 1/2 is (x - 1) / (x + 1) = 1/2, x = 3: gains 9/16, losses 1/16, equal 6/16.
    # Mean square 5/8: ((1.95996 sqrt(5/8) + 0.84162 sqrt(5/8 - 1/4)) / 0.5)**2 = 17.05
    assert row["examples_needed"] == 18
    assert row["power"] == pytest.approx(mcnemar_power(24, 9 / 16, 1 / 16))


def mcnemar_power(num: int, gain: float, loss: float) -> float:
    """The sum over all numbers of gains and losses that are significant."""
    return sum(
        math.comb(num, up) * math.comb(num - up, down) * gain**up * loss**down * (1 - gain - loss) ** (num - up - down)
        for up in range(num + 1)
        for down in range(num - up + 1)
        if mcnemar(up, down) <= 0.05
    )


def test_equal_answers_of_both_sides_have_an_interval_and_no_known_power(
    root: Root, store_samples: StoreSamples
) -> None:
    for version in (0, 1):
        store_samples(samples([0.0] * 40), version=version)
    found = ludic.Run(root).compare(0, 1)
    row = row_of(found)
    # At most 1 - 0.05**(1/40) of all examples have another difference, from -1 to 1.
    assert (row["low"], row["high"]) == pytest.approx((0.05 ** (1 / 40) - 1, 1 - 0.05 ** (1 / 40)))
    assert (row["std_error"], row["power"], row["examples_needed"]) == (None, None, None)
    assert (row["p_value"], row["p_mid"]) == (1.0, 1.0)
    assert "power for a difference of 0.05: cannot be estimated" in repr(found)


def test_five_pairs_have_no_power(root: Root, store_samples: StoreSamples) -> None:
    store_samples(samples([0.0] * 5))
    store_samples(samples([1.0, 1.0, 1.0, 1.0, 0.0]), version=1)
    found = ludic.Run(root).compare(0, 1, difference=0.3)
    row = row_of(found)
    assert (row["p_value"], row["p_mid"], row["power"]) == (0.125, 0.0625, 0.0)
    assert "McNemar's exact test (mid-p 0.062, 0.062 by Holm)" in repr(found)
    assert "power for a difference of 0.3: 0%" in repr(found)


@pytest.mark.slow
def test_two_roots_are_compared(root: Root, store_samples: StoreSamples, tmp_path: Path) -> None:
    other = put_run(str(tmp_path / "o@2"), RunConfig(model="m", env=("addition",)))
    store_samples(samples([0.0, 1.0]))
    store_samples(samples([1.0, 1.0]), to=other, version=5)
    row = row_of(ludic.Run(root).compare(0, f"{other.url}@5"))
    assert (row["a"], row["b"], row["difference"]) == (f"{root.url}@0", f"{other.url}@5", 0.5)


@pytest.mark.slow
def test_equal_settings_of_two_roots_give_no_warning(root: Root, store_samples: StoreSamples, tmp_path: Path) -> None:
    other, each = put_run(str(tmp_path / "o"), RunConfig(model="m", env=("addition",))), evaluation({"n": 1})
    for to in (root, other):
        store_samples(samples([0.0, 1.0]), to=to, worker_id=worker(each, to))
    assert ludic.Run(root).compare("latest", f"{other.url}@0").warnings == []


def test_other_settings_code_and_prompts_are_warned_of(root: Root, store_samples: StoreSamples) -> None:
    first, second = evaluation({"temperature": 1.0, "seed": 0}), evaluation({"temperature": 0.5, "seed": 0}, "b")
    store_samples(
        samples([0.0, 1.0]), worker_id=worker(first, root), messages=(Message(role="user", content="What is 1+1?"),)
    )
    store_samples(
        samples([0.0, 1.0]),
        version=1,
        worker_id=worker(second, root),
        messages=lambda example, index: (Message(role="user", content="What is 1+1?" + "!" * (example == "e1")),),
    )
    found = ludic.Run(root).compare(0, 1)
    where = f"{root.url}@1, addition: "
    assert found.warnings == [
        f"{where}the prompts of 1 of 2 examples differ",
        f"{where}temperature is 1.0 in the baseline, 0.5 here",
        f"{where}the environment 'addition' was another version of its code in the baseline",
    ]
    assert "warning" in repr(found)


def test_samples_of_unknown_origin_are_warned_of(root: Root, store_samples: StoreSamples) -> None:
    store_samples(samples([0.0, 1.0]))
    store_samples(samples([0.0, 1.0]), version=1, temperature=0.5)
    first, second = ludic.Run(root).compare(0, 1).warnings
    assert "not both were sampled by `ludic eval`, so the code that scored them can't be compared" in first
    assert '"temperature": 1.0' in second
    assert '"temperature": 0.5' in second


@pytest.mark.slow
def test_the_newest_settings_that_both_have_are_compared(root: Root, store_samples: StoreSamples) -> None:
    old, new = evaluation({"temperature": 1.0}), evaluation({"temperature": 0.5})
    for version, each, rewards in ((0, old, [0.0, 0.0]), (1, old, [1.0, 1.0]), (1, new, [0.0, 0.0])):
        store_samples(samples(rewards), version=version, worker_id=worker(each, root))
    run = ludic.Run(root)
    assert row_of(run.compare(0, 1))["difference"] == 1.0
    assert run.compare(0, 1).warnings == []
    with pytest.raises(ConfigError, match=f"@0 has no evaluation '{new.evaluation}' of addition"):
        run.compare(0, 1, evaluation=new.evaluation)


@pytest.mark.parametrize(
    ("sides", "options", "message"),
    [
        ([0], {}, "there is nothing to compare 0 with; wanted two or more sides"),
        ([0, 7], {}, "has no evaluation of version 7; it has version 0 of addition"),
        ([0, 0], {"env": "opposites"}, "@0 has no evaluation of 'opposites'; it has addition"),
    ],
)
def test_a_comparison_that_can_not_be_made_is_explained(
    root: Root, store_samples: StoreSamples, sides: list, options: dict, message: str
) -> None:
    store_samples(samples([0.0, 1.0]))
    with pytest.raises(ConfigError, match=message):
        ludic.Run(root).compare(*sides, **options)


def test_sides_without_common_examples_are_refused(root: Root, store_samples: StoreSamples) -> None:
    store_samples({"a": [0.0]})
    store_samples({"b": [0.0]}, version=1)
    with pytest.raises(ConfigError, match="have no example in common; evaluate them with one --seed"):
        ludic.Run(root).compare(0, 1)


def test_a_root_that_is_not_there_is_refused(root: Root, tmp_path: Path) -> None:
    with pytest.raises(MissingRootError):
        ludic.Run(root).compare(0, f"{tmp_path}/none@0")
