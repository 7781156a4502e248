"""Contamination: planted texts are found, with numbers worked by hand, and what can't be compared is said."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from eval.conftest import StoreSamples
from evaluations import row

import ludic
from ludic.errors import ConfigError, QueryError
from ludic.records.rollout import Message, RolloutBatch, RolloutGroup, RolloutMetadata, new_id
from ludic.records.tables import arrow_schema
from ludic.root.root import Root
from ludic.root.rows.parquet import encode_plain
from ludic.root.rows.writer import RolloutWriter
from ludic.run.config import RunConfig
from ludic.run.run_json import put_run

FIVE = "one two three four five"


def asks(*texts: str) -> tuple[Message, ...]:
    """A prompt with a system message, and completions in between; what comes behind " <- " is thinking."""
    roles = [Message(role="system", content="always answer in one short sentence please")]
    for index, text in enumerate(texts):
        content, _, reasoning = text.partition(" <- ")
        role = "user" if index % 2 == 0 else "assistant"
        roles.append(Message(role=role, content=content, reasoning=reasoning or None))
    return tuple(roles)


def train_on(root: Root, texts: dict[str, tuple[str, ...]], *, used: bool = True, stored: bool = True) -> None:
    """Store a rollout for each id, with a user's message, an answer and so on, and a ledger that used them."""
    ids = {name: new_id() for name in texts}
    TRAINED.update({rollout_id: name for name, rollout_id in ids.items()})
    shared = {"purpose": "train", "env_example_id": "t", "group_size": 1, "group_index": 0, "policy_version": 0}
    groups = [
        RolloutGroup(
            key=name,
            rollouts=(
                row(
                    **shared,
                    group_id=new_id(),
                    rollout_id=rollout_id,
                    request_index=number,
                    policy_version_last=0,
                    episode_reward=1.0,
                    terminated=True,
                    error=None,
                    messages=asks(*texts[name]),
                ),
            ),
        )
        for number, (name, rollout_id) in enumerate(ids.items())
    ]
    if stored:
        worker_id = f"w0-{new_id()}"
        with RolloutWriter(root, worker_id) as writer:
            writer.append(RolloutBatch(groups=tuple(groups), metadata=RolloutMetadata(worker_id=worker_id)))
    put_ledger(root, list(ids.values()), used=used)


TRAINED: dict[str, str] = {}
"""Names of rollouts by id."""


def put_ledger(root: Root, rollout_ids: list[str], *, used: bool = True) -> None:
    root.put_if_absent(
        "attempts/1.json",
        b'{"attempt_id": 1, "parent_attempt": null, "parent_step": null, "owner": "t-1", '
        b'"created_at": "2026-01-01T00:00:00+00:00", "config": {}, "numerics": null, "code": []}',
    )
    step = len(root.list("batches")) + 1
    numbers = {"attempt_id": 1, "step": step, "policy_version": 0, "trainer_version": 0, "lag": 0, "num_uses": 1}
    zeros = dict.fromkeys(("row_group", "row", "prompt_length", "response_length", "batch_index"), 0)
    facts = {"env_name": "addition", "file": "f", "weight": 1.0, "used": used, "seq_len_truncated": False}
    blank = dict.fromkeys(arrow_schema("batches").names)
    rows = [{**blank, **numbers, **zeros, **facts, "rollout_id": each, "group_id": each} for each in rollout_ids]
    table = pa.Table.from_pylist(rows, schema=arrow_schema("batches"))
    root.put_if_absent(f"batches/attempt=1/step={step}.parquet", encode_plain(table))


Found = Callable[..., dict[str, tuple[Any, ...]]]


@pytest.fixture
def evaluated(root: Root, store_samples: StoreSamples) -> Callable[..., ludic.Run]:
    """Stores an evaluation with these prompts by example."""

    def store(**prompts: str) -> ludic.Run:
        store_samples(
            {name: [1.0, 0.0] for name in prompts},
            messages=lambda example, index: asks(prompts[example], "an answer", "a later observation of its own"),
        )
        return ludic.Run(root)

    return store


def by_example(run: ludic.Run, **options: Any) -> dict[str, tuple[Any, ...]]:
    """num_ngrams, num_found, rollout and num_shared of each example."""
    rows = run.contamination(**options).examples.rows(named=True)
    return {
        row["env_example_id"]: (
            row["num_ngrams"],
            row["num_found"],
            TRAINED.get(row["rollout_id"] or ""),
            row["num_shared"],
        )
        for row in rows
    }


