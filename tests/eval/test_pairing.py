"""Sides that call the same data otherwise, or identify its examples otherwise, are paired, and what differs is said."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from environments.test_qa import make, write_jsonl
from eval.conftest import StoreSamples
from eval.test_measures import measured

import ludic
from ludic.app.show.report.page import comparison_section
from ludic.errors import ConfigError
from ludic.eval.config import MeasureConfig
from ludic.eval.pairing import SampledEnvironment, comparable_options, pair_environments
from ludic.records.rollout import Message
from ludic.root.json_records import CodeRecord, EvaluationRecord
from ludic.root.root import Root
from ludic.root.rows.evaluations import evaluation_of, put_evaluation
from ludic.root.sql.connection import Connections
from ludic.run.config import RunConfig
from ludic.run.run_json import put_run

REWARDS = "inputs/reward.py:ludic_score"


def evaluated(
    env: str, rows: str | None = "a", *, example_ids: str | None = "row", reward: str = "c", **options: Any
) -> EvaluationRecord:
    """An evaluation as `ludic eval` records it. rows, reward: stand for digests."""
    code = [CodeRecord(role="environment", name=env, sha256=None if rows is None else rows * 64)]
    code += [CodeRecord(role="scorer", name=options["scorer"], sha256=reward * 64)] if "scorer" in options else []
    settings = {"env_options": options} | ({} if example_ids is None else {"example_ids": example_ids})
    return evaluation_of(env, settings, code)


def other_root(root: Root, name: str = "other") -> Root:
    return put_run(f"{Path(root.path).parent}/{name}", RunConfig(model="m", env=("addition",)))


def asked(questions: Mapping[str, str], answers: Mapping[str, str | None]) -> dict[str, Any]:
    """Fields of rows: question and wanted answer by example."""
    return {
        "messages": lambda example, index: (
            Message(role="system", content="Be brief."),
            Message(role="user", content=questions[example]),
        ),
        "wanted": lambda example, index: answers[example],
    }


def store(
    store_samples: StoreSamples, to: Root, each: EvaluationRecord, rewards: Mapping[str, float], **options: Any
) -> None:
    put_evaluation(to, each)
    values = {name: [reward] for name, reward in rewards.items()}
    store_samples(values, to=to, worker_id=f"eval-{each.evaluation}-0.9-0.1", env_name=each.env_name, **options)


def pairs(first: Sequence[EvaluationRecord], other: Sequence[EvaluationRecord]) -> list[tuple[str, str]]:
    sides = [[SampledEnvironment(name=each.env_name, record=each) for each in side] for side in (first, other)]
    return pair_environments(*sides)


# --- Environments ----------------------------------------------------------------------------------------------------


def test_equal_rows_are_one_environment_whatever_their_name() -> None:
    old = evaluated("qa/runs/lr1/inputs/questions-0123456789abcdef.jsonl", scorer=f"runs/lr1/{REWARDS}")
    new = evaluated("qa/gsm8k", stored="questions-0123456789abcdef.jsonl", sha256="a" * 64, scorer=f"lr2/{REWARDS}")
    assert comparable_options(old.settings["env_options"]) == comparable_options(new.settings["env_options"])
    assert pairs([old], [new]) == [(old.env_name, "qa/gsm8k")]
    assert pairs([old], [evaluated("qa/gsm8k", "b")]) == []


def test_rows_and_options_decide_before_rows_and_rows_before_names() -> None:
    one = [evaluated("qa/x", "a", system_prompt="Be brief."), evaluated("qa/y", "b"), evaluated("addition", "c")]
    two = [
        evaluated("qa/x", "b"),  # the rows that the first side calls qa/y
        evaluated("qa/v", "a"),
        evaluated("qa/w", "a", system_prompt="Be brief."),
        evaluated("addition", "d"),  # of other code: names decide, and compare says so
    ]
    assert pairs(one, two) == [("addition", "addition"), ("qa/x", "qa/w"), ("qa/y", "qa/x")]


def test_names_decide_where_nothing_else_is_known() -> None:
    hub = evaluated("qa/openai/gsm8k", None)
    assert pairs([hub], [hub]) == [("qa/openai/gsm8k", "qa/openai/gsm8k")]
    assert pairs([hub], [evaluated("qa/gsm8k", None)]) == []
    assert pair_environments(
        [SampledEnvironment(name="qa/x", record=None)], [SampledEnvironment(name="qa/x", record=hub)]
    ) == [("qa/x", "qa/x")]


# --- Comparisons -----------------------------------------------------------------------------------------------------

OLD = f"qa/runs/lr1/inputs/questions-{'a' * 16}.jsonl"


def test_two_runs_on_the_same_rows_are_compared(root: Root, store_samples: StoreSamples) -> None:
    other = other_root(root)
    first = evaluated("qa/words-aaaaaaaa", scorer=f"{root.url}/{REWARDS}")
    second = evaluated("qa/mine", scorer=f"{other.url}/{REWARDS}")
    store(store_samples, root, first, {"1": 0.0, "2": 1.0})
    store(store_samples, other, second, {"1": 1.0, "2": 1.0})
    found = ludic.Run(root).compare("latest", f"{other.url}@latest")
    (row,) = found.differences.to_dicts()
    assert (row["env_name"], row["env_name_b"], row["difference"]) == ("qa/words-aaaaaaaa", "qa/mine", 0.5)
    assert found.warnings == []
    for name in ("qa/mine", "qa/words-aaaaaaaa"):
        assert len(ludic.Run(root).compare("latest", f"{other.url}@latest", env=name).differences) == 1
    with pytest.raises(ConfigError, match="has no evaluation of 'qa/other'; it has qa/words-aaaaaaaa"):
        ludic.Run(root).compare("latest", f"{other.url}@latest", env="qa/other")


def test_a_reward_that_differs_is_still_warned_of(root: Root, store_samples: StoreSamples) -> None:
    other = other_root(root)
    store(store_samples, root, evaluated("qa/words", scorer=f"{root.url}/{REWARDS}"), {"1": 0.0})
    store(store_samples, other, evaluated("qa/words", scorer=f"{other.url}/{REWARDS}", reward="d"), {"1": 1.0})
    (warning,) = ludic.Run(root).compare("latest", f"{other.url}@latest").warnings
    assert "the scorer 'reward.py:ludic_score' was another version of its code in the baseline" in warning


def test_a_root_of_before_and_a_new_one_are_paired_by_question_and_answer(
    root: Root, store_samples: StoreSamples
) -> None:
    other = other_root(root)
    old, new = evaluated(OLD, example_ids=None), evaluated("qa/words")
    store(
        store_samples,
        root,
        old,
        {"h1": 0.0, "h2": 0.0, "h3": 1.0},
        **asked({"h1": "1+1?", "h2": "2+2?", "h3": "sort"}, {"h1": "2", "h2": "4", "h3": "-"}),
    )
    # Two rows with the question and the answer of h3: which of them it was is not known.
    store(
        store_samples,
        other,
        new,
        {"a": 1.0, "b": 0.0, "c": 1.0, "d": 0.0},
        **asked({"a": "1+1?", "b": "2+2?", "c": "sort", "d": "sort"}, {"a": "2", "b": "4", "c": "-", "d": "-"}),
    )
    found = ludic.Run(root).compare("latest", f"{other.url}@latest")
    (row,) = found.differences.to_dicts()
    assert (row["num_examples"], row["num_only_a"], row["num_only_b"], row["difference"]) == (2, 1, 2, 0.5)
    assert found.examples.select("env_example_id", "env_example_id_b", "difference").rows() == [
        ("h1", "a", 1.0),
        ("h2", "b", 0.0),
    ]
    assert found.warnings == [
        f"{other.url}@0, qa/words: the environment has ids that are made in another way here, so examples are paired "
        "by question and answer; 2 that share them with another one are left out"
    ]
    # The report shows the answers of both sides.
    with Connections() as connections:
        shown = comparison_section(connections, root, ["latest", f"{other.url}@latest"], MeasureConfig())
    (gained,) = shown["rows"][0]["changed"]["gained"]
    assert [side["reward"] for side in gained["sides"]] == [0.0, 1.0]


def test_without_answers_on_one_side_the_question_is_what_both_have(root: Root, store_samples: StoreSamples) -> None:
    other, questions = other_root(root), {"h": "1+1?", "a": "1+1?"}
    store(store_samples, root, evaluated(OLD, example_ids=None), {"h": 0.0}, **asked(questions, {"h": None}))
    store(store_samples, other, evaluated("qa/words"), {"a": 1.0}, **asked(questions, {"a": "2"}))
    found = ludic.Run(root).compare("latest", f"{other.url}@latest")
    assert found.differences["num_examples"].to_list() == [1]
    assert found.warnings[0].endswith("so examples are paired by question")


def test_equal_ids_of_other_rows_are_not_equal_examples(root: Root, store_samples: StoreSamples) -> None:
    other = other_root(root)
    store(
        store_samples,
        root,
        evaluated("qa/words", "a"),
        {"1": 0.0, "2": 0.0},
        **asked({"1": "one?", "2": "two?"}, {"1": "1", "2": "2"}),
    )
    store(
        store_samples,
        other,
        evaluated("qa/words", "b"),
        {"1": 1.0, "2": 1.0},
        **asked({"1": "two?", "2": "three?"}, {"1": "2", "2": "3"}),
    )
    found = ludic.Run(root).compare("latest", f"{other.url}@latest")
    assert found.examples.select("env_example_id", "env_example_id_b").rows() == [("2", "1")]
    assert "the environment holds other rows here, so examples are paired by question and answer" in found.warnings[0]
    assert "the environment 'qa/words' held other rows in the baseline" in found.warnings[1]


@pytest.mark.parametrize(
    ("rows", "options", "other_options"),
    [
        ("a", {"split": "train"}, {"split": "test"}),
        ("a", {"heldout": "test"}, {"heldout": "validation"}),  # splits of one folder
        (None, {"config": "main"}, {"config": "socratic"}),
        (None, {"revision": "1"}, {"revision": "2"}),
        (None, {}, {"heldout": "more.jsonl"}),
    ],
)
def test_options_that_choose_other_rows_make_other_examples(
    root: Root, store_samples: StoreSamples, rows: str | None, options: dict, other_options: dict
) -> None:
    other = other_root(root)
    first, second = (evaluated("qa/owner/words", rows, **each) for each in (options, other_options))
    store(store_samples, root, first, {"1": 0.0, "2": 0.0}, **asked({"1": "a?", "2": "b?"}, {"1": "1", "2": "2"}))
    store(store_samples, other, second, {"1": 1.0, "2": 1.0}, **asked({"1": "b?", "2": "c?"}, {"1": "2", "2": "3"}))
    found = ludic.Run(root).compare("latest", f"{other.url}@latest")
    assert found.examples.select("env_example_id", "env_example_id_b").rows() == [("2", "1")]
    assert "the environment holds other rows here, so examples are paired by question" in found.warnings[0]


def test_a_name_of_a_file_of_held_out_rows_that_are_the_same_chooses_no_other_rows() -> None:
    code = [CodeRecord(role="environment", name="qa/w", sha256="a" * 64, imports={"heldout": "b" * 64})]
    one, two = (
        SampledEnvironment(name="qa/w", record=evaluation_of("qa/w", {"env_options": {"heldout": name}}, code))
        for name in ("x.jsonl", "moved/x.jsonl")
    )
    assert one.selected == two.selected


def test_examples_that_failed_before_their_first_prompt_are_left_out_and_counted(
    root: Root, store_samples: StoreSamples
) -> None:
    """Of "1" and "2" no sample has a prompt on one side; of "3" the second sample has."""
    other = other_root(root)
    wanted = {"1": "1", "2": "2", "3": "3"}
    questions = {"1": "a?", "2": "b?", "3": "c?"}

    def without(failed: set[tuple[str, int]]) -> dict[str, Any]:
        whole = asked(questions, wanted)
        return whole | {
            "messages": lambda example, index: () if (example, index) in failed else whole["messages"](example, index),
            "prompt_tokens": lambda example, index: np.zeros(1 if (example, index) in failed else 5, np.int32),
            **{
                name: lambda example, index, kind=kind: np.zeros(0 if (example, index) in failed else 3, kind)
                for name, kind in (
                    ("response_tokens", np.int32),
                    ("response_logprobs", np.float32),
                    ("token_rewards", np.float32),
                )
            },
        }

    failed = {("1", 0), ("1", 1), ("2", 0), ("2", 1), ("3", 0)}
    for to, rows, of_failed in ((root, "a", failed), (other, "b", set())):
        record = evaluated("qa/words", rows)
        put_evaluation(to, record)
        store_samples(
            {name: [None if (name, index) in of_failed else 1.0 for index in range(2)] for name in questions},
            to=to,
            worker_id=f"eval-{record.evaluation}-0.9-0.1",
            env_name=record.env_name,
            **without(of_failed),
        )
    found = ludic.Run(root).compare("latest", f"{other.url}@latest")
    assert found.examples.select("env_example_id", "env_example_id_b").rows() == [("3", "3")]
    assert found.warnings[0].endswith("; 2 that failed before the first prompt are left out")


def test_two_roots_of_before_are_paired_by_their_ids(root: Root, store_samples: StoreSamples) -> None:
    other = other_root(root)
    for to, env, rewards in ((root, OLD, {"h": 0.0}), (other, OLD.replace("lr1", "lr2"), {"h": 1.0})):
        store(store_samples, to, evaluated(env, example_ids=None), rewards)
    found = ludic.Run(root).compare("latest", f"{other.url}@latest")
    assert found.examples.select("env_example_id", "env_example_id_b").rows() == [("h", "h")]
    assert found.warnings == []


# --- pass@k ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("example_ids", "wanted"), [("row", None), ("question", 0.5)])
def test_pass_at_k_counts_samples_of_one_row_alone(
    root: Root, store_samples: StoreSamples, tmp_path: Path, example_ids: str, wanted: float | None
) -> None:
    """Four rows with one question, a sample each, one of them right. Two of one row there are not."""
    rows = [{"question": "Write a sort.", "answer": "-", "level": level} for level in range(4)]
    source = write_jsonl(tmp_path / "rows.jsonl", rows)
    environment = make(f"qa/{source}", heldout_share=1, example_ids=example_ids)
    ids = [environment.example(index, "heldout").example_id for index in range(4)]
    samples: dict[str, list[float | None]] = {}
    for number, example in enumerate(ids):
        samples.setdefault(example, []).append(float(number == 0))
    store_samples(samples)
    # 1 - C(3, 2) / C(4, 2) = 1/2 if they are taken for one example.
    assert measured(root, "pass_at_k", k=2) == {None: wanted}
