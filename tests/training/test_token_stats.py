"""token_stats/: each number against a plain forward pass and a loss worked out by hand; one row a step and rollout."""

import re
from collections.abc import Iterator
from pathlib import Path

import duckdb
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_runs import create_root, fill, make_model, query, train_here, train_until_killed
from transformers import AutoModelForCausalLM

import ludic
from ludic.root.root import Root
from ludic.root.rows.tables import round_to_11_bits

CLIP = 1e-3
"""So narrow that the first step, whose rollouts are drawn at random, clips about half of the tokens."""
SETTINGS = {"objective": "ppo_clip", "clip_low": CLIP, "clip_high": CLIP, "keep_token_stats": True}

ROWS = """
select
    token_stats.*, prompt_tokens, response_tokens, response_logprobs, temperature, batches.advantage,
    coalesce(action_mask, [true for _ in response_tokens]) as mask
from token_stats
inner join rollouts using (rollout_id)
inner join batches using (rollout_id, step)
order by rollout_id
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def root(tmp_path: Path, model: str) -> Root:
    return new_root(tmp_path, model)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, model: str) -> Root:
    """A root after two steps; not to be changed."""
    root = new_root(tmp_path_factory.mktemp("trained"), model)
    train_here(root, num_steps=2, **SETTINGS)
    return root


def new_root(folder: Path, model: str) -> Root:
    """Rollouts of two turns, with masked tokens between them."""
    root = create_root(str(folder / "run"), model, temperature=0.8)
    for seed, length in enumerate((9, 20)):
        fill(root, num_files=1, seed=seed, worker_id=f"w{seed}", response_length=length, num_turns=2)
    return root


def rows(root: Root) -> Iterator[dict]:
    for row in ludic.connect(root).sql(ROWS).to_arrow_table().to_pylist():
        yield {name: np.array(value) if isinstance(value, list) else value for name, value in row.items()}


def plain_forward(model: torch.nn.Module, row: dict) -> tuple[np.ndarray, np.ndarray]:
    """Logprobs and entropies of the response by the model's own logits, one sequence at a time."""
    tokens = torch.tensor(np.concatenate([row["prompt_tokens"], row["response_tokens"]]), dtype=torch.int64)
    with torch.no_grad():
        logits = model(input_ids=tokens[None]).logits[0] / row["temperature"]
    distributions = logits[len(row["prompt_tokens"]) - 1 : -1].log_softmax(-1)
    logprobs = distributions.gather(1, tokens[len(row["prompt_tokens"]) :, None])[:, 0]
    return logprobs.numpy(), -(distributions.exp() * distributions).sum(-1).numpy()


@pytest.mark.slow
def test_what_is_stored_is_what_a_plain_forward_pass_and_the_formula_give(root: Root, model: str):
    train_here(root, num_steps=1, max_tokens_per_micro_batch=60, **SETTINGS)
    plain = AutoModelForCausalLM.from_pretrained(model)
    found = list(rows(root))
    assert len(found) == query(root, "select count(*) from batches where used")[0][0] > 0
    num_clipped = 0
    for row in found:
        logprobs, entropies = plain_forward(plain, row)
        assert row["response_length"] == len(row["response_tokens"])
        np.testing.assert_allclose(row["trainer_logprobs"], logprobs, rtol=0, atol=2e-6)
        np.testing.assert_allclose(row["entropy"], entropies, rtol=2**-11, atol=0)
        ratio, advantage = np.exp(logprobs - row["response_logprobs"]), row["advantage"]
        beyond = ratio > 1 + CLIP if advantage > 0 else ratio < 1 - CLIP
        clipped = beyond & row["mask"] & (advantage != 0)
        weight = np.where(clipped | ~row["mask"], 0, ratio * advantage)
        np.testing.assert_array_equal(row["clipped"], clipped)
        np.testing.assert_allclose(row["weight"], weight, rtol=1e-3, atol=0)
        num_clipped += clipped.sum()
    assert num_clipped > 0
    assert not all(row["mask"].all() for row in found)


