"""The draw of one token, on distributions small enough to work out by hand."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ludic.engines.continuous import make_rows, random_numbers, sample
from ludic.engines.engine import SamplingParams


def draw(probabilities: list[float], uniform: float, **params: Any) -> tuple[int, float]:
    """Token and probability that one row draws from logits log(probabilities)."""
    rows = make_rows([SamplingParams(**params)], torch.device("cpu"))
    logits = torch.tensor([probabilities]).log()
    token, logprob, _ = sample(logits, rows, torch.tensor([uniform], dtype=torch.float64))
    return int(token), float(logprob.exp())


@pytest.mark.parametrize(
    ("uniform", "token", "probability"),
    [(0.0, 0, 0.5), (0.49, 0, 0.5), (0.51, 1, 0.3), (0.79, 1, 0.3), (0.81, 2, 0.2), (1 - 2**-53, 2, 0.2)],
)
def test_a_uniform_picks_the_token_whose_share_it_falls_in(uniform: float, token: int, probability: float) -> None:
    assert draw([0.5, 0.3, 0.2], uniform) == (token, pytest.approx(probability, abs=1e-6))


def test_tokens_without_probability_are_never_drawn() -> None:
    drawn = [draw([0.0, 0.5, 0.0, 0.5, 0.0], uniform)[0] for uniform in (0.0, 0.4999, 0.5001, 1 - 2**-53)]
    assert drawn == [1, 1, 3, 3]


def test_temperature_divides_the_logits() -> None:
    # At temperature 0.5 probabilities are squared: .64 and .04 of .68.
    assert draw([0.8, 0.2], 0.95, temperature=0.5) == (1, pytest.approx(0.04 / 0.68, abs=1e-6))


def test_top_k_keeps_the_most_likely_and_renormalises() -> None:
    # .5 and .3 of .8 stay.
    assert draw([0.2, 0.3, 0.5], 0.374, top_k=2) == (1, pytest.approx(0.375, abs=1e-6))
    assert draw([0.2, 0.3, 0.5], 0.376, top_k=2) == (2, pytest.approx(0.625, abs=1e-6))


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    # .5 alone is below .6, .5 + .3 is not.
    assert draw([0.2, 0.3, 0.5], 0.0, top_p=0.6) == (1, pytest.approx(0.375, abs=1e-6))
    assert draw([0.2, 0.3, 0.5], 0.0, top_p=0.49) == (2, pytest.approx(1.0))


def test_top_p_counts_what_top_k_left() -> None:
    # top_k leaves 4/7 and 3/7, and 4/7 reaches .5; counted before top_k, .4 would not.
    assert draw([0.4, 0.3, 0.2, 0.1], 0.99, top_k=2, top_p=0.5) == (0, pytest.approx(1.0))


def test_of_equally_likely_tokens_top_k_keeps_the_lower_ids() -> None:
    assert draw([1 / 5000] * 5000, 0.99, top_k=2) == (1, pytest.approx(0.5, abs=1e-6))


def test_top_k_above_the_vocabulary_takes_all() -> None:
    assert draw([0.5, 0.3, 0.2], 0.9, top_k=50) == (2, pytest.approx(0.2, abs=1e-6))


def test_a_row_without_top_p_keeps_its_least_likely_tokens_beside_one_with() -> None:
    # Nearly all tokens lie past the point where the sum of probabilities rounds to 1.
    logits = torch.full((2, 1000), -30.0)
    logits[:, 0] = 0.0
    rows = make_rows([SamplingParams(), SamplingParams(top_p=0.5)], torch.device("cpu"))
    tokens, logprobs, _ = sample(logits, rows, torch.full((2,), 1 - 2**-53, dtype=torch.float64))
    assert tokens.tolist() == [999, 0]
    assert logprobs.tolist() == [pytest.approx(-30.0), 0.0]


@given(seed=st.integers(-(2**63), 2**63 - 1))
def test_random_numbers_depend_on_the_seed_and_the_position_alone(seed: int) -> None:
    one_by_one = random_numbers(seed)
    drawn = [one_by_one.random() for _ in range(20)]
    assert drawn == random_numbers(seed).random(20).tolist()
    assert drawn != random_numbers(seed + 1).random(20).tolist()
    assert all(0 <= number < 1 for number in drawn)
