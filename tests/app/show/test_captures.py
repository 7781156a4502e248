"""Rows without logprobs of their sampling say so, and no figure takes their zeros for probabilities of 1."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from ludic.app.show.lookup import look_up
from ludic.app.show.stats import collect_stats
from ludic.app.show.transcript import PrintOptions, coloured, token_rows, token_table
from ludic.root.root import Root

GOLDEN = Path(__file__).parents[2] / "golden" / "v1.8"
"""Of ten rollouts one has token ids alone, and one was made from a text."""


@pytest.fixture(scope="module")
def root() -> Root:
    return Root.open(str(GOLDEN))


def printed(root: Root, rollout_id: str) -> str:
    console = Console(file=io.StringIO(), width=200)
    look_up(root, rollout_id, "rollout", options=PrintOptions(tokens=True)).print_to(console)
    return console.file.getvalue()


def test_stats_count_them(root: Root) -> None:
    stats = collect_stats(root)
    totals = stats.facts["rollouts"]
    assert (totals["num_rollouts"], totals["num_without_logprobs"], totals["num_from_text"]) == (10, 2, 1)
    assert "2 rollouts (20.0%) without the sampler's logprobs; 1 made from texts" in str(stats)
    assert "logprobs" not in str(collect_stats(Root.open(str(GOLDEN.with_name("v1.7")))))


def test_a_rollout_says_what_was_kept_of_its_sampling(root: Root) -> None:
    said = {
        "turns-r0": "the sampler's were not stored; the token ids are its own",
        "turns-r0-child": "the sampler's were not stored; the token ids were encoded from the recorded text",
        "single-r2": "of a trainer's forward pass with the weights that sampled",
    }
    assert {
        rollout_id: [text for text in said.values() if text in printed(root, rollout_id)] for rollout_id in said
    } == {rollout_id: [text] for rollout_id, text in said.items()}
    assert "nobody kept" not in printed(root, "single-r1")


def test_its_tokens_have_no_probability(root: Root) -> None:
    found = look_up(root, "turns-r0-child", "rollout")
    tokens = token_rows(found.rows[0], lambda ids: [str(each) for each in ids], 0, 5)
    assert [token.logprob for token in tokens] == [None] * 5
    assert found.tokens()["logprob"].to_list() == [None] * 5
    assert {str(span.style) for span in coloured(tokens, "logprob", None).spans} <= {""}
    assert all(list(column.cells) == ["-"] * 5 for column in token_table(tokens).columns[3:5])
    known = look_up(root, "single-r1", "rollout").tokens()["logprob"]
    assert known.null_count() == 0