@pytest.mark.slow
def test_the_columns_add_up_to_the_metrics_of_the_step(trained: Root):
    sums = """
    with tokens as (
        select step, unnest(clipped) as clipped, unnest(entropy) as entropy,
            unnest(coalesce(action_mask, [true for _ in response_tokens])) as mask
        from token_stats inner join rollouts using (rollout_id)
    )
    select step, count(*) filter (clipped) / count(*) filter (mask), avg(entropy) filter (mask)
    from tokens
    group by step
    order by step
    """
    metrics = query(trained, "select step, clip_fraction, entropy from metrics order by step")
    assert [row[0] for row in metrics] == [1, 2]
    np.testing.assert_allclose(query(trained, sums), metrics, rtol=1e-3)
    of_view = query(trained, "select k1, k3, ratio_max from mismatch where grouping = 'step' order by step")
    of_metrics = query(trained, "select sampler_kl_k1, sampler_kl, ratio_max from metrics order by step")
    np.testing.assert_allclose(of_view, of_metrics, rtol=1e-4)
    ranks = "select quantile_disc(exp(log_ratio), [0.01, 0.99]) from trained_tokens group by step order by step"
    quantiles = query(trained, "select ratio_p01, ratio_p99 from metrics order by step")
    np.testing.assert_allclose([row for (row,) in query(trained, ranks)], quantiles, rtol=0.02)


@pytest.mark.slow
def test_a_response_that_is_cut_has_its_first_tokens_and_one_that_is_cut_away_has_no_row(root: Root):
    train_here(root, num_steps=2, max_seq_len=16, **SETTINGS)
    lengths = """
    select greatest(0, least(batches.response_length, 16 - prompt_length)) as kept, token_stats.response_length
    from batches left join token_stats using (step, rollout_id) where used
    """
    found = query(root, lengths)
    assert all(stored == (kept or None) for kept, stored in found)
    assert query(root, "select count(*) > 0 from batches where seq_len_truncated") == [(True,)]
    (ends,) = query(root, "select bool_and(len(weight) = response_length) from token_stats")
    assert ends == (True,)


@pytest.mark.slow
def test_steps_that_a_resumed_trainer_took_again_count_once(root: Root):
    train_until_killed(root, at_step=3, num_steps=4, checkpoint_every=2, async_checkpoint=False, **SETTINGS)
    train_here(root, num_steps=4, **SETTINGS)
    of_steps = "select distinct attempt_id, step from token_stats order by step"
    assert query(root, of_steps) == [(1, 1), (1, 2), (2, 3), (2, 4)]
    assert query(root, "select distinct attempt_id, step from all_token_stats where superseded") == [(1, 3)]


def test_nothing_is_written_unless_it_is_asked_for(root: Root):
    train_here(root, num_steps=1)
    assert root.list("token_stats") == []
    assert query(root, "from token_stats") == []


@given(st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-(2.0**120), max_value=2.0**120))
def test_rounded_floats_are_as_near_as_11_bits_can_be(value: float):
    (found,) = round_to_11_bits(np.array([value], np.float32))
    assert found.view(np.uint32) % 2**13 == 0
    # a subnormal number has fewer bits
    assert abs(found - value) <= max(abs(value) * 2**-11, 2.0**-136)


@pytest.mark.slow
def test_the_guides_queries_run(trained: Root):
    guide = (Path(__file__).parents[2] / "docs/token_stats.md").read_text(encoding="utf-8")
    con: duckdb.DuckDBPyConnection = ludic.connect(trained)
    queries = re.findall(r"```sql\n(.*?)```", guide, re.DOTALL)
    mismatch, *others = [con.sql(text).to_arrow_table() for text in queries]
    # of the first step alone, whose rollouts the trainer's first weights sampled
    trained = [row for row in rows(trained) if row["step"] == 1]
    log_ratios = np.concatenate([(row["trainer_logprobs"] - row["response_logprobs"])[row["mask"]] for row in trained])
    (found,) = mismatch.to_pylist()
    assert (found["env_name"], found["num_tokens"]) == ("moar_cats", len(log_ratios))
    assert found["k1"] == pytest.approx(-log_ratios.mean(dtype=float), rel=1e-6)
    np.testing.assert_allclose(found["ratios"], np.exp(np.quantile(log_ratios, [0.01, 0.5, 0.99])), rtol=0.02)
    assert all(table.num_rows for table in others)