@pytest.mark.slow
def test_planted_ngrams_are_counted(root: Root, evaluated: Callable[..., ludic.Run]) -> None:
    # Words: 7, so five 3-grams: abc bcd cde def efg. Trained texts hold abc and bcd, and efg in an answer.
    run = evaluated(planted="A, b c: d e f g?", clean="h i j k", short="x y")
    train_on(root, {"prompt": ("say a B c d!", "no"), "answer": ("z", "it is e f g"), "other": ("x", "y x")})
    found = run.contamination(params={"n": 3})
    # The two found in one text are shared with its rollout; "x y" is one n-gram, which no text as a whole is.
    assert by_example(run, params={"n": 3}) == {
        "planted": (5, 3, "prompt", 2),
        "clean": (2, 0, None, 0),
        "short": (1, 0, None, 0),
    }
    assert found.total.row(0, named=True) == {
        "env_name": "addition",
        "num_examples": 3,
        "num_overlapping": 1,
        "num_ngrams": 8,
        "num_found": 3,
        "share": 3 / 8,
    }
    assert (found.num_trained, found.num_absent) == (3, 0)


@pytest.mark.slow
def test_ngrams_do_not_cross_messages_and_system_messages_are_not_asked(root, evaluated) -> None:
    run = evaluated(one=FIVE)
    train_on(root, {"split": ("one two", "three four five"), "other": ("always answer in one short sentence please",)})
    # 3-grams of the prompt: 123 234 345; only 345 is inside of one message.
    assert by_example(run, params={"n": 3}) == {"one": (3, 1, "split", 1)}


@pytest.mark.slow
def test_thinking_is_a_text_of_its_own(root, evaluated) -> None:
    run = evaluated(one=FIVE)
    train_on(root, {"thought": ("z", "four five <- one two three four"), "other": ("z", "y")})
    # 123 and 234 of 3; with the answer behind it, 345 would be there too.
    assert by_example(run, params={"n": 3}) == {"one": (3, 2, "thought", 2)}


@pytest.mark.slow
def test_a_text_that_is_shorter_than_an_ngram_is_compared_as_a_whole(root, evaluated) -> None:
    run = evaluated(same="What is 3 plus 4?", part="What is 3")
    train_on(root, {"same": ("what is 3 PLUS 4",)})
    assert by_example(run) == {"same": (1, 1, "same", 1), "part": (1, 0, None, 0)}


@pytest.mark.slow
def test_dropped_rollouts_were_not_trained_on(root, evaluated) -> None:
    run = evaluated(one=FIVE)
    train_on(root, {"dropped": (FIVE,)}, used=False)
    train_on(root, {"used": ("four five",)})
    assert by_example(run, params={"n": 3}) == {"one": (3, 0, None, 0)}


@pytest.mark.slow
def test_the_template_of_the_prompts_is_left_out_unless_asked_for(root, evaluated) -> None:
    # "solve this sum" is in all three prompts; each also has its own 3-grams.
    run = evaluated(a="solve this sum a b", b="solve this sum c d", c="solve this sum e f")
    train_on(root, {"template": ("please solve this sum",)})
    assert {name: row[:2] for name, row in by_example(run, params={"n": 3}).items()} == dict.fromkeys("abc", (2, 0))
    everything = by_example(run, params={"n": 3, "common": 1})
    assert everything == dict.fromkeys("abc", (3, 1, "template", 1))


@pytest.mark.slow
def test_another_root_may_have_trained(root, evaluated, tmp_path: Path) -> None:
    run = evaluated(one=FIVE)
    other = put_run(str(tmp_path / "other"), RunConfig(model="m", env=("addition",)))
    with pytest.raises(ConfigError, match=r"no gradient step is in the ledger of .*; name the run that trained"):
        run.contamination()
    train_on(other, {"theirs": (FIVE,)})
    assert by_example(run, also=[other.url]) == {"one": (1, 1, "theirs", 1)}


@pytest.mark.slow
def test_trained_rollouts_without_a_text_are_counted(root, evaluated) -> None:
    run = evaluated(one=FIVE)
    train_on(root, {"here": ("nothing",), "there": ("nothing at all",)})
    train_on(root, {"gone": (FIVE,)}, stored=False)
    found = run.contamination()
    assert (found.num_trained, found.num_absent) == (3, 1)
    assert "1 of 3 trained rollouts are not stored here" in str(found)


@pytest.mark.slow
def test_a_query_of_your_own_runs_and_a_wrong_one_is_explained(root, evaluated, tmp_path: Path) -> None:
    run = evaluated(one=FIVE)
    train_on(root, {"any": ("nothing",)})
    text = Path(ludic.__file__).parent.joinpath("root/sql/contamination/ngrams.sql").read_text()
    (tmp_path / "mine.sql").write_text(text.replace("default: n = 13", "default: n = 4"))
    assert by_example(run, query=str(tmp_path / "mine.sql"))["one"][0] == 2
    (tmp_path / "mine.sql").write_text("select 1 as share")
    with pytest.raises(QueryError, match=r"mine\.sql: returns share; wanted one SELECT that returns env_name, env_ex"):
        run.contamination(query=str(tmp_path / "mine.sql"))
    with pytest.raises(ConfigError, match="parameter 'm' is unknown"):
        run.contamination(params={"m": 3})
    with pytest.raises(ConfigError, match=r"has no evaluation of environment nowhere"):
        run.contamination(env="nowhere")
